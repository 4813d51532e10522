"""The rules of a correction: settings, validated on construction, what each `needs`, its text, and what it does to a
batch. How to add one: docs/new-correction.md. A value that equals a bound is inside it.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import torch
from msgspec import Meta
from torch import Tensor

from tokentrue.errors import ConfigError
from tokentrue.mismatch.batch import Batch, Need, Signal
from tokentrue.mismatch.metrics import ESTIMATORS
from tokentrue.records import record
from tokentrue.types import Checked, Count, NotNegative, check_fields, is_finite

Level = Literal["token", "sequence", "geometric"]
Mode = Literal["truncate", "clip", "mask", "raw"]
Estimator = Literal["ratio", "k1", "k2", "k3"]
Aggregate = Literal["token", "seq_sum", "seq_mean", "seq_max", "geometric"]
Surrogate = Literal["ppo", "ratio", "reinforce", "gspo", "cispo", "dppo_tv", "sapo", "vespo"]

RATIO: dict[Signal, str] = {
    "corr": "π_old/π_rollout",
    "ppo_train": "π_current/π_old",
    "ppo_rollout": "π_current/π_rollout",
}
POLICIES: Mapping[Signal | None, frozenset[Need]] = {
    "corr": frozenset({"old"}),
    "ppo_train": frozenset({"old", "current"}),
    "ppo_rollout": frozenset({"current"}),
}


class Rule(Checked, ABC):
    __slots__ = ()

    also: ClassVar[frozenset[Need]] = frozenset()  # beside the two policies of the signal, if the rule has one

    @property
    def needs(self) -> frozenset[Need]:
        """What `correct` must be given beside the rollout's log-probabilities."""
        return self.also | POLICIES.get(getattr(self, "signal", None), frozenset())

    @abstractmethod
    def explain(self) -> str:
        """One line for `Correction.explain`."""

    @abstractmethod
    def apply(self, batch: Batch) -> None:
        """Drops tokens or rows; weights set the batch's."""

    @property
    def order(self) -> int:
        """0 drops tokens and rows, then 1 makes weights, then 2 judges rows, by the tokens left if staged."""
        return 0


def refuse(owner: str, reasons: Mapping[str, bool]) -> None:
    for reason, applies in reasons.items():
        if applies:
            raise ConfigError(f"{owner}: {reason}")


@record
class BoundedRule(Rule):
    lower: float | None = None
    upper: float | None = None
    signal: Signal = "corr"

    @property
    def is_bounded(self) -> bool:
        return self.lower is not None or self.upper is not None

    def check(self, refused: Mapping[str, bool], *, perfect: int = 1) -> None:
        """`refused`: whether each reason applies; `perfect`: the value (of a ratio, 1) of agreement."""
        owner, low, high = type(self).__name__, self.lower, self.upper
        check_fields(self, owner)
        for field, value in (("lower", low), ("upper", high)):
            if isinstance(value, str):
                raise ConfigError(
                    f"{owner}.{field}: {value!r} is text; bounds are two numbers, never a range in a string"
                )
            what = "is not a finite number" if not is_finite(value) else "bounds a ratio and must be > 0"
            if value is not None and (not is_finite(value) or (value <= 0 and perfect == 1)):
                raise ConfigError(f"{owner}.{field}: {value!r} {what}; leave it out for no bound")
        if low is not None and high is not None and low > high:
            raise ConfigError(f"{owner}: lower {low} is above upper {high}")
        refuse(owner, refused)
        if (low is not None and low > perfect) or (high is not None and high < perfect):
            raise ConfigError(
                f"{owner}: the bounds [{low}, {high}] change tokens on which both sides agree exactly; "
                f"they must hold {perfect} (in YAML, an unquoted 0.5_5 reads as 0.55)"
            )

    def describe_bounds(self, name: str) -> str:
        left = "" if self.lower is None else f"{self.lower:g} <= "
        return f"{left}{name}" + ("" if self.upper is None else f" <= {self.upper:g}")

    def holds(self, values: Tensor, *, is_log: bool = True) -> Tensor:
        """Which values, by default logarithms of ratios, are inside the bounds."""
        low, high = (math.log(b) if is_log and b is not None else b for b in (self.lower, self.upper))
        good = torch.ones_like(values, dtype=torch.bool) if low is None else values >= low
        return good if high is None else good & (values <= high)


@record
class Normalise(Checked):
    """Divides the weights by their mean over this call of `correct`: of "kept" tokens, of all "valid" ones with masked
    weights as 0, or of all with "raw" masked weights. `empty_rows` counts rows without tokens as weight 0 (as Miles).
    """

    level: Literal["token", "sequence"] = "token"
    over: Literal["kept", "valid", "raw"] = "kept"
    empty_rows: bool = False


