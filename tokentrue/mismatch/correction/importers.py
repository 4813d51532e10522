"""Other frameworks' own configuration dictionaries as the fields of a `Correction`.

By default a key means what its framework's documentation says. Where the code behaves differently, `faithful=True`
reproduces the code; each such place is marked "faithful:" and said in the correction's `notes`. Unknown keys are
refused: a silent typo is a silent run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from tokentrue.errors import ConfigError
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.mismatch.correction.rules import (
    Aggregate,
    Level,
    Normalise,
    OffPolicyMask,
    Outlier,
    Reject,
    Signal,
    Veto,
    Weights,
)

Fields: TypeAlias = JsonObject
"""Keyword arguments of `Correction`."""

LEVEL_AGGREGATE: Mapping[Level, Aggregate] = {"token": "token", "sequence": "seq_sum", "geometric": "geometric"}


def from_verl(config: JsonMapping, *, faithful: bool = False) -> Fields:
    """verl's `algorithm.rollout_correction`. Its ranges in strings ("0.5_5.0") are read here and nowhere else."""
    keys = {
        "rollout_is": None, "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": False, "rollout_rs": None,
        "rollout_rs_threshold": None, "bypass_mode": False, "loss_type": "ppo_clip",
    }  # fmt: skip
    given = check_keys("verl", config, keys)
    notes: list[str] = []
    bypass, reinforce = bool(given["bypass_mode"]), given["loss_type"] == "reinforce"
    if given["loss_type"] not in ("ppo_clip", "reinforce"):
        raise ConfigError(f"verl.loss_type: {given['loss_type']!r} is not one of 'ppo_clip', 'reinforce'")
    reinforce = reinforce and bypass  # verl reads loss_type in bypass mode only
    signal: Signal = "ppo_rollout" if bypass else "corr"
    weights = _verl_weights(given, signal)
    if weights is not None and bypass and not reinforce:
        notes.append(
            "bypass PPO-clip applies no importance weights: its ratio holds them already; rollout_is is only measured"
        )
        weights = None
    rules = _verl_rules(given, signal, faithful, notes)
    return dict(
        denominator="rollout" if bypass else "trainer",
        weights=weights,
        reject=rules,
        surrogate="reinforce" if reinforce else "ppo",
        loss_counts="kept" if faithful and not bypass else "original",
        clamp_tokens=faithful,
        notes=tuple(notes),
    )


def _verl_weights(given: JsonMapping, signal: Signal) -> Weights | None:
    level, threshold = given["rollout_is"], given["rollout_is_threshold"]
    if level is None or threshold is None:
        return None
    if level not in ("token", "sequence"):
        raise ConfigError(f"verl.rollout_is: {level!r} is not one of 'token', 'sequence'")
    lower, upper = _range("verl.rollout_is_threshold", threshold)
    normalise = Normalise(scope="call", level=level, over="valid") if given["rollout_is_batch_normalize"] else None
    mode = "truncate" if lower is None else "mask"
    return Weights(level=level, mode=mode, lower=lower, upper=upper, signal=signal, normalise=normalise)


def _verl_rules(given: JsonMapping, signal: Signal, faithful: bool, notes: list[str]) -> tuple[Reject, ...]:
    if given["rollout_rs"] is None:
        return ()
    options = list(dict.fromkeys(part.strip() for part in str(given["rollout_rs"]).split(",") if part.strip()))
    threshold = given["rollout_rs_threshold"]
    if threshold is None:
        raise ConfigError("verl.rollout_rs_threshold: missing; rollout_rs needs one")
    parts = (
        [part.strip() for part in threshold.split(",") if part.strip()] if isinstance(threshold, str) else [threshold]
    )
    if len(parts) not in (1, len(options)):
        raise ConfigError(f"verl.rollout_rs_threshold: {len(parts)} thresholds for {len(options)} options")
    parts = parts * len(options) if len(parts) == 1 else parts
    return tuple(_verl_rule(option, part, signal, faithful, notes) for option, part in zip(options, parts, strict=True))


