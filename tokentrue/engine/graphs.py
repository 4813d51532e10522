"""CUDA graphs for decode bursts and short prefills, replayed without the host in between.

A decode step reads and updates only device state (`Rows`): the sampled token is the next step's input, its place in the
pages comes from the row's table. The host reads the tokens of one burst while the device computes the next. Tokens that
a row samples after its stop are dropped; writes beyond its blocks go to the null block. The burst in flight may still
write blocks that a finished request released, but only before their next owner's first write, because the device works
in order. Any change of who runs waits for the bursts in flight. Bits do not change: rows are independent of the batch,
and the noise depends only on seed and position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from tokentrue.engine.forward import Forward, paged_batch, table_of
from tokentrue.engine.sample import GOLDEN, MASK, mix, not_finite, to_signed
from tokentrue.engine.schedule import Phase, Request, Scheduler, StepInputs, Work
from tokentrue.numerics import PagedBatch, RowSlots
from tokentrue.records import record

if TYPE_CHECKING:
    from tokentrue.numerics.triton.sampling import Rows

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
STEPS = 8  # of a burst
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Pending:
    """Tokens and log-probabilities [steps, rows]; in host memory once the event `done` has completed."""

    ids: Tensor
    logprobs: Tensor
    done: torch.cuda.Event

    def results(self) -> tuple[list[list[int]], list[list[float]], list[bool]]:
        """Row by row: tokens, log-probabilities, and whether all are finite."""
        self.done.synchronize()
        logprobs = self.logprobs.t()
        return self.ids.t().tolist(), logprobs.tolist(), torch.isfinite(logprobs).all(-1).tolist()


def capture_graph(
    step: Callable[[], Result], pool: tuple[int, int] | None = None
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Returns a graph of what `step` launches, and the tensors that each replay writes its results to."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()  # compiles every kernel, so that nothing is compiled while capturing
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = step()
    return graph, result


class Graphs(Generic[Result]):
    """Captured steps by size. Those with adapters are separate, and invalid once the adapters' memory has moved.
    `width`: most blocks of a sequence."""

    def __init__(self, forward: Forward, *, width: int) -> None:
        self.forward = forward
        self.width = width
        self._captured: dict[tuple[int, int | None], Result] = {}

    def captured(self, size: int, *, adapted: bool) -> Result:
        current = self.forward.bank.generation
        key = size, current if adapted else None
        if key not in self._captured:
            self._captured = {at: one for at, one in self._captured.items() if at[1] in (None, current)}
            self._captured[key] = self.capture(size, adapted=adapted)
        return self._captured[key]

    def capture(self, size: int, *, adapted: bool) -> Result:
        raise NotImplementedError

    def forget(self) -> None:
        self._captured.clear()

    def zeros(self, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.forward.device)


class DecodeGraphs(Graphs["tuple[torch.cuda.CUDAGraph, Rows]"]):
    def __init__(self, forward: Forward, *, width: int) -> None:
        from tokentrue.numerics.triton.sampling import Rows, advance

        super().__init__(forward, width=width)
        self._advance = advance
        self._rows: type[Rows] = Rows
        self._pool: tuple[int, int] | None = None

    @torch.inference_mode()
    def start(self, requests: Sequence[Request], steps: int) -> Pending:
        """Launches steps of requests that are plain decodes and own the blocks of the tokens they will keep."""
        graph, rows = self.graph_for(requests)
        self.fill(rows, requests)
        return self.launch(graph, rows, steps)

    @torch.inference_mode()
    def go_on(self, requests: Sequence[Request], steps: int) -> Pending:
        """Continues the rows of the last launch before the host saw their tokens; only blocks may have grown."""
        graph, rows = self.graph_for(requests)
        self.fill_memory(rows, requests)
        rows.starts.copy_(rows.positions)
        page = self.forward.ops.block_size  # the last step chose the next slot before these blocks were known
        block = rows.tables.gather(1, (rows.positions // page).clamp_(max=self.width - 1)[:, None])[:, 0]
        rows.slots.copy_(block * page + rows.positions % page)
        return self.launch(graph, rows, steps)

    def launch(self, graph: torch.cuda.CUDAGraph, rows: Rows, steps: int) -> Pending:
        for _ in range(steps):
            graph.replay()
        ids = torch.empty((steps, rows.ids.shape[0]), dtype=torch.int64, pin_memory=True)
        logprobs = torch.empty((steps, rows.ids.shape[0]), dtype=torch.float32, pin_memory=True)
        ids.copy_(rows.out_ids[:steps], non_blocking=True)
        logprobs.copy_(rows.out_logprobs[:steps], non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return Pending(ids=ids, logprobs=logprobs, done=done)

    def fill_memory(self, rows: Rows, requests: Sequence[Request]) -> None:
        """Blocks, and slots of recurrent states; a finished request has given its slot up."""
        size, spare = rows.ids.shape[0], self.forward.num_states
        tables = torch.from_numpy(table_of([request.blocks for request in requests], size, self.width))
        slots = [spare if request.state_slot is None else request.state_slot for request in requests]
        rows.tables.copy_(tables.pin_memory(), non_blocking=True)
        rows.states.copy_(torch.tensor([*slots, *[spare] * (size - len(slots))]).pin_memory(), non_blocking=True)

    def graph_for(self, requests: Sequence[Request]) -> tuple[torch.cuda.CUDAGraph, Rows]:
        size = next(b for b in BUCKETS if b >= len(requests))
        return self.captured(size, adapted=any(request.adapter for request in requests))

    def forget(self) -> None:
        torch.cuda.synchronize()
        super().forget()
        self._pool = None

    def fill(self, rows: Rows, requests: Sequence[Request]) -> None:
        """Padding rows decode token 0 at position 0 into the null block."""
        size, page = rows.ids.shape[0], self.forward.ops.block_size
        state = np.zeros((6, size), dtype=np.int64)
        bank = self.forward.bank
        numbers = np.zeros((2, size), dtype=np.float32)
        numbers[0] = 1.0
        count, last = len(requests), [len(r.tokens) - 1 for r in requests]
        state[0, :count] = [r.tokens[-1] for r in requests]
        state[1, :count] = last
        state[2, :count] = [r.blocks[at // page] * page + at % page for r, at in zip(requests, last, strict=True)]
        state[3, :count] = [to_signed(mix((r.seed * GOLDEN + 1) & MASK)) for r in requests]
        state[4] = bank.count
        state[4, :count] = bank.slots_of([r.adapter for r in requests])
        state[5, :count] = [0 if r.images is None else r.images.shift for r in requests]
        numbers[0, :count] = [r.sampling.temperature or 1.0 for r in requests]
        numbers[1, :count] = [r.sampling.temperature > 0 for r in requests]
        state_d, numbers_d = (
            torch.from_numpy(a).pin_memory().to(rows.ids.device, non_blocking=True) for a in (state, numbers)
        )
        self.fill_memory(rows, requests)
        for at, target in enumerate((rows.ids, rows.positions, rows.slots, rows.keys, rows.adapters, rows.shifts)):
            target.copy_(state_d[at])
        rows.starts.copy_(state_d[1])
        rows.contexts.copy_(state_d[1] + 1)
        rows.temperatures.copy_(numbers_d[0])
        rows.noisy.copy_(numbers_d[1])

    # ---- capture
    def capture(self, size: int, *, adapted: bool) -> tuple[torch.cuda.CUDAGraph, Rows]:
        rows = self.new_rows(size)
        graph, _ = capture_graph(lambda: self.step(rows, adapted=adapted), pool=self._pool)
        self._pool = graph.pool()
        return graph, rows

    def new_rows(self, size: int) -> Rows:
        zeros = self.zeros
        return self._rows(
            order=torch.arange(size + 1, dtype=torch.int32, device=self.forward.device), ids=zeros(size), positions=zeros(size), slots=zeros(size), shifts=zeros(size),
            adapters=zeros(size) + self.forward.bank.count, states=zeros(size) + self.forward.num_states,
            contexts=zeros(size, dtype=torch.int32) + 1,
            tables=zeros(size, self.width, dtype=torch.int32), starts=zeros(size), keys=zeros(size), noisy=zeros(size, dtype=torch.int32),
            temperatures=zeros(size, dtype=torch.float32) + 1.0, out_ids=zeros(STEPS, size),
            out_logprobs=zeros(STEPS, size, dtype=torch.float32),
        )  # fmt: skip

    def step(self, rows: Rows, *, adapted: bool) -> None:
        size = rows.ids.shape[0]
        batch = PagedBatch(
            positions=rows.positions, slots=rows.slots, cu_q=rows.order, context_lens=rows.contexts,
            block_tables=rows.tables, q_lens=(1,) * size, contexts=(1,) * size, num_decodes=size,
            rope=None if self.forward.decoder.tower is None else rows.positions + rows.shifts,
        )  # fmt: skip
        by_row = RowSlots(slots=rows.adapters, count=self.forward.bank.count, by_slot={}) if adapted else None
        logits = self.forward.logits_of_all(rows.ids, batch, by_row, rows.states)
        self._advance(logits, rows, self.forward.ops.block_size)


SIZES = (64, 128, 256, 512, 1024)
MOST_SEQUENCES = 8
HOST = torch.device("cpu")


@record
class Prefill:
    ids: Tensor  # int64 [T]
    batch: PagedBatch  # MOST_SEQUENCES sequences, and one more without queries
    rows: Tensor  # int64 [MOST_SEQUENCES]: tokens whose logits are wanted
    adapters: Tensor  # int64 [T]: slot of each token's adapter
    states: Tensor  # int64 [MOST_SEQUENCES + 1]: slots of recurrent states
    logits: Tensor
    graph: torch.cuda.CUDAGraph


class PrefillGraphs(Graphs[Prefill]):
    """Pads a short prefill to a captured size: padding tokens go to the null block, padding tiles to a sequence without
    queries."""

    @torch.inference_mode()
    def step(self, inputs: StepInputs, rows: Sequence[int]) -> Tensor | None:
        """None if the step has no captured form: too long, or with decodes."""
        total = inputs.rows
        few = len(inputs.counts) <= MOST_SEQUENCES and len(rows) <= MOST_SEQUENCES
        bank, adapted = self.forward.bank, any(inputs.adapters)
        plain = all(count > 1 for count in inputs.counts) and (not adapted or bank.is_packed)
        if not few or not plain or inputs.images or total > SIZES[-1] or self.forward.trace is not None:
            return None
        self.forward.copy_states(inputs.state_copies)
        prefill = self.captured(next(s for s in SIZES if s >= total), adapted=adapted)
        self.fill(prefill, inputs, rows)
        prefill.graph.replay()
        return prefill.logits[: len(rows)]

    def fill(self, prefill: Prefill, inputs: StepInputs, rows: Sequence[int]) -> None:
        ids = inputs.ids
        host, to = paged_batch(inputs, self.forward.ops.block_size, HOST), prefill.batch
        starts = torch.tensor(self.tile_starts(host.q_lens), dtype=torch.int32).t()
        copy_rows(prefill.ids, torch.tensor(ids))
        slots = self.forward.bank.slots_of(inputs.adapters).repeat_interleave(torch.tensor(inputs.counts))
        copy_rows(prefill.adapters, slots, rest=self.forward.bank.count)
        copy_rows(prefill.states, torch.tensor(inputs.state_slots, dtype=torch.int64), rest=self.forward.num_states)
        copy_rows(prefill.rows, torch.tensor(rows, dtype=torch.int64))
        copy_rows(to.positions, host.positions)
        copy_rows(to.slots, host.slots)
        copy_rows(to.cu_q, host.cu_q, rest=len(ids))
        copy_rows(to.context_lens, host.context_lens)
        copy_rows(to.block_tables, host.block_tables[:, : self.width])
        copy_rows(to.plan.sequence, starts[0], rest=MOST_SEQUENCES)
        copy_rows(to.plan.query, starts[1])

    def tile_starts(self, counts: Sequence[int]) -> list[tuple[int, int]]:
        from tokentrue.numerics.triton.attention import tile_starts

        heads, key_heads, size = self.forward.decoder.heads
        return tile_starts(counts, heads=heads, key_heads=key_heads, size=size, dtype=self.forward.decoder.dtype)

    def capture(self, size: int, *, adapted: bool) -> Prefill:
        from tokentrue.numerics.triton.attention import Tiles

        zeros, sequences = self.zeros, MOST_SEQUENCES + 1
        tiles = len(self.tile_starts((size,))) + MOST_SEQUENCES
        plan = Tiles(sequence=zeros(tiles, dtype=torch.int32) + MOST_SEQUENCES, query=zeros(tiles, dtype=torch.int32))
        batch = PagedBatch(
            positions=zeros(size), slots=zeros(size), cu_q=zeros(sequences + 1, dtype=torch.int32),
            context_lens=zeros(sequences, dtype=torch.int32), block_tables=zeros(sequences, self.width, dtype=torch.int32),
            q_lens=(0,) * sequences, contexts=(0,) * sequences, num_decodes=0, plan=plan,
        )  # fmt: skip
        forward = self.forward
        ids, rows, adapters = zeros(size), zeros(MOST_SEQUENCES), zeros(size) + forward.bank.count
        states = zeros(sequences) + forward.num_states

        def step() -> Tensor:
            by_row = RowSlots(slots=adapters, count=forward.bank.count, by_slot={}) if adapted else None
            h, x = forward.layers(forward.decoder.embed(ids), batch, by_row, states)
            return forward.logits((x + h).index_select(0, rows))

        graph, logits = capture_graph(step)
        return Prefill(ids=ids, batch=batch, rows=rows, adapters=adapters, states=states, logits=logits, graph=graph)


def copy_rows(target: Tensor, source: Tensor, *, rest: int = 0) -> None:
    """Copies `source` to the first rows (and columns) of `target`; fills the rest with `rest`."""
    padded = torch.full(target.shape, rest, dtype=target.dtype)
    padded[tuple(slice(n) for n in source.shape)] = source
    target.copy_(padded)


@dataclass(slots=True)
class Burst:
    """`lengths`: tokens of each request at the start of the burst."""

    requests: list[Request]
    lengths: list[int]
    steps: int
    pending: Pending


class Bursts:
    def __init__(
        self,
        forward: Forward,
        scheduler: Scheduler,
        capacity: int,
        deliver: Callable[[Request, Sequence[int], Sequence[float]], None],
        reject: Callable[[Request, Exception], None],
    ) -> None:
        """`deliver` gets the tokens of a request; `reject` a request whose log-probabilities are not finite."""
        self.scheduler = scheduler
        self.capacity = capacity
        self.graphs = DecodeGraphs(forward, width=-(-capacity // forward.ops.block_size))
        self.in_flight: Burst | None = None
        self._deliver = deliver
        self._reject = reject

    def start(self, batch: Sequence[Work]) -> bool:
        """Launches a burst if the batch is all plain decodes with blocks to grow into."""
        requests = [work.request for work in batch]
        if len(batch) > BUCKETS[-1] or any(
            work.count > 1 or not work.samples or not is_plain(work.request) for work in batch
        ):
            return False
        if any(request.adapter for request in requests) and not self.graphs.forward.bank.is_packed:
            return False
        lengths = [len(r.tokens) for r in requests]
        steps = self.steps_that_fit(requests, lengths)
        if steps < 1:
            return False
        if self.scheduler.states is not None:
            self.graphs.forward.copy_states(self.scheduler.states.take_copies())
        self.in_flight = Burst(requests, lengths, steps, self.graphs.start(requests, steps))
        return True

    def proceed(self) -> None:
        """Delivers the burst in flight, after launching the next one unless another request should run."""
        burst = self.in_flight
        if burst is not None:
            self.in_flight = self.launch_next(burst)
            self.deliver(burst)

    def drain(self) -> None:
        while self.in_flight is not None:
            burst, self.in_flight = self.in_flight, None
            self.deliver(burst)

    def close(self) -> None:
        self.in_flight = None
        self.graphs.forget()

    def launch_next(self, burst: Burst) -> Burst | None:
        active = [r for r in burst.requests if r.phase is Phase.RUNNING and not r.cancelled]
        scheduler = self.scheduler
        lengths = [length + burst.steps for length in burst.lengths]
        unfinished = [
            r
            for r, n in zip(burst.requests, lengths, strict=True)
            if r.phase is Phase.RUNNING and n < self.most_tokens(r)
        ]
        newcomers = scheduler.waiting and len(unfinished) < scheduler.limits.max_requests
        if newcomers or len(active) < len(scheduler.running) or len(unfinished) < 0.75 * len(burst.requests):
            return None
        steps = self.steps_that_fit(burst.requests, lengths)
        if steps < 1:
            return None
        return Burst(burst.requests, lengths, steps, self.graphs.go_on(burst.requests, steps))

    def most_tokens(self, request: Request) -> int:
        return min(len(request.prompt_ids) + request.max_tokens, self.capacity)

    def steps_that_fit(self, requests: Sequence[Request], lengths: Sequence[int]) -> int:
        """Steps for which every request has blocks and stays within the tables; 0 if memory is short."""
        left = [self.most_tokens(r) - n for r, n in zip(requests, lengths, strict=True)]
        steps = min(STEPS, max(left), self.capacity - max(lengths) + 1)
        for request, length, keep in zip(requests, lengths, left, strict=True):
            if request.phase is not Phase.RUNNING or keep <= 0:
                continue
            if not self.scheduler.grow(request, length - 1 + min(steps, keep)):
                return 0
        return steps

    def deliver(self, burst: Burst) -> None:
        ids, logprobs, good = burst.pending.results()
        for request, tokens, found, finite in zip(burst.requests, ids, logprobs, good, strict=False):
            if request.phase is not Phase.RUNNING or request.cancelled:
                continue
            if not finite:
                self.in_flight = None
                self._reject(request, not_finite())  # drops every page, so later results are void
                return
            self._deliver(request, tokens, found)


def is_plain(request: Request) -> bool:
    """Samples with temperature and seed only, and needs only tokens and log-probabilities."""
    if request.shaped or request.sampling.top_logprobs or request.wants_routes:
        return False
    return not (request.wants_prompt and not request.num_sampled)
