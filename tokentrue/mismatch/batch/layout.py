"""Padded, packed and ragged batches: checked to lie alike, and brought into one working form (see `rows`) for the
formulas and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from tokentrue.errors import InputError
from tokentrue.mismatch.batch.chunks import ChunkedRows, PrefixRows, RowRange, Values

BLOCK_TOKENS = (
    1 << 16
)  # rows are worked on in blocks of about this many tokens, so that temporaries stay in the processor's cache;
GPU_BLOCK_TOKENS = 1 << 21  # on a GPU launches cost more than memory


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
                raise InputError(
                    "cu_seqlens: given with a padded [B, T] batch; pass the packed 1-D tensors, or leave it out"
                )
            rows, width = like.shape
            return Layout(kind="padded", offsets=tuple(row * width for row in range(rows + 1)), width=width, mask=mask)
        if like.dim() != 1:
            raise InputError(
                f"log-probabilities: {like.dim()} dimensions; pass [B, T], packed [N] with cu_seqlens, or a list of rows"
            )
        if cu_seqlens is None:
            raise InputError(
                "cu_seqlens: missing for packed 1-D log-probabilities; pass the row boundaries, from 0 to N"
            )
        return Layout(kind="packed", offsets=_boundaries(cu_seqlens, like.shape[0]), width=0, mask=mask)

    @property
    def num_rows(self) -> int:
        return len(self.offsets) - 1

    def check(self, name: str, values: Values) -> None:
        """Refuses a batch that lies differently from this one."""
        if self.kind == "rows":
            lengths = [self.offsets[i + 1] - self.offsets[i] for i in range(self.num_rows)]
            if isinstance(values, Tensor) or [int(v.shape[0]) for v in values] != lengths:
                raise InputError(
                    f"{name}: must be a list of {self.num_rows} rows of the same lengths as the log-probabilities"
                )
            for row, mask in zip(values, self.mask, strict=True):
                _same_device(name, row, mask)
            return
        if not isinstance(values, Tensor) or not isinstance(self.mask, Tensor) or values.shape != self.mask.shape:
            raise InputError(
                f"{name}: shape {_shape(values)} does not match the log-probabilities' {_shape(self.mask)}"
            )
        _same_device(name, values, self.mask)

    def dtype(self, values: Values) -> torch.dtype:
        """What arithmetic on these values is done in: theirs, but at least float32."""
        first = values if isinstance(values, Tensor) else values[0] if len(values) else torch.zeros(0)
        return torch.promote_types(first.dtype, torch.float32)

    def whole(self) -> ChunkedRows:
        return self.rows(0, self.num_rows)

    def blocks(self) -> Iterator[ChunkedRows]:
        """All rows, a few at a time."""
        first = self.mask if isinstance(self.mask, Tensor) else next(iter(self.mask), torch.zeros(0))
        most = BLOCK_TOKENS if first.device.type == "cpu" else GPU_BLOCK_TOKENS
        prefixes = self._prefixes(0, self.num_rows)
        start = 0
        while start < self.num_rows:
            stop = start + 1
            while stop < self.num_rows and self.offsets[stop + 1] - self.offsets[start] <= most:
                stop += 1
            yield self.rows(start, stop) if prefixes is None else prefixes.rows(self.place(start, stop))
            start = stop

    def rows(self, start: int, stop: int) -> ChunkedRows:
        place, prefixes = self.place(start, stop), self._prefixes(start, stop)
        if prefixes is not None:
            return prefixes.rows(place, start)
        offsets = [offset - place.begin for offset in self.offsets[start : stop + 1]]
        return ChunkedRows.from_holes(place, offsets, place.flat(self.mask).to(torch.bool))

    def place(self, start: int, stop: int) -> RowRange:
        return RowRange(
            start=start,
            stop=stop,
            begin=self.offsets[start],
            end=self.offsets[stop],
            width=self.width,
            padded=self.kind == "padded",
        )

    def _prefixes(self, start: int, stop: int) -> PrefixRows | None:
        if self.kind != "padded" or not self.width or start == stop:
            return None
        return PrefixRows.of(self.place(start, stop).flat(self.mask).view(-1, self.width).to(torch.bool))

    def shaped(self, flat: Tensor) -> Values:
        """A flat result over all positions, in the layout of the inputs."""
        if self.kind == "padded":
            return flat.view(self.num_rows, self.width)
        if self.kind == "packed":
            return flat
        return list(flat.split([self.offsets[i + 1] - self.offsets[i] for i in range(self.num_rows)]))


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
        raise InputError(
            f"cu_seqlens: must rise from 0 to {total}, the number of packed tokens, got {list(bounds[:8])}…"
        )
    return bounds


def _shape(values: object) -> object:
    if isinstance(values, Tensor):
        return list(values.shape)
    return f"a list of {len(values)}" if isinstance(values, Sequence) else type(values).__name__