def _verl_rule(option: str, threshold: str | float, signal: Signal, faithful: bool, notes: list[str]) -> Reject:
    aggregate, _, estimator = option.rpartition("_")
    if (
        aggregate not in ("token", "seq_sum", "seq_mean", "seq_max")
        or estimator not in ("k1", "k2", "k3")
        or option == "seq_max_k1"
    ):
        raise ConfigError(f"verl.rollout_rs: no option {option!r}")
    lower, upper = _range(f"verl.rollout_rs_threshold of {option}", threshold)
    if estimator != "k1":
        if lower is not None:
            raise ConfigError(f"verl.rollout_rs_threshold: {option} takes one upper bound, got {threshold!r}")
        return Reject(estimator=estimator, aggregate=aggregate, upper=upper, signal=signal)  # type: ignore[arg-type]
    lower = 1.0 / upper if lower is None else lower
    if faithful:  # faithful: verl compares -log r with log lo and log hi, which bounds 1/r
        notes.append(f"{option}: bounds [{lower}, {upper}] hold for rollout ÷ trainer, as verl's code does")
        lower, upper = 1.0 / upper, 1.0 / lower
    kind: Aggregate = {"token": "token", "seq_sum": "seq_sum", "seq_mean": "geometric"}[aggregate]  # type: ignore[assignment]
    return Reject(estimator="ratio", aggregate=kind, lower=lower, upper=upper, signal=signal)


def from_miles(config: JsonMapping, *, faithful: bool = False) -> Fields:
    """Miles' and slime's arguments. Which function corrects is `custom_tis_function_path`: the mismatch helper, with
    the keys of `mis.yaml` (also where none is named but no `tis_clip` either), `icepop_function`, or the built-in
    truncation to `tis_clip`.
    """
    keys = {
        "use_tis": True, "use_rs": True, "tis_level": "token", "rs_level": "token", "tis_mode": "truncate",
        "tis_lower_bound": 0.5, "tis_upper_bound": 2.0, "rs_lower_bound": None, "rs_upper_bound": None,
        "rs_veto_threshold": 1e-4, "tis_batch_normalize": True, "use_rollout_logprobs": False, "use_opsm": False, "opsm_delta": 1e-4,
        "tis_clip": None, "tis_clip_low": None, "custom_tis_function_path": None,
    }  # fmt: skip
    given = check_keys("miles", config, keys)
    if given["use_rollout_logprobs"] and given["use_tis"] and "use_tis" in config:
        raise ConfigError("miles: use_rollout_logprobs and use_tis exclude each other")
    opsm = None
    if given["use_opsm"]:
        opsm = OffPolicyMask(
            threshold=given["opsm_delta"], signal="ppo_rollout" if given["use_rollout_logprobs"] else "ppo_train"
        )
    if given["use_rollout_logprobs"]:
        return dict(denominator="rollout", off_policy_mask=opsm)
    path = str(given["custom_tis_function_path"] or "")
    icepop = path.endswith("icepop_function")
    if icepop or (given["tis_clip"] is not None and "compute_mis_weights" not in path):
        if path and not icepop and not path.endswith("vanilla_tis_function"):
            raise ConfigError(
                f"miles.custom_tis_function_path: {path!r} is a function of your own; write its Correction by hand"
            )
        return dict(weights=_miles_builtin(given, icepop) if given["use_tis"] else None, off_policy_mask=opsm)
    if not given["use_tis"] and (faithful or not given["use_rs"]):
        note = ("use_tis is off, so Miles rejects nothing: use_rs works only inside it",) if given["use_rs"] else ()
        return dict(off_policy_mask=opsm, notes=note)
    return _miles_helper(given, faithful, opsm)


def _miles_builtin(given: JsonMapping, icepop: bool) -> Weights:
    low, high = given["tis_clip_low"] or None, 2.0 if given["tis_clip"] is None else given["tis_clip"]
    return Weights(level="token", mode="mask" if icepop else "clip" if low else "truncate", lower=low, upper=high)


