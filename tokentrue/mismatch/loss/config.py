"""`LossConfig`: one policy loss as a frozen record; settings that contradict each other are refused at construction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from tokentrue.errors import ConfigError
from tokentrue.json_types import JsonMapping
from tokentrue.mismatch.correction.config import Correction
from tokentrue.mismatch.correction.rules import SecondMoment, Surrogate, choose, is_finite
from tokentrue.mismatch.estimators import LOG_CLAMP

Aggregation: TypeAlias = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "fixed_length", "token_sum"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalty:
    """A divergence of the current policy from another, added to the loss.

    With x = log other - log current: k1 = -x, k2 = x²/2, k3 = eˣ - 1 - x. "unbiased" (DeepSeek-V3.2) is r·k3 with r the
    PPO ratio,
    differentiated too: its expected gradient is that of the true divergence. `tokens`: pay on kept tokens, or on all
    valid ones. x is clamped to ±`clamp` (None: not at all, as in TRL) and the estimate to ±`ceiling` (10 in verl);
    outside them there is no gradient.
    """

    coefficient: float
    estimator: Literal["k1", "k2", "k3", "unbiased"] = "k3"
    against: Literal["reference", "rollout", "trainer"] = "reference"
    tokens: Literal["kept", "valid"] = "kept"
    clamp: float | None = LOG_CLAMP
    ceiling: float | None = None

    def __post_init__(self) -> None:
        choose("Penalty", "estimator", self.estimator, Literal["k1", "k2", "k3", "unbiased"])
        choose("Penalty", "against", self.against, Literal["reference", "rollout", "trainer"])
        choose("Penalty", "tokens", self.tokens, Literal["kept", "valid"])
        if not (is_finite(self.coefficient) and self.coefficient >= 0):
            raise ConfigError(f"Penalty.coefficient: {self.coefficient!r} must be finite and >= 0")
        for name in ("clamp", "ceiling"):
            value = getattr(self, name)
            if value is not None and not (is_finite(value) and value > 0):
                raise ConfigError(f"Penalty.{name}: {value!r} must be finite and > 0, or None for no bound")


@dataclass(frozen=True, slots=True, kw_only=True)
class SapoTemperatures:
    """SAPO's gate σ(τ(r - 1))·4/τ (arXiv 2511.20347): τ for positive advantages, and for the others, whose gradient
    fades faster."""

    positive: float = 1.0
    negative: float = 1.05

    def __post_init__(self) -> None:
        if not all(is_finite(value) and value > 0 for value in (self.positive, self.negative)):
            raise ConfigError(f"SapoTemperatures: {self.positive!r}, {self.negative!r} must be finite and > 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class VespoKernel:
    """VESPO's weight of a row (arXiv 2602.10693): φ(W) = W^k · e^(λ(1 - W)), with k and λ by the sign of the
    advantage."""

    k_positive: float = 2.0
    lambda_positive: float = 3.0
    k_negative: float = 3.0
    lambda_negative: float = 2.0

    def __post_init__(self) -> None:
        values = (self.k_positive, self.lambda_positive, self.k_negative, self.lambda_negative)
        if not all(is_finite(value) and value >= 0 for value in values):
            raise ConfigError("VespoKernel: k and lambda must be finite and >= 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """One policy loss. `surrogate=None` takes the correction's.

    `clip_low`/`clip_high` bound the ratio to [1 - low, 1 + high] (PPO, GSPO, CISPO; None is no bound) or are DPPO's
    bounds on the change of probability. `dual_clip` caps the loss of negative advantages at that ratio. `ratio_cap`
    turns DPPO's ratio into a constant min(r, cap) on the log-probability. `gspo_gradient`: per "token" through its own
    log-probability, or through the "sequence" mean. Surrogate "ratio" is -r·A without a clip; "sapo" and "vespo"
    replace the clip by a smooth gate, set by `sapo` and `vespo`.
    """

    correction: Correction = field(default_factory=Correction)
    surrogate: Surrogate | None = None
    clip_low: float | None = 0.2
    clip_high: float | None = 0.2
    dual_clip: float | None = None
    ratio_cap: float | None = None
    gspo_gradient: Literal["token", "sequence"] = "token"
    sapo: SapoTemperatures = SapoTemperatures()
    vespo: VespoKernel = VespoKernel()
    aggregate: Aggregation = "token_mean"
    fixed_length: int | None = None
    penalty: Penalty | None = None
    entropy_coefficient: float = 0.0

    def __post_init__(self) -> None:
        choose("LossConfig", "surrogate", self.surrogate or self.correction.surrogate, Surrogate)
        choose("LossConfig", "aggregate", self.aggregate, Aggregation)
        choose("LossConfig", "gspo_gradient", self.gspo_gradient, Literal["token", "sequence"])
        if self.surrogate is not None and self.surrogate != self.correction.surrogate:
            object.__setattr__(
                self, "correction", replace(self.correction, surrogate=self.surrogate)
            )  # refuses double counting
        self._check_clips()
        self._check_options()

    def _check_clips(self) -> None:
        kind = self.correction.surrogate
        for name in ("clip_low", "clip_high"):
            value = getattr(self, name)
            if value is not None and not (is_finite(value) and value >= 0):
                raise ConfigError(f"LossConfig.{name}: {value!r} must be finite and >= 0, or None for no bound")
        if kind in ("ppo", "gspo", "dppo_tv") and (self.clip_low is None or self.clip_high is None):
            raise ConfigError(f"LossConfig: {kind} needs clip_low and clip_high")
        if kind in ("ppo", "gspo") and (self.clip_low or 0) >= 1:
            raise ConfigError(
                f"LossConfig.clip_low: {self.clip_low} leaves no lower bound on a ratio; it must be below 1 for {kind}"
            )

    def _check_options(self) -> None:
        kind, length = self.correction.surrogate, self.fixed_length
        least = 1 + (self.clip_high or 0)
        if self.dual_clip is not None and not (kind == "ppo" and is_finite(self.dual_clip) and self.dual_clip > least):
            raise ConfigError(
                f"LossConfig.dual_clip: {self.dual_clip!r} must be finite and above 1 + clip_high, and belongs to ppo"
            )
        if self.ratio_cap is not None and not (kind == "dppo_tv" and is_finite(self.ratio_cap) and self.ratio_cap >= 1):
            raise ConfigError(
                f"LossConfig.ratio_cap: {self.ratio_cap!r} must be finite and >= 1, and belongs to dppo_tv"
            )
        if not is_finite(self.entropy_coefficient):
            raise ConfigError(f"LossConfig.entropy_coefficient: {self.entropy_coefficient!r} must be a finite number")
        if kind == "vespo" and self.correction.weights is not None:
            raise ConfigError(
                "LossConfig: vespo weighs rows by their whole ratio; use denominator='rollout' instead of importance weights"
            )
        if length is not None and not (is_finite(length) and length > 0):
            raise ConfigError(f"LossConfig.fixed_length: {length!r} must be a positive number of tokens")
        if (self.aggregate == "fixed_length") != (length is not None):
            raise ConfigError(
                "LossConfig.fixed_length: a number of tokens, goes with aggregate='fixed_length' and no other"
            )


LOSSES: Mapping[str, JsonMapping] = {
    "reinforce": {"surrogate": "reinforce"},
    "ppo": {"surrogate": "ppo"},
    "grpo": {"surrogate": "ppo", "aggregate": "seq_mean_token_mean"},
    "dapo": {"surrogate": "ppo", "clip_low": 0.2, "clip_high": 0.28, "aggregate": "token_mean"},
    "decoupled_ppo": {"surrogate": "ppo", "dual_clip": 3.0},
    "bypass_ppo": {"correction": Correction(denominator="rollout")},
    "gspo": {"surrogate": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "aggregate": "seq_mean_token_mean"},
    "cispo": {"surrogate": "cispo", "clip_low": None, "clip_high": 4.0},
    "dppo_tv": {
        "correction": Correction(denominator="rollout", surrogate="dppo_tv"),
        "clip_low": 0.2,
        "clip_high": 0.2,
    },
    "sapo": {"surrogate": "sapo", "aggregate": "seq_mean_token_mean"},
    "vespo": {"correction": Correction(denominator="rollout", surrogate="vespo")},
    "m2po": {
        "correction": Correction(denominator="rollout", surrogate="ratio", second_moment=SecondMoment(threshold=0.04))
    },
}
"""Losses by the name they go by in papers: starting points for `loss_named`."""


def loss_named(name: str, **changes: Any) -> LossConfig:
    """`loss_named("grpo", clip_high=0.28, correction=PRESETS["decoupled_token_is"])`."""
    if name not in LOSSES:
        raise ConfigError(f"no loss {name!r}; choose one of {', '.join(LOSSES)}")
    return LossConfig(**{**LOSSES[name], **changes})
