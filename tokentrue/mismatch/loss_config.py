"""`LossConfig`: one policy loss as a frozen record, by the names of papers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta

from tokentrue.errors import ConfigError
from tokentrue.json_types import JsonMapping
from tokentrue.mismatch.correction import Correction
from tokentrue.mismatch.metrics import LOG_CLAMP
from tokentrue.mismatch.rules import SecondMoment, Surrogate, refuse
from tokentrue.records import record
from tokentrue.types import AtLeastOne, Checked, Finite, NotNegative, Positive, check_fields

Aggregation: TypeAlias = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "fixed_length", "token_sum"]


@record
class Penalty(Checked):
    """A divergence of the current policy from another, added to the loss.

    With x = log other - log current: k1 = -x, k2 = x²/2, k3 = eˣ - 1 - x; "unbiased" (DeepSeek-V3.2) is r·k3 with r the
    PPO ratio, differentiated too. x is clamped to ±`clamp` (None in TRL), the estimate to ±`ceiling` (10 in verl).
    """

    coefficient: NotNegative
    estimator: Literal["k1", "k2", "k3", "unbiased"] = "k3"
    against: Literal["reference", "rollout", "trainer"] = "reference"
    tokens: Literal["kept", "valid"] = "kept"
    clamp: Positive | None = LOG_CLAMP
    ceiling: Positive | None = None


@record
class SapoTemperatures(Checked):
    """SAPO's gate σ(τ(r - 1))·4/τ (arXiv 2511.20347): τ by the sign of the advantage."""

    positive: Positive = 1.0
    negative: Positive = 1.05


@record
class VespoKernel(Checked):
    """VESPO's weight of a row (arXiv 2602.10693): φ(W) = W^k · e^(λ(1 - W)), k and λ by the sign of the advantage."""

    k_positive: NotNegative = 2.0
    lambda_positive: NotNegative = 3.0
    k_negative: NotNegative = 3.0
    lambda_negative: NotNegative = 2.0


@record
class LossConfig:
    """One policy loss. `surrogate=None` takes the correction's.

    Clips bound the ratio to [1 - low, 1 + high] or, for DPPO, the change of probability. `dual_clip` caps the loss of
    negative advantages at that ratio. `ratio_cap` makes DPPO's ratio a constant min(r, cap) on the log-probability.
    GSPO's gradient flows through each token or through the row's mean.
    """

    correction: Correction = field(default_factory=Correction)
    surrogate: Surrogate | None = None
    clip_low: NotNegative | None = 0.2
    clip_high: NotNegative | None = 0.2
    dual_clip: Finite | None = None
    ratio_cap: Annotated[float, Meta(ge=1)] | None = None
    gspo_gradient: Literal["token", "sequence"] = "token"
    sapo: SapoTemperatures = SapoTemperatures()
    vespo: VespoKernel = VespoKernel()
    aggregate: Aggregation = "token_mean"
    fixed_length: AtLeastOne | None = None
    penalty: Penalty | None = None
    entropy_coefficient: Finite = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "LossConfig")
        if self.surrogate is not None and self.surrogate != self.correction.surrogate:
            # `Correction` refuses a surrogate that counts a ratio twice.
            object.__setattr__(self, "correction", replace(self.correction, surrogate=self.surrogate))
        kind, low, high, dual = self.correction.surrogate, self.clip_low, self.clip_high, self.dual_clip
        refuse(
            "LossConfig",
            {
                f"{kind} needs clip_low and clip_high": kind in ("ppo", "gspo", "dppo_tv") and None in (low, high),
                f"clip_low: {low} leaves no lower bound on a ratio; it must be below 1 for {kind}": (
                    kind in ("ppo", "gspo") and (low or 0) >= 1
                ),
                f"dual_clip: {dual!r} must be above 1 + clip_high, and belongs to ppo": (
                    dual is not None and (kind != "ppo" or dual <= 1 + (high or 0))
                ),
                "ratio_cap: belongs to dppo_tv": self.ratio_cap is not None and kind != "dppo_tv",
                "vespo weighs rows by their whole ratio; use denominator='rollout' instead of weights": (
                    kind == "vespo" and self.correction.weights is not None
                ),
                "aggregate: score centering weighs every token alike; use token_mean, token_sum or fixed_length": (
                    self.correction.centering is not None and self.aggregate.startswith("seq_mean")
                ),
                "fixed_length: a number of tokens, goes with aggregate='fixed_length' and no other": (
                    (self.aggregate == "fixed_length") != (self.fixed_length is not None)
                ),
            },
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
    "dppo_tv": {"correction": Correction(denominator="rollout", surrogate="dppo_tv")},
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
