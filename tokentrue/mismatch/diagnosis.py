"""`diagnose`: what differs between trainer and rollout, where, and what it does to the objective; `check_update`:
whether to keep an update. The metrics' names: docs/mismatch.md.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Unpack

import torch
from torch import Tensor

from tokentrue.errors import InputError
from tokentrue.mismatch.batch import Batch, BatchOptions, Bounds, NonFinite, Values, dtype_of, read_batch
from tokentrue.mismatch.correction import Corrected, Correction, correct_batch
from tokentrue.mismatch.metrics import (
    ESTIMATORS,
    LOG_CLAMP,
    Count,
    Extremes,
    Histogram,
    Mean,
    Metrics,
    Moments,
    Statistic,
    contribution,
    k3,
)
from tokentrue.records import record


@record
class WorstRow:
    """`score` is the row's mean K3, `position` the valid token with the largest |δ|."""

    row: str
    score: float
    tokens: int
    sum_k3: float
    mean_delta: float
    max_abs_delta: float
    position: int
    log_product: float


@record
class Diagnosis:
    """`diagnosis["corr/k3"]` reads a metric; diagnoses of batches merge."""

    metrics: Metrics
    worst: tuple[WorstRow, ...]
    keep_worst: int = 10
    corrected: Corrected | None = field(default=None, compare=False)  # this batch's, when a correction was given

    def __getitem__(self, key: str) -> float:
        return self.metrics[key]

    def merge(self, *others: "Diagnosis") -> "Diagnosis":
        rows = [row for part in (self, *others) for row in part.worst]
        metrics = self.metrics.merge(*(other.metrics for other in others))
        return Diagnosis(metrics=metrics, worst=_worst(rows, self.keep_worst), keep_worst=self.keep_worst)


@torch.no_grad()
def diagnose(
    trainer_logprobs: Values,
    rollout_logprobs: Values,
    mask: Values | None = None,
    *,
    correction: Correction | None = None,  # made in the same pass; comes back as `.corrected`
    kinds: Values | None = None,  # each token's kind, an index into `kind_names`
    kind_names: Sequence[str] = (),
    flips: Values | None = None,  # whether the most likely tokens of both sides differ
    row_names: Sequence[str] | None = None,
    worst: int = 10,  # how many rows `Diagnosis.worst` lists
    non_finite: NonFinite = "raise",
    **options: Unpack[BatchOptions],
) -> Diagnosis:
    """Every metric of docs/mismatch.md; those whose inputs are not given have nothing counted."""
    config = correction or Correction(non_finite=non_finite)  # which refuses an unknown word
    batch = read_batch(trainer_logprobs, rollout_logprobs, mask, options, non_finite=config.non_finite)
    rows = batch.rows
    if row_names is not None and len(row_names) != rows.num_rows:
        raise InputError(f"row_names: {len(row_names)} names for {rows.num_rows} rows")
    metrics = {
        **measure_mismatch(batch),
        **measure_ppo(batch),
        **measure_contribution(batch),
        **by_kind(batch, kinds, kind_names),
        "flips": Mean() if flips is None else Mean.of(rows.read("flips", flips, torch.bool)),
    }
    found = worst_rows(batch, worst, row_names)
    corrected, applied = None, torch.zeros(0)
    if correction is not None:
        corrected = correct_batch(batch, correction, dtype_of(trainer_logprobs))
        applied = batch.applied
    metrics |= {
        "ratio/applied": Moments.of(applied),
        "ratio/applied_range": Extremes.of(applied),
        **tails("applied", applied),
    }
    if corrected is not None:
        did = corrected.metrics.statistics.items()
        metrics |= {name: stat for name, stat in did if name.startswith(("fraction/", "weight/"))}
    return Diagnosis(metrics=Metrics(metrics), worst=found, keep_worst=worst, corrected=corrected)


def by_kind(batch: Batch, kinds: Values | None, names: Sequence[str]) -> Mapping[str, Mean]:
    codes = batch.rows.row[:0] if kinds is None else batch.rows.read("kinds", kinds, torch.long)
    if codes.numel() and (int(codes.min()) < 0 or int(codes.max()) >= len(names)):
        raise InputError(f"kinds: {int(codes.min())} to {int(codes.max())} do not index the {len(names)} kind_names")
    return by_bucket("kind", codes, names, batch.corr.abs()[: len(codes)])


