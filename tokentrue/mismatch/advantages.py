"""Advantages from rewards, in float64."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from tokentrue.errors import InputError

AdvantageScale: TypeAlias = Literal["group", "batch"]
LoneGroup: TypeAlias = Literal["zero", "reward"]


def grpo_advantages(
    rewards: Tensor,
    groups: Sequence[Hashable] | Tensor,
    *,
    std: bool = True,
    eps: float = 1e-6,
    scale: AdvantageScale = "group",
    lone: LoneGroup = "zero",
) -> Tensor:
    """Reward less its group's mean, over the deviation (n - 1) of the group or of the "batch"; `std=False` is Dr. GRPO.

    A group of equal rewards gives exactly 0, and so does a group of one; with `lone="reward"` that gives its reward, as
    in verl.
    """
    values, index, counts = _group_rows(rewards, groups)
    centred = _centre(values, index, counts)
    is_lone = (counts == 1)[index]
    kept = torch.where(is_lone, values, 0.0) if lone == "reward" else torch.zeros_like(values)
    if not std:
        return torch.where(is_lone, kept, centred).to(_kind(rewards))
    if scale == "batch":
        deviation = values.std().expand_as(values) if values.numel() > 1 else torch.zeros_like(values)
    else:
        deviation = (_per_group(centred * centred, index, counts) / (counts - 1).clamp(min=1)).sqrt()[index]
    scaled = torch.where(centred == 0, 0.0, centred / (deviation + eps))  # also without eps
    return torch.where(is_lone, kept / (1 + eps), scaled).to(_kind(rewards))


def rloo_advantages(rewards: Tensor, groups: Sequence[Hashable] | Tensor, *, lone: LoneGroup = "zero") -> Tensor:
    """Reward less the mean of the others of its group; a group of one gives 0, or its reward."""
    values, index, counts = _group_rows(rewards, groups)
    made = _centre(values, index, counts) * (counts / (counts - 1).clamp(min=1))[index]
    if lone == "reward":
        made = torch.where((counts == 1)[index], values, made)
    return made.to(_kind(rewards))


def whitened_advantages(
    rewards: Tensor,
    groups: Sequence[Hashable] | Tensor | None = None,
    *,
    eps: float = 1e-6,
    tokens: Sequence[int] | Tensor | None = None,
    lone: LoneGroup = "zero",
) -> Tensor:
    """REINFORCE++: zero mean and unit deviation over the batch; with `groups`, of group-centred rewards.

    With `tokens` (trained tokens per row): (r - m) / sqrt(v + eps), m = sum(n r) / N, v = sum(n (r - m)^2) / (N - 1),
    verl's `masked_whiten`.
    """
    _require_finite(rewards)
    values = rewards.double() if groups is None else grpo_advantages(rewards.double(), groups, std=False, lone=lone)
    if values.numel() < 2 or bool((values == values[0]).all()):
        return torch.zeros_like(values).to(_kind(rewards))
    if tokens is None:
        return ((values - values.mean()) / (values.std() + eps)).to(_kind(rewards))
    counts = torch.as_tensor(tokens, dtype=torch.float64, device=values.device)
    if counts.shape != values.shape:
        raise InputError(
            f"tokens: {len(counts)} counts for {len(values)} rewards; pass each row's number of trained tokens"
        )
    if float(counts.sum()) < 2:
        return torch.zeros_like(values).to(_kind(rewards))
    centred = values - (counts * values).sum() / counts.sum()
    variance = (counts * centred * centred).sum() / (counts.sum() - 1)
    return (centred / (variance + eps).sqrt()).to(_kind(rewards))


def _group_rows(rewards: Tensor, groups: Sequence[Hashable] | Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if rewards.dim() != 1 or len(groups) != rewards.shape[0]:
        raise InputError(
            f"groups: {len(groups)} for rewards of shape {list(rewards.shape)}; pass one reward and one group per row"
        )
    _require_finite(rewards)
    seen: dict[Hashable, int] = {}
    names = groups.tolist() if isinstance(groups, Tensor) else groups
    index = torch.tensor([seen.setdefault(name, len(seen)) for name in names], dtype=torch.long, device=rewards.device)
    counts = torch.bincount(index, minlength=len(seen)).double()
    return rewards.double(), index, counts


def _require_finite(rewards: Tensor) -> None:
    if not bool(torch.isfinite(rewards).all()):
        raise InputError("rewards: not all finite; score every row, or leave unscored rows out")


def _centre(values: Tensor, index: Tensor, counts: Tensor) -> Tensor:
    """Rewards less their group's mean; exactly 0 where all of a group are equal."""
    centred = values - (_per_group(values, index, counts) / counts)[index]
    return torch.where(_all_equal(values, index, counts)[index], 0.0, centred)


def _per_group(values: Tensor, index: Tensor, counts: Tensor) -> Tensor:
    return torch.zeros_like(counts).index_add(0, index, values)


def _all_equal(values: Tensor, index: Tensor, counts: Tensor) -> Tensor:
    """Groups whose members have the same reward: rounding of the mean must not give them a signal."""
    low = torch.full_like(counts, torch.inf).scatter_reduce(0, index, values, "amin")
    high = torch.full_like(counts, -torch.inf).scatter_reduce(0, index, values, "amax")
    return low == high


def _kind(rewards: Tensor) -> torch.dtype:
    return rewards.dtype if rewards.dtype in (torch.float32, torch.float64) else torch.float32
