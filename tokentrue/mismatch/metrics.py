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
    """`e^x - 1 - x`, never negative: a series below |x| = 0.01, where the subtraction would leave only rounding noise."""
    x = log_ratio
    series = x * x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720 + x * (1 / 5040 + x / 40320))))))
    return torch.where(x.abs() < 0.01, series, torch.expm1(x) - x)


def contribution(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """`C(r) = -(r - 1)·A`: what a token adds to the surrogate loss beyond its on-policy value -A; zero-centred when on policy."""
    return -torch.expm1(log_ratio) * advantages


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
