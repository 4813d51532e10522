"""`correct`: importance weights and rejection for a batch, from the log-probabilities alone. Nothing here is
differentiated through.

`weights` never encode rejection, and `mask` carries it, except where a mode says otherwise (IcePop's "mask", a rule's
action "mask").
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Unpack

import torch
from torch import Tensor

from tokentrue.mismatch.batch.chunks import Values
from tokentrue.mismatch.correction.config import Correction
from tokentrue.mismatch.correction.judge import Block, correct_rows
from tokentrue.mismatch.correction.rules import Weights
from tokentrue.mismatch.correction.signals import Batch, BatchOptions, Signals, read_signals
from tokentrue.mismatch.correction.whole_batch import BatchLimits, measure_batch
from tokentrue.mismatch.exact_sums import as_float, exact_totals
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
        return replace(self, weights=_scale(self.weights, mean), pending=False)


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
    collector = Collector.of(batch, config)
    with torch.no_grad():
        for rows in batch.layout.blocks():
            collector.add(read_signals(batch, rows, config))
    return collector.finish()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Collector:
    """Corrects block after block into one result."""

    batch: Batch
    config: Correction
    limits: BatchLimits
    weights: Tensor
    keep: Tensor
    tally: Tally

    @staticmethod
    def of(batch: Batch, config: Correction) -> Collector:
        given = batch.trainer
        first = given if isinstance(given, Tensor) else next(iter(given), torch.zeros(0))
        size = batch.layout.offsets[-1]
        weights = torch.zeros(size, dtype=batch.layout.dtype(given), device=first.device)
        keep = torch.zeros(size, dtype=torch.bool, device=first.device)
        with torch.no_grad():
            limits = measure_batch(batch, config)
        return Collector(batch=batch, config=config, limits=limits, weights=weights, keep=keep, tally=Tally())

    def add(self, signals: Signals) -> Block:
        block = correct_rows(signals, self.batch, self.config, self.limits)
        block.rows.write(block.weights, self.weights)
        block.rows.write(block.keep, self.keep)
        self.tally.add(block, self.config)
        return block

    def finish(self) -> Corrected:
        weights, totals, pending = _normalise(self.weights, self.config.weights, self.tally)
        return Corrected(
            weights=self.batch.layout.shaped(weights),
            mask=self.batch.layout.shaped(self.keep),
            metrics=self.tally.metrics(),
            correction=self.config,
            totals=totals,
            pending=pending,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Tally:
    """Adds up blocks into metrics and into the totals that normalisation needs."""

    hits: dict[str, int] = field(default_factory=dict[str, int])
    tokens: int = 0
    rows: int = 0
    weight_sums: list[Tensor] = field(default_factory=list[Tensor])  # per row, of what normalisation averages
    weight_count: int = 0
    applied: list[Tensor] = field(default_factory=list[Tensor])  # weights of kept tokens, per row

    def add(self, block: Block, config: Correction) -> None:
        rows = block.rows
        for name, hit in block.hits.items():
            self.hits[name] = self.hits.get(name, 0) + hit
        self.tokens += rows.tokens
        self.rows += int((rows.lengths > 0).sum())
        self.applied.append(block.row_weights)
        how = config.weights.normalise if config.weights is not None else None
        if how is None:
            return
        counted = rows.valid if how.over != "kept" else block.keep & (block.weights > 0)
        source = block.unmasked if how.over == "raw" else block.weights
        sums, counts = rows.sum(torch.where(counted, source, 0.0)), rows.sum(counted.double())
        if how.level == "token":
            self.weight_sums.append(sums)
            self.weight_count += int(counts.sum())
            return
        self.weight_sums.append(sums / counts.clamp(min=1))
        self.weight_count += rows.num_rows if how.empty_rows else int((counts > 0).sum())

    def metrics(self) -> Metrics:
        statistics: dict[str, Statistic] = {"tokens": Count(count=self.tokens), "rows": Count(count=self.rows)}
        for name, hit in sorted(self.hits.items()):
            of = self.rows if name.endswith("_rows") or name == "rows_rejected" else self.tokens
            statistics[f"fraction/{name}"] = Mean.fraction(hit, of)
        statistics["weight/applied_mean"] = Mean(total=_total(self.applied), count=self.tokens)
        return Metrics(statistics)


def _normalise(weights: Tensor, how: Weights | None, tally: Tally) -> tuple[Tensor, tuple[float, int] | None, bool]:
    if how is None or how.normalise is None:
        return weights, None, False
    totals = (as_float(_total(tally.weight_sums)), tally.weight_count)
    if how.normalise.scope == "step":
        return weights, totals, True
    if tally.rows == 1 and how.level != "token":
        warnings.warn(
            "weights normalised over a single row become 1: the correction is cancelled; use scope='step'", stacklevel=3
        )
    mean = totals[0] / totals[1] if totals[1] else 0.0
    return (weights / mean if mean > 1e-8 else weights), totals, False


def _total(parts: Sequence[Tensor]) -> int:
    return exact_totals(torch.cat(list(parts)).unsqueeze(0))[0] if parts else 0


def _scale(weights: Values, mean: float) -> Values:
    if mean <= 1e-8:
        return weights
    return weights / mean if isinstance(weights, Tensor) else [row / mean for row in weights]
