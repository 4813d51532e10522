"""Padded, packed and ragged batches, read as their valid tokens, end to end, and written back; and a batch as the rules
of a correction see it.

A row's sum is taken in an order that depends on the row alone: its bits do not depend on other rows, padding or layout.
r is always trainer ÷ rollout probability: `corr` is e^(old - rollout), the mismatch itself; `ppo_train` is e^(current -
old) and `ppo_rollout` e^(current - rollout), which contain the policy's drift.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Literal, TypedDict

import torch
from torch import Tensor

from tokentrue.errors import InputError
from tokentrue.mismatch.metrics import LOG_CLAMP
from tokentrue.records import record

Values = Tensor | Sequence[Tensor]
"""A batch in one of three layouts: `[B, T]`, packed `[N]` with `cu_seqlens`, or one tensor per row."""
Shape = torch.Size | list[torch.Size]
Bounds = Tensor | Sequence[int] | None
"""Row boundaries of packed 1-D tensors, from 0 to N."""


def shape_of(values: Values) -> Shape:
    return values.shape if isinstance(values, Tensor) else [row.shape for row in values]


def flatten(values: Values) -> Tensor:
    if isinstance(values, Tensor):
        return values.reshape(-1)
    return torch.cat(list(values)) if len(values) else torch.zeros(0)


def detach(values: Values) -> Values:
    return values.detach() if isinstance(values, Tensor) else [row.detach() for row in values]


def dtype_of(values: Values) -> torch.dtype:
    """Of results: that of the values, but at least float32."""
    first = values if isinstance(values, Tensor) else values[0] if len(values) else torch.zeros(0)
    return torch.promote_types(first.dtype, torch.float32)


@record(eq=False)
class Rows:
    """A batch's layout and its valid tokens: a tensor `[n]` holds one value for each, row after row."""

    shape: Shape
    offsets: tuple[int, ...]  # row i is at [offsets[i], offsets[i + 1]) of the flat batch
    lengths: Tensor  # valid tokens of each row
    source: Tensor  # the position of each token in the flat batch
    row: Tensor  # the row of each token

    @staticmethod
    def of(like: Values, mask: Values | None, cu_seqlens: Bounds = None) -> "Rows":
        offsets, shape = _offsets(like, cu_seqlens), shape_of(like)
        device = like.device if isinstance(like, Tensor) else like[0].device if len(like) else torch.device("cpu")
        if mask is None:
            valid = torch.ones(offsets[-1], dtype=torch.bool, device=device)
        else:
            require_alike("mask", mask, shape, device)
            valid = flatten(mask).to(torch.bool)
        before = torch.nn.functional.pad(valid.cumsum(0), (1, 0))[torch.tensor(offsets, device=device)]
        lengths = before[1:] - before[:-1]
        row = torch.arange(len(offsets) - 1, device=device).repeat_interleave(lengths)
        return Rows(shape=shape, offsets=offsets, lengths=lengths, source=valid.nonzero().squeeze(1), row=row)

    @property
    def tokens(self) -> int:
        return self.source.shape[0]

    @property
    def num_rows(self) -> int:
        return self.lengths.shape[0]

    @property
    def num_full_rows(self) -> int:
        return int((self.lengths > 0).sum())

    def read(self, name: str, values: Values, dtype: torch.dtype = torch.float64) -> Tensor:
        require_alike(name, values, self.shape, self.row.device)
        return flatten(values).index_select(0, self.source).to(dtype)

    def read_wide(self, name: str, values: Values) -> Tensor:
        """`[n, K]` from K values at each position, in a last dimension; differentiable."""
        flat = values.flatten(0, -2) if isinstance(values, Tensor) else torch.cat(list(values))
        if flat.dim() != 2 or flat.shape[0] != self.offsets[-1]:
            raise InputError(f"{name}: needs K values in a last dimension at each of {self.offsets[-1]} positions")
        return flat.index_select(0, self.source).double()

    def read_per_token(self, name: str, values: Values) -> Tensor:
        """Values per token, or one per row at each of its tokens."""
        is_alike = shape_of(values) == self.shape
        if isinstance(values, Tensor) and values.dim() <= 1 and values.numel() == self.num_rows and not is_alike:
            return self.spread(values.reshape(-1).to(device=self.row.device, dtype=torch.float64))
        return self.read(name, values)

    def scatter(self, values: Tensor, dtype: torch.dtype) -> Values:
        flat = torch.zeros(self.offsets[-1], dtype=dtype, device=values.device)
        flat = flat.index_copy(0, self.source, values.to(dtype))
        if isinstance(self.shape, torch.Size):
            return flat.view(self.shape)
        return list(flat.split([end - start for start, end in pairwise(self.offsets)]))

    def flags(self, value: bool) -> Tensor:
        return torch.full((self.tokens,), value, device=self.row.device)

    def sum(self, values: Tensor) -> Tensor:
        if values.device.type == "cpu":
            return torch.segment_reduce(values.double(), "sum", lengths=self.lengths, unsafe=True, initial=0)
        return sum_padded_rows(values.double(), self.lengths)

    def mean(self, values: Tensor) -> Tensor:
        """0 for empty rows."""
        return self.sum(values) / self.lengths.clamp(min=1)

    def max(self, values: Tensor, empty: float) -> Tensor:
        found = torch.segment_reduce(values, "max", lengths=self.lengths, unsafe=True, initial=-torch.inf)
        return torch.where(self.lengths > 0, found, empty)

    def count(self, flags: Tensor) -> Tensor:
        return self.sum(flags.double())

    def any(self, flags: Tensor) -> Tensor:
        return self.count(flags) > 0

    def spread(self, per_row: Tensor) -> Tensor:
        return per_row.index_select(0, self.row)

    def positions(self) -> Tensor:
        before = self.lengths.cumsum(0) - self.lengths
        return torch.arange(self.tokens, device=self.row.device) - self.spread(before)


