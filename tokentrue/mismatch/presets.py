"""Published corrections by name."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from tokentrue.mismatch.correction import Correction
from tokentrue.mismatch.rules import Normalise, OffPolicyMask, Reject, ScoreCentering, SecondMoment, Weights

_TOKEN = Weights(level="token", mode="truncate", upper=2.0)
_SEQUENCE = Weights(level="sequence", mode="truncate", upper=2.0)
_ICEPOP = Weights(level="token", mode="mask", lower=0.5, upper=5.0)
_GEO = Reject(estimator="ratio", aggregate="geometric", lower=0.999, upper=1.001)
_K3 = Reject(estimator="k3", aggregate="seq_mean", upper=0.01)
_PRODUCT = Reject(estimator="ratio", aggregate="seq_sum", lower=0.5, upper=2.0)


def _bypass(*rules: Reject, **fields: Any) -> Correction:
    """On the rollout's denominator the rules look at current ÷ rollout."""
    return Correction(
        denominator="rollout", reject=tuple(replace(rule, signal="ppo_rollout") for rule in rules), **fields
    )


def _gradient(weights: Weights | None, *rules: Reject) -> Correction:
    moved = None if weights is None else replace(weights, signal="ppo_rollout")
    return _bypass(*rules, weights=moved, surrogate="reinforce")


_VERL = {
    "decoupled_token_is": Correction(weights=_TOKEN),
    "decoupled_seq_is": Correction(weights=_SEQUENCE),
    "decoupled_token_icepop": Correction(weights=_ICEPOP),
    "decoupled_seq_is_rs": Correction(weights=_SEQUENCE, reject=(_PRODUCT,)),
    "decoupled_geo_rs": Correction(reject=(_GEO,)),
    "decoupled_geo_rs_seq_tis": Correction(weights=_SEQUENCE, reject=(_GEO,)),
    "decoupled_geo_rs_token_tis": Correction(weights=_TOKEN, reject=(_GEO,)),
    "decoupled_k3_rs": Correction(reject=(_K3,)),
    "decoupled_k3_rs_seq_tis": Correction(weights=_SEQUENCE, reject=(_K3,)),
    "decoupled_k3_rs_token_tis": Correction(weights=_TOKEN, reject=(_K3,)),
    "bypass_ppo_clip": _bypass(),
    "bypass_ppo_clip_geo_rs": _bypass(_GEO),
    "bypass_ppo_clip_k3_rs": _bypass(_K3),
    "bypass_pg_is": _gradient(_SEQUENCE),
    "bypass_pg_token_icepop": _gradient(_ICEPOP),
    "bypass_pg_geo_rs": _gradient(None, _GEO),
    "bypass_pg_geo_rs_seq_tis": _gradient(_SEQUENCE, _GEO),
    "bypass_pg_geo_rs_token_tis": _gradient(_TOKEN, _GEO),
    "disabled": Correction(),
}


def _miles(upper: float, *, reject: bool, normalise: bool) -> Correction:
    mean = Normalise(level="token", over="valid") if normalise else None
    weights = Weights(level="token", mode="clip", lower=0.5, upper=upper, normalise=mean)
    rule = Reject(estimator="ratio", aggregate="geometric", lower=0.99, upper=1.001)
    return Correction(weights=weights, reject=(rule,) if reject else ())


_MILES = {
    "miles_config_1": _miles(2.0, reject=True, normalise=True),
    "miles_config_2": _miles(1.5, reject=True, normalise=True),
    "miles_config_3": _miles(1.5, reject=True, normalise=False),
    "miles_config_4": _miles(1.5, reject=False, normalise=False),
}


def _vexact(aggregate: str) -> dict[str, Correction]:
    """The paper's threshold bounds a sum, which long rows cannot meet; the mean is the usable reading."""
    suffix = "" if aggregate == "seq_sum" else "-mean"

    def rule(estimator: str, signal: str = "corr") -> tuple[Reject, ...]:
        return (Reject(estimator=estimator, aggregate=aggregate, upper=0.001, signal=signal),)  # type: ignore[arg-type]

    return {
        f"srs-k3-corr{suffix}": Correction(denominator="rollout", reject=rule("k3")),
        f"srs-k3-ppo{suffix}": Correction(denominator="rollout", reject=rule("k3", "ppo_rollout")),
        f"tis-srs-k3-corr{suffix}": Correction(weights=_TOKEN, reject=rule("k3")),
        f"tis-srs-k1-corr{suffix}": Correction(weights=_TOKEN, reject=rule("k1")),
    }


_AREAL: Any = {"non_finite": "unit", "log_clamp": 80.0}
_OTHERS = {
    "trl_default": Correction.from_trl({}),
    "prime_rl_default": Correction(denominator="rollout", surrogate="dppo_tv"),
    "areal_token_mask": Correction(
        weights=Weights(mode="raw"), reject=(Reject(estimator="ratio", aggregate="token", upper=5.0),), **_AREAL
    ),
    "skyrl_recommended": Correction(
        weights=_TOKEN, reject=(Reject(estimator="ratio", aggregate="geometric", lower=0.99, upper=1.01),), staged=True
    ),
    "m2po": Correction(denominator="rollout", surrogate="ratio", second_moment=SecondMoment(threshold=0.04)),
    "areal_m2po": Correction(second_moment=SecondMoment(threshold=0.04, signal="corr", tokens="all"), **_AREAL),
    "vespo": Correction(denominator="rollout", surrogate="vespo"),
    "score_centering": replace(_gradient(None), centering=ScoreCentering()),
    "score_centering_tis": replace(_gradient(_TOKEN), centering=ScoreCentering()),
    "a3po": Correction(denominator="interpolated", weights=Weights(mode="raw")),
    "deepseek_v3_2": Correction(off_policy_mask=OffPolicyMask(threshold=1e-4, signal="ppo_rollout")),
}

PRESETS: Mapping[str, Correction] = MappingProxyType(
    {**_VERL, **_MILES, **_vexact("seq_sum"), **_vexact("seq_mean"), **_OTHERS}
)
