"""Padded, packed and ragged batches in one working form, so that every formula is written once and gives the same bits in each.

The working form of some rows is their *valid* tokens only, in order, each row filled up with zeros to whole chunks of `CHUNK`:
a tensor `[S, CHUNK]` ("slots"). What stands at masked positions is never read, so NaN there cannot leak. A row's sum is taken
chunk by chunk, then over the chunks: in float64, in an order of its own (`chunk_sums`, `row_sums`), so that its bits do not depend on
the other rows, on padding or on the layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from tokentrue.errors import InputError

CHUNK = 128
BLOCK_TOKENS = 1 << 16  # rows are worked on in blocks of about this many tokens, so that temporaries stay in the processor's cache;
GPU_BLOCK_TOKENS = 1 << 21  # on a GPU launches cost more than memory

Values: TypeAlias = Tensor | Sequence[Tensor]
"""A batch in one of three layouts: `[B, T]`, packed `[N]` with `cu_seqlens`, or one tensor per row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a batch lies in memory. `offsets[i]:offsets[i+1]` are row i's positions in the flat view."""

    kind: Literal["padded", "packed", "rows"]
    offsets: tuple[int, ...]
    width: int  # T of a padded batch, else 0
    mask: Values

    @staticmethod
    def of(like: Values, mask: Values | None, cu_seqlens: Tensor | Sequence[int] | None = None) -> Layout:
        """The layout of `like`; `mask=None` means that every position is valid."""
        if not isinstance(like, Tensor):
            return _rows_layout(like, mask, cu_seqlens)
        if mask is None:
            mask = torch.ones(like.shape, dtype=torch.bool, device=like.device)
        if not isinstance(mask, Tensor) or mask.shape != like.shape:
            raise InputError(f"mask: shape {_shape(mask)} does not match the log-probabilities' {_shape(like)}")
        _same_device("mask", mask, like)
        if like.dim() == 2:
            if cu_seqlens is not None:
                raise InputError("cu_seqlens: given with a padded [B, T] batch; pass the packed 1-D tensors, or leave it out")
            rows, width = like.shape
            return Layout(kind="padded", offsets=tuple(row * width for row in range(rows + 1)), width=width, mask=mask)
        if like.dim() != 1:
            raise InputError(f"log-probabilities: {like.dim()} dimensions; pass [B, T], packed [N] with cu_seqlens, or a list of rows")
        if cu_seqlens is None:
            raise InputError("cu_seqlens: missing for packed 1-D log-probabilities; pass the row boundaries, from 0 to N")
        return Layout(kind="packed", offsets=_boundaries(cu_seqlens, like.shape[0]), width=0, mask=mask)

    @property
    def num_rows(self) -> int:
        return len(self.offsets) - 1

    def check(self, name: str, values: Values) -> None:
        """Refuses a batch that lies differently from this one."""
        if self.kind == "rows":
            lengths = [self.offsets[i + 1] - self.offsets[i] for i in range(self.num_rows)]
            if isinstance(values, Tensor) or [int(v.shape[0]) for v in values] != lengths:
                raise InputError(f"{name}: must be a list of {self.num_rows} rows of the same lengths as the log-probabilities")
            for row, mask in zip(values, self.mask, strict=True):
                _same_device(name, row, mask)
            return
        if not isinstance(values, Tensor) or not isinstance(self.mask, Tensor) or values.shape != self.mask.shape:
            raise InputError(f"{name}: shape {_shape(values)} does not match the log-probabilities' {_shape(self.mask)}")
        _same_device(name, values, self.mask)

    def dtype(self, values: Values) -> torch.dtype:
        """What arithmetic on these values is done in: theirs, but at least float32."""
        first = values if isinstance(values, Tensor) else values[0] if len(values) else torch.zeros(0)
        return torch.promote_types(first.dtype, torch.float32)

    def whole(self) -> Rows:
        return self.rows(0, self.num_rows)

    def blocks(self) -> Iterator[Rows]:
        """All rows, a few at a time."""
        first = self.mask if isinstance(self.mask, Tensor) else next(iter(self.mask), torch.zeros(0))
        most = BLOCK_TOKENS if first.device.type == "cpu" else GPU_BLOCK_TOKENS
        start = 0
        while start < self.num_rows:
            stop = start + 1
            while stop < self.num_rows and self.offsets[stop + 1] - self.offsets[start] <= most:
                stop += 1
            yield self.rows(start, stop)
            start = stop

    def rows(self, start: int, stop: int) -> Rows:
        flat_mask = self.flat(self.mask, start, stop)
        flat_mask = flat_mask if flat_mask.dtype == torch.bool else flat_mask != 0
        if self.kind == "padded" and self.width:
            grid = flat_mask.view(stop - start, self.width)
            lengths = grid.sum(dim=1)
            prefix = torch.arange(self.width, device=grid.device) < lengths.unsqueeze(1)
            if torch.equal(prefix, grid):
                return Rows.from_prefix(self, start, stop, grid, lengths)
        bounds = torch.tensor(self.offsets[start : stop + 1], device=flat_mask.device) - self.offsets[start]
        running = torch.nn.functional.pad(flat_mask.cumsum(0), (1, 0))
        return Rows.from_holes(self, start, stop, flat_mask, running[bounds[1:]] - running[bounds[:-1]])

    def flat(self, values: Values, start: int, stop: int) -> Tensor:
        """The positions of rows `[start, stop)`, masked ones included, end to end."""
        if isinstance(values, Tensor):
            return values[start:stop].reshape(-1) if self.kind == "padded" else values[self.offsets[start] : self.offsets[stop]]
        return torch.cat(list(values[start:stop])) if stop > start else torch.zeros(0)

    def shaped(self, flat: Tensor) -> Values:
        """A flat result over all positions, in the layout of the inputs."""
        if self.kind == "padded":
            return flat.view(self.num_rows, self.width)
        if self.kind == "packed":
            return flat
        return list(flat.split([self.offsets[i + 1] - self.offsets[i] for i in range(self.num_rows)]))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Rows `[start, stop)` of a layout in the working form."""

    layout: Layout
    start: int
    stop: int
    lengths: Tensor  # valid tokens of each row
    tokens: int  # valid tokens of all of them
    chunks: Tensor  # chunks of each row
    valid: Tensor  # bool [S, CHUNK]
    padding: Tensor  # its inverse
    source: Tensor | None  # flat positions of the valid tokens, and
    target: Tensor | None  # their slots; both None where the rows are prefixes of a padded batch and need no moving

    @staticmethod
    def from_prefix(layout: Layout, start: int, stop: int, grid: Tensor, lengths: Tensor) -> Rows:
        fill = -layout.width % CHUNK
        padded = torch.nn.functional.pad(grid, (0, fill)) if fill else grid
        valid = padded.reshape(-1, CHUNK)
        chunks = torch.full_like(lengths, (layout.width + fill) // CHUNK)
        return Rows(
            layout=layout, start=start, stop=stop, lengths=lengths, tokens=int(lengths.sum()), chunks=chunks,
            valid=valid, padding=~valid, source=None, target=None,
        )  # fmt: skip

    @staticmethod
    def from_holes(layout: Layout, start: int, stop: int, flat_mask: Tensor, lengths: Tensor) -> Rows:
        chunks = (lengths + CHUNK - 1) // CHUNK
        source = flat_mask.nonzero().squeeze(1)
        shift = (chunks.cumsum(0) - chunks) * CHUNK - (lengths.cumsum(0) - lengths)
        target = torch.arange(source.shape[0], device=source.device) + shift.repeat_interleave(lengths)
        valid = torch.zeros(int(chunks.sum()) * CHUNK, dtype=torch.bool, device=flat_mask.device)
        valid[target] = True
        valid = valid.view(-1, CHUNK)
        return Rows(
            layout=layout, start=start, stop=stop, lengths=lengths, tokens=source.shape[0], chunks=chunks,
            valid=valid, padding=~valid, source=source, target=target,
        )  # fmt: skip

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    def without(self, slots: Tensor) -> Rows:
        """The same rows with some more slots counted as padding."""
        valid = self.valid & ~slots
        lengths = self.sum(valid.double()).long()
        return replace(self, valid=valid, padding=~valid, lengths=lengths, tokens=int(lengths.sum()))

    def read(self, values: Values, dtype: torch.dtype = torch.float64) -> Tensor:
        """The valid tokens in slots, zero in the rest; differentiable."""
        flat = self.layout.flat(values, self.start, self.stop)
        if self.source is None or self.target is None:
            grid = flat.view(self.num_rows, self.layout.width)
            fill = -self.layout.width % CHUNK
            if fill:
                grid = torch.nn.functional.pad(grid, (0, fill))
            slots = grid.reshape(-1, CHUNK)
            return slots.masked_fill(self.padding, 0) if slots.dtype == dtype else slots.to(dtype).masked_fill_(self.padding, 0)
        slots = torch.zeros(self.valid.numel(), dtype=dtype, device=flat.device)
        return slots.index_copy(0, self.target, flat.index_select(0, self.source).to(dtype)).view(-1, CHUNK)

    def read_rows(self, values: Tensor) -> Tensor:
        """One value per row of the batch, spread over the row's slots."""
        return self.spread(values[self.start : self.stop].to(device=self.valid.device, dtype=torch.float64))

    def write(self, slots: Tensor, out: Tensor) -> None:
        """Puts slots back at their positions of the flat `out`, which holds zeros; slots outside `valid` must hold 0."""
        part = out[self.layout.offsets[self.start] : self.layout.offsets[self.stop]]
        if self.source is None or self.target is None:
            grid = slots.reshape(self.num_rows, -1)[:, : self.layout.width]
            part.view(self.num_rows, self.layout.width).copy_(grid)
            return
        part.index_copy_(0, self.source, slots.reshape(-1).index_select(0, self.target).to(out.dtype))

    def sum(self, slots: Tensor) -> Tensor:
        """Row sums `[b]` in a fixed order; slots outside `valid` must hold 0."""
        return row_sums(chunk_sums(slots), self.chunks)

    def max(self, slots: Tensor, empty: float) -> Tensor:
        """Row maxima over valid tokens; `empty` for rows without one."""
        best = slots.masked_fill(self.padding, -torch.inf).amax(dim=1)
        rows = torch.segment_reduce(best, "max", lengths=self.chunks, unsafe=True, initial=-torch.inf)
        return torch.where(self.lengths > 0, rows, torch.full_like(rows, empty))

    def peak(self, slots: Tensor) -> Tensor:
        """Row maxima of what is nowhere negative and 0 outside valid tokens; 0 for empty rows."""
        return torch.segment_reduce(slots.amax(dim=1), "max", lengths=self.chunks, unsafe=True, initial=0)

    def any(self, slots: Tensor) -> Tensor:
        """Which rows hold a True."""
        return self.peak(slots.any(dim=1, keepdim=True).double()) > 0

    def extremes(self, slots: Tensor) -> tuple[float, float]:
        """Smallest and largest value over valid tokens; (inf, -inf) if there is none."""
        if not slots.numel() or not self.tokens:
            return torch.inf, -torch.inf
        low, high = (float(end) for end in torch.aminmax(slots))
        if low < 0 and high > 0:  # the padding's zeros are neither
            return low, high
        low = float(slots.masked_fill(self.padding, torch.inf).amin())
        return low, float(slots.masked_fill(self.padding, -torch.inf).amax())

    def mean(self, slots: Tensor) -> Tensor:
        """Row means; 0 for empty rows."""
        return self.sum(slots) / self.lengths.clamp(min=1)

    def spread(self, per_row: Tensor) -> Tensor:
        """A value per row at each of its valid slots, zero in the rest."""
        spread = per_row.repeat_interleave(self.chunks).unsqueeze(1).expand(-1, CHUNK)
        return spread.masked_fill(self.padding, 0)

    def spread_flags(self, per_row: Tensor) -> Tensor:
        """The valid slots of the flagged rows."""
        return self.valid & per_row.repeat_interleave(self.chunks).unsqueeze(1)


