"""The rules of a correction: each has its settings, validated on construction, what it `needs`, its text, and what it
does to a batch. `Correction` iterates over them; docs/new-correction.md says how to add one.

Bounds are two numbers, never a string, and a value that equals a bound is inside it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

import torch
from msgspec import Meta
from torch import Tensor

from tokentrue.errors import ConfigError
from tokentrue.mismatch.metrics import ESTIMATORS, k3
from tokentrue.mismatch.signals import Judge, Need, Signal
from tokentrue.types import Checked, Count, NotNegative, Positive, Share, check_fields, is_finite

Level: TypeAlias = Literal["token", "sequence", "geometric"]
Mode: TypeAlias = Literal["truncate", "clip", "mask", "raw"]
Estimator: TypeAlias = Literal["ratio", "k1", "k2", "k3"]
Aggregate: TypeAlias = Literal["token", "seq_sum", "seq_mean", "seq_max", "geometric"]
Surrogate: TypeAlias = Literal["ppo", "ratio", "reinforce", "gspo", "cispo", "dppo_tv", "sapo", "vespo"]

RATIO: dict[Signal, str] = {
    "corr": "π_old/π_rollout",
    "ppo_train": "π_current/π_old",
    "ppo_rollout": "π_current/π_rollout",
}
POLICIES: dict[Signal, frozenset[Need]] = {
    "corr": frozenset({"old"}),
    "ppo_train": frozenset({"old", "current"}),
    "ppo_rollout": frozenset({"current"}),
}


class Rule(Checked, ABC):
    """One rule of a correction; a frozen record."""

    __slots__ = ()

    @property
    @abstractmethod
    def needs(self) -> frozenset[Need]:
        """What `correct` must be given beside the rollout's log-probabilities."""

    @abstractmethod
    def explain(self) -> str:
        """One line for `Correction.explain`."""

    @abstractmethod
    def apply(self, judge: Judge) -> None:
        """Drops tokens or rows; weights set the judge's."""

    @property
    def order(self) -> int:
        """Tokens and rows are dropped first (0), then weights made (1), then rows judged (2), by the tokens that are
        left where the correction is staged."""
        return 0


def check_bounds(owner: str, lower: object, upper: object, *, positive: bool) -> None:
    for field, value in (("lower", lower), ("upper", upper)):
        if value is None:
            continue
        if isinstance(value, str):
            raise ConfigError(
                f"{owner}.{field}: {value!r} is text; bounds are two numbers, lower= and upper=, never a range in a "
                "string"
            )
        if not is_finite(value):
            raise ConfigError(f"{owner}.{field}: {value!r} is not a finite number; leave it out for no bound")
        if positive and value <= 0:
            raise ConfigError(f"{owner}.{field}: {value!r} bounds a ratio and must be > 0; leave it out for no bound")
    if is_finite(lower) and is_finite(upper) and lower > upper:
        raise ConfigError(f"{owner}: lower {lower} is above upper {upper}")


def holds(value: float, lower: float | None, upper: float | None) -> bool:
    return (lower is None or lower <= value) and (upper is None or value <= upper)


def inside(values: Tensor, lower: float | None, upper: float | None) -> Tensor:
    good = torch.ones_like(values, dtype=torch.bool) if lower is None else values >= lower
    return good if upper is None else good & (values <= upper)


def log_or_none(bound: float | None) -> float | None:
    return None if bound is None else math.log(bound)


