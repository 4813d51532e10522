"""`Correction`: three independent choices (denominator, weights, rejection) in one frozen record; nonsense is refused
at construction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Literal

from tokentrue.errors import ConfigError, InputError
from tokentrue.json_types import JsonMapping
from tokentrue.mismatch.correction import importers
from tokentrue.mismatch.correction.rules import (
    Need,
    OffPolicyMask,
    Outlier,
    Reject,
    Rule,
    SecondMoment,
    Staleness,
    Surrogate,
    Veto,
    Weights,
    choose,
    is_finite,
)
from tokentrue.mismatch.estimators import LOG_CLAMP

MISSING: Mapping[Need, str] = {
    "old": "trainer_logprobs: missing",
    "current": "logprobs: the current policy's log-probabilities are missing",
    "advantages": "advantages: missing",
    "versions": "versions, version: the policy version of each token (or row) and the current one are missing",
}


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
    def rules(self) -> tuple[Rule, ...]:
        """Every rule that is set, in the order of the fields."""
        values = [getattr(self, field.name) for field in fields(self)]
        found = [rule for value in values for rule in (value if isinstance(value, tuple) else (value,))]
        return tuple(rule for rule in found if isinstance(rule, Rule))

    @property
    def is_active(self) -> bool:
        """Whether anything is weighted or rejected."""
        return bool(self.rules)

    @property
    def needs(self) -> frozenset[Need]:
        """What `correct` must be given."""
        return frozenset(need for rule in self.rules for need in rule.needs)

    @property
    def needs_current(self) -> bool:
        """Whether `correct` must be given the current policy's log-probabilities."""
        return "current" in self.needs

    def require(self, has: Callable[[Need], bool]) -> None:
        """Raises InputError, which names the keyword, where a batch lacks what a rule needs."""
        for rule in self.rules:
            for need in sorted(rule.needs):
                if not has(need):
                    raise InputError(f"{MISSING[need]}; {type(rule).__name__} needs them")

    def explain(self) -> str:
        """The formula in words, and what it costs."""
        base = "π_rollout (bypass)" if self.denominator == "rollout" else "π_old, recomputed by the trainer"
        lines = [f"surrogate: {self.surrogate}, ratio over {base}"]
        lines += ["weights: none"] if self.weights is None else []
        lines += [rule.explain() for rule in self.rules]
        lines.append(f"the loss divides by the {self.loss_counts} counts")
        needs_old = self.denominator == "trainer" or "old" in self.needs
        lines.append("cost: one extra forward pass per step for π_old" if needs_old else "cost: no extra forward pass")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    @classmethod
    def from_verl(cls, config: JsonMapping, *, faithful: bool = False) -> Correction:
        """verl's `algorithm.rollout_correction`."""
        return cls(**importers.from_verl(config, faithful=faithful))

    @classmethod
    def from_miles(cls, config: JsonMapping, *, faithful: bool = False) -> Correction:
        """Miles' and slime's arguments: `mis.yaml`, `tis_clip`, `custom_tis_function_path`, OPSM and bypass flags."""
        return cls(**importers.from_miles(config, faithful=faithful))

    @classmethod
    def from_trl(cls, config: JsonMapping, *, faithful: bool = False) -> Correction:
        """TRL's GRPOConfig."""
        return cls(**importers.from_trl(config, faithful=faithful))
