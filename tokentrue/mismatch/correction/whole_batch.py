"""What some rules must know of the whole batch before its rows are judged: a first pass over all blocks, made only for
those rules."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tokentrue.errors import InputError
from tokentrue.mismatch.correction.config import Correction
from tokentrue.mismatch.correction.rules import AdaptiveMix, SecondMoment
from tokentrue.mismatch.correction.signals import Batch, Signals, read_per_token, read_signals
from tokentrue.mismatch.estimators import k3


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """`drop_from`: harmful tokens with a (log r)² of at least this are dropped. `mix`: between no correction and the
    weights."""

    drop_from: float = math.inf
    mix: float = 1.0


def measure_batch(batch: Batch, config: Correction) -> BatchLimits:
    moment, weights = config.second_moment, config.weights
    mix = 1.0 if weights is None or weights.mix is None else weights.mix
    if moment is None and not isinstance(mix, AdaptiveMix):
        return BatchLimits(mix=mix)
    squares: list[Tensor] = []
    ratios: list[Tensor] = []
    for rows in batch.layout.blocks():
        signals = read_signals(batch, rows, config)
        if moment is not None:
            squares.append(second_moments(signals, moment)[harmful_tokens(signals, batch, moment)])
        if isinstance(mix, AdaptiveMix) and weights is not None:
            ratios.append(signals.log_ratio(weights.signal)[signals.rows.valid])
    return BatchLimits(
        drop_from=math.inf if moment is None else first_dropped(torch.cat(squares), moment.threshold),
        mix=measure_mix(torch.cat(ratios), mix, config.log_clamp) if isinstance(mix, AdaptiveMix) else mix,
    )


def second_moments(signals: Signals, rule: SecondMoment) -> Tensor:
    log_ratio = signals.log_ratio(rule.signal)
    return log_ratio * log_ratio


def harmful_tokens(signals: Signals, batch: Batch, rule: SecondMoment) -> Tensor:
    """The slots that the rule looks at."""
    rows = signals.rows
    if rule.tokens == "all":
        return rows.valid
    if batch.advantages is None:
        raise InputError("advantages: SecondMoment(tokens='harmful') looks at their sign and needs them")
    advantages, log_ratio = (
        read_per_token(batch.layout, rows, "advantages", batch.advantages),
        signals.log_ratio(rule.signal),
    )
    return rows.valid & (((advantages > 0) & (log_ratio > 0)) | ((advantages < 0) & (log_ratio < 0)))


def first_dropped(squares: Tensor, threshold: float) -> float:
    """The smallest value that must go, so that the mean of those below it is at most `threshold`; inf where all may
    stay."""
    ordered = squares.sort().values
    means = ordered.cumsum(0) / torch.arange(1, ordered.shape[0] + 1, device=ordered.device, dtype=ordered.dtype)
    kept = int((means <= threshold).sum())
    return float(ordered[kept]) if kept < ordered.shape[0] else math.inf


def measure_mix(log_ratios: Tensor, how: AdaptiveMix, limit: float) -> float:
    """See `AdaptiveMix`; 0 for an empty batch."""
    if not log_ratios.numel():
        return 0.0
    x = log_ratios.clamp(-limit, limit)
    weights = x.exp()
    second = float((weights * weights).mean())
    share = float(weights.mean()) ** 2 / second
    severity = -math.expm1(-float(k3(x).mean()) / how.divergence)
    return share * severity / max(1.0, second)