def _miles_helper(given: JsonMapping, faithful: bool, opsm: OffPolicyMask | None) -> Fields:
    upper = given["tis_upper_bound"]
    lower = 1.0 / upper if given["tis_lower_bound"] is None else given["tis_lower_bound"]
    level, mode, notes = given["tis_level"], given["tis_mode"], []
    rules: list[Reject] = []
    weights = None
    if given["use_tis"]:
        weights = _miles_weights(given, lower, upper, faithful, notes)
        if mode == "mask":
            rules.append(Reject(estimator="ratio", aggregate=LEVEL_AGGREGATE[level], lower=lower, upper=upper))
    veto, outlier = None, None
    threshold = given["rs_veto_threshold"]
    if given["use_rs"]:
        low = lower if given["rs_lower_bound"] is None else given["rs_lower_bound"]
        high = upper if given["rs_upper_bound"] is None else given["rs_upper_bound"]
        rules.append(Reject(estimator="ratio", aggregate=LEVEL_AGGREGATE[given["rs_level"]], lower=low, upper=high))
    if threshold is not None and faithful and given["use_rs"]:
        notes.append(
            "faithful: the veto bounds the ratio trainer ÷ rollout and works only with use_rs, as Miles' code does"
        )
        outlier = Outlier(lower=threshold, upper=None)
    elif threshold is not None and not faithful:
        veto = Veto(below=threshold)
    return dict(
        weights=weights, reject=tuple(rules), veto=veto, outlier=outlier, off_policy_mask=opsm, notes=tuple(notes)
    )


def _miles_weights(given: JsonMapping, lower: float, upper: float, faithful: bool, notes: list[str]) -> Weights:
    level, mode = given["tis_level"], given["tis_mode"]
    normalise = None
    if given["tis_batch_normalize"]:
        if faithful and level == "geometric":
            raise ConfigError(
                "miles: tis_batch_normalize with tis_level 'geometric' raises in Miles; leave faithful off to have it"
            )
        over = "valid"
        if mode == "mask":
            over = "raw" if faithful else "kept"
            if faithful:
                notes.append(
                    "faithful: the mean for normalisation includes the weights of masked tokens, as Miles' code does"
                )
        rows = level != "token"
        normalise = Normalise(
            scope="call", level="sequence" if rows else "token", over=over, empty_rows=faithful and rows
        )
    return Weights(
        level=level, mode=mode, lower=None if mode == "truncate" else lower, upper=upper, normalise=normalise
    )


def from_trl(config: JsonMapping, *, faithful: bool = False) -> Fields:
    """TRL's GRPOConfig: the `vllm_importance_sampling_*` keys and `off_policy_mask_threshold`; other GRPOConfig keys
    may be present."""
    keys = {
        "vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "sequence_mask",
        "vllm_importance_sampling_clip_max": 3.0, "vllm_importance_sampling_clip_min": None, "off_policy_mask_threshold": None,
    }  # fmt: skip
    mine = {key: value for key, value in config.items() if key in keys or key.startswith("vllm_importance_sampling")}
    given = check_keys("trl", mine, keys)
    threshold = given["off_policy_mask_threshold"]
    opsm = None if threshold is None else OffPolicyMask(threshold=threshold, signal="ppo_rollout")
    if not given["vllm_importance_sampling_correction"]:
        return dict(off_policy_mask=opsm, non_finite="unit")
    level, _, mode = str(given["vllm_importance_sampling_mode"]).rpartition("_")
    if level not in ("token", "sequence") or mode not in ("truncate", "mask"):
        raise ConfigError(f"trl.vllm_importance_sampling_mode: no mode {given['vllm_importance_sampling_mode']!r}")
    low, high = given["vllm_importance_sampling_clip_min"], given["vllm_importance_sampling_clip_max"]
    kind = "mask" if mode == "mask" else "truncate" if low is None else "clip"
    if low is None and high is None:
        kind = "raw"
    weights = Weights(level=level, mode=kind, lower=low, upper=high)  # type: ignore[arg-type]
    return dict(weights=weights, off_policy_mask=opsm, non_finite="unit", log_clamp=80.0)


def check_keys(owner: str, config: JsonMapping, keys: JsonMapping) -> JsonObject:
    unknown = sorted(set(config) - set(keys))
    if unknown:
        raise ConfigError(f"{owner}: unknown keys {', '.join(unknown)}; known are {', '.join(keys)}")
    return {**keys, **config}


def _range(owner: str, value: Any) -> tuple[float | None, float]:
    """verl's threshold: a number, or "lower_upper" in a string."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(f"{owner}: {value!r} is not a number or 'lower_upper'")
    try:
        parts = [float(part) for part in str(value).split("_", 1)] if isinstance(value, str) else [float(value)]
    except ValueError as error:
        raise ConfigError(f"{owner}: {value!r} is not a number or 'lower_upper'") from error
    if any(part <= 0 for part in parts):
        raise ConfigError(f"{owner}: {value!r} must be positive")
    return (parts[0], parts[1]) if len(parts) == 2 else (None, parts[0])