@record
class Weights(BoundedRule):
    """Importance weights, detached: per token, the row's product ("sequence") or its geometric mean. "mask" (IcePop)
    sets a weight outside the bounds to 0 and leaves the mask alone."""

    level: Level = "token"
    mode: Mode = "truncate"
    normalise: Normalise | None = None

    def __post_init__(self) -> None:
        mode, mean = self.mode, self.normalise
        self.check(
            {
                "mode 'raw' has no bounds; use 'truncate', 'clip' or 'mask'": mode == "raw" and self.is_bounded,
                "mode 'truncate' has no lower bound; use mode 'clip' for both, or 'mask' to zero outside them": (
                    mode == "truncate" and self.lower is not None
                ),
                f"mode {mode!r} needs a lower or an upper bound": mode != "raw" and not self.is_bounded,
                "normalise over='raw' only means something with mode 'mask'": (
                    mean is not None and mean.over == "raw" and mode != "mask"
                ),
            }
        )

    @property
    def order(self) -> int:
        return 1

    def explain(self) -> str:
        bounds = "" if self.mode == "raw" else f" ({self.mode}: {self.describe_bounds('w')})"
        how = f"w = {RATIO[self.signal]} per {self.level}{bounds}"
        if (mean := self.normalise) is not None:
            how += f", over the mean of {mean.over} {mean.level}s"
        return f"weights: {how}"

    def apply(self, batch: Batch) -> None:
        limit, log_ratio = batch.log_clamp, batch.log_ratio(self.signal)
        log_weight = log_ratio
        if self.level != "token":
            total, count = batch.row_totals(log_ratio)
            log_weight = batch.rows.spread(total / count if self.level == "geometric" else total)
        outside = ~self.holds(log_weight)
        batch.hits["weights_below"] = int((outside & (log_weight < 0)).sum())
        batch.hits["weights_above"] = int((outside & (log_weight > 0)).sum())
        batch.hits["clamped"] = int((log_weight.abs() > limit).sum())
        bounded = unmasked = log_weight.clamp(-limit, limit).exp()
        if self.mode == "mask":
            bounded = unmasked.masked_fill(outside, 0)
        elif self.mode != "raw":
            bounded = unmasked = unmasked.clamp(min=self.lower, max=self.upper)
        batch.weights, batch.unmasked = bounded, unmasked


@record
class Reject(BoundedRule):
    """A token or a row stays only if lower <= statistic <= upper: `estimator` of `signal`'s ratio, aggregated over the
    row's valid tokens."""

    estimator: Estimator
    aggregate: Aggregate
    inverse: bool = False

    def __post_init__(self) -> None:
        kind, aggregate, is_ratio = self.estimator, self.aggregate, self.estimator == "ratio"
        self.check(
            {
                "without a lower or an upper bound nothing can be rejected": not self.is_bounded,
                f"{kind} is never negative and 0 is perfect agreement: it needs an upper bound > 0, and no lower one": (
                    kind in ("k2", "k3") and (self.lower is not None or not self.upper)
                ),
                f"'geometric' is a mean of ratios; for {kind} use 'seq_mean'": aggregate == "geometric"
                and not is_ratio,
                "the mean of ratios hides opposite errors of long rows; use 'geometric', or k1 with 'seq_mean'": (
                    aggregate == "seq_mean" and is_ratio
                ),
                "a lower bound on a maximum keeps rows for one bad token; use Outlier(lower=…) for 'any token below'": (
                    aggregate == "seq_max" and self.lower is not None
                ),
            },
            perfect=1 if is_ratio else 0,
        )

    @property
    def order(self) -> int:
        return 0 if self.aggregate == "token" else 2

    def explain(self) -> str:
        ratio = RATIO[self.signal] if not self.inverse else f"1/({RATIO[self.signal]})"
        shown = f"{self.aggregate} of {self.estimator}({ratio})"
        return f"keep {'tokens' if self.aggregate == 'token' else 'rows'} with {self.describe_bounds(shown)}"

    def apply(self, batch: Batch) -> None:
        rows, values = batch.rows, batch.log_ratio(self.signal)
        if self.inverse:
            values = -values
        if self.estimator in ("k2", "k3") or batch.clamp_tokens:
            values = values.clamp(-batch.log_clamp, batch.log_clamp)
        is_ratio = self.estimator == "ratio"
        if not is_ratio:
            values = ESTIMATORS[self.estimator](values)
        if self.aggregate == "seq_max":
            values = rows.max(torch.where(batch.active, values, -torch.inf), empty=0.0)
        elif self.aggregate != "token":
            total, count = batch.row_totals(values)
            values = total if self.aggregate == "seq_sum" else total / count
        failing = ~self.holds(values, is_log=is_ratio)
        failing = failing if self.aggregate == "token" else rows.spread(failing)
        batch.count(f"{self.signal}_{self.aggregate}_{self.estimator}{'_inverse' * self.inverse}", failing)
        batch.dropped |= failing