def worst_rows(batch: Batch, keep: int, names: Sequence[str] | None) -> tuple[WorstRow, ...]:
    rows = batch.rows
    sums = rows.sum(k3(batch.corr.clamp(-LOG_CLAMP, LOG_CLAMP)))
    deltas = batch.corr.split(rows.lengths.tolist())
    scores = enumerate((sums / rows.lengths.clamp(min=1)).tolist())
    found = heapq.nsmallest(keep, ((-score, row) for row, score in scores if score > 0))
    rows_found = [
        WorstRow(
            row=f"row {row}" if names is None else names[row],
            score=-negative,
            tokens=len(delta := deltas[row]),
            sum_k3=float(sums[row]),
            mean_delta=float(delta.mean()),
            max_abs_delta=float(delta.abs().max()),
            position=int(delta.abs().argmax()),
            log_product=float(delta.sum()),
        )
        for negative, row in found
    ]
    return _worst(rows_found, keep)


def _worst(rows: list[WorstRow], keep: int) -> tuple[WorstRow, ...]:
    return tuple(sorted(rows, key=lambda row: (-row.score, row.row))[:keep])


PROBABILITIES = (1e-4, 1e-2, 0.1, 0.5, 0.9, 0.99)
POSITIONS = (128, 512, 2048, 8192, 32768)
TAILS = (1.1, 1.5, 2.0, 5.0, 10.0)
SIGNS = ("positive", "negative")
LARGEST = 700.0  # of a logarithm whose exp is finite


def measure_mismatch(batch: Batch) -> dict[str, Statistic]:
    rows, delta = batch.rows, batch.corr
    magnitude, x = delta.abs(), delta.clamp(-LOG_CLAMP, LOG_CLAMP)
    gaps = k3(x)
    full = rows.lengths > 0

    def per_row(values: Tensor) -> Tensor:
        return rows.mean(values)[full]

    trainer, rollout = per_row(batch.trainer), per_row(batch.rollout)
    gap = rollout - trainer
    product = rows.sum(delta)[full].clamp(-LOG_CLAMP, LOG_CLAMP)
    return {
        "tokens": Count(count=rows.tokens),
        "rows": Count(count=rows.num_full_rows),
        "delta/mean": Mean.of(delta),
        "delta/abs_mean": Mean.of(magnitude),
        "delta/abs_mean_rows": Mean.of(per_row(magnitude)),
        "delta": Extremes.of(delta),
        "delta/quantile": Histogram.of(delta),
        "delta/clamped": Mean.of(magnitude > LOG_CLAMP),
        "corr/k1": Mean.of(-delta),
        "corr/k2": Mean.of(x * x / 2),
        "corr/k3": Mean.of(gaps),
        "corr/k1_rows": Mean.of(per_row(-delta)),
        "corr/k2_rows": Mean.of(per_row(x * x / 2)),
        "corr/k3_rows": Mean.of(per_row(gaps)),
        "ppl/trainer": Mean.of((-trainer).clamp(max=LARGEST).exp()),
        "ppl/rollout": Mean.of((-rollout).clamp(max=LARGEST).exp()),
        "ppl/ratio": Mean.of(gap.clamp(max=LARGEST).exp()),
        "log_ppl/trainer": Mean.of(-trainer),
        "log_ppl/rollout": Mean.of(-rollout),
        "log_ppl/gap_mean": Mean.of(gap),
        "log_ppl/abs_gap_mean": Mean.of(gap.abs()),
        "log_ppl/gap": Extremes.of(gap),
        "chi2/token": Mean.of(torch.expm1(2 * x)),
        "chi2/sequence": Mean.of(torch.expm1(2 * product)),
        "ratio/raw": Moments.of(x.exp()),
        "ratio/sequence": Moments.of(product.exp()),
        **tails("raw", x.exp()),
        **by_range("probability", batch.rollout.exp(), PROBABILITIES, "1", magnitude),
        **by_range("position", rows.positions(), POSITIONS, "", magnitude),
    }


def measure_ppo(batch: Batch) -> dict[str, Statistic]:
    found: dict[str, Statistic] = {}
    for name in ("ppo_train", "ppo_rollout"):
        x = None if batch.current is None else batch.log_ratio(name).clamp(-LOG_CLAMP, LOG_CLAMP)
        found |= {f"{name}/{key}": Mean() if x is None else Mean.of(f(x)) for key, f in ESTIMATORS.items()}
    return found


def measure_contribution(batch: Batch) -> dict[str, Statistic]:
    """Moments of C(r) by the sign of A; the trainer's own policy is the current one if none is given."""
    advantages = batch.per_token("advantages") if batch.has("advantages") else torch.zeros_like(batch.corr)
    own = torch.zeros_like(batch.corr) if batch.current is None else batch.log_ratio("ppo_train")
    theirs = batch.corr if batch.current is None else batch.log_ratio("ppo_rollout")
    found: dict[str, Statistic] = {}
    for sign, chosen in zip(SIGNS, (advantages > 0, advantages < 0), strict=True):
        for name, log_ratio in (("trainer", own), ("rollout", theirs)):
            value = contribution(log_ratio[chosen].clamp(-LOG_CLAMP, LOG_CLAMP), advantages[chosen])
            found[f"contribution/{name}/{sign}"] = Moments.of(value, third=True)
    return found


