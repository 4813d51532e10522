"""What a correction is made of: small frozen records, with nonsense refused at construction. `config.Correction` joins
them.

r is always trainer ÷ rollout probability. `corr` is r_corr = e^(old - rollout), the mismatch itself; `ppo_train` is
e^(current - old) and `ppo_rollout` is e^(current - rollout), which contain the policy's own drift.
Bounds are two numbers, never a string, and a value that equals a bound is inside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeGuard, get_args

from tokentrue.errors import ConfigError

Signal: TypeAlias = Literal["corr", "ppo_train", "ppo_rollout"]
Level: TypeAlias = Literal["token", "sequence", "geometric"]
Mode: TypeAlias = Literal["truncate", "clip", "mask", "raw"]
Estimator: TypeAlias = Literal["ratio", "k1", "k2", "k3"]
Aggregate: TypeAlias = Literal["token", "seq_sum", "seq_mean", "seq_max", "geometric"]
Surrogate: TypeAlias = Literal["ppo", "ratio", "reinforce", "gspo", "cispo", "dppo_tv", "sapo", "vespo"]


def choose(owner: str, field: str, value: object, kind: Any) -> None:
    if value not in get_args(kind):
        raise ConfigError(f"{owner}.{field}: {value!r} is not one of {', '.join(map(repr, get_args(kind)))}")


def is_finite(value: object) -> TypeGuard[float]:
    """A finite number; text, True and NaN are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def bounds_of(owner: str, lower: object, upper: object, *, positive: bool) -> None:
    for field, value in (("lower", lower), ("upper", upper)):
        if value is None:
            continue
        if isinstance(value, str):
            raise ConfigError(
                f"{owner}.{field}: {value!r} is text; bounds are two numbers, lower= and upper=, never a range in a string"
            )
        if not is_finite(value):
            raise ConfigError(f"{owner}.{field}: {value!r} is not a finite number; leave it out for no bound")
        if positive and value <= 0:
            raise ConfigError(f"{owner}.{field}: {value!r} bounds a ratio and must be > 0; leave it out for no bound")
    if isinstance(lower, int | float) and isinstance(upper, int | float) and lower > upper:
        raise ConfigError(f"{owner}: lower {lower} is above upper {upper}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalise:
    """Divide the weights by their mean. `scope` says over what, explicitly:

    "call": the tokens of this call of `correct` (a micro-batch, if that is what it is given; one sequence at sequence
    level cancels the correction, which warns). "step": the caller's whole step; `correct` returns the totals, the
    caller adds them up over ranks and micro-batches and calls `Corrected.normalised(total, count)`.
    `over`: the mean is of the weights of "kept" tokens; of all "valid" tokens, rejected ones included and masked
    weights as 0; or of all valid tokens with "raw" masked weights. `empty_rows` counts rows without tokens as weight 0
    (Miles does).
    """

    scope: Literal["call", "step"]
    level: Literal["token", "sequence"] = "token"
    over: Literal["kept", "valid", "raw"] = "kept"
    empty_rows: bool = False

    def __post_init__(self) -> None:
        choose("Normalise", "scope", self.scope, Literal["call", "step"])
        choose("Normalise", "level", self.level, Literal["token", "sequence"])
        choose("Normalise", "over", self.over, Literal["kept", "valid", "raw"])


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveMix:
    """A mixing coefficient measured on the batch, between no correction (0) and the full importance weights (1).

    It combines the three diagnostics that AIS (arXiv 2605.13907) names: the effective sample share of the weights (how
    reliable they are), K3 (how severe the divergence is) and E[w²] (how much the weights amplify the variance):
    `ess · (1 - e^(-K3 / divergence)) / max(1, E[w²])`. The way they are combined is this package's own; the paper's was
    not available.
    """

    divergence: float = 0.01

    def __post_init__(self) -> None:
        if not (is_finite(self.divergence) and self.divergence > 0):
            raise ConfigError(f"AdaptiveMix.divergence: {self.divergence!r} must be finite and > 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Importance weights, always detached. Level "sequence" is the product of the row's ratios, "geometric" their
    geometric mean.

    Mode "truncate" caps at `upper`; "clip" clamps into [lower, upper]; "mask" (IcePop) keeps a weight inside the bounds
    as it is and sets it to 0 outside, leaving the mask alone; "raw" has no bounds.
    `mix` interpolates between no correction and these weights: 1 - α + α·w, with a fixed α or one measured on the
    batch.
    """

    level: Level = "token"
    mode: Mode = "truncate"
    lower: float | None = None
    upper: float | None = None
    signal: Signal = "corr"
    normalise: Normalise | None = None
    mix: float | AdaptiveMix | None = None

    def __post_init__(self) -> None:
        choose("Weights", "level", self.level, Level)
        choose("Weights", "mode", self.mode, Mode)
        choose("Weights", "signal", self.signal, Signal)
        bounds_of("Weights", self.lower, self.upper, positive=True)
        if not (self.mix is None or isinstance(self.mix, AdaptiveMix) or (is_finite(self.mix) and 0 <= self.mix <= 1)):
            raise ConfigError(
                f"Weights.mix: {self.mix!r} interpolates between no correction and the weights; it must be in [0, 1]"
            )
        self._check_bounds()

    def _check_bounds(self) -> None:
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
        if (self.lower or 0) > 1 or (self.upper is not None and self.upper < 1):
            raise ConfigError(
                f"Weights: the bounds [{self.lower}, {self.upper}] change tokens on which both sides agree exactly; they must hold 1 "
                "(in YAML, an unquoted 0.5_5 reads as 0.55)"
            )
        if self.normalise is not None and self.normalise.over == "raw" and self.mode != "mask":
            raise ConfigError("Weights.normalise: over='raw' only means something with mode 'mask'")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """One rule: a token or a row stays only if lower <= statistic <= upper.

    The statistic is `estimator` of `signal`'s ratio (of its inverse, with `inverse`), aggregated over the row's valid
    tokens. With estimator "ratio", "seq_sum" is the product of ratios and "geometric" their geometric mean (both
    compared in log space). `action` "drop" takes the tokens out of the mask; "mask" leaves the mask alone and sets
    their weights to 0.
    """

    estimator: Estimator
    aggregate: Aggregate
    lower: float | None = None
    upper: float | None = None
    signal: Signal = "corr"
    action: Literal["drop", "mask"] = "drop"
    inverse: bool = False

    def __post_init__(self) -> None:
        choose("Reject", "estimator", self.estimator, Estimator)
        choose("Reject", "aggregate", self.aggregate, Aggregate)
        choose("Reject", "signal", self.signal, Signal)
        choose("Reject", "action", self.action, Literal["drop", "mask"])
        bounds_of("Reject", self.lower, self.upper, positive=self.estimator == "ratio")
        if self.lower is None and self.upper is None:
            raise ConfigError("Reject: without a lower or an upper bound nothing can be rejected")
        if self.estimator in ("k2", "k3"):
            if self.lower is not None:
                raise ConfigError(
                    f"Reject: {self.estimator} is never negative and 0 is perfect agreement; a lower bound would reject it"
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
                "Reject: a lower bound on a maximum keeps rows for one bad token; use Outlier(lower=…) for 'any token below'"
            )
        if self._refuses_identity():
            raise ConfigError(
                f"Reject: the bounds [{self.lower}, {self.upper}] reject tokens on which both sides agree exactly"
            )

    def _refuses_identity(self) -> bool:
        agree = 1.0 if self.estimator == "ratio" else 0.0
        return (self.lower is not None and agree < self.lower) or (self.upper is not None and agree > self.upper)


@dataclass(frozen=True, slots=True, kw_only=True)
class Veto:
    """Drops a whole row if any of its valid tokens is less likely than `below` under the `of` policy."""

    below: float = 1e-6
    of: Literal["trainer", "rollout", "current"] = "trainer"

    def __post_init__(self) -> None:
        choose("Veto", "of", self.of, Literal["trainer", "rollout", "current"])
        if not (is_finite(self.below) and 0 < self.below < 1):
            raise ConfigError(f"Veto.below: {self.below!r} is a probability and must be in (0, 1)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlier:
    """Drops a whole row if any of its valid tokens has a ratio outside [lower, upper]."""

    lower: float | None = 1e-4
    upper: float | None = 100.0
    signal: Signal = "corr"

    def __post_init__(self) -> None:
        choose("Outlier", "signal", self.signal, Signal)
        bounds_of("Outlier", self.lower, self.upper, positive=True)
        if self.lower is None and self.upper is None:
            raise ConfigError("Outlier: needs a lower or an upper bound")
        if (self.lower or 0) > 1 or (self.upper is not None and self.upper < 1):
            raise ConfigError(
                f"Outlier: the bounds [{self.lower}, {self.upper}] reject tokens on which both sides agree exactly"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicyMask:
    """DeepSeek-V3.2's off-policy sequence mask: tokens with a negative advantage go, in rows whose mean -log r exceeds
    `threshold`.

    `whole_row`: one negative advantage in such a row drops all of it (they differ only where advantages vary inside a
    row).
    """

    threshold: float
    signal: Signal = "ppo_rollout"
    whole_row: bool = False

    def __post_init__(self) -> None:
        choose("OffPolicyMask", "signal", self.signal, Signal)
        if not (is_finite(self.threshold) and self.threshold >= 0):
            raise ConfigError(
                f"OffPolicyMask.threshold: {self.threshold!r} must be finite and >= 0: it bounds a divergence"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondMoment:
    """M2PO (arXiv 2510.01161): the tokens with the largest (log r)² go until the mean of the rest is at most
    `threshold`.

    `tokens` "harmful" looks only where PPO's clip would act (A > 0 and r > 1, or A < 0 and r < 1), as the paper's
    Algorithm 1 does; "all" looks at every valid token, as AReaL does. The tokens of one call of `correct` are sorted
    together: give it the whole mini-batch.
    """

    threshold: float = 0.04
    signal: Signal = "ppo_rollout"
    tokens: Literal["harmful", "all"] = "harmful"

    def __post_init__(self) -> None:
        choose("SecondMoment", "signal", self.signal, Signal)
        choose("SecondMoment", "tokens", self.tokens, Literal["harmful", "all"])
        if not (is_finite(self.threshold) and self.threshold >= 0):
            raise ConfigError(f"SecondMoment.threshold: {self.threshold!r} must be finite and >= 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """Drops tokens (or rows holding one) that were sampled more than `limit` policy versions ago."""

    limit: int
    level: Literal["token", "sequence"] = "token"

    def __post_init__(self) -> None:
        choose("Staleness", "level", self.level, Literal["token", "sequence"])
        if not (is_finite(self.limit) and self.limit >= 0):
            raise ConfigError(f"Staleness.limit: {self.limit!r} versions; must be finite and >= 0")