def describe_interval(name: str, lower: float | None, upper: float | None) -> str:
    left = "" if lower is None else f"{lower:g} <= "
    right = "" if upper is None else f" <= {upper:g}"
    return f"{left}{name}{right}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalise(Checked):
    """Divides the weights by their mean.

    Scope "call": of this call of `correct`. Scope "step": `correct` returns the totals, the caller adds them up over
    ranks and micro-batches and calls `Corrected.normalised`. The mean is of "kept" tokens, of all "valid" ones with
    masked weights as 0, or of all with "raw" masked weights. `empty_rows` counts rows without tokens as weight 0
    (Miles does).
    """

    scope: Literal["call", "step"]
    level: Literal["token", "sequence"] = "token"
    over: Literal["kept", "valid", "raw"] = "kept"
    empty_rows: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveMix(Checked):
    """A mixing coefficient measured on the batch: `ess · (1 - e^(-K3 / divergence)) / max(1, E[w²])`.

    The three diagnostics are those of AIS (arXiv 2605.13907); the way they are combined is this package's own.
    """

    divergence: Positive = 0.01

    def measure(self, log_ratios: Tensor, limit: float) -> float:
        """0 for an empty batch."""
        if not log_ratios.numel():
            return 0.0
        x = log_ratios.clamp(-limit, limit)
        weights = x.exp()
        second = float((weights * weights).mean())
        share = float(weights.mean()) ** 2 / second
        severity = -math.expm1(-float(k3(x).mean()) / self.divergence)
        return share * severity / max(1.0, second)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights(Rule):
    """Importance weights, always detached: per token, the row's product ("sequence") or its geometric mean.

    "truncate" caps at `upper`; "clip" clamps; "mask" (IcePop) sets a weight outside the bounds to 0 and leaves the mask
    alone. `mix` interpolates: 1 - α + α·w.
    """

    level: Level = "token"
    mode: Mode = "truncate"
    lower: float | None = None
    upper: float | None = None
    signal: Signal = "corr"
    normalise: Normalise | None = None
    mix: Share | AdaptiveMix | None = None

    def __post_init__(self) -> None:
        check_fields(self, "Weights")
        check_bounds("Weights", self.lower, self.upper, positive=True)
        if self.mode == "raw" and (self.lower is not None or self.upper is not None):
            raise ConfigError("Weights: mode 'raw' has no bounds; use 'truncate', 'clip' or 'mask'")
        if self.mode == "truncate" and self.lower is not None:
            raise ConfigError(
                "Weights: mode 'truncate' has no lower bound; use mode 'clip' for both, or 'mask' to zero outside them"
            )
        if self.mode == "truncate" and self.upper is None:
            raise ConfigError("Weights: mode 'truncate' needs an upper bound")
        if self.mode != "raw" and self.lower is None and self.upper is None:
            raise ConfigError(f"Weights: mode {self.mode!r} needs a lower or an upper bound")
        if not holds(1, self.lower, self.upper):
            raise ConfigError(
                f"Weights: the bounds [{self.lower}, {self.upper}] change tokens on which both sides agree exactly; "
                "they "
                "must hold 1 (in YAML, an unquoted 0.5_5 reads as 0.55)"
            )
        if self.normalise is not None and self.normalise.over == "raw" and self.mode != "mask":
            raise ConfigError("Weights.normalise: over='raw' only means something with mode 'mask'")

    @property
    def needs(self) -> frozenset[Need]:
        return POLICIES[self.signal]

    @property
    def order(self) -> int:
        return 1

    def explain(self) -> str:
        r = RATIO[self.signal]
        what = {"token": r, "sequence": f"Π_t {r}", "geometric": f"(Π_t {r})^(1/T)"}[self.level]
        how = {
            "truncate": f"min({what}, {self.upper})",
            "clip": f"clip({what}, {self.lower}, {self.upper})",
            "mask": f"{what} where {describe_interval('it', self.lower, self.upper)}, else 0",
            "raw": what,
        }[self.mode]
        if self.mix is not None:
            how = f"1 - α + α·{how}, α = {self.mix if isinstance(self.mix, int | float) else 'measured on the batch'}"
        mean = self.normalise
        how = how if mean is None else f"{how}, over the mean of {mean.over} {mean.level}s of the {mean.scope}"
        return f"weights: {how}"

    def apply(self, judge: Judge) -> None:
        rows, limit, given = judge.rows, judge.log_clamp, judge.signals.log_ratio(self.signal)
        log_weight = given
        if self.level != "token":
            total, count = judge.row_totals(given)
            log_weight = rows.spread(total / count if self.level == "geometric" else total)
        low, high = log_or_none(self.lower), log_or_none(self.upper)
        judge.hits["weights_below"] = 0 if low is None else int((log_weight < low).sum())
        judge.hits["weights_above"] = 0 if high is None else int((log_weight > high).sum())
        judge.hits["clamped"] = int((log_weight.abs() > limit).sum())
        bounded = unmasked = log_weight.clamp(-limit, limit).exp()
        if self.mode == "mask":
            bounded = unmasked.masked_fill(~inside(log_weight, low, high), 0)
        elif self.mode != "raw":
            bounded = unmasked = unmasked.clamp(min=self.lower, max=self.upper)
        if self.mix is not None:
            mix = self.mix.measure(given, limit) if isinstance(self.mix, AdaptiveMix) else self.mix
            bounded, unmasked = bounded * mix + (1 - mix), unmasked * mix + (1 - mix)
        judge.weights, judge.unmasked = bounded, unmasked


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject(Rule):
    """A token or a row stays only if lower <= statistic <= upper.

    The statistic is `estimator` of `signal`'s ratio, aggregated over the row's valid tokens; ratios are compared in log
    space. `action` "mask" leaves the mask alone and sets weights to 0.
    """

    estimator: Estimator
    aggregate: Aggregate
    lower: float | None = None
    upper: float | None = None
    signal: Signal = "corr"
    action: Literal["drop", "mask"] = "drop"
    inverse: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "Reject")
        check_bounds("Reject", self.lower, self.upper, positive=self.estimator == "ratio")
        if self.lower is None and self.upper is None:
            raise ConfigError("Reject: without a lower or an upper bound nothing can be rejected")
        if self.estimator in ("k2", "k3"):
            if self.lower is not None:
                raise ConfigError(
                    f"Reject: {self.estimator} is never negative and 0 is perfect agreement; a lower bound would "
                    "reject it"
                )
            if self.upper is not None and self.upper <= 0:
                raise ConfigError(f"Reject.upper: {self.estimator} needs a bound > 0, got {self.upper}")
        if self.aggregate == "geometric" and self.estimator != "ratio":
            raise ConfigError(f"Reject: 'geometric' is a mean of ratios; for {self.estimator} use 'seq_mean'")
        if self.aggregate == "seq_mean" and self.estimator == "ratio":
            raise ConfigError(
                "Reject: the mean of ratios hides opposite errors of long rows; use 'geometric', or k1 with 'seq_mean'"
            )
        if self.aggregate == "seq_max" and self.lower is not None:
            raise ConfigError(
                "Reject: a lower bound on a maximum keeps rows for one bad token; use Outlier(lower=…) for 'any token "
                "below'"
            )
        if not holds(1 if self.estimator == "ratio" else 0, self.lower, self.upper):
            raise ConfigError(
                f"Reject: the bounds [{self.lower}, {self.upper}] reject tokens on which both sides agree exactly"
            )

    @property
    def needs(self) -> frozenset[Need]:
        return POLICIES[self.signal]

    @property
    def order(self) -> int:
        return 0 if self.aggregate == "token" else 2

    @property
    def name(self) -> str:
        return f"{self.signal}_{self.aggregate}_{self.estimator}" + ("_inverse" if self.inverse else "")

    def explain(self) -> str:
        ratio = RATIO[self.signal] if not self.inverse else f"1/({RATIO[self.signal]})"
        name = ratio if self.estimator == "ratio" else f"{self.estimator}({ratio})"
        what, shown = {
            "token": ("tokens", name),
            "seq_sum": ("rows", f"Π_t {name}" if self.estimator == "ratio" else f"Σ_t {name}"),
            "seq_mean": ("rows", f"mean_t {name}"),
            "seq_max": ("rows", f"max_t {name}"),
            "geometric": ("rows", f"(Π_t {name})^(1/T)"),
        }[self.aggregate]
        said = f"keep {what} with {describe_interval(shown, self.lower, self.upper)}"
        return said + (" (else weight 0, still counted)" if self.action == "mask" else "")

    def apply(self, judge: Judge) -> None:
        rows, values = judge.rows, self._estimate(judge)
        if self.aggregate == "seq_max":
            values = rows.max(torch.where(judge.active, values, -torch.inf), empty=0.0)
        elif self.aggregate != "token":
            total, count = judge.row_totals(values)
            values = total if self.aggregate == "seq_sum" else total / count
        bounds = (self.lower, self.upper)
        if self.estimator == "ratio":  # compared in log space
            bounds = (log_or_none(self.lower), log_or_none(self.upper))
        failing = ~inside(values, *bounds)
        failing = failing if self.aggregate == "token" else rows.spread(failing)
        judge.count(self.name, failing)
        if self.action == "mask":
            judge.zeroed |= failing
        else:
            judge.dropped |= failing

    def _estimate(self, judge: Judge) -> Tensor:
        log_ratio, limit = judge.signals.log_ratio(self.signal), judge.log_clamp
        if self.inverse:
            log_ratio = -log_ratio
        if self.estimator in ("k2", "k3") or judge.clamp_tokens:
            log_ratio = log_ratio.clamp(-limit, limit)
        return log_ratio if self.estimator == "ratio" else ESTIMATORS[self.estimator](log_ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class Veto(Rule):
    """Drops a whole row if any of its valid tokens is less likely than `below` under the `of` policy."""

    below: Annotated[float, Meta(gt=0, lt=1)] = 1e-6
    of: Literal["trainer", "rollout", "current"] = "trainer"

    @property
    def needs(self) -> frozenset[Need]:
        needed: dict[str, frozenset[Need]] = {"trainer": frozenset({"old"}), "current": frozenset({"current"})}
        return needed.get(self.of, frozenset())

    def explain(self) -> str:
        return f"drop rows with a token below probability {self.below:g} under the {self.of} policy"

    def apply(self, judge: Judge) -> None:
        judge.drop("vetoed", getattr(judge.signals, self.of) < math.log(self.below), whole_rows=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlier(Rule):
    """Drops a whole row if any of its valid tokens has a ratio outside [lower, upper]."""

    lower: float | None = 1e-4
    upper: float | None = 100.0
    signal: Signal = "corr"

    def __post_init__(self) -> None:
        check_fields(self, "Outlier")
        check_bounds("Outlier", self.lower, self.upper, positive=True)
        if self.lower is None and self.upper is None:
            raise ConfigError("Outlier: needs a lower or an upper bound")
        if not holds(1, self.lower, self.upper):
            raise ConfigError(
                f"Outlier: the bounds [{self.lower}, {self.upper}] reject tokens on which both sides agree exactly"
            )

    @property
    def needs(self) -> frozenset[Need]:
        return POLICIES[self.signal]

    def explain(self) -> str:
        bounds = describe_interval("r", self.lower, self.upper)
        return f"drop rows unless every token has {bounds}, r = {RATIO[self.signal]}"

    def apply(self, judge: Judge) -> None:
        log_ratio = judge.signals.log_ratio(self.signal)
        outside = ~inside(log_ratio, log_or_none(self.lower), log_or_none(self.upper))
        judge.drop("outlier", outside, whole_rows=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicyMask(Rule):
    """DeepSeek-V3.2's off-policy mask: drops negative advantages in rows whose mean -log r exceeds `threshold`.

    `whole_row`: one negative advantage in such a row drops all of it.
    """

    threshold: NotNegative
    signal: Signal = "ppo_rollout"
    whole_row: bool = False

    @property
    def needs(self) -> frozenset[Need]:
        return POLICIES[self.signal] | frozenset[Need]({"advantages"})

    def explain(self) -> str:
        return f"drop negative advantages in rows with mean -log {RATIO[self.signal]} > {self.threshold:g}"

    def apply(self, judge: Judge) -> None:
        drift = judge.rows.mean(-judge.signals.log_ratio(self.signal))
        negative = judge.signals.per_token("advantages") < 0
        judge.drop("off_policy", negative & judge.rows.spread(drift > self.threshold), whole_rows=self.whole_row)


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondMoment(Rule):
    """M2PO (arXiv 2510.01161): the tokens with the largest (log r)² go until the mean of the rest is at most
    `threshold`.

    "harmful" looks only where PPO's clip would act, as the paper's Algorithm 1; "all" at every valid token, as AReaL.
    All tokens of one call are sorted together: give it the whole mini-batch.
    """

    threshold: NotNegative = 0.04
    signal: Signal = "ppo_rollout"
    tokens: Literal["harmful", "all"] = "harmful"

    @property
    def needs(self) -> frozenset[Need]:
        return POLICIES[self.signal] | frozenset[Need]({"advantages"} if self.tokens == "harmful" else ())

    def explain(self) -> str:
        squares = f"(log {RATIO[self.signal]})²"
        return f"drop the largest {squares} of {self.tokens} tokens until their mean <= {self.threshold:g}"

    def apply(self, judge: Judge) -> None:
        log_ratio = judge.signals.log_ratio(self.signal)
        squares, judged = log_ratio * log_ratio, judge.rows.flags(True)
        if self.tokens == "harmful":
            advantages = judge.signals.per_token("advantages")
            judged = ((advantages > 0) & (log_ratio > 0)) | ((advantages < 0) & (log_ratio < 0))
        judge.drop("second_moment", judged & (squares >= self._first_dropped(squares[judged])))

    def _first_dropped(self, squares: Tensor) -> float:
        """The smallest value that must go; inf where all may stay."""
        ordered = squares.sort().values
        means = ordered.cumsum(0) / torch.arange(1, ordered.shape[0] + 1, device=ordered.device, dtype=ordered.dtype)
        kept = int((means <= self.threshold).sum())
        return float(ordered[kept]) if kept < ordered.shape[0] else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness(Rule):
    """Drops tokens (or rows holding one) that were sampled more than `limit` policy versions ago."""

    limit: Count
    level: Literal["token", "sequence"] = "token"

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"versions"})

    def explain(self) -> str:
        return f"drop {self.level}s sampled more than {self.limit} versions ago"

    def apply(self, judge: Judge) -> None:
        version = judge.signals.options.get("version")
        assert version is not None
        judge.drop(
            "stale", version - judge.signals.per_token("versions") > self.limit, whole_rows=self.level == "sequence"
        )
