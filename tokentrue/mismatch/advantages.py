"""Advantages from rewards: group-relative (GRPO, Dr. GRPO), leave-one-out (RLOO), batch-whitened REINFORCE and GAE. float64 inside."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from tokentrue.errors import ConfigError, InputError
from tokentrue.mismatch.batch.chunks import Values
from tokentrue.mismatch.batch.layout import Layout


def grpo_advantages(rewards: Tensor, groups: Sequence[Hashable] | Tensor, *, std: bool = True, eps: float = 1e-6) -> Tensor:
    """Reward less its group's mean, over the group's standard deviation (n - 1) plus `eps`; `std=False` is Dr. GRPO.

    A group of one, or one whose rewards are all equal, has nothing to compare: exactly 0.
    """
    values, index, counts = _group_rows(rewards, groups)
    centred = values - (_per_group(values, index, counts) / counts)[index]
    centred = torch.where(_all_equal(values, index, counts)[index], 0.0, centred)
    if not std:
        return centred.to(_kind(rewards))
    variance = _per_group(centred * centred, index, counts) / (counts - 1).clamp(min=1)
    scaled = torch.where(centred == 0, 0.0, centred / (variance.sqrt()[index] + eps))  # also without eps
    return scaled.to(_kind(rewards))


def rloo_advantages(rewards: Tensor, groups: Sequence[Hashable] | Tensor) -> Tensor:
    """Reward less the mean of the other members of its group; 0 in a group of one, which has no others."""
    values, index, counts = _group_rows(rewards, groups)
    centred = values - (_per_group(values, index, counts) / counts)[index]
    centred = torch.where(_all_equal(values, index, counts)[index], 0.0, centred)
    return (centred * (counts / (counts - 1).clamp(min=1))[index]).to(_kind(rewards))


def whitened_advantages(rewards: Tensor, groups: Sequence[Hashable] | Tensor | None = None, *, eps: float = 1e-6) -> Tensor:
    """Batch-whitened REINFORCE (REINFORCE++): zero mean and unit deviation over the batch; with `groups`, of group-centred rewards."""
    values = rewards.double() if groups is None else grpo_advantages(rewards.double(), groups, std=False)
    if values.numel() < 2 or bool((values == values[0]).all()):
        return torch.zeros_like(values).to(_kind(rewards))
    return ((values - values.mean()) / (values.std() + eps)).to(_kind(rewards))


def gae_advantages(
    rewards: Values,
    values: Values,
    mask: Values | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    last_values: Tensor | None = None,
) -> tuple[Values, Values]:
    """Generalised advantage estimates and returns. Time runs over valid tokens only: given tokens in between are no steps.

    `last_values[i]` is the value after row i's last token where it was cut off; 0 (the end of the episode) if left out.
    """
    if not (0 <= gamma <= 1 and 0 <= lam <= 1):
        raise ConfigError(f"gae: gamma {gamma} and lam {lam} must be in [0, 1]")
    layout = Layout.of(rewards, mask, cu_seqlens)
    layout.check("values", values)
    first = rewards if isinstance(rewards, Tensor) else rewards[0]
    advantages = torch.zeros(layout.offsets[-1], dtype=torch.promote_types(first.dtype, torch.float32), device=first.device)
    returns = torch.zeros_like(advantages)
    with torch.no_grad():
        for rows in layout.blocks():
            reward, value = rows.read(rewards), rows.read(values)
            gained = torch.zeros_like(reward)
            start = 0
            for row, (length, chunks) in enumerate(zip(rows.lengths.tolist(), rows.chunks.tolist(), strict=True)):
                last = 0.0 if last_values is None else float(last_values[rows.place.start + row])
                span = slice(start, start + length)
                gained.view(-1)[span] = _scan(reward.view(-1)[span], value.view(-1)[span], gamma, lam, last)
                start += chunks * reward.shape[1]
            rows.write(gained, advantages)
            rows.write(gained + value, returns)
    return layout.shaped(advantages), layout.shaped(returns)


def _scan(reward: Tensor, value: Tensor, gamma: float, lam: float, last: float) -> Tensor:
    following = torch.cat([value[1:], torch.tensor([last], dtype=value.dtype, device=value.device)])[: value.shape[0]]
    errors = (reward + gamma * following - value).tolist()
    carried, out = 0.0, [0.0] * len(errors)
    for t in range(len(errors) - 1, -1, -1):
        carried = errors[t] + gamma * lam * carried
        out[t] = carried
    return torch.tensor(out, dtype=reward.dtype, device=reward.device)


def _group_rows(rewards: Tensor, groups: Sequence[Hashable] | Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if rewards.dim() != 1 or len(groups) != rewards.shape[0]:
        raise InputError(f"groups: {len(groups)} for rewards of shape {list(rewards.shape)}; pass one reward and one group per row")
    if not bool(torch.isfinite(rewards).all()):
        raise InputError("rewards: not all finite; score every row, or leave unscored rows out")
    seen: dict[Hashable, int] = {}
    names = groups.tolist() if isinstance(groups, Tensor) else groups
    index = torch.tensor([seen.setdefault(name, len(seen)) for name in names], dtype=torch.long, device=rewards.device)
    counts = torch.bincount(index, minlength=len(seen)).double()
    return rewards.double(), index, counts


def _per_group(values: Tensor, index: Tensor, counts: Tensor) -> Tensor:
    return torch.zeros_like(counts).index_add(0, index, values)


def _all_equal(values: Tensor, index: Tensor, counts: Tensor) -> Tensor:
    """Groups whose members have the same reward: rounding of the mean must not give them a signal."""
    low = torch.full_like(counts, torch.inf).scatter_reduce(0, index, values, "amin")
    high = torch.full_like(counts, -torch.inf).scatter_reduce(0, index, values, "amax")
    return low == high


def _kind(rewards: Tensor) -> torch.dtype:
    return rewards.dtype if rewards.dtype in (torch.float32, torch.float64) else torch.float32