def sum_padded_rows(values: Tensor, lengths: Tensor) -> Tensor:
    """By pairs of neighbours: torch's sums on a GPU order their terms by the shape of the whole batch."""
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


def require_alike(name: str, values: Values, shape: Shape, device: torch.device) -> None:
    found = shape_of(values)
    if found != shape and isinstance(shape, list):
        raise InputError(f"{name}: must be a list of {len(shape)} rows of the same lengths as the log-probabilities")
    if found != shape:
        shown = list(found) if isinstance(found, torch.Size) else f"a list of {len(found)}"
        raise InputError(f"{name}: shape {shown} does not match the log-probabilities' {list(shape)}")
    for part in [values] if isinstance(values, Tensor) else values:
        if part.device != device:
            raise InputError(f"{name}: on {part.device}, the rest on {device}; move them to one device")


def _offsets(like: Values, cu_seqlens: Bounds) -> tuple[int, ...]:
    if not isinstance(like, Tensor):
        if any(not isinstance(row, Tensor) or row.dim() != 1 for row in like):
            raise InputError("log-probabilities: a list must hold one 1-D tensor per row")
        bounds = tuple(accumulate((row.shape[0] for row in like), initial=0))
    elif like.dim() == 2:
        bounds = tuple(row * like.shape[1] for row in range(like.shape[0] + 1))
    elif like.dim() == 1:
        if cu_seqlens is None:
            raise InputError(
                "cu_seqlens: missing for packed 1-D log-probabilities; pass the row boundaries, from 0 to N"
            )
        bounds = tuple(torch.as_tensor(cu_seqlens, dtype=torch.long).tolist())
        total = like.shape[0]
        if not bounds or bounds[0] != 0 or bounds[-1] != total or any(a > b for a, b in pairwise(bounds)):
            raise InputError(f"cu_seqlens: must rise from 0 to {total}, the number of packed tokens, got {bounds[:8]}…")
        return bounds
    else:
        raise InputError(
            f"log-probabilities: {like.dim()} dimensions; pass [B, T], packed [N] with cu_seqlens, or a list of rows"
        )
    if cu_seqlens is not None:
        raise InputError(
            "cu_seqlens: given with a padded batch or a list of rows; pass the packed 1-D tensors, or leave it out"
        )
    return bounds


Signal = Literal["corr", "ppo_train", "ppo_rollout"]
Need = Literal["old", "current", "advantages", "versions", "head"]
"""What a rule may need; "head", both policies at the sampler's most likely ids, concerns the loss alone."""
NonFinite = Literal["raise", "unit"]


class BatchOptions(TypedDict, total=False):
    cu_seqlens: Bounds
    logprobs: Values | None  # the current policy's log-probabilities
    advantages: Values | None  # per token, or one per row
    versions: Values | None  # the policy version that sampled each token, or each row
    version: int | None  # the current policy version


