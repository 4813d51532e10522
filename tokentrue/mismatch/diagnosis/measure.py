"""The statistics behind `diagnose`, each from a batch's valid tokens or from its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tokentrue.mismatch.correction.signals import Signals
from tokentrue.mismatch.estimators import ESTIMATORS, LOG_CLAMP, contribution, k3
from tokentrue.mismatch.metrics import Count, Extremes, Histogram, Mean, Moments, Statistic

PROBABILITIES = (1e-4, 1e-2, 0.1, 0.5, 0.9, 0.99)
POSITIONS = (128, 512, 2048, 8192, 32768)
TAILS = (1.1, 1.5, 2.0, 5.0, 10.0)
SIGNS = ("positive", "negative")
LARGEST = 700.0  # of a logarithm whose exp is finite


def measure_mismatch(signals: Signals) -> dict[str, Statistic]:
    """δ, the KL estimators, perplexities, χ² and the ratio's moments, over tokens and over rows."""
    rows, delta = signals.rows, signals.corr
    magnitude, x = delta.abs(), delta.clamp(-LOG_CLAMP, LOG_CLAMP)
    gaps = k3(x)
    full = rows.lengths > 0

    def per_row(values: Tensor) -> Tensor:
        """Means of the rows that have tokens."""
        return rows.mean(values)[full]

    trainer, rollout = per_row(signals.trainer), per_row(signals.rollout)
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
        **by_bucket(
            "probability", _bucketize(signals.rollout.exp(), PROBABILITIES), _labels(PROBABILITIES, 1.0), magnitude
        ),
        **by_bucket("position", _bucketize(rows.positions(), POSITIONS), _labels(POSITIONS, None), magnitude),
    }


def measure_ppo(signals: Signals) -> dict[str, Statistic]:
    """The KL estimators of the two ratios that contain the policy's drift; nothing counted without a current policy."""
    found: dict[str, Statistic] = {}
    for name in ("ppo_train", "ppo_rollout"):
        x = None if signals.current is None else signals.log_ratio(name).clamp(-LOG_CLAMP, LOG_CLAMP)
        found |= {f"{name}/{key}": Mean() if x is None else Mean.of(f(x)) for key, f in ESTIMATORS.items()}
    return found


def measure_contribution(signals: Signals, advantages: Tensor | None) -> dict[str, Statistic]:
    """Moments of C(r) = -(r - 1)·A by the sign of A. Without a current policy the trainer's own is taken for it: its
    contribution is then 0, and the rollout's that of the mismatch."""
    advantages = torch.zeros_like(signals.corr) if advantages is None else advantages
    own = torch.zeros_like(signals.corr) if signals.current is None else signals.log_ratio("ppo_train")
    theirs = signals.corr if signals.current is None else signals.log_ratio("ppo_rollout")
    found: dict[str, Statistic] = {}
    for sign, chosen in zip(SIGNS, (advantages > 0, advantages < 0), strict=True):
        for name, log_ratio in (("trainer", own), ("rollout", theirs)):
            value = contribution(log_ratio[chosen].clamp(-LOG_CLAMP, LOG_CLAMP), advantages[chosen])
            found[f"contribution/{name}/{sign}"] = Moments.of(value, third=True)
        found[f"quadrant/{sign}_up"] = Mean.of(signals.corr[chosen] > 0)
        found[f"quadrant/{sign}_down"] = Mean.of(signals.corr[chosen] < 0)
    return found


def measure_applied(weights: Tensor | None) -> dict[str, Statistic]:
    """Weights as the loss uses them: 0 where rejected."""
    weights = torch.zeros(0) if weights is None else weights
    return {
        "ratio/applied": Moments.of(weights),
        "ratio/applied_range": Extremes.of(weights),
        **tails("applied", weights),
    }


def tails(side: str, ratio: Tensor) -> dict[str, Statistic]:
    above = {f"tail/{side}/above_{bound:g}": Mean.of(ratio > bound) for bound in TAILS}
    return {**above, **{f"tail/{side}/below_1/{bound:g}": Mean.of(ratio < 1 / bound) for bound in TAILS}}


def by_bucket(name: str, buckets: Tensor, labels: Sequence[str], values: Tensor) -> Mapping[str, Mean]:
    """The mean of `values` in each bucket."""
    counts = torch.bincount(buckets, minlength=len(labels)).tolist()
    sums = torch.bincount(buckets, weights=values, minlength=len(labels)).tolist()
    return {f"by_{name}/{label}": Mean(total=s, count=n) for label, s, n in zip(labels, sums, counts, strict=True)}


def _bucketize(values: Tensor, edges: Sequence[float]) -> Tensor:
    return torch.bucketize(values, torch.tensor(edges, device=values.device, dtype=values.dtype), right=True)


def _labels(edges: Sequence[float], last: float | None) -> list[str]:
    tops = [*(f"{edge:g}" for edge in edges), "" if last is None else f"{last:g}"]
    return [f"{low:g}-{high}" for low, high in zip([0, *edges], tops, strict=True)]
