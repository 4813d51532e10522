"""`diagnose`: what differs between trainer and rollout, where, and what it does to the objective. Mergeable over ranks
and steps.

Metric names (r = trainer ÷ rollout, δ = log r, A the advantage):
`delta/*` δ and |δ|; `corr/*`, `ppo_train/*`, `ppo_rollout/*` the KL estimators of the three ratios, token-weighted, and
row-weighted with `_rows`; `ppl/*`, `log_ppl/*`; `chi2/*`; `ratio/raw`, `ratio/applied`, `ratio/sequence` moments with
`ess`; `tail/raw/*`, `tail/applied/*`; `contribution/<trainer|rollout>/<positive|negative>` moments of C(r) = -(r -
1)·A; `quadrant/*`; `by_probability/*`, `by_position/*`, `by_kind/*` mean |δ|; `flips`; `fraction/*` what a correction
did.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Literal, Unpack, cast

import torch
from torch import Tensor

from tokentrue.errors import InputError
from tokentrue.mismatch.correction.config import Correction
from tokentrue.mismatch.correction.correct import Corrected, correct_signals, finish
from tokentrue.mismatch.correction.signals import Batch, BatchOptions, Signals, read_signals
from tokentrue.mismatch.diagnosis.measure import (
    by_bucket,
    measure_applied,
    measure_contribution,
    measure_mismatch,
    measure_ppo,
)
from tokentrue.mismatch.estimators import LOG_CLAMP, k3
from tokentrue.mismatch.layout import Values
from tokentrue.mismatch.metrics import Mean, Metrics, Statistic

VERL_NAMES = {
    "kl": "corr/k1",
    "k3_kl": "corr/k3",
    "chi2_token": "chi2/token",
    "chi2_seq": "chi2/sequence",
    "training_ppl": "ppl/trainer",
    "training_log_ppl": "log_ppl/trainer",
    "rollout_ppl": "ppl/rollout",
    "rollout_log_ppl": "log_ppl/rollout",
    "ppl_ratio": "ppl/ratio",
    "log_ppl_diff": "log_ppl/gap_mean",
    "log_ppl_abs_diff": "log_ppl/abs_gap_mean",
    "log_ppl_diff_max": "log_ppl/gap/max",
    "log_ppl_diff_min": "log_ppl/gap/min",
    "rollout_is_mean": "ratio/applied/mean",
    "rollout_is_std": "ratio/applied/std",
    "rollout_is_max": "ratio/applied_range/max",
    "rollout_is_min": "ratio/applied_range/min",
    "rollout_is_eff_sample_size": "ratio/applied/ess",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstRow:
    """A row that disagrees; `score` is its mean K3. `position` counts valid tokens, and is where |δ| is largest."""

    row: str
    score: float
    tokens: int
    sum_k3: float
    mean_delta: float
    max_abs_delta: float
    position: int
    log_product: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """`diagnosis["corr/k3"]` reads a metric; `merge` gives what the batches together would have given."""

    metrics: Metrics
    worst: tuple[WorstRow, ...]
    keep_worst: int = 10
    corrected: Corrected | None = field(default=None, compare=False)  # this batch's, when a correction was given

    def __getitem__(self, key: str) -> float:
        return self.metrics[key]

    def as_verl(self) -> dict[str, float]:
        """The metrics that verl logs too, under its names, for dashboards that have them."""
        return {f"rollout_corr/{theirs}": self.metrics[mine] for theirs, mine in VERL_NAMES.items()}

    def merge(self, *others: Diagnosis) -> Diagnosis:
        rows = [row for part in (self, *others) for row in part.worst]
        metrics = self.metrics.merge(*(other.metrics for other in others))
        return Diagnosis(metrics=metrics, worst=_worst(rows, self.keep_worst), keep_worst=self.keep_worst)


class DiagnoseOptions(BatchOptions, total=False):
    """The keywords of `diagnose`, beside those that it shares with `correct`."""

    correction: Correction | None  # made in the same pass; comes back as `.corrected`
    corrected: Corrected | None  # what `correct` returned before
    kinds: Values | None  # each token's kind, an index into `kind_names`
    kind_names: Sequence[str]
    trainer_top_ids: Values | None  # the most likely token of each side
    rollout_top_ids: Values | None
    trainer_top_logprobs: Values | None  # its log-probability, where its id is not known
    rollout_top_logprobs: Values | None
    row_names: Sequence[str] | None
    worst: int  # how many rows `Diagnosis.worst` lists (10)
    non_finite: Literal["raise", "unit", "token", "sequence"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """What is known of each token beside its log-probabilities."""

    kinds: Values | None = None
    kind_names: Sequence[str] = ()
    trainer_top_ids: Values | None = None
    rollout_top_ids: Values | None = None
    trainer_top_logprobs: Values | None = None
    rollout_top_logprobs: Values | None = None

    def measure(self, signals: Signals) -> dict[str, Statistic]:
        rows, layout = signals.rows, signals.batch.layout
        found: dict[str, Statistic] = {"flips": Mean()}
        for name in ("kinds", "trainer_top_ids", "rollout_top_ids", "trainer_top_logprobs", "rollout_top_logprobs"):
            if (values := getattr(self, name)) is not None:
                layout.check(name, values)
        codes = rows.row[:0] if self.kinds is None else rows.read(self.kinds, torch.long)
        if codes.numel() and (int(codes.min()) < 0 or int(codes.max()) >= len(self.kind_names)):
            raise InputError(
                f"kinds: {int(codes.min())} to {int(codes.max())} do not index the {len(self.kind_names)} kind_names"
            )
        found |= by_bucket("kind", codes, self.kind_names, signals.corr.abs()[: len(codes)])
        if self.trainer_top_ids is not None and self.rollout_top_ids is not None:
            trainer, rollout = (rows.read(ids, torch.long) for ids in (self.trainer_top_ids, self.rollout_top_ids))
            found["flips"] = Mean.of(trainer != rollout)
        elif self.trainer_top_logprobs is not None and self.rollout_top_logprobs is not None:
            best_there = signals.trainer >= rows.read(self.trainer_top_logprobs)
            best_here = signals.rollout >= rows.read(self.rollout_top_logprobs)
            found["flips"] = Mean.of((best_there != best_here)[best_there | best_here])
        return found


def diagnose(
    trainer_logprobs: Values, rollout_logprobs: Values, mask: Values | None = None, **options: Unpack[DiagnoseOptions]
) -> Diagnosis:
    """Everything that can be said from these inputs; what is not given has its keys all the same, with nothing counted.

    `logprobs` is the current policy (the trainer's own if left out). With `*_top_logprobs` but without `*_top_ids`, a
    flip is where the sampled token is the most likely one of one side alone, out of the tokens that are the most likely
    one of at least one side.
    """
    correction, corrected = options.pop("correction", None), options.pop("corrected", None)
    if correction is not None and corrected is not None:
        raise InputError("correction, corrected: pass the one to be made, or the one already made, not both")
    row_names, worst, non_finite = (
        options.pop("row_names", None),
        options.pop("worst", 10),
        options.pop("non_finite", "raise"),
    )
    labels = Labels(**{field.name: options.pop(field.name) for field in fields(Labels) if field.name in options})  # type: ignore[misc]
    batch = Batch.of(trainer_logprobs, rollout_logprobs, mask, cast("BatchOptions", options))
    if row_names is not None and len(row_names) != batch.layout.num_rows:
        raise InputError(f"row_names: {len(row_names)} names for {batch.layout.num_rows} rows")
    with torch.no_grad():
        config = correction or Correction(non_finite=non_finite)
        signals = read_signals(batch, non_finite=config.non_finite, align_support=config.align_support)
        applied = None if corrected is None else _read_applied(signals, corrected)
        if correction is not None:
            judge = correct_signals(signals, correction)
            applied, corrected = judge.applied, finish(judge, correction)
        advantages = None if batch.advantages is None else signals.per_token("advantages")
        metrics = Metrics(
            measure_mismatch(signals)
            | measure_ppo(signals)
            | measure_contribution(signals, advantages)
            | measure_applied(applied)
            | labels.measure(signals)
        )
        found = worst_rows(signals, worst, row_names)
    if corrected is not None:
        own = {
            name: stat
            for name, stat in corrected.metrics.statistics.items()
            if name.startswith(("fraction/", "weight/"))
        }
        metrics = metrics.merge(Metrics(own))
    return Diagnosis(metrics=metrics, worst=found, keep_worst=worst, corrected=corrected)


def _read_applied(signals: Signals, corrected: Corrected) -> Tensor:
    kept = signals.rows.read(corrected.mask, torch.bool)
    return torch.where(kept, signals.rows.read(corrected.weights), 0.0)


def worst_rows(signals: Signals, keep: int, names: Sequence[str] | None) -> tuple[WorstRow, ...]:
    """The rows with the largest mean K3."""
    rows, delta = signals.rows, signals.corr
    sums = rows.sum(k3(delta.clamp(-LOG_CLAMP, LOG_CLAMP)))
    scores = (sums / rows.lengths.clamp(min=1)).tolist()
    ends = rows.lengths.cumsum(0).tolist()
    found: list[WorstRow] = []
    for score, row in heapq.nsmallest(keep, ((-score, row) for row, score in enumerate(scores) if score > 0)):
        tokens = int(rows.lengths[row])
        mine = delta[ends[row] - tokens : ends[row]]
        found.append(
            WorstRow(
                row=f"row {row}" if names is None else names[row],
                score=-score,
                tokens=tokens,
                sum_k3=float(sums[row]),
                mean_delta=float(mine.mean()),
                max_abs_delta=float(mine.abs().max()),
                position=int(mine.abs().argmax()),
                log_product=float(mine.sum()),
            )
        )
    return _worst(found, keep)


def _worst(rows: list[WorstRow], keep: int) -> tuple[WorstRow, ...]:
    return tuple(sorted(rows, key=lambda row: (-row.score, row.row))[:keep])