@dataclass(slots=True, kw_only=True, eq=False)
class Batch:
    """Log-probabilities of the valid tokens, and what the rules decided."""

    rows: Rows
    options: BatchOptions
    trainer: Tensor
    rollout: Tensor
    current: Tensor | None
    hits: dict[str, int]  # how many tokens or rows each decision concerns, by its name
    log_clamp: float = LOG_CLAMP
    clamp_tokens: bool = False  # each log-ratio before it is summed, instead of the sum
    weights: Tensor = field(init=False)
    unmasked: Tensor = field(init=False)  # weights before mode "mask" zeroed any
    dropped: Tensor = field(init=False)
    active: Tensor = field(init=False)  # tokens that statistics of whole rows are taken over

    def __post_init__(self) -> None:
        self.weights = self.unmasked = torch.ones_like(self.rollout)
        self.dropped, self.active = self.rows.flags(False), self.rows.flags(True)

    @property
    def corr(self) -> Tensor:
        return self.trainer - self.rollout

    @property
    def applied(self) -> Tensor:
        return self.weights.masked_fill(self.dropped, 0)

    def log_ratio(self, signal: Signal) -> Tensor:
        if signal == "corr":
            return self.corr
        assert self.current is not None, "`correct_batch` refuses a batch without it"
        return self.current - (self.trainer if signal == "ppo_train" else self.rollout)

    def per_token(self, name: Literal["advantages", "versions"]) -> Tensor:
        values = self.options.get(name)
        assert values is not None, "`correct_batch` refuses a batch without it"
        return self.rows.read_per_token(name, values)

    @property
    def age(self) -> Tensor:
        version = self.options.get("version")
        assert version is not None, "`correct_batch` refuses a batch without it"
        return version - self.per_token("versions")

    def has(self, need: Need) -> bool:
        if need == "versions":
            return self.options.get("versions") is not None and self.options.get("version") is not None
        return need in ("old", "head") or self.options.get("logprobs" if need == "current" else need) is not None

    def row_totals(self, values: Tensor) -> tuple[Tensor, Tensor]:
        return self.rows.sum(torch.where(self.active, values, 0.0)), self.rows.count(self.active).clamp(min=1)

    def count(self, name: str, tokens: Tensor) -> None:
        self.hits[f"{name}_tokens"] = int(tokens.sum())
        self.hits[f"{name}_rows"] = int(self.rows.any(tokens).sum())

    def drop(self, name: str, tokens: Tensor, *, whole_rows: bool = False) -> None:
        self.count(name, tokens)
        self.dropped |= self.rows.spread(self.rows.any(tokens)) if whole_rows else tokens


def read_batch(
    trainer_logprobs: Values,
    rollout_logprobs: Values,
    mask: Values | None,
    options: BatchOptions,
    *,
    non_finite: NonFinite = "raise",
) -> Batch:
    if unknown := sorted(set(options) - BatchOptions.__annotations__.keys()):
        raise TypeError(f"unexpected keyword argument {unknown[0]!r}")
    rows = Rows.of(trainer_logprobs, mask, options.get("cu_seqlens"))
    logprobs = options.get("logprobs")
    trainer = rows.read("trainer_logprobs", trainer_logprobs)
    rollout = rows.read("rollout_logprobs", rollout_logprobs)
    current = None if logprobs is None else rows.read("logprobs", logprobs)
    bad = ~torch.isfinite(trainer - rollout if current is None else trainer - rollout + current)
    num_bad = int(bad.sum())
    if num_bad and non_finite == "raise":
        raise InputError(
            f"log-probabilities: {num_bad} valid tokens are not finite, the first in row {int(rows.row[bad][0])}; the "
            "engine or the trainer could not score them. Correct the mask, or choose Correction(non_finite='unit')"
        )
    if num_bad:
        rollout = torch.where(bad, 0.0, rollout)
        trainer = torch.where(bad, rollout, trainer)
        current = None if current is None else torch.where(bad, rollout, current)
    return Batch(rows=rows, options=options, trainer=trainer, rollout=rollout, current=current, hits={"bad": num_bad})


def interpolate_policy(current: Tensor, rollout: Tensor, age: Tensor) -> Tensor:
    """A-3PO (arXiv 2512.06547): the policy one version before the current one."""
    return rollout + (1 - 1 / age.clamp(min=1)) * (current - rollout)
