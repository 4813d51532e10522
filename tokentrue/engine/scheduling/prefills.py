"""Short prefills on a CUDA device, captured once a size and replayed: one by one, the host takes longer to launch a
step's kernels than the device to run them.

A step is padded to its size: padding tokens go to the null block, padding tiles to a sequence without queries. Bits do
not change, because rows are independent of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokentrue.engine.graphs import capture_graph
from tokentrue.engine.model.forward import Forward, paged_batch
from tokentrue.engine.model.step import StepInputs
from tokentrue.numerics import PagedBatch, RowSlots
from tokentrue.numerics.triton.kernels.attention import Tiles, tile_starts

SIZES = (64, 128, 256, 512, 1024)
MOST_SEQUENCES = 8
HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """One captured size: what a step reads, and the logits that it leaves."""

    ids: Tensor  # int64 [T]
    batch: PagedBatch  # of MOST_SEQUENCES, and one more without queries
    rows: Tensor  # int64 [MOST_SEQUENCES]: tokens whose logits are wanted
    adapters: Tensor  # int64 [T]: slot of each token's adapter
    logits: Tensor
    graph: torch.cuda.CUDAGraph


class PrefillGraphs:
    """Captured prefill steps of one Forward. `width` is the most blocks a sequence can have."""

    def __init__(self, forward: Forward, *, width: int) -> None:
        self.forward = forward
        self.width = width
        self._captured: dict[tuple[int, int | None], Prefill] = {}

    @torch.inference_mode()
    def step(self, inputs: StepInputs, rows: Sequence[int]) -> Tensor | None:
        """Logits of those token rows, or None for a step that has no captured form: too long, or with decodes in it."""
        total = inputs.rows
        few = len(inputs.counts) <= MOST_SEQUENCES and len(rows) <= MOST_SEQUENCES
        bank, adapted = self.forward.bank, any(inputs.adapters)
        plain = all(count > 1 for count in inputs.counts) and (not adapted or bank.is_packed)
        if not few or not plain or total > SIZES[-1] or self.forward.trace is not None:
            return None
        key = next(s for s in SIZES if s >= total), bank.generation if adapted else None
        if key not in self._captured:
            self._captured = {at: one for at, one in self._captured.items() if at[1] in (None, bank.generation)}
            self._captured[key] = self.capture(key[0], adapted=adapted)
        prefill = self._captured[key]
        self.fill(prefill, inputs, rows)
        prefill.graph.replay()
        return prefill.logits[: len(rows)]

    @property
    def sizes(self) -> list[int]:
        """Those captured so far."""
        return [size for size, _ in self._captured]

    def forget(self) -> None:
        """Give back the memory of what was captured."""
        self._captured.clear()

    def fill(self, prefill: Prefill, inputs: StepInputs, rows: Sequence[int]) -> None:
        ids = inputs.ids
        host, to = paged_batch(inputs, self.forward.ops.block_size, HOST), prefill.batch
        starts = torch.tensor(self.tile_starts(host.q_lens), dtype=torch.int32).t()
        copy_rows(prefill.ids, torch.tensor(ids))
        slots = self.forward.bank.slots_of(inputs.adapters).repeat_interleave(torch.tensor(inputs.counts))
        copy_rows(prefill.adapters, slots, rest=self.forward.bank.count)
        copy_rows(prefill.rows, torch.tensor(rows, dtype=torch.int64))
        copy_rows(to.positions, host.positions)
        copy_rows(to.slots, host.slots)
        copy_rows(to.cu_q, host.cu_q, rest=len(ids))
        copy_rows(to.context_lens, host.context_lens)
        copy_rows(to.block_tables, host.block_tables[:, : self.width])
        copy_rows(to.plan.sequence, starts[0], rest=MOST_SEQUENCES)
        copy_rows(to.plan.query, starts[1])

    def tile_starts(self, counts: Sequence[int]) -> list[tuple[int, int]]:
        heads, key_heads, _ = self.forward.decoder.heads
        return tile_starts(counts, heads=heads, key_heads=key_heads, dtype=self.forward.decoder.dtype)

    def capture(self, size: int, *, adapted: bool) -> Prefill:
        device, sequences = self.forward.device, MOST_SEQUENCES + 1

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        tiles = len(self.tile_starts((size,))) + MOST_SEQUENCES
        plan = Tiles(sequence=zeros(tiles, dtype=torch.int32) + MOST_SEQUENCES, query=zeros(tiles, dtype=torch.int32))
        batch = PagedBatch(
            positions=zeros(size), slots=zeros(size), cu_q=zeros(sequences + 1, dtype=torch.int32),
            context_lens=zeros(sequences, dtype=torch.int32), block_tables=zeros(sequences, self.width, dtype=torch.int32),
            q_lens=(0,) * sequences, contexts=(0,) * sequences, num_decodes=0, plan=plan,
        )  # fmt: skip
        forward = self.forward
        ids, rows, adapters = zeros(size), zeros(MOST_SEQUENCES), zeros(size) + forward.bank.count

        def step() -> Tensor:
            by_row = RowSlots(slots=adapters, count=forward.bank.count, by_slot={}) if adapted else None
            return forward.logits(forward.layers(forward.decoder.embed(ids), batch, by_row).index_select(0, rows))

        graph, logits = capture_graph(step)
        return Prefill(ids=ids, batch=batch, rows=rows, adapters=adapters, logits=logits, graph=graph)


def copy_rows(target: Tensor, source: Tensor, *, rest: int = 0) -> None:
    """`source` into the first rows (and columns) of `target`; `rest` everywhere else."""
    padded = torch.full(target.shape, rest, dtype=target.dtype)
    padded[tuple(slice(n) for n in source.shape)] = source
    target.copy_(padded)
