"""`diagnose`: what differs between trainer and rollout, where, and what it does to the objective; `check_update` and
`LengthDecay`: whether to keep a whole update, and how large the next one may be.

Metric names (r = trainer ÷ rollout, δ = log r, A the advantage): the table in docs/mismatch.md.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import field
from itertools import accumulate
from typing import Unpack, cast

import torch
from torch import Tensor

from tokentrue.errors import InputError
from tokentrue.mismatch.batch import Batch, BatchOptions, NonFinite, read_batch
from tokentrue.mismatch.correction import Corrected, Correction, correct_batch
from tokentrue.mismatch.layout import Bounds, Values, dtype_of
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


@record
class WorstRow:
    """A row that disagrees; `score` is its mean K3, `position` the valid token with the largest |δ|."""

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

    def as_verl(self) -> dict[str, float]:
        """The metrics that verl logs too, under its names."""
        return {f"rollout_corr/{theirs}": self.metrics[mine] for theirs, mine in VERL_NAMES.items()}

    def merge(self, *others: Diagnosis) -> Diagnosis:
        rows = [row for part in (self, *others) for row in part.worst]
        metrics = self.metrics.merge(*(other.metrics for other in others))
        return Diagnosis(metrics=metrics, worst=_worst(rows, self.keep_worst), keep_worst=self.keep_worst)


class DiagnoseOptions(BatchOptions, total=False):
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
    non_finite: NonFinite


@torch.no_grad()
def diagnose(
    trainer_logprobs: Values, rollout_logprobs: Values, mask: Values | None = None, **options: Unpack[DiagnoseOptions]
) -> Diagnosis:
    """Every metric of docs/mismatch.md; those whose inputs are not given have nothing counted.

    `logprobs` is the current policy. With `*_top_logprobs` alone, a flip is a token that is the most likely one of one
    side alone, out of those that are of at least one.
    """
    correction, corrected = options.get("correction"), options.get("corrected")
    if correction is not None and corrected is not None:
        raise InputError("correction, corrected: pass the one to be made, or the one already made, not both")
    config = correction or Correction(non_finite=options.get("non_finite", "raise"))
    own = DiagnoseOptions.__annotations__.keys() - BatchOptions.__annotations__.keys()
    shared = cast("BatchOptions", {name: value for name, value in options.items() if name not in own})
    row_names, worst = options.get("row_names"), options.get("worst", 10)
    batch = read_batch(
        trainer_logprobs, rollout_logprobs, mask, shared,
        non_finite=config.non_finite, align_support=config.align_support,
    )  # fmt: skip
    rows = batch.rows
    if row_names is not None and len(row_names) != rows.num_rows:
        raise InputError(f"row_names: {len(row_names)} names for {rows.num_rows} rows")
    applied = torch.zeros(0)
    if corrected is not None:
        weights = rows.read("corrected.weights", corrected.weights)
        applied = weights.masked_fill(~rows.read("corrected.mask", corrected.mask, torch.bool), 0)
    elif correction is not None:
        corrected = correct_batch(batch, correction, dtype_of(trainer_logprobs))
        applied = batch.applied
    metrics = {
        **measure_mismatch(batch),
        **measure_ppo(batch),
        **measure_contribution(batch),
        "ratio/applied": Moments.of(applied),
        "ratio/applied_range": Extremes.of(applied),
        **tails("applied", applied),
        **measure_labels(batch, options),
    }
    if corrected is not None:
        did = corrected.metrics.statistics.items()
        metrics |= {name: stat for name, stat in did if name.startswith(("fraction/", "weight/"))}
    found = worst_rows(batch, worst, row_names)
    return Diagnosis(metrics=Metrics(metrics), worst=found, keep_worst=worst, corrected=corrected)


def measure_labels(batch: Batch, options: DiagnoseOptions) -> dict[str, Statistic]:
    """By kinds of tokens, and whether both sides have the same most likely token."""
    rows, names = batch.rows, options.get("kind_names", ())

    def read(name: str, dtype: torch.dtype) -> Tensor | None:
        values = cast("Values | None", options.get(name))
        return None if values is None else rows.read(name, values, dtype)

    kinds = read("kinds", torch.long)
    codes = rows.row[:0] if kinds is None else kinds
    if codes.numel() and (int(codes.min()) < 0 or int(codes.max()) >= len(names)):
        raise InputError(f"kinds: {int(codes.min())} to {int(codes.max())} do not index the {len(names)} kind_names")
    flips = Mean()
    trainer, rollout = (read(f"{side}_top_ids", torch.long) for side in ("trainer", "rollout"))
    best_trainer, best_rollout = (read(f"{side}_top_logprobs", torch.float64) for side in ("trainer", "rollout"))
    if trainer is not None and rollout is not None:
        flips = Mean.of(trainer != rollout)
    elif best_trainer is not None and best_rollout is not None:
        best_there, best_here = batch.trainer >= best_trainer, batch.rollout >= best_rollout
        flips = Mean.of((best_there != best_here)[best_there | best_here])
    return {"flips": flips, **by_bucket("kind", codes, names, batch.corr.abs()[: len(codes)])}


def worst_rows(batch: Batch, keep: int, names: Sequence[str] | None) -> tuple[WorstRow, ...]:
    rows = batch.rows
    sums = rows.sum(k3(batch.corr.clamp(-LOG_CLAMP, LOG_CLAMP)))
    deltas = batch.corr.split(rows.lengths.tolist())
    scores = enumerate((sums / rows.lengths.clamp(min=1)).tolist())
    found: list[WorstRow] = []
    for negative, row in heapq.nsmallest(keep, ((-score, row) for row, score in scores if score > 0)):
        delta = deltas[row]
        found.append(
            WorstRow(
                row=f"row {row}" if names is None else names[row],
                score=-negative,
                tokens=len(delta),
                sum_k3=float(sums[row]),
                mean_delta=float(delta.mean()),
                max_abs_delta=float(delta.abs().max()),
                position=int(delta.abs().argmax()),
                log_product=float(delta.sum()),
            )
        )
    return _worst(found, keep)


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
    """Moments of C(r) by the sign of A. Without a current policy the trainer's own is taken for it."""
    advantages = batch.per_token("advantages") if batch.has("advantages") else torch.zeros_like(batch.corr)
    own = torch.zeros_like(batch.corr) if batch.current is None else batch.log_ratio("ppo_train")
    theirs = batch.corr if batch.current is None else batch.log_ratio("ppo_rollout")
    found: dict[str, Statistic] = {}
    for sign, chosen in zip(SIGNS, (advantages > 0, advantages < 0), strict=True):
        for name, log_ratio in (("trainer", own), ("rollout", theirs)):
            value = contribution(log_ratio[chosen].clamp(-LOG_CLAMP, LOG_CLAMP), advantages[chosen])
            found[f"contribution/{name}/{sign}"] = Moments.of(value, third=True)
        found[f"quadrant/{sign}_up"] = Mean.of(batch.corr[chosen] > 0)
        found[f"quadrant/{sign}_down"] = Mean.of(batch.corr[chosen] < 0)
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
    """`gain` of the inference policy on the old samples, and K3 of its change."""

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
    """Whether an update improves the policy that samples: the mean of (r - 1)·A is at least `min_gain`, r = updated ÷
    rollout.

    Both log-probabilities are the engine's. The principle is MIPU's (arXiv 2606.29526); estimator and bounds are ours.
    Where no token has an advantage, `min_gain` does not count.
    """
    batch = read_batch(updated_logprobs, rollout_logprobs, mask, {"cu_seqlens": cu_seqlens, "advantages": advantages})
    if not batch.rows.tokens:
        raise InputError("check_update: no valid token; an update cannot be judged on an empty batch")
    x, per_token = batch.corr.clamp(-LOG_CLAMP, LOG_CLAMP), batch.per_token("advantages")
    has_advantage = bool((per_token != 0).any())
    gain, divergence = -float(contribution(x, per_token).mean()), float(k3(x).mean())
    accepted = (gain >= min_gain or not has_advantage) and (max_divergence is None or divergence <= max_divergence)
    return UpdateCheck(accepted=accepted, gain=gain, divergence=divergence, tokens=batch.rows.tokens)


@record
class LengthDecay:
    """Learning rate by response length (arXiv 2602.01826: a surge in length announces mismatch).

    Each time the average length over `window` steps exceeds `surge` times its reference (at first the smallest so far),
    the rate is multiplied by `factor`, down to `floor`, and the average becomes the reference.
    """

    window: int = 10
    surge: float = 1.25
    factor: float = 0.5
    floor: float = 0.1

    def __post_init__(self) -> None:
        if self.window < 1 or self.surge <= 1 or not 0 < self.factor < 1 or not 0 < self.floor <= 1:
            raise InputError("LengthDecay: needs window >= 1, surge > 1, factor in (0, 1) and floor in (0, 1]")

    def scale(self, mean_lengths: Sequence[float]) -> float:
        """The multiple of the initial rate, from the mean length of every step so far."""
        step = 1.0 / self.window
        averages = accumulate(mean_lengths, lambda average, length: average + step * (length - average))
        rate, reference, decayed = 1.0, float("inf"), False
        for average in averages:
            reference = reference if decayed else min(reference, average)
            if average > self.surge * reference:
                rate, reference, decayed = max(self.floor, rate * self.factor), average, True
        return rate
