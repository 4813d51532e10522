"""Advantages from rewards: group-relative (GRPO, Dr. GRPO), leave-one-out (RLOO), batch-whitened REINFORCE and GAE.
float64 inside."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from tokentrue.errors import ConfigError, InputError
from tokentrue.mismatch.batch.chunks import Values
from tokentrue.mismatch.batch.layout import Layout

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
    """Reward less its group's mean, over a standard deviation (n - 1) plus `eps`; `std=False` is Dr. GRPO.

    The deviation is the group's own, or with `scale="batch"` that of all rewards (TRL's `scale_rewards="batch"`). A
    group whose rewards are
    all equal has nothing to compare: exactly 0. So has a group of one, unless `lone="reward"`: its mean is then 0 and
    its deviation 1, as in verl.
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
    """Reward less the mean of the other members of its group. A group of one has no others: 0, or with `lone="reward"`
    its reward."""
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
    """Batch-whitened REINFORCE (REINFORCE++): zero mean and unit deviation over the batch; with `groups`, of
    group-centred rewards.

    With `tokens`, each row's number of trained tokens, mean and variance are over tokens instead of rows, and `eps` is
    added to the
    variance: (r - m) / sqrt(v + eps), m = sum(n r) / N, v = sum(n (r - m)^2) / (N - 1). That is verl's `masked_whiten`,
    with eps 1e-8.
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
    """Generalised advantage estimates and returns. Time runs over valid tokens only: given tokens in between are no
    steps.

    `last_values[i]` is the value after row i's last token where it was cut off; 0 (the end of the episode) if left out.
    """
    if not (0 <= gamma <= 1 and 0 <= lam <= 1):
        raise ConfigError(f"gae: gamma {gamma} and lam {lam} must be in [0, 1]")
    layout = Layout.of(rewards, mask, cu_seqlens)
    layout.check("values", values)
    if not isinstance(rewards, Tensor) and not rewards:
        return [], []
    first = rewards if isinstance(rewards, Tensor) else rewards[0]
    advantages = torch.zeros(
        layout.offsets[-1], dtype=torch.promote_types(first.dtype, torch.float32), device=first.device
    )
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