@record
class Veto(Rule):
    also: ClassVar[frozenset[Need]] = frozenset({"old"})
    below: Annotated[float, Meta(gt=0, lt=1)] = 1e-6

    def explain(self) -> str:
        return f"drop rows with a token below probability {self.below:g} under the trainer's policy"

    def apply(self, batch: Batch) -> None:
        batch.drop("vetoed", batch.trainer < math.log(self.below), whole_rows=True)


@record
class Outlier(BoundedRule):
    lower: float | None = 1e-4
    upper: float | None = 100.0

    def __post_init__(self) -> None:
        self.check({"needs a lower or an upper bound": not self.is_bounded})

    def explain(self) -> str:
        return f"drop rows unless every token has {self.describe_bounds('r')}, r = {RATIO[self.signal]}"

    def apply(self, batch: Batch) -> None:
        batch.drop("outlier", ~self.holds(batch.log_ratio(self.signal)), whole_rows=True)


@record
class OffPolicyMask(Rule):
    """DeepSeek-V3.2: drops negative advantages in rows whose mean -log r exceeds `threshold`."""

    also: ClassVar[frozenset[Need]] = frozenset({"advantages"})
    threshold: NotNegative
    signal: Signal = "ppo_rollout"

    def explain(self) -> str:
        return f"drop negative advantages in rows with mean -log {RATIO[self.signal]} > {self.threshold:g}"

    def apply(self, batch: Batch) -> None:
        drift = batch.rows.mean(-batch.log_ratio(self.signal))
        negative = batch.per_token("advantages") < 0
        batch.drop("off_policy", negative & batch.rows.spread(drift > self.threshold))


@record
class SecondMoment(Rule):
    """M2PO (arXiv 2510.01161). "harmful" looks only where PPO's clip would act, as the paper; "all" at every valid
    token, as AReaL. All tokens of one call are sorted together: give it the whole mini-batch."""

    threshold: NotNegative = 0.04
    signal: Signal = "ppo_rollout"
    tokens: Literal["harmful", "all"] = "harmful"

    @property
    def needs(self) -> frozenset[Need]:
        return POLICIES[self.signal] | frozenset[Need]({"advantages"} if self.tokens == "harmful" else ())

    def explain(self) -> str:
        squares = f"(log {RATIO[self.signal]})²"
        return f"drop the largest {squares} of {self.tokens} tokens until their mean <= {self.threshold:g}"

    def apply(self, batch: Batch) -> None:
        log_ratio = batch.log_ratio(self.signal)
        squares, judged = log_ratio * log_ratio, batch.rows.flags(True)
        if self.tokens == "harmful":
            advantages = batch.per_token("advantages")
            judged = ((advantages > 0) & (log_ratio > 0)) | ((advantages < 0) & (log_ratio < 0))
        ordered = squares[judged].sort().values
        means = ordered.cumsum(0) / torch.arange(1, ordered.shape[0] + 1, device=ordered.device, dtype=ordered.dtype)
        kept = int((means <= self.threshold).sum())
        smallest = float(ordered[kept]) if kept < ordered.shape[0] else math.inf  # that must go
        batch.drop("second_moment", judged & (squares >= smallest))


@record
class ScoreCentering(Rule):
    """Subtracts the sampler's expected score (arXiv 2609.20807): a term of the loss, with the weights' cap."""

    also: ClassVar[frozenset[Need]] = frozenset({"head"})

    def explain(self) -> str:
        return "centre the score: add A·Σ_v (q·w(p/q) - α·p)·log p over the sampler's top ids v, α = ρ·w(1/ρ)"

    def apply(self, batch: Batch) -> None:
        pass  # `policy_loss` adds the term

    def term(self, logprobs: Tensor, rollout: Tensor, cap: float | None) -> tuple[Tensor, Tensor]:
        """Σ_v c_v·log π(v) of each token, c constant, from `[n, K]` log-probabilities (-inf in `rollout` where a token
        has fewer ids); and the rollout's mass on those ids."""
        known = torch.isfinite(rollout) & torch.isfinite(logprobs)
        p, q = (torch.where(known, values.detach(), -torch.inf).exp() for values in (logprobs, rollout))
        tail = (1 - q.sum(-1)).clamp(min=1e-6) / (1 - p.sum(-1)).clamp(min=1e-6)
        share = tail if cap is None else (cap * tail).clamp(max=1)
        c = (q if cap is None else torch.minimum(p, cap * q)) - share[:, None] * p
        return (c * torch.where(known, logprobs, 0.0)).sum(-1), q.sum(-1)


@record
class Staleness(Rule):
    also: ClassVar[frozenset[Need]] = frozenset({"versions"})
    limit: Count

    def explain(self) -> str:
        return f"drop tokens sampled more than {self.limit} versions ago"

    def apply(self, batch: Batch) -> None:
        batch.drop("stale", batch.age > self.limit)
