"""`Correction`: three independent choices (denominator, weights, rejection) in one frozen record; nonsense is refused
at construction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tokentrue.errors import ConfigError
from tokentrue.mismatch.correction import importers
from tokentrue.mismatch.correction.explain import RATIO, describe_interval, rule_text, weights_text
from tokentrue.mismatch.correction.rules import (
    OffPolicyMask,
    Outlier,
    Reject,
    SecondMoment,
    Signal,
    Staleness,
    Surrogate,
    Veto,
    Weights,
    choose,
    is_finite,
)
from tokentrue.mismatch.estimators import LOG_CLAMP


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """A whole correction. `Correction()` changes nothing and measures everything.

    The three choices: `denominator` of the PPO ratio (the trainer's recomputed or the rollout's log-probabilities);
    `weights`; `reject` (all rules must agree to keep). Then what the loss divides by after rejection: the "original"
    count or what was "kept". `surrogate` names the objective that the correction is meant for, which `policy_loss` uses
    when it is given no other. `non_finite` valid log-probabilities: "raise", count as agreement ("unit"), or drop the
    "token" or its "sequence". `clamp_tokens` clamps each log-ratio before it is summed for rejection, as verl does,
    instead of the sum.
    """

    denominator: Literal["trainer", "rollout"] = "trainer"
    weights: Weights | None = None
    reject: tuple[Reject, ...] = ()
    veto: Veto | None = None
    outlier: Outlier | None = None
    off_policy_mask: OffPolicyMask | None = None
    staleness: Staleness | None = None
    second_moment: SecondMoment | None = None
    align_support: bool = False
    loss_counts: Literal["original", "kept"] = "original"
    surrogate: Surrogate = "ppo"
    staged: bool = (
        False  # each rule sees only what earlier ones kept: outlier, token rules, weights, row rules (SkyRL's order)
    )
    non_finite: Literal["raise", "unit", "token", "sequence"] = "raise"
    log_clamp: float = LOG_CLAMP
    clamp_tokens: bool = False
    notes: tuple[str, ...] = ()  # what an importer wants the user to know

    def __post_init__(self) -> None:
        choose("Correction", "denominator", self.denominator, Literal["trainer", "rollout"])
        choose("Correction", "loss_counts", self.loss_counts, Literal["original", "kept"])
        choose("Correction", "surrogate", self.surrogate, Surrogate)
        choose("Correction", "non_finite", self.non_finite, Literal["raise", "unit", "token", "sequence"])
        if isinstance(self.reject, Reject):
            object.__setattr__(self, "reject", (self.reject,))
        if not isinstance(self.reject, tuple) or not all(isinstance(rule, Reject) for rule in self.reject):
            raise ConfigError("Correction.reject: must be a tuple of Reject rules")
        if not (is_finite(self.log_clamp) and 0 < self.log_clamp <= 80):
            raise ConfigError(f"Correction.log_clamp: {self.log_clamp!r} must be in (0, 80]")
        self._refuse_double_count()

    def _refuse_double_count(self) -> None:
        if self.weights is None:
            return
        if self.denominator == "rollout" and self.surrogate != "reinforce":
            raise ConfigError(
                f"Correction: with the rollout as denominator the {self.surrogate} ratio already holds trainer ÷ rollout; importance "
                "weights would count it twice. Use denominator='trainer', surrogate='reinforce', or no weights"
            )
        if self.weights.signal != "corr" and self.surrogate != "reinforce":
            raise ConfigError(
                f"Correction: weights of {self.weights.signal} on the {self.surrogate} surrogate count the policy's drift twice; "
                "use signal='corr', or surrogate='reinforce'"
            )

    @property
    def signals(self) -> frozenset[Signal]:
        """The ratios that this correction needs."""
        used: set[Signal] = {rule.signal for rule in self.reject}
        rules = (self.weights, self.outlier, self.off_policy_mask, self.second_moment)
        used |= {rule.signal for rule in rules if rule is not None}
        return frozenset(used)

    @property
    def is_active(self) -> bool:
        """Whether anything is weighted or rejected."""
        rules = (self.weights, self.veto, self.outlier, self.off_policy_mask, self.staleness, self.second_moment)
        return bool(self.reject) or any(rule is not None for rule in rules)

    @property
    def needs_current(self) -> bool:
        """Whether `correct` must be given the current policy's log-probabilities."""
        return bool(self.signals - {"corr"}) or (self.veto is not None and self.veto.of == "current")

    def explain(self) -> str:
        """The formula in words, and what it costs."""
        base = "π_rollout (bypass)" if self.denominator == "rollout" else "π_old, recomputed by the trainer"
        lines = [f"surrogate: {self.surrogate}, ratio over {base}"]
        lines.append("weights: none" if self.weights is None else "weights: " + weights_text(self.weights))
        lines += [
            f"keep {rule_text(rule)}" + (" (else weight 0, still counted)" if rule.action == "mask" else "")
            for rule in self.reject
        ]
        if self.veto is not None:
            lines.append(
                f"drop rows with a token below probability {self.veto.below:g} under the {self.veto.of} policy"
            )
        if self.outlier is not None:
            bounds = describe_interval("r", self.outlier.lower, self.outlier.upper)
            lines.append(f"drop rows unless every token has {bounds}, r = {RATIO[self.outlier.signal]}")
        if self.off_policy_mask is not None:
            mask = self.off_policy_mask
            lines.append(f"drop negative advantages in rows with mean -log {RATIO[mask.signal]} > {mask.threshold:g}")
        if self.staleness is not None:
            lines.append(f"drop {self.staleness.level}s sampled more than {self.staleness.limit} versions ago")
        if self.second_moment is not None:
            moment = self.second_moment
            lines.append(
                f"drop the largest (log {RATIO[moment.signal]})² of {moment.tokens} tokens until their mean <= {moment.threshold:g}"
            )
        lines.append(f"the loss divides by the {self.loss_counts} counts")
        needs_old = self.denominator == "trainer" or "corr" in self.signals or "ppo_train" in self.signals
        lines.append("cost: one extra forward pass per step for π_old" if needs_old else "cost: no extra forward pass")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    @classmethod
    def from_verl(cls, config: Mapping[str, Any], *, faithful: bool = False) -> Correction:
        """verl's `algorithm.rollout_correction`."""
        return cls(**importers.from_verl(config, faithful=faithful))

    @classmethod
    def from_miles(cls, config: Mapping[str, Any], *, faithful: bool = False) -> Correction:
        """Miles' and slime's arguments: `mis.yaml`, `tis_clip`, `custom_tis_function_path`, OPSM and bypass flags."""
        return cls(**importers.from_miles(config, faithful=faithful))

    @classmethod
    def from_trl(cls, config: Mapping[str, Any], *, faithful: bool = False) -> Correction:
        """TRL's GRPOConfig."""
        return cls(**importers.from_trl(config, faithful=faithful))

    @classmethod
    def from_areal(cls, config: Mapping[str, Any], *, faithful: bool = False) -> Correction:
        """AReaL's PPO actor."""
        return cls(**importers.from_areal(config, faithful=faithful))

    @classmethod
    def from_skyrl(cls, config: Mapping[str, Any], *, faithful: bool = False) -> Correction:
        """SkyRL's `off_policy_correction`."""
        return cls(**importers.from_skyrl(config, faithful=faithful))