def tails(side: str, ratio: Tensor) -> dict[str, Statistic]:
    above = {f"tail/{side}/above_{bound:g}": Mean.of(ratio > bound) for bound in TAILS}
    return {**above, **{f"tail/{side}/below_1/{bound:g}": Mean.of(ratio < 1 / bound) for bound in TAILS}}


def by_range(name: str, values: Tensor, edges: Sequence[float], top: str, magnitude: Tensor) -> Mapping[str, Mean]:
    bounds = torch.tensor(edges, device=values.device, dtype=values.dtype)
    labels = [f"{low:g}-{high}" for low, high in zip([0, *edges], [*(f"{edge:g}" for edge in edges), top], strict=True)]
    return by_bucket(name, torch.bucketize(values, bounds, right=True), labels, magnitude)


def by_bucket(name: str, buckets: Tensor, labels: Sequence[str], values: Tensor) -> Mapping[str, Mean]:
    counts = torch.bincount(buckets, minlength=len(labels)).tolist()
    sums = torch.bincount(buckets, weights=values, minlength=len(labels)).tolist()
    return {f"by_{name}/{label}": Mean(total=s, count=n) for label, s, n in zip(labels, sums, counts, strict=True)}


@record
class UpdateCheck:
    """`gain` by the estimator that was used, and the K3 of the two policies."""

    accepted: bool
    gain: float
    divergence: float
    tokens: int


@torch.no_grad()
def check_update(
    updated_logprobs: Values,
    rollout_logprobs: Values,
    advantages: Values,
    mask: Values | None = None,
    *,
    cu_seqlens: Bounds = None,
    min_gain: float = 0.0,
    max_divergence: float | None = None,
) -> UpdateCheck:
    """Whether the mean of (r - 1)·A is at least `min_gain` (if any token has an advantage), r = updated ÷ rollout, both
    the engine's, of the samples that the update was made from. The principle is MIPU's (arXiv 2606.29526);
    `check_update_mipu` is the paper's estimator."""
    batch, x, per_token = _read_update(updated_logprobs, rollout_logprobs, advantages, mask, cu_seqlens)
    has_advantage = bool((per_token != 0).any())
    gain, divergence = -float(contribution(x, per_token).mean()), float(k3(x).mean())
    accepted = (gain >= min_gain or not has_advantage) and (max_divergence is None or divergence <= max_divergence)
    return UpdateCheck(accepted=accepted, gain=gain, divergence=divergence, tokens=batch.rows.tokens)


@torch.no_grad()
def check_update_mipu(
    trainer_logprobs: Values,
    engine_logprobs: Values,
    advantages: Values,
    mask: Values | None = None,
    *,
    cu_seqlens: Bounds = None,
    step: int = 100,
    slack: tuple[float, float] = (1e-3, 0.0),
) -> UpdateCheck:
    """MIPU's second step (arXiv 2606.29526) on samples of the *new* engine policy on held-out prompts: the gain, minus
    the mean over rows of ρ·Â, is at least -c. ρ is a row's length-normalised ratio, updated trainer ÷ engine; c goes
    through `slack` in the first 100 steps."""
    batch, x, per_token = _read_update(trainer_logprobs, engine_logprobs, advantages, mask, cu_seqlens)
    rows = batch.rows
    ratio = rows.mean(batch.corr).clamp(-LOG_CLAMP, LOG_CLAMP).exp()
    gain = -float((ratio * rows.mean(per_token))[rows.lengths > 0].mean())
    most = slack[0] + (slack[1] - slack[0]) * min(max(step, 0) / 100, 1.0)
    return UpdateCheck(accepted=gain >= -most, gain=gain, divergence=float(k3(x).mean()), tokens=rows.tokens)


def _read_update(
    new: Values, old: Values, advantages: Values, mask: Values | None, cu_seqlens: Bounds
) -> tuple[Batch, Tensor, Tensor]:
    batch = read_batch(new, old, mask, {"cu_seqlens": cu_seqlens, "advantages": advantages})
    if not batch.rows.tokens:
        raise InputError("no valid token; an update cannot be judged on an empty batch")
    return batch, batch.corr.clamp(-LOG_CLAMP, LOG_CLAMP), batch.per_token("advantages")