def chunk_sums(slots: Tensor) -> Tensor:
    """The sum of each chunk, in float64. torch's own sum on a GPU orders its terms by the number of chunks; pairs do not."""
    return slots.sum(dim=1, dtype=torch.float64) if slots.device.type == "cpu" else _sum_pairs(slots.double())


def row_sums(sums: Tensor, chunks: Tensor) -> Tensor:
    """From the sums of chunks to those of rows, which have `chunks` of them each."""
    if sums.device.type == "cpu":
        return torch.segment_reduce(sums, "sum", lengths=chunks, unsafe=True, initial=0)
    return sum_padded_rows(sums, chunks)


def sum_padded_rows(sums: Tensor, chunks: Tensor) -> Tensor:
    """`row_sums` by pairs of neighbours: the zeros that fill up the shorter rows change no bit."""
    width = int(chunks.max()) if chunks.numel() else 0
    if not width:
        return sums.new_zeros(chunks.shape[0])
    row = torch.arange(chunks.shape[0], device=sums.device).repeat_interleave(chunks)
    place = torch.arange(sums.shape[0], device=sums.device) - (chunks.cumsum(0) - chunks)[row] + row * width
    grid = sums.new_zeros(chunks.shape[0] * width).index_copy(0, place, sums)
    return _sum_pairs(grid.view(-1, width))


