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
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Literal, Unpack, cast

import torch

from tokentrue.errors import InputError
from tokentrue.mismatch.batch.chunks import Values
from tokentrue.mismatch.batch.layout import Layout
from tokentrue.mismatch.correction.config import Correction
from tokentrue.mismatch.correction.correct import Collector, Corrected
from tokentrue.mismatch.correction.signals import Batch, BatchOptions, Signals, read_per_token, read_signals
from tokentrue.mismatch.diagnosis.sums import Sums
from tokentrue.mismatch.metrics import Metrics

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

    def add(self, sums: Sums, layout: Layout, signals: Signals) -> None:
        if self.kinds is not None:
            sums.add_kinds(layout, signals, self.kinds)
        if self.trainer_top_ids is not None and self.rollout_top_ids is not None:
            sums.add_flips(layout, signals.rows, self.trainer_top_ids, self.rollout_top_ids)
        elif self.trainer_top_logprobs is not None and self.rollout_top_logprobs is not None:
            sums.add_flips_by_logprob(layout, signals, self.trainer_top_logprobs, self.rollout_top_logprobs)


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
    collector = None if correction is None else Collector.of(batch, correction)
    sums = Sums(kind_names=tuple(labels.kind_names))
    with torch.no_grad():
        for rows in batch.layout.blocks():
            signals = read_signals(batch, rows, correction or Correction(non_finite=non_finite))
            _add_block(sums, batch, signals, collector, corrected)
            labels.add(sums, batch.layout, signals)
        metrics = sums.finish()
        found = worst_rows(batch, sums.by_row(), worst, row_names)
    corrected = corrected if collector is None else collector.finish()
    if corrected is not None:
        own = {
            name: stat
            for name, stat in corrected.metrics.statistics.items()
            if name.startswith(("fraction/", "weight/"))
        }
        metrics = metrics.merge(Metrics(own))
    return Diagnosis(metrics=metrics, worst=found, keep_worst=worst, corrected=corrected)


def _add_block(
    sums: Sums, batch: Batch, signals: Signals, collector: Collector | None, corrected: Corrected | None
) -> None:
    rows = signals.rows
    sums.add_mismatch(signals)
    sums.add_ppo(signals)
    if batch.advantages is not None:
        sums.add_contribution(signals, read_per_token(batch.layout, rows, "advantages", batch.advantages))
    if collector is not None:
        sums.add_applied(rows, collector.add(signals).applied())
    elif corrected is not None:
        keep = rows.read(corrected.mask, torch.bool)
        sums.add_applied(rows, torch.where(keep, rows.read(corrected.weights), 0.0))


def worst_rows(
    batch: Batch, by_row: Sequence[tuple[int, float, float, float]], keep: int, names: Sequence[str] | None
) -> tuple[WorstRow, ...]:
    """The rows with the largest mean K3."""
    scored = ((-k3 / tokens, row) for row, (tokens, k3, _, _) in enumerate(by_row) if tokens and k3 > 0)
    found: list[WorstRow] = []
    for score, row in heapq.nsmallest(keep, scored):
        tokens, k3, delta, peak = by_row[row]
        found.append(
            WorstRow(
                row=f"row {row}" if names is None else names[row],
                score=-score,
                tokens=tokens,
                sum_k3=k3,
                mean_delta=delta / tokens,
                max_abs_delta=peak,
                position=_position(batch, row),
                log_product=delta,
            )
        )
    return _worst(found, keep)


def _position(batch: Batch, row: int) -> int:
    """How many valid tokens of a row stand before its largest |δ|."""
    place = batch.layout.place(row, row + 1)
    valid = place.flat(batch.layout.mask) != 0
    trainer, rollout = (place.flat(values).double() for values in (batch.trainer, batch.rollout))
    gap = (trainer - rollout).abs_().masked_fill_(~valid, -1.0)
    if not math.isfinite(float(gap.sum())):  # tokens that could not be scored are nobody's largest
        gap = gap.nan_to_num(nan=-1.0, posinf=-1.0)
    return int(torch.count_nonzero(valid[: int(gap.argmax())]))


def _worst(rows: list[WorstRow], keep: int) -> tuple[WorstRow, ...]:
    return tuple(sorted(rows, key=lambda row: (-row.score, row.row))[:keep])
