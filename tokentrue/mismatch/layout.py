"""Padded, packed and ragged batches: checked to lie alike, and read as their valid tokens, end to end, and back.

What is at masked positions of a batch is never read, so NaN there cannot leak. A row's sum is taken in an order that
depends on the row alone, so that its bits do not depend on the other rows, on padding or on the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from tokentrue.errors import InputError

Values: TypeAlias = Tensor | Sequence[Tensor]
"""A batch in one of three layouts: `[B, T]`, packed `[N]` with `cu_seqlens`, or one tensor per row."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """The valid tokens of a batch: a tensor `[n]` holds one value for each, row after row."""

    lengths: Tensor  # valid tokens of each row
    source: Tensor  # the position of each token in the flat batch
    row: Tensor  # the row of each token

    @property
    def tokens(self) -> int:
        return self.source.shape[0]

    @property
    def num_rows(self) -> int:
        return self.lengths.shape[0]

    @property
    def num_full_rows(self) -> int:
        """Rows with at least one token."""
        return int((self.lengths > 0).sum())

    def read(self, values: Values, dtype: torch.dtype = torch.float64) -> Tensor:
        """The valid tokens' values; differentiable."""
        return flatten(values).index_select(0, self.source).to(dtype)

    def without(self, tokens: Tensor) -> Rows:
        """The same rows with fewer tokens."""
        left = ~tokens
        return Rows(lengths=self.count(left).long(), source=self.source[left], row=self.row[left])

    def flags(self, value: bool) -> Tensor:
        return torch.full((self.tokens,), value, device=self.row.device)

    def sum(self, values: Tensor) -> Tensor:
        """Row sums in float64."""
        if values.device.type == "cpu":
            return torch.segment_reduce(values.double(), "sum", lengths=self.lengths, unsafe=True, initial=0)
        return sum_padded_rows(values.double(), self.lengths)

    def mean(self, values: Tensor) -> Tensor:
        """Row means; 0 for empty rows."""
        return self.sum(values) / self.lengths.clamp(min=1)

    def max(self, values: Tensor, empty: float) -> Tensor:
        """Row maxima; `empty` for rows without a token."""
        found = torch.segment_reduce(values, "max", lengths=self.lengths, unsafe=True, initial=-torch.inf)
        return torch.where(self.lengths > 0, found, empty)

    def count(self, flags: Tensor) -> Tensor:
        """How many True each row holds, as doubles."""
        return self.sum(flags.double())

    def any(self, flags: Tensor) -> Tensor:
        """Which rows hold a True."""
        return self.count(flags) > 0

    def spread(self, per_row: Tensor) -> Tensor:
        """A value per row at each of its tokens."""
        return per_row.index_select(0, self.row)

    def positions(self) -> Tensor:
        """The place of each token among the valid ones of its row."""
        before = self.lengths.cumsum(0) - self.lengths
        return torch.arange(self.tokens, device=self.row.device) - self.spread(before)


def flatten(values: Values) -> Tensor:
    """All positions of a batch, masked ones included, end to end."""
    if isinstance(values, Tensor):
        return values.reshape(-1)
    return torch.cat(list(values)) if len(values) else torch.zeros(0)


def sum_padded_rows(values: Tensor, lengths: Tensor) -> Tensor:
    """Row sums by pairs of neighbours: torch's own sums on a GPU order their terms by the shape of the whole batch. The
    zeros that fill up shorter rows change no bit."""
    width = int(lengths.max()) if lengths.numel() else 0
    if not width:
        return values.new_zeros(lengths.shape[0]) + values.sum()  # 0, and still part of the graph
    row = torch.arange(lengths.shape[0], device=values.device).repeat_interleave(lengths)
    place = torch.arange(values.shape[0], device=values.device) - (lengths.cumsum(0) - lengths)[row] + row * width
    grid = values.new_zeros(lengths.shape[0] * width).index_copy(0, place, values).view(-1, width)
    while grid.shape[1] > 1:
        if grid.shape[1] % 2:
            grid = torch.nn.functional.pad(grid, (0, 1))
        grid = grid[:, 0::2] + grid[:, 1::2]
    return grid[:, 0]


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

    def rows(self) -> Rows:
        mask = flatten(self.mask).to(torch.bool)
        bounds = torch.tensor(self.offsets, device=mask.device)
        before = torch.nn.functional.pad(mask.cumsum(0), (1, 0))[bounds]
        lengths = before[1:] - before[:-1]
        row = torch.arange(self.num_rows, device=mask.device).repeat_interleave(lengths)
        return Rows(lengths=lengths, source=mask.nonzero().squeeze(1), row=row)

    def read_per_token(self, rows: Rows, name: str, values: Values) -> Tensor:
        """Values per token, or one per row at each of its tokens."""
        is_packed = self.kind == "packed" and isinstance(values, Tensor) and values.shape[:1] == (self.offsets[-1],)
        if isinstance(values, Tensor) and values.dim() <= 1 and values.numel() == self.num_rows and not is_packed:
            return rows.spread(values.reshape(-1).to(device=rows.row.device, dtype=torch.float64))
        self.check(name, values)
        return rows.read(values)

    def scatter(self, rows: Rows, values: Tensor, dtype: torch.dtype) -> Values:
        """A value per valid token in the layout of the inputs, 0 elsewhere."""
        flat = torch.zeros(self.offsets[-1], dtype=dtype, device=values.device)
        return self.shaped(flat.index_copy(0, rows.source, values.to(dtype)))

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
