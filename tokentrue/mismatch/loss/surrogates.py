"""The surrogate objectives: each turns a batch's tokens into a loss per token, with its clip fractions.

Gradient flows through the current policy's log-probabilities only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tokentrue.mismatch.correction.rules import Surrogate
from tokentrue.mismatch.estimators import LOG_CLAMP
from tokentrue.mismatch.layout import Rows
from tokentrue.mismatch.loss.config import LossConfig
from tokentrue.mismatch.metrics import Mean, Statistic


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokens:
    """What a surrogate sees: a value per valid token."""

    rows: Rows
    current: Tensor
    base: Tensor  # log-probabilities of the denominator
    log_ratio: Tensor  # current - base, clamped; carries gradient
    advantages: Tensor
    bad: Tensor | None = None  # not finite, and set to agreement


def _ppo(t: Tokens, config: LossConfig) -> tuple[Tensor, dict[str, Statistic]]:
    return _clip(t, t.log_ratio.exp(), config)


def _gspo(t: Tokens, config: LossConfig) -> tuple[Tensor, dict[str, Statistic]]:
    limit = config.correction.log_clamp
    mean = t.rows.mean(t.current - t.base).clamp(-limit, limit)
    if config.gspo_gradient == "sequence":
        return _clip(t, t.rows.spread(mean).exp(), config)
    carrier = t.current - t.current.detach()  # zero in value, each token's own gradient
    return _clip(t, (carrier + t.rows.spread(mean.detach())).exp(), config)


def _clip(t: Tokens, ratio: Tensor, config: LossConfig) -> tuple[Tensor, dict[str, Statistic]]:
    assert config.clip_low is not None and config.clip_high is not None
    plain = -t.advantages * ratio
    bounded = -t.advantages * ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss = torch.maximum(plain, bounded)
    hits = bounded > plain
    metrics: dict[str, Statistic] = {
        "clip/high": Mean.of(hits & (t.advantages > 0)),
        "clip/low": Mean.of(hits & (t.advantages < 0)),
    }
    if config.dual_clip is not None:
        cap = -t.advantages * config.dual_clip
        metrics["clip/dual"] = Mean.of((t.advantages < 0) & (loss > cap))
        loss = torch.where(t.advantages < 0, torch.minimum(loss, cap), loss)
    return loss, metrics


def _reinforce(t: Tokens, config: LossConfig) -> tuple[Tensor, dict[str, Statistic]]:
    return -t.advantages * t.current, {}


def _cispo(t: Tokens, config: LossConfig) -> tuple[Tensor, dict[str, Statistic]]:
    ratio = t.log_ratio.detach().exp()
    low = None if config.clip_low is None else 1 - config.clip_low
    high = None if config.clip_high is None else 1 + config.clip_high
    clipped = ratio if low is None and high is None else ratio.clamp(low, high)
    metrics: dict[str, Statistic] = {
        "clip/high": Mean.of(clipped < ratio),
        "clip/low": Mean.of(clipped > ratio),
    }
    return -clipped * t.advantages * t.current, metrics


def _dppo_tv(t: Tokens, config: LossConfig) -> tuple[Tensor, dict[str, Statistic]]:
    assert config.clip_low is not None and config.clip_high is not None
    change = t.current.detach().exp() - t.base.exp()
    drop = torch.where(t.advantages > 0, change > config.clip_high, change < -config.clip_low)
    if config.ratio_cap is None:
        loss = -t.advantages * t.log_ratio.exp()
    else:
        loss = -t.advantages * t.log_ratio.detach().exp().clamp(max=config.ratio_cap) * t.current
    metrics: dict[str, Statistic] = {
        "clip/high": Mean.of(drop & (t.advantages > 0)),
        "clip/low": Mean.of(drop & (t.advantages <= 0)),
    }
    return loss.masked_fill(drop, 0), metrics


def _ratio(t: Tokens, config: LossConfig) -> tuple[Tensor, dict[str, Statistic]]:
    return -t.advantages * t.log_ratio.exp(), {}


def _sapo(t: Tokens, config: LossConfig) -> tuple[Tensor, dict[str, Statistic]]:
    temperature = torch.where(t.advantages > 0, config.sapo.positive, config.sapo.negative)
    gate = torch.sigmoid(temperature * torch.expm1(t.log_ratio)) * 4 / temperature
    return -t.advantages * gate, {}


def _vespo(t: Tokens, config: LossConfig) -> tuple[Tensor, dict[str, Statistic]]:
    kernel, positive = config.vespo, t.advantages >= 0
    log_w = t.rows.spread(t.rows.sum(t.log_ratio.detach()).clamp(math.log(1e-8), LOG_CLAMP))
    k = torch.where(positive, kernel.k_positive, kernel.k_negative)
    steepness = torch.where(positive, kernel.lambda_positive, kernel.lambda_negative)
    weight = (k * log_w - steepness * torch.expm1(log_w)).exp()
    metrics: dict[str, Statistic] = {"vespo/weight": Mean.of(weight)}
    return -weight * t.advantages * t.current, metrics


SURROGATES: Mapping[Surrogate, Callable[[Tokens, LossConfig], tuple[Tensor, dict[str, Statistic]]]] = {
    "ppo": _ppo,
    "reinforce": _reinforce,
    "gspo": _gspo,
    "cispo": _cispo,
    "dppo_tv": _dppo_tv,
    "ratio": _ratio,
    "sapo": _sapo,
    "vespo": _vespo,
}
