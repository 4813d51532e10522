"""Some rows of a batch in the working form: their *valid* tokens only, in order, each row filled up with zeros to whole
chunks of `CHUNK`.

A tensor `[S, CHUNK]` in this form is called slots. What stands at masked positions of the batch is never read, so NaN
there cannot leak. A row's sum is taken in an order of its own (see `reduce`), so that its bits do not depend on the
other rows, on padding or on the layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeAlias

import torch
from torch import Tensor

from tokentrue.mismatch.batch.reduce import chunk_counts, chunk_sums, row_maxima, row_sums

CHUNK = 128

Values: TypeAlias = Tensor | Sequence[Tensor]
"""A batch in one of three layouts: `[B, T]`, packed `[N]` with `cu_seqlens`, or one tensor per row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRange:
    """Where rows `[start, stop)` lie: positions `[begin, end)` of the flat batch; `width` is T of a padded one, else
    0."""

    start: int
    stop: int
    begin: int
    end: int
    width: int
    padded: bool

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    def flat(self, values: Values) -> Tensor:
        """The rows' positions, masked ones included, end to end."""
        if isinstance(values, Tensor):
            return values[self.start : self.stop].reshape(-1) if self.padded else values[self.begin : self.end]
        return torch.cat(list(values[self.start : self.stop])) if self.num_rows else torch.zeros(0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkedRows:
    """ChunkedRows in the working form, and the way there and back.

    Where the valid tokens of a padded batch stand first in their rows, slots are its chunks number `picked`, moved as
    they are; elsewhere each token is moved, from its flat position in `source` to its slot in `target`.
    """

    place: RowRange
    lengths: Tensor  # valid tokens of each row
    tokens: int  # valid tokens of all of them
    chunks: Tensor  # chunks of each row
    row: Tensor  # the row of each chunk
    filled: Tensor  # valid tokens of each chunk
    valid: Tensor  # bool [S, CHUNK]
    edges: Tensor  # chunks that hold some padding
    edge_padding: Tensor  # where in them
    picked: Tensor | None
    source: Tensor | None
    target: Tensor | None

    @staticmethod
    def from_holes(place: RowRange, offsets: Sequence[int], flat_mask: Tensor) -> ChunkedRows:
        """`offsets` are the boundaries of these rows in `flat_mask`."""
        bounds = torch.tensor(offsets, device=flat_mask.device)
        running = torch.nn.functional.pad(flat_mask.cumsum(0), (1, 0))
        lengths = running[bounds[1:]] - running[bounds[:-1]]
        chunks = (lengths + CHUNK - 1) // CHUNK
        source = flat_mask.nonzero().squeeze(1)
        shift = (chunks.cumsum(0) - chunks) * CHUNK - (lengths.cumsum(0) - lengths)
        target = torch.arange(source.shape[0], device=source.device) + shift.repeat_interleave(lengths)
        valid = torch.zeros(int(chunks.sum()) * CHUNK, dtype=torch.bool, device=flat_mask.device)
        valid[target] = True
        valid = valid.view(-1, CHUNK)
        filled = chunk_counts(valid)
        edges = (filled < CHUNK).nonzero().squeeze(1)
        row = torch.arange(place.num_rows, device=flat_mask.device).repeat_interleave(chunks)
        return ChunkedRows(
            place=place, lengths=lengths, tokens=source.shape[0], chunks=chunks, row=row, filled=filled, valid=valid,
            edges=edges, edge_padding=~valid.index_select(0, edges), picked=None, source=source, target=target,
        )  # fmt: skip

    @property
    def num_rows(self) -> int:
        return self.place.num_rows

    def without(self, slots: Tensor) -> ChunkedRows:
        """The same rows with some more slots counted as padding."""
        valid = self.valid & ~slots
        filled = chunk_counts(valid)
        lengths = row_sums(filled.double(), self.chunks).long()
        source, target = self.source, self.target
        if source is not None and target is not None:
            still = valid.view(-1)[target]
            source, target = source[still], target[still]
        edges = (filled < CHUNK).nonzero().squeeze(1)
        return replace(
            self, valid=valid, filled=filled, edges=edges, edge_padding=~valid.index_select(0, edges),
            lengths=lengths, tokens=int(lengths.sum()), source=source, target=target,
        )  # fmt: skip

    def read(self, values: Values, dtype: torch.dtype = torch.float64) -> Tensor:
        """The valid tokens in slots, zero in the rest; differentiable."""
        flat = self.place.flat(values)
        if self.source is not None and self.target is not None:
            slots = torch.zeros(self.valid.numel(), dtype=dtype, device=flat.device)
            return slots.index_copy(0, self.target, flat.index_select(0, self.source).to(dtype)).view(-1, CHUNK)
        assert self.picked is not None
        grid = flat.view(self.num_rows, self.place.width)
        return self.clear_padding(_to_chunks(grid).index_select(0, self.picked).to(dtype))

    def read_rows(self, values: Tensor) -> Tensor:
        """One value per row of the batch, spread over the row's slots."""
        return self.spread(values[self.place.start : self.place.stop].to(device=self.valid.device, dtype=torch.float64))

    def write(self, slots: Tensor, out: Tensor) -> None:
        """Puts slots back at their positions of the flat `out`, which holds zeros; slots outside `valid` must hold
        0."""
        part = out[self.place.begin : self.place.end]
        if self.source is not None and self.target is not None:
            part.index_copy_(0, self.source, slots.reshape(-1).index_select(0, self.target).to(out.dtype))
            return
        assert self.picked is not None
        grid = part.view(self.num_rows, self.place.width)
        slots = slots.to(out.dtype)
        if self.place.width % CHUNK == 0:
            grid.view(-1, CHUNK).index_copy_(0, self.picked, slots)
            return
        whole = _to_chunks(grid).index_copy_(0, self.picked, slots)
        grid.copy_(whole.view(self.num_rows, -1)[:, : self.place.width])

    def clear_padding(self, slots: Tensor) -> Tensor:
        """Zeroes what stands outside `valid`, in place."""
        if not self.edges.numel():
            return slots
        return slots.index_copy_(0, self.edges, slots.index_select(0, self.edges).masked_fill_(self.edge_padding, 0))

    def sum(self, slots: Tensor) -> Tensor:
        """Row sums `[b]` in a fixed order; slots outside `valid` must hold 0."""
        return row_sums(chunk_sums(slots), self.chunks)

    def max(self, slots: Tensor, empty: float) -> Tensor:
        """Row maxima over valid tokens; `empty` for rows without one."""
        edges = slots.index_select(0, self.edges).masked_fill_(self.edge_padding, -torch.inf).amax(dim=1)
        rows = row_maxima(slots.amax(dim=1).index_copy(0, self.edges, edges), self.chunks, -torch.inf)
        return torch.where(self.lengths > 0, rows, torch.full_like(rows, empty))

    def peak(self, slots: Tensor) -> Tensor:
        """Row maxima of what is nowhere negative and 0 outside valid tokens; 0 for empty rows."""
        return row_maxima(slots.amax(dim=1), self.chunks, 0)

    def any(self, slots: Tensor) -> Tensor:
        """Which rows hold a True."""
        return self.count(slots) > 0

    def count(self, slots: Tensor) -> Tensor:
        """How many True each row holds, as doubles."""
        return row_sums(chunk_counts(slots).double(), self.chunks)

    def extremes(self, slots: Tensor) -> tuple[float, float]:
        """Smallest and largest value over valid tokens; (inf, -inf) if there is none."""
        if not slots.numel() or not self.tokens:
            return torch.inf, -torch.inf
        low, high = float(slots.amin()), float(slots.amax())
        if low < 0 and high > 0:  # the padding's zeros are neither
            return low, high
        return self.least(slots), -self.least(-slots)

    def least(self, slots: Tensor) -> float:
        """Smallest value over valid tokens; inf if there is none."""
        by_chunk = slots.amin(dim=1)
        edges = slots.index_select(0, self.edges).masked_fill_(self.edge_padding, torch.inf).amin(dim=1)
        by_chunk = by_chunk.index_copy(0, self.edges, edges)
        return float(by_chunk.amin()) if by_chunk.numel() else torch.inf

    def mean(self, slots: Tensor) -> Tensor:
        """Row means; 0 for empty rows."""
        return self.sum(slots) / self.lengths.clamp(min=1)

    def spread(self, per_row: Tensor) -> Tensor:
        """A value per row at each of its valid slots, zero in the rest."""
        spread = per_row.index_select(0, self.row).unsqueeze(1).expand(-1, CHUNK)
        return self.clear_padding(spread.contiguous())

    def spread_flags(self, per_row: Tensor) -> Tensor:
        """The valid slots of the flagged rows."""
        return self.valid & per_row.index_select(0, self.row).unsqueeze(1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefixRows:
    """A padded batch whose rows each begin with all of their valid tokens: looked at once, cut into `ChunkedRows` by
    slicing."""

    valid: Tensor
    filled: Tensor
    lengths: Tensor
    chunks: Tensor
    row: Tensor
    picked: Tensor
    edges: Tensor
    tokens_before: Sequence[int]  # of each row, and of the end
    chunks_before: Sequence[int]
    edges_before: Sequence[int]
    width: int  # of a row, in chunks

    @staticmethod
    def of(grid: Tensor) -> PrefixRows | None:
        """None where a valid token stands behind an invalid one; `grid` is bool `[b, T]`."""
        whole, rows = _to_chunks(grid), grid.shape[0]
        filled = chunk_counts(whole)
        lengths = filled.view(rows, -1).sum(dim=1)
        chunks = (lengths + CHUNK - 1) // CHUNK
        width = whole.shape[0] // rows
        place = torch.arange(width, device=grid.device)
        if not torch.equal(filled.view(rows, -1), (lengths.unsqueeze(1) - place * CHUNK).clamp(0, CHUNK)):
            return None
        picked = (place < chunks.unsqueeze(1)).view(-1).nonzero().squeeze(1)
        valid, filled = whole.index_select(0, picked), filled.index_select(0, picked)
        edges = (filled < CHUNK).nonzero().squeeze(1)
        if not torch.equal(
            valid.index_select(0, edges), torch.arange(CHUNK, device=grid.device) < filled[edges].unsqueeze(1)
        ):
            return None
        counts = lengths.tolist()
        return PrefixRows(
            valid=valid, filled=filled, lengths=lengths, chunks=chunks, row=picked // width, picked=picked, edges=edges,
            tokens_before=_before(counts), chunks_before=_before(-(-count // CHUNK) for count in counts),
            edges_before=_before(int(count % CHUNK > 0) for count in counts), width=width,
        )  # fmt: skip

    def rows(self, place: RowRange, first: int = 0) -> ChunkedRows:
        """Those of `place`; `first` is the batch's row that this record begins with."""
        start, stop = place.start - first, place.stop - first
        low, high = self.chunks_before[start], self.chunks_before[stop]
        valid = self.valid[low:high]
        edges = self.edges[self.edges_before[start] : self.edges_before[stop]] - low
        return ChunkedRows(
            place=place, lengths=self.lengths[start:stop], tokens=self.tokens_before[stop] - self.tokens_before[start],
            chunks=self.chunks[start:stop], row=self.row[low:high] - start, filled=self.filled[low:high], valid=valid,
            edges=edges, edge_padding=~valid.index_select(0, edges), picked=self.picked[low:high] - start * self.width,
            source=None, target=None,
        )  # fmt: skip


def _before(counts: Iterable[int]) -> list[int]:
    return [0, *accumulate(counts)]


def _to_chunks(grid: Tensor) -> Tensor:
    """`[b, T]` as chunks, rows filled up to whole ones."""
    fill = -grid.shape[1] % CHUNK
    return (torch.nn.functional.pad(grid, (0, fill)) if fill else grid).reshape(-1, CHUNK)