def _sum_pairs(values: Tensor) -> Tensor:
    """Sums over the last dimension, neighbours first, by elementwise additions only."""
    while values.shape[1] > 1:
        if values.shape[1] % 2:
            values = torch.nn.functional.pad(values, (0, 1))
        values = values[:, 0::2] + values[:, 1::2]
    return values[:, 0]


def _same_device(name: str, values: Tensor, other: Tensor) -> None:
    if values.device != other.device:
        raise InputError(f"{name}: on {values.device}, the rest on {other.device}; move them to one device")


def _rows_layout(like: Sequence[Tensor], mask: Values | None, cu_seqlens: object) -> Layout:
    if cu_seqlens is not None:
        raise InputError("cu_seqlens: given with a list of rows, which carry their own boundaries; leave it out")
    if any(not isinstance(row, Tensor) or row.dim() != 1 for row in like):
        raise InputError("log-probabilities: a list must hold one 1-D tensor per row")
    if mask is None:
        mask = [torch.ones(row.shape, dtype=torch.bool, device=row.device) for row in like]
    lengths = [int(row.shape[0]) for row in like]
    if isinstance(mask, Tensor) or [int(m.shape[0]) for m in mask] != lengths:
        raise InputError(f"mask: must be a list of {len(like)} rows of the same lengths as the log-probabilities")
    for row, valid in zip(like, mask, strict=True):
        _same_device("mask", valid, row)
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    return Layout(kind="rows", offsets=tuple(offsets), width=0, mask=mask)


def _boundaries(cu_seqlens: Tensor | Sequence[int], total: int) -> tuple[int, ...]:
    bounds = tuple(int(b) for b in (cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens))
    if not bounds or bounds[0] != 0 or bounds[-1] != total or any(a > b for a, b in pairwise(bounds)):
        raise InputError(f"cu_seqlens: must rise from 0 to {total}, the number of packed tokens, got {list(bounds[:8])}…")
    return bounds


def _shape(values: object) -> object:
    if isinstance(values, Tensor):
        return list(values.shape)
    return f"a list of {len(values)}" if isinstance(values, Sequence) else type(values).__name__
