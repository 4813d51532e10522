"""Advantages from rewards, in float64."""

from collections.abc import Hashable, Sequence
from typing import Literal

import torch
from torch import Tensor

from tokentrue.errors import InputError

AdvantageScale = Literal["group", "batch"]


def grpo_advantages(
    rewards: Tensor,
    groups: Sequence[Hashable] | Tensor,
    *,
    std: bool = True,
    eps: float = 1e-6,
    scale: AdvantageScale = "group",
) -> Tensor:
    """Reward less its group's mean, over the deviation (n - 1) of the group or of the "batch"; `std=False` is Dr. GRPO.
    Equal rewards give exactly 0."""
    centred, index, size = _centre(rewards, groups)
    if not std:
        return centred.to(_kind(rewards))
    if scale == "batch":
        values = rewards.double()
        deviation = values.std() if values.numel() > 1 else torch.zeros_like(values)
    else:
        deviation = (_group_sums(centred * centred, index) / (size - 1).clamp(min=1)).sqrt()
    scaled = torch.where(centred == 0, 0.0, centred / (deviation + eps))  # also without eps
    return scaled.to(_kind(rewards))


def rloo_advantages(rewards: Tensor, groups: Sequence[Hashable] | Tensor) -> Tensor:
    """Reward less the mean of the others of its group; a group of one gives 0."""
    centred, _, size = _centre(rewards, groups)
    return (centred * size / (size - 1).clamp(min=1)).to(_kind(rewards))


def whitened_advantages(rewards: Tensor, *, eps: float = 1e-6) -> Tensor:
    """REINFORCE++: rewards less their mean, over their deviation (n - 1); equal rewards give exactly 0."""
    _require_finite(rewards)
    values = rewards.double()
    if values.numel() < 2 or bool((values == values[0]).all()):
        return torch.zeros_like(values).to(_kind(rewards))
    return ((values - values.mean()) / (values.std() + eps)).to(_kind(rewards))


def _centre(rewards: Tensor, groups: Sequence[Hashable] | Tensor) -> tuple[Tensor, Tensor, Tensor]:
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
    return torch.zeros_like(values).index_add(0, index, values)[index]


def _require_finite(rewards: Tensor) -> None:
    if not bool(torch.isfinite(rewards).all()):
        raise InputError("rewards: not all finite; score every row, or leave unscored rows out")


def _kind(rewards: Tensor) -> torch.dtype:
    return rewards.dtype if rewards.dtype in (torch.float32, torch.float64) else torch.float32
