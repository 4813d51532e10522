"""`Correction`, a denominator, weights and rejection rules, and `correct`, which applies it to a batch."""

import warnings
from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Annotated, Literal, Unpack

import msgspec
import torch

from tokentrue.errors import ConfigError, InputError
from tokentrue.json_types import JsonMapping, read_table
from tokentrue.mismatch import importers
from tokentrue.mismatch.batch import (
    Batch,
    BatchOptions,
    Need,
    NonFinite,
    Values,
    dtype_of,
    interpolate_policy,
    read_batch,
)
from tokentrue.mismatch.metrics import LOG_CLAMP, Count, Mean, Metrics, Statistic
from tokentrue.mismatch.rules import (
    Normalise,
    OffPolicyMask,
    Outlier,
    Reject,
    Rule,
    ScoreCentering,
    SecondMoment,
    Staleness,
    Surrogate,
    Veto,
    Weights,
    refuse,
)
from tokentrue.records import record
from tokentrue.types import check_fields

MISSING: Mapping[Need, str] = {
    "current": "logprobs: the current policy's log-probabilities are missing",
    "advantages": "advantages: missing",
    "versions": "versions, version: the policy version of each token (or row) and the current one are missing",
    "head": "head_logprobs, rollout_head_logprobs: both policies' values at the sampler's top ids are missing",
}


@record
class Correction:
    """Denominator of the PPO ratio, weights, and rules that must all agree to keep a token; `Correction()` changes
    nothing. "interpolated" is A-3PO's proximal policy. `non_finite` log-probabilities raise, or count as agreement
    ("unit")."""

    denominator: Literal["trainer", "rollout", "interpolated"] = "trainer"
    weights: Weights | None = None
    reject: tuple[Reject, ...] = ()
    veto: Veto | None = None
    outlier: Outlier | None = None
    off_policy_mask: OffPolicyMask | None = None
    staleness: Staleness | None = None
    second_moment: SecondMoment | None = None
    centering: ScoreCentering | None = None
    loss_counts: Literal["original", "kept"] = "original"  # what the loss divides by after rejection
    surrogate: Surrogate = "ppo"  # the objective that `policy_loss` uses when it is given no other
    staged: bool = False  # each rule sees only what earlier ones kept: outlier, token rules, weights, row rules (SkyRL)
    non_finite: NonFinite = "raise"
    log_clamp: Annotated[float, msgspec.Meta(gt=0, le=80)] = LOG_CLAMP
    clamp_tokens: bool = False  # clamps each log-ratio before it is summed, as verl does, instead of the sum
    notes: tuple[str, ...] = ()  # what an importer wants the user to know

    def __post_init__(self) -> None:
        check_fields(self, "Correction")
        if isinstance(self.reject, Reject):
            object.__setattr__(self, "reject", (self.reject,))
        if not isinstance(self.reject, tuple) or not all(isinstance(rule, Reject) for rule in self.reject):
            raise ConfigError("Correction.reject: must be a tuple of Reject rules")
        weights, centred, kind = self.weights, self.centering is not None, self.surrogate
        is_cap = weights is None or weights == Weights(upper=weights.upper or 1.0, signal="ppo_rollout")
        refuse(
            "Correction.centering",
            {
                "belongs to surrogate='reinforce': a clip has another expectation": centred and kind != "reinforce",
                "goes with no weights, or with a cap on token weights of signal 'ppo_rollout'": centred and not is_cap,
            },
        )
        if weights is None or kind == "reinforce":
            return
        held = f"with the rollout as denominator the {kind} ratio already holds trainer ÷ rollout"
        drift = f"weights of {weights.signal} on the {kind} surrogate count the policy's drift twice"
        refuse(
            "Correction",
            {
                f"{held}; importance weights would count it twice. Use denominator='trainer', surrogate='reinforce', "
                "or no weights": self.denominator == "rollout",
                f"{drift}; use signal='corr', or surrogate='reinforce'": weights.signal != "corr",
            },
        )

    @property
    def rules(self) -> tuple[Rule, ...]:
        values = [getattr(self, field.name) for field in fields(self)]
        found = [rule for value in values for rule in (value if isinstance(value, tuple) else (value,))]
        return tuple(rule for rule in found if isinstance(rule, Rule))

    @property
    def is_active(self) -> bool:
        return bool(self.rules) or self.denominator == "interpolated"

    @property
    def needs(self) -> frozenset[Need]:
        own: set[Need] = {"current", "versions"} if self.denominator == "interpolated" else set()
        found = own.union(*(rule.needs for rule in self.rules))
        return frozenset(found - {"old"} if own else found)  # the interpolated policy is the old one

    @property
    def needs_current(self) -> bool:
        return "current" in self.needs

    def explain(self) -> str:
        base = {
            "trainer": "π_old, recomputed by the trainer",
            "rollout": "π_rollout (bypass)",
            "interpolated": "π_old = π_rollout^(1/d)·π_current^(1 - 1/d), d versions old",
        }[self.denominator]
        lines = [f"surrogate: {self.surrogate}, ratio over {base}"]
        lines += ["weights: none"] if self.weights is None else []
        lines += [rule.explain() for rule in self.rules]
        lines.append(f"the loss divides by the {self.loss_counts} counts")
        needs_old = self.denominator == "trainer" or "old" in self.needs
        lines.append("cost: one extra forward pass per step for π_old" if needs_old else "cost: no extra forward pass")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    @classmethod
    def from_verl(cls, config: JsonMapping, *, faithful: bool = False) -> "Correction":
        return cls(**importers.from_verl(config, faithful=faithful))

    @classmethod
    def from_miles(cls, config: JsonMapping, *, faithful: bool = False) -> "Correction":
        return cls(**importers.from_miles(config, faithful=faithful))

    @classmethod
    def from_trl(cls, config: JsonMapping) -> "Correction":
        return cls(**importers.from_trl(config))


