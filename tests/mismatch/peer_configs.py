"""AReaL's and SkyRL's own configuration dictionaries as corrections, for the comparisons with their formulas: each of
their settings is a point of the space that `Correction` spans."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from tokentrue.errors import ConfigError
from tokentrue.json_types import JsonObject
from tokentrue.mismatch import Correction, Outlier, Reject, SecondMoment, Weights
from tokentrue.mismatch.importers import check_keys
from tokentrue.mismatch.rules import Aggregate, Estimator


def from_areal(config: Mapping[str, Any], *, faithful: bool = False) -> Correction:
    """AReaL's PPO actor: `use_decoupled_loss`, `recompute_logprob`, `rejection_sampling` (a dictionary or None) and
    `m2_threshold`; its other keys may be present.
    """
    keys: dict[str, Any] = {
        "use_decoupled_loss": False,
        "recompute_logprob": False,
        "rejection_sampling": None,
        "m2_threshold": None,
    }
    given = check_keys("areal", _mine("areal", config, keys), keys)
    fields = _areal_fields(given, faithful)
    if given["m2_threshold"] is not None:
        fields["second_moment"] = SecondMoment(threshold=given["m2_threshold"], signal="corr", tokens="all")
    return Correction(**fields)


def _areal_fields(given: Mapping[str, Any], faithful: bool) -> JsonObject:
    if not given["use_decoupled_loss"]:
        note = (
            ("rejection_sampling works only with use_decoupled_loss: AReaL ignores it here",)
            if given["rejection_sampling"]
            else ()
        )
        base = "trainer" if given["recompute_logprob"] else "rollout"
        return dict(denominator=base, non_finite="unit", log_clamp=80.0, notes=note)
    if given["rejection_sampling"] is None:
        note = "decoupled without rejection_sampling applies no behaviour weight in AReaL: plain PPO on the recomputed policy"
        return dict(non_finite="unit", log_clamp=80.0, notes=(note,))
    keys = {"level": "token", "action": "mask", "metric": "ratio", "agg": "mean", "upper": 5.0, "lower": None}
    rule = check_keys("areal.rejection_sampling", given["rejection_sampling"], keys)
    if rule["action"] not in ("mask", "clamp"):
        raise ConfigError(f"areal.rejection_sampling.action: {rule['action']!r} is not one of 'mask', 'clamp'")
    if rule["action"] == "clamp":
        if rule["metric"] != "ratio":
            raise ConfigError("areal.rejection_sampling: action 'clamp' works with metric 'ratio' only")
        level = "token" if rule["level"] == "token" else "geometric"
        low = rule["lower"] or None
        if faithful and level == "geometric" and rule["agg"] == "max" and low:
            raise ConfigError(
                "areal.rejection_sampling: with agg 'max' AReaL leaves weights below `lower` as they are; use agg 'mean'"
            )
        weights = Weights(level=level, mode="clip" if low else "truncate", lower=low, upper=rule["upper"])
        return dict(weights=weights, non_finite="unit", log_clamp=80.0)
    reject, notes = _areal_rule(rule, faithful)
    geometric = (
        rule["metric"] == "ratio" and rule["level"] == "sequence"
    )  # AReaL then weighs by the geometric mean, for any agg
    weights = Weights(level="geometric" if geometric else "token", mode="raw")
    return dict(weights=weights, reject=(reject,), non_finite="unit", log_clamp=80.0, notes=notes)


def _areal_rule(rule: Mapping[str, Any], faithful: bool) -> tuple[Reject, tuple[str, ...]]:
    names: Mapping[str, Estimator] = {"ratio": "ratio", "kl_k1": "k1", "kl_k2": "k2", "kl_k3": "k3"}
    if (
        rule["metric"] not in names
        or rule["agg"] not in ("sum", "mean", "max")
        or rule["level"] not in ("token", "sequence")
    ):
        raise ConfigError(f"areal.rejection_sampling: unknown metric, agg or level in {dict(rule)!r}")
    estimator = names[rule["metric"]]
    aggregate: Aggregate = "token"
    if rule["level"] == "sequence":
        mean: Aggregate = "geometric" if estimator == "ratio" else "seq_mean"
        aggregate = {"sum": "seq_sum", "mean": mean, "max": "seq_max"}[rule["agg"]]  # type: ignore[assignment]
    inverse = estimator == "k1" or (faithful and estimator == "k3")  # its k1 is log r, in words and in code
    notes = ("faithful: k3 is of rollout ÷ trainer, as AReaL's code does",) if estimator == "k3" and inverse else ()
    return Reject(
        estimator=estimator, aggregate=aggregate, lower=rule["lower"], upper=rule["upper"], inverse=inverse
    ), notes


def from_skyrl(config: Mapping[str, Any], *, faithful: bool = False) -> Correction:
    """SkyRL's `off_policy_correction`. Its stages run in order (outlier, token mask, weights, sequence mask), each on
    what is left."""
    keys = {
        "tis_ratio_type": None, "token_tis_ratio_clip_high": 2.0, "sequence_tis_ratio_clip_high": 5.0,
        "sequence_mask_metric": None, "geo_mask_high": 1.01, "geo_mask_low": 0.99, "product_mask_high": 2.0, "product_mask_low": 0.5,
        "outlier_token_is_threshold_low": None, "outlier_token_is_threshold_high": None,
        "token_mask_is_threshold_low": None, "token_mask_is_threshold_high": None,
    }  # fmt: skip
    given = check_keys("skyrl", config, keys)
    rules: list[Reject] = []
    low, high = given["token_mask_is_threshold_low"], given["token_mask_is_threshold_high"]
    if (low is None) != (high is None):
        raise ConfigError("skyrl: token_mask_is_threshold_low and _high go together")
    if low is not None:
        rules.append(Reject(estimator="ratio", aggregate="token", lower=low, upper=high))
    metric = given["sequence_mask_metric"]
    if metric not in (None, "geometric", "product"):
        raise ConfigError(f"skyrl.sequence_mask_metric: {metric!r} is not one of 'geometric', 'product'")
    if metric is not None:
        short, aggregate = ("geo", "geometric") if metric == "geometric" else ("product", "seq_sum")
        bounds = {"lower": given[f"{short}_mask_low"], "upper": given[f"{short}_mask_high"]}
        rules.append(Reject(estimator="ratio", aggregate=aggregate, **bounds))  # type: ignore[arg-type]
    kind = given["tis_ratio_type"]
    if kind not in (None, "token", "sequence"):
        raise ConfigError(f"skyrl.tis_ratio_type: {kind!r} is not one of 'token', 'sequence'")
    weights = None if kind is None else Weights(level=kind, mode="truncate", upper=given[f"{kind}_tis_ratio_clip_high"])
    low, high = given["outlier_token_is_threshold_low"], given["outlier_token_is_threshold_high"]
    outlier = None if low is None and high is None else Outlier(lower=low, upper=high)
    return Correction(weights=weights, reject=tuple(rules), outlier=outlier, staged=True)


def _mine(owner: str, config: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that this importer reads, out of a larger section; one that was meant to be among them is refused."""
    gone = sorted(key for key in config if key.startswith("behave_imp_weight"))
    if gone:
        raise ConfigError(f"{owner}.{gone[0]}: no longer a key of AReaL; say it as rejection_sampling")
    for key in config:
        near = get_close_matches(key, keys, n=1, cutoff=0.85)
        if key not in keys and near:
            raise ConfigError(f"{owner}: unknown key {key}; did you mean {near[0]}?")
    return {key: value for key, value in config.items() if key in keys}
