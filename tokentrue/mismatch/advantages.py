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
    centred, index, size = _centre(rewards, groups)
    values = rewards.double()
    alone = values if lone == "reward" else torch.zeros_like(values)
    if not std:
        return torch.where(size == 1, alone, centred).to(_kind(rewards))
    if scale == "batch":
        deviation = values.std() if values.numel() > 1 else torch.zeros_like(values)
    else:
        deviation = (_group_sums(centred * centred, index) / (size - 1).clamp(min=1)).sqrt()
    scaled = torch.where(centred == 0, 0.0, centred / (deviation + eps))  # also without eps
    return torch.where(size == 1, alone / (1 + eps), scaled).to(_kind(rewards))


def rloo_advantages(rewards: Tensor, groups: Sequence[Hashable] | Tensor, *, lone: LoneGroup = "zero") -> Tensor:
    """Reward less the mean of the others of its group; a group of one gives 0, or its reward."""
    centred, _, size = _centre(rewards, groups)
    made = centred * size / (size - 1).clamp(min=1)
    return (torch.where(size == 1, rewards.double(), made) if lone == "reward" else made).to(_kind(rewards))


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


def _centre(rewards: Tensor, groups: Sequence[Hashable] | Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards less their group's mean, the first row of each row's group, and the group's size."""
    if rewards.dim() != 1 or len(groups) != rewards.shape[0]:
        raise InputError(
            f"groups: {len(groups)} for rewards of shape {list(rewards.shape)}; pass one reward and one group per row"
        )
    _require_finite(rewards)
    first: dict[Hashable, int] = {}
    names = groups.tolist() if isinstance(groups, Tensor) else groups
    firsts = [first.setdefault(name, row) for row, name in enumerate(names)]
    index = torch.tensor(firsts, dtype=torch.long, device=rewards.device)
    # Less the first reward before the mean: rounding of the mean must not give equal rewards a signal.
    values = rewards.double() - rewards.double()[index]
    size = _group_sums(torch.ones_like(values), index)
    return values - _group_sums(values, index) / size, index, size


def _group_sums(values: Tensor, index: Tensor) -> Tensor:
    """At each row, the sum over its group."""
    return torch.zeros_like(values).index_add(0, index, values)[index]


def _require_finite(rewards: Tensor) -> None:
    if not bool(torch.isfinite(rewards).all()):
        raise InputError("rewards: not all finite; score every row, or leave unscored rows out")


def _kind(rewards: Tensor) -> torch.dtype:
    return rewards.dtype if rewards.dtype in (torch.float32, torch.float64) else torch.float32
