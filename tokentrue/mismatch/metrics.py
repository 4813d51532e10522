"""The estimators, each defined here and nowhere else. All take log r with r = trainer ÷ rollout (or the PPO ratio that is named).

`k1 = -log r`, `k2 = (log r)²/2`, `k3 = r - 1 - log r` estimate KL(rollout ‖ trainer) from tokens sampled by the rollout policy.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG_CLAMP = 20.0
"""exp of a log-ratio is taken inside ±this (e²⁰ ≈ 4.9e8); how often that bites is a metric, `clamped`."""


def k1(log_ratio: Tensor) -> Tensor:
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    return 0.5 * log_ratio * log_ratio


def k3(log_ratio: Tensor) -> Tensor:
    """`e^x - 1 - x`, never negative: a series below |x| = 0.01, where the subtraction would leave only rounding noise.

    In float64 the relative error is below 3e-11 everywhere.
    """
    return k3_from(log_ratio, torch.expm1(log_ratio), log_ratio * log_ratio)


def k3_from(x: Tensor, expm1: Tensor, square: Tensor) -> Tensor:
    """`k3(x)` where e^x - 1 and x² are at hand."""
    series = x * (1 / 120)
    if torch.is_grad_enabled() and x.requires_grad:
        series = ((series + 1 / 24) * x + 1 / 6) * x + 1 / 2
        return torch.where(square < 1e-4, series * square, expm1 - x)
    series.add_(1 / 24).mul_(x).add_(1 / 6).mul_(x).add_(1 / 2).mul_(square)  # the same, without temporaries
    return torch.where(square < 1e-4, series, expm1 - x)


def contribution(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """`C(r) = -(r - 1)·A`: what a token adds to the surrogate loss beyond its on-policy value -A; zero-centred when on policy."""
    return -torch.expm1(log_ratio) * advantages


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
