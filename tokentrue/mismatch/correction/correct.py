"""`correct`: importance weights and rejection for a batch, from the log-probabilities alone. Nothing here is
differentiated through.

`weights` never encode rejection, and `mask` carries it, except where a mode says otherwise (IcePop's "mask", a rule's
action "mask").
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Unpack

import torch
from torch import Tensor

from tokentrue.mismatch.correction.config import Correction
from tokentrue.mismatch.correction.judge import Judge
from tokentrue.mismatch.correction.rules import Normalise, Weights
from tokentrue.mismatch.correction.signals import Batch, BatchOptions, Signals, read_signals
from tokentrue.mismatch.layout import Values
from tokentrue.mismatch.metrics import Count, Mean, Metrics, Statistic


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Corrected:
    """`weights` (0 at masked positions) and `mask` lie as the inputs did. `metrics` merge over micro-batches and ranks.

    `totals` is the sum of weights and their count when the correction normalises over a step: add them up over
    micro-batches and ranks, then call `normalised`.
    """

    weights: Values
    mask: Values
    metrics: Metrics
    correction: Correction
    totals: tuple[float, int] | None = None
    pending: bool = False

    def normalised(self, total: float, count: int) -> Corrected:
        """These weights over the step's mean."""
        mean = total / count if count else 0.0
        if mean <= 1e-8:
            return replace(self, pending=False)
        weights = self.weights
        scaled = weights / mean if isinstance(weights, Tensor) else [row / mean for row in weights]
        return replace(self, weights=scaled, pending=False)


def correct(
    trainer_logprobs: Values,
    rollout_logprobs: Values,
    mask: Values | None = None,
    correction: Correction | None = None,
    **options: Unpack[BatchOptions],
) -> Corrected:
    """Weights and mask of `correction` for this batch; see `Correction` for which keywords each rule needs."""
    config = Correction() if correction is None else correction
    batch = Batch.of(trainer_logprobs, rollout_logprobs, mask, options)
    with torch.no_grad():
        signals = read_signals(batch, non_finite=config.non_finite, align_support=config.align_support)
        return finish(correct_signals(signals, config), config)


def correct_signals(signals: Signals, config: Correction) -> Judge:
    """Applies every rule of the correction."""
    config.require(signals.batch.has)
    judge = Judge.of(signals, log_clamp=config.log_clamp, clamp_tokens=config.clamp_tokens)
    if signals.bad is not None and config.non_finite == "sequence":
        judge.drop("bad", signals.bad, whole_rows=True)
    rules = sorted(config.rules, key=lambda rule: rule.order)
    for rule in rules:
        if rule.order == 0:
            rule.apply(judge)
    if config.staged:
        judge.active = ~judge.dropped
    for rule in rules:
        if rule.order > 0:
            rule.apply(judge)
    judge.weights = judge.weights.masked_fill(judge.zeroed, 0)
    return judge


def finish(judge: Judge, config: Correction) -> Corrected:
    layout, rows = judge.signals.batch.layout, judge.rows
    weights, totals, pending = normalise(judge, config.weights)
    return Corrected(
        weights=layout.scatter(rows, weights, layout.dtype(judge.signals.batch.trainer)),
        mask=layout.scatter(rows, ~judge.dropped, torch.bool),
        metrics=metrics_of(judge),
        correction=config,
        totals=totals,
        pending=pending,
    )


def metrics_of(judge: Judge) -> Metrics:
    rows = judge.rows
    full = rows.num_full_rows
    left = rows.any(~judge.dropped)
    hits = {**judge.hits, "rejected": int(judge.dropped.sum()), "rows_rejected": full - int(left.sum())}
    statistics: dict[str, Statistic] = {"tokens": Count(count=rows.tokens), "rows": Count(count=full)}
    for name, hit in sorted(hits.items()):
        of = full if name.endswith("_rows") or name == "rows_rejected" else rows.tokens
        statistics[f"fraction/{name}"] = Mean(total=hit, count=of)
    statistics["weight/applied_mean"] = Mean(total=float(judge.applied.sum()), count=rows.tokens)
    return Metrics(statistics)


def normalise(judge: Judge, how: Weights | None) -> tuple[Tensor, tuple[float, int] | None, bool]:
    """Weights over their mean, the totals that it is made of, and whether the caller has still to divide."""
    if how is None or how.normalise is None:
        return judge.weights, None, False
    total, count = weight_totals(judge, how.normalise)
    if how.normalise.scope == "step":
        return judge.weights, (total, count), True
    if judge.rows.num_full_rows == 1 and how.level != "token":
        warnings.warn(
            "weights normalised over a single row become 1: the correction is cancelled; use scope='step'",
            stacklevel=4,
        )
    mean = total / count if count else 0.0
    return (judge.weights / mean if mean > 1e-8 else judge.weights), (total, count), False


def weight_totals(judge: Judge, how: Normalise) -> tuple[float, int]:
    rows = judge.rows
    counted = rows.flags(True) if how.over != "kept" else ~judge.dropped & (judge.weights > 0)
    source = judge.unmasked if how.over == "raw" else judge.weights
    sums, counts = rows.sum(torch.where(counted, source, 0.0)), rows.count(counted)
    if how.level == "token":
        return float(sums.sum()), int(counts.sum())
    number = rows.num_rows if how.empty_rows else int((counts > 0).sum())
    return float((sums / counts.clamp(min=1)).sum()), number
