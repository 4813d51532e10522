"""Decode steps on a CUDA device, captured once a batch size and replayed without the host in between.

A step reads and moves device state alone (`Rows`): the sampled token is the next step's input, its place in the pages
comes from the row's table. The host sees a burst's tokens at its end; what a row samples past its stop is dropped
there, and what it writes past its blocks goes
to the null block. Bits do not change: rows are independent of the batch, and the noise depends on seed and position
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor

from tokentrue.engine.model.forward import Forward, table_of
from tokentrue.engine.sample import GOLDEN, MASK, mix, to_signed
from tokentrue.engine.scheduling.request import Request
from tokentrue.numerics import PagedBatch, RowSlots

if TYPE_CHECKING:
    from tokentrue.numerics.triton.kernels.sampling import Rows

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
MOST_STEPS = 16
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Pending:
    """Steps under way: their tokens and log-probabilities [steps, rows] are in host memory when `done` has happened."""

    ids: Tensor
    logprobs: Tensor
    done: torch.cuda.Event

    def results(self) -> tuple[list[list[int]], list[list[float]], list[bool]]:
        """Row by row: tokens, log-probabilities, and whether those are all finite."""
        self.done.synchronize()
        logprobs = self.logprobs.t()
        return self.ids.t().tolist(), logprobs.tolist(), torch.isfinite(logprobs).all(-1).tolist()


def capture_graph(
    step: Callable[[], Result], pool: tuple[int, int] | None = None
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A graph of what `step` launches, and the tensors that every replay leaves its results in."""
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


class DecodeGraphs:
    """Captured decode steps of one Forward. `width` is the most blocks a sequence can have."""

    def __init__(self, forward: Forward, *, width: int) -> None:
        from tokentrue.numerics.triton.kernels.sampling import Rows, advance

        self.forward = forward
        self.width = width
        self._advance = advance
        self._rows: type[Rows] = Rows
        self._pool: tuple[int, int] | None = None
        self._captured: dict[tuple[int, int | None], tuple[torch.cuda.CUDAGraph, Rows]] = {}

    @torch.inference_mode()
    def start(self, requests: Sequence[Request], steps: int) -> Pending:
        """Launch the next `steps` steps of requests that are decoding, plain, and own the blocks of the tokens that
        they will keep."""
        graph, rows = self.captured(requests)
        self.fill(rows, requests)
        return self.launch(graph, rows, steps)

    @torch.inference_mode()
    def go_on(self, requests: Sequence[Request], steps: int) -> Pending:
        """The same for the rows of the last launch, whose tokens the host need not have seen; only their blocks may
        have grown."""
        graph, rows = self.captured(requests)
        rows.tables.copy_(self.table_of(requests, rows.ids.shape[0]).pin_memory(), non_blocking=True)
        rows.starts.copy_(rows.positions)
        page = self.forward.ops.block_size  # the last step chose its successor's slot before these blocks were known
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

    def table_of(self, requests: Sequence[Request], size: int) -> Tensor:
        return torch.from_numpy(table_of([request.blocks for request in requests], size, self.width))

    def captured(self, requests: Sequence[Request]) -> tuple[torch.cuda.CUDAGraph, Rows]:
        """The step of this many rows; with adapters it is another one, void when their memory has moved."""
        size = next(b for b in BUCKETS if b >= len(requests))
        generation = self.forward.bank.generation if any(request.adapter for request in requests) else None
        if (size, generation) not in self._captured:
            current = (None, self.forward.bank.generation)
            self._captured = {key: value for key, value in self._captured.items() if key[1] in current}
            self._captured[size, generation] = self.capture(size, adapted=generation is not None)
        return self._captured[size, generation]

    def forget(self) -> None:
        """Give back the memory of what was captured."""
        torch.cuda.synchronize()
        self._captured.clear()
        self._pool = None

    def fill(self, rows: Rows, requests: Sequence[Request]) -> None:
        """One copy of everything the rows need; padding rows decode token 0 at position 0 into the null block."""
        size, page = rows.ids.shape[0], self.forward.ops.block_size
        state = np.zeros((5, size), dtype=np.int64)
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
        numbers[0, :count] = [r.sampling.temperature or 1.0 for r in requests]
        numbers[1, :count] = [r.sampling.temperature > 0 for r in requests]
        state_d, numbers_d = (
            torch.from_numpy(a).pin_memory().to(rows.ids.device, non_blocking=True) for a in (state, numbers)
        )
        rows.tables.copy_(self.table_of(requests, size).pin_memory(), non_blocking=True)
        for target, source in (
            (rows.ids, state_d[0]),
            (rows.positions, state_d[1]),
            (rows.starts, state_d[1]),
            (rows.slots, state_d[2]),
            (rows.adapters, state_d[4]),
        ):
            target.copy_(source)
        rows.keys.copy_(state_d[3])
        rows.contexts.copy_(state_d[1] + 1)
        rows.temperatures.copy_(numbers_d[0])
        rows.noisy.copy_(numbers_d[1])

    # ---- capture ------------------------------------------------------------------------------------------------------------------
    def capture(self, size: int, *, adapted: bool) -> tuple[torch.cuda.CUDAGraph, Rows]:
        rows = self.new_rows(size)
        graph, _ = capture_graph(lambda: self.step(rows, adapted=adapted), pool=self._pool)
        self._pool = graph.pool()
        return graph, rows

    def new_rows(self, size: int) -> Rows:
        device = self.forward.device

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return self._rows(
            order=torch.arange(size + 1, dtype=torch.int32, device=device), ids=zeros(size), positions=zeros(size), slots=zeros(size),
            adapters=zeros(size) + self.forward.bank.count,
            contexts=zeros(size, dtype=torch.int32) + 1,
            tables=zeros(size, self.width, dtype=torch.int32), starts=zeros(size), keys=zeros(size), noisy=zeros(size, dtype=torch.int32),
            temperatures=zeros(size, dtype=torch.float32) + 1.0, out_ids=zeros(MOST_STEPS, size),
            out_logprobs=zeros(MOST_STEPS, size, dtype=torch.float32),
        )  # fmt: skip

    def step(self, rows: Rows, *, adapted: bool) -> None:
        """One decode step from and to device state."""
        size = rows.ids.shape[0]
        batch = PagedBatch(
            positions=rows.positions, slots=rows.slots, cu_q=rows.order, context_lens=rows.contexts,
            block_tables=rows.tables, q_lens=(1,) * size, contexts=(1,) * size, num_decodes=size,
        )  # fmt: skip
        by_row = RowSlots(slots=rows.adapters, count=self.forward.bank.count, by_slot={}) if adapted else None
        self._advance(self.forward.logits_of_all(rows.ids, batch, by_row), rows, self.forward.ops.block_size)