_PRESETS = msgspec.convert(read_table(__file__, "presets.toml"), dict[str, Correction])
PRESETS: Mapping[str, Correction] = MappingProxyType(_PRESETS)
"""Published corrections by name."""


@record(eq=False)
class Corrected:
    """`weights` (0 at masked positions) and `mask` have the layout of the inputs."""

    weights: Values
    mask: Values
    metrics: Metrics


@torch.no_grad()
def correct(
    trainer_logprobs: Values,
    rollout_logprobs: Values,
    mask: Values | None = None,
    correction: Correction | None = None,
    **options: Unpack[BatchOptions],
) -> Corrected:
    """Weights and mask for this batch. Rejection is in `mask` alone, except in mode "mask"."""
    config = correction or Correction()
    batch = read_batch(trainer_logprobs, rollout_logprobs, mask, options, non_finite=config.non_finite)
    return correct_batch(batch, config, dtype_of(trainer_logprobs))


def correct_batch(batch: Batch, config: Correction, dtype: torch.dtype) -> Corrected:
    is_interpolated = config.denominator == "interpolated"
    asked = [(type(rule).__name__, rule.needs) for rule in config.rules]
    for name, needs in [*asked, ("denominator='interpolated'", config.needs if is_interpolated else frozenset[Need]())]:
        for need in sorted(needs):
            if not batch.has(need):
                raise InputError(f"{MISSING[need]}; {name} needs them")
    if is_interpolated:
        assert batch.current is not None
        batch.trainer = interpolate_policy(batch.current, batch.rollout, batch.age)
    batch.log_clamp, batch.clamp_tokens = config.log_clamp, config.clamp_tokens
    rules = sorted(config.rules, key=lambda rule: rule.order)
    for rule in rules:
        if rule.order == 0:
            rule.apply(batch)
    if config.staged:
        batch.active = ~batch.dropped
    for rule in rules:
        if rule.order > 0:
            rule.apply(batch)
    metrics, rows, weights = _measure(batch), batch.rows, batch.weights
    how = None if config.weights is None else config.weights.normalise
    if config.weights is not None and how is not None:
        weights = weights / _mean_weight(batch, how)
        if rows.num_full_rows == 1 and config.weights.level != "token":
            warnings.warn(
                "weights normalised over a single row become 1: the correction is cancelled; pass the whole minibatch",
                stacklevel=4,
            )
    return Corrected(
        weights=rows.scatter(weights, dtype), mask=rows.scatter(~batch.dropped, torch.bool), metrics=metrics
    )


def _measure(batch: Batch) -> Metrics:
    rows = batch.rows
    full, left = rows.num_full_rows, rows.any(~batch.dropped)
    hits = {**batch.hits, "rejected": int(batch.dropped.sum()), "rows_rejected": full - int(left.sum())}
    statistics: dict[str, Statistic] = {"tokens": Count(count=rows.tokens), "rows": Count(count=full)}
    for name, hit in sorted(hits.items()):
        of = full if name.endswith("_rows") or name == "rows_rejected" else rows.tokens
        statistics[f"fraction/{name}"] = Mean(total=hit, count=of)
    statistics["weight/applied_mean"] = Mean(total=float(batch.applied.sum()), count=rows.tokens)
    return Metrics(statistics)


def _mean_weight(batch: Batch, how: Normalise) -> float:
    """1 where there is none."""
    rows = batch.rows
    counted = rows.flags(True) if how.over != "kept" else ~batch.dropped & (batch.weights > 0)
    source = batch.unmasked if how.over == "raw" else batch.weights
    sums, counts = rows.sum(torch.where(counted, source, 0.0)), rows.count(counted)
    if how.level == "token":
        total, number = sums.sum(), int(counts.sum())
    else:
        total, number = (sums / counts.clamp(min=1)).sum(), int((counts > 0).sum())
        number = rows.num_rows if how.empty_rows else number
    mean = float(total) / number if number else 0.0
    return mean if mean > 1e-8 else 1.0
