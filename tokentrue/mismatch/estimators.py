"""The estimators, each defined here and nowhere else. All take log r with r = trainer ÷ rollout (or the PPO ratio that
is named).

`k1 = -log r`, `k2 = (log r)²/2`, `k3 = r - 1 - log r` estimate KL(rollout ‖ trainer) from tokens sampled by the rollout
policy.
"""

from __future__ import annotations

from typing import Any

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

    Computed in float64; its relative error is below 3e-11 everywhere.
    """
    return _K3.apply(log_ratio.double()).to(log_ratio.dtype)  # type: ignore[no-any-return]


class _K3(torch.autograd.Function):
    """Its derivative, e^x - 1, comes out of the same computation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        excess, value = excess_and_k3(x)
        ctx.save_for_backward(excess)
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * ctx.saved_tensors[0]


def excess_and_k3(x: Tensor) -> tuple[Tensor, Tensor]:
    """`e^x - 1` and `e^x - 1 - x` of float64, each to its own last digits, without a branch per element; not
    differentiable.

    x = y + z with y inside ±0.01, where series give s = e^y - 1 - y and g = e^y - 1; then h = e^z - 1, which is exactly
    0 for small x, and e^x - 1 = g + h·(1 + g).
    """
    y = x.clamp(-0.01, 0.01)
    z = x - y
    half, sixth, last = (torch.tensor(1 / n, dtype=x.dtype, device=x.device) for n in (2, 6, 24))
    s = torch.add(last, y, alpha=1 / 120)
    torch.addcmul(sixth, s, y, out=s)
    torch.addcmul(half, s, y, out=s)
    s.mul_(y).mul_(y)
    g = y.add_(s)
    h = z.exp().sub_(1)
    far = h.addcmul_(h, g)
    return g.add_(far), far.sub_(z).add_(s)


def contribution(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """`C(r) = -(r - 1)·A`: what a token adds to the surrogate loss beyond its on-policy value -A; zero-centred when on
    policy."""
    return -torch.expm1(log_ratio) * advantages


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
