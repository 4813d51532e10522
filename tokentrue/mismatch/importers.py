"""Other frameworks' configuration dictionaries as the fields of a `Correction`.

A key means what its framework documents. Where the code behaves differently, `faithful=True` reproduces the code, and
the correction's `notes` say so. Unknown keys are refused.
"""

from collections.abc import Mapping
from typing import cast

from tokentrue.errors import ConfigError
from tokentrue.json_types import JsonMapping, JsonObject, read_table
from tokentrue.mismatch.batch import Signal
from tokentrue.mismatch.rules import (
    Aggregate,
    Estimator,
    Level,
    Mode,
    Normalise,
    OffPolicyMask,
    Outlier,
    Reject,
    Veto,
    Weights,
)

DEFAULTS: Mapping[str, JsonMapping] = read_table(__file__, "importers.json")
"""The keys of each framework that are understood, and what it takes where one is missing."""
TRL = "vllm_importance_sampling"
ROW_RATIO: Mapping[Level, Aggregate] = {"token": "token", "sequence": "seq_sum", "geometric": "geometric"}
VERL_RATIO: Mapping[str, Aggregate] = {"token": "token", "seq_sum": "seq_sum", "seq_mean": "geometric"}


def from_verl(config: JsonMapping, *, faithful: bool = False) -> JsonObject:
    given = check_keys("verl", config, DEFAULTS["verl"])
    require_one_of("verl.loss_type", given["loss_type"], ("ppo_clip", "reinforce"))
    bypass = bool(given["bypass_mode"])
    reinforce = bypass and given["loss_type"] == "reinforce"  # verl reads loss_type in bypass mode only
    signal: Signal = "ppo_rollout" if bypass else "corr"
    weights, notes = None, list[str]()
    level, threshold = given["rollout_is"], given["rollout_is_threshold"]
    if level is not None and threshold is not None:
        require_one_of("verl.rollout_is", level, ("token", "sequence"))
        lower, upper = _range("verl.rollout_is_threshold", threshold)
        mean = Normalise(level=level, over="valid") if given["rollout_is_batch_normalize"] else None
        mode: Mode = "truncate" if lower is None else "mask"
        weights = Weights(level=level, mode=mode, lower=lower, upper=upper, signal=signal, normalise=mean)
    if weights is not None and bypass and not reinforce:
        weights = None
        notes.append(
            "bypass PPO-clip applies no importance weights: its ratio holds them already; rollout_is is only measured"
        )
    return dict(
        denominator="rollout" if bypass else "trainer",
        weights=weights,
        reject=_verl_rules(given, signal, faithful, notes),
        surrogate="reinforce" if reinforce else "ppo",
        loss_counts="kept" if faithful and not bypass else "original",
        clamp_tokens=faithful,
        notes=tuple(notes),
    )


def _verl_rules(given: JsonMapping, signal: Signal, faithful: bool, notes: list[str]) -> tuple[Reject, ...]:
    threshold = given["rollout_rs_threshold"]
    if given["rollout_rs"] is None:
        return ()
    if threshold is None:
        raise ConfigError("verl.rollout_rs_threshold: missing; rollout_rs needs one")
    options = list(dict.fromkeys(_split(given["rollout_rs"])))
    parts = _split(threshold) if isinstance(threshold, str) else [threshold]
    if len(parts) not in (1, len(options)):
        raise ConfigError(f"verl.rollout_rs_threshold: {len(parts)} thresholds for {len(options)} options")
    rules: list[Reject] = []
    for option, part in zip(options, parts * len(options) if len(parts) == 1 else parts, strict=True):
        aggregate, _, estimator = option.rpartition("_")
        known = aggregate in ("token", "seq_sum", "seq_mean", "seq_max") and estimator in ("k1", "k2", "k3")
        if not known or option == "seq_max_k1":
            raise ConfigError(f"verl.rollout_rs: no option {option!r}")
        lower, upper = _range(f"verl.rollout_rs_threshold of {option}", part)
        if estimator == "k1":
            lower = 1.0 / upper if lower is None else lower
            if faithful:  # verl compares -log r with log lo and log hi, which bounds 1/r
                notes.append(f"{option}: bounds [{lower}, {upper}] hold for rollout ÷ trainer, as verl's code does")
                lower, upper = 1.0 / upper, 1.0 / lower
            estimator, aggregate = "ratio", VERL_RATIO[aggregate]
        elif lower is not None:
            raise ConfigError(f"verl.rollout_rs_threshold: {option} takes one upper bound, got {part!r}")
        kinds = cast("Estimator", estimator), cast("Aggregate", aggregate)
        rules.append(Reject(estimator=kinds[0], aggregate=kinds[1], lower=lower, upper=upper, signal=signal))
    return tuple(rules)


def from_miles(config: JsonMapping, *, faithful: bool = False) -> JsonObject:
    """Miles' and slime's arguments. `custom_tis_function_path` names what corrects: the mismatch helper (the default
    without `tis_clip`), `icepop_function`, or the built-in truncation to `tis_clip`."""
    given = check_keys("miles", config, DEFAULTS["miles"])
    bypass, use_tis, use_rs = given["use_rollout_logprobs"], given["use_tis"], given["use_rs"]
    if bypass and use_tis and "use_tis" in config:
        raise ConfigError("miles: use_rollout_logprobs and use_tis exclude each other")
    opsm = None
    if given["use_opsm"]:
        opsm = OffPolicyMask(threshold=given["opsm_delta"], signal="ppo_rollout" if bypass else "ppo_train")
    if bypass:
        return dict(denominator="rollout", off_policy_mask=opsm)
    path = str(given["custom_tis_function_path"] or "")
    icepop = path.endswith("icepop_function")
    if icepop or (given["tis_clip"] is not None and "compute_mis_weights" not in path):
        if path and not icepop and not path.endswith("vanilla_tis_function"):
            raise ConfigError(
                f"miles.custom_tis_function_path: {path!r} is a function of your own; write its Correction by hand"
            )
        low, high = given["tis_clip_low"] or None, 2.0 if given["tis_clip"] is None else given["tis_clip"]
        mode: Mode = "mask" if icepop else "clip" if low else "truncate"
        return dict(weights=Weights(mode=mode, lower=low, upper=high) if use_tis else None, off_policy_mask=opsm)
    if not use_tis and (faithful or not use_rs):
        note = ("use_tis is off, so Miles rejects nothing: use_rs works only inside it",) if use_rs else ()
        return dict(off_policy_mask=opsm, notes=note)
    return {**_miles_helper(given, faithful), "off_policy_mask": opsm}


def _miles_helper(given: JsonMapping, faithful: bool) -> JsonObject:
    level, mode, upper = given["tis_level"], given["tis_mode"], given["tis_upper_bound"]
    lower = 1.0 / upper if given["tis_lower_bound"] is None else given["tis_lower_bound"]
    weights, veto, outlier, mean, threshold = None, None, None, None, given["rs_veto_threshold"]
    rules, notes = list[Reject](), list[str]()
    if given["use_tis"]:
        if given["tis_batch_normalize"]:
            if faithful and level == "geometric":
                raise ConfigError(
                    "miles: tis_batch_normalize with tis_level 'geometric' raises in Miles; leave faithful off for it"
                )
            if faithful and mode == "mask":
                notes.append(
                    "faithful: the mean for normalisation includes the weights of masked tokens, as Miles' code does"
                )
            over = "valid" if mode != "mask" else "raw" if faithful else "kept"
            rows = level != "token"
            mean = Normalise(level="sequence" if rows else "token", over=over, empty_rows=faithful and rows)
        low = None if mode == "truncate" else lower
        weights = Weights(level=level, mode=mode, lower=low, upper=upper, normalise=mean)
        if mode == "mask":
            rules.append(Reject(estimator="ratio", aggregate=ROW_RATIO[level], lower=lower, upper=upper))
    if given["use_rs"]:
        low = lower if given["rs_lower_bound"] is None else given["rs_lower_bound"]
        high = upper if given["rs_upper_bound"] is None else given["rs_upper_bound"]
        rules.append(Reject(estimator="ratio", aggregate=ROW_RATIO[given["rs_level"]], lower=low, upper=high))
    if threshold is not None and not faithful:
        veto = Veto(below=threshold)
    elif threshold is not None and given["use_rs"]:
        outlier = Outlier(lower=threshold, upper=None)
        notes.append(
            "faithful: the veto bounds the ratio trainer ÷ rollout and works only with use_rs, as Miles' code does"
        )
    return dict(weights=weights, reject=tuple(rules), veto=veto, outlier=outlier, notes=tuple(notes))


def from_trl(config: JsonMapping) -> JsonObject:
    """The `vllm_importance_sampling_*` keys and `off_policy_mask_threshold` of a GRPOConfig, which may hold others."""
    mine = {key: value for key, value in config.items() if key in DEFAULTS["trl"] or key.startswith(TRL)}
    given = check_keys("trl", mine, DEFAULTS["trl"])
    threshold = given["off_policy_mask_threshold"]
    opsm = None if threshold is None else OffPolicyMask(threshold=threshold, signal="ppo_rollout")
    if not given[f"{TRL}_correction"]:
        return dict(off_policy_mask=opsm, non_finite="unit")
    level, _, mode = str(given[f"{TRL}_mode"]).rpartition("_")
    if level not in ("token", "sequence") or mode not in ("truncate", "mask"):
        raise ConfigError(f"trl.{TRL}_mode: no mode {given[f'{TRL}_mode']!r}")
    low, high = given[f"{TRL}_clip_min"], given[f"{TRL}_clip_max"]
    kind: Mode = "mask" if mode == "mask" else "truncate" if low is None else "clip"
    if low is None and high is None:
        kind = "raw"
    weights = Weights(level=cast("Level", level), mode=kind, lower=low, upper=high)
    return dict(weights=weights, off_policy_mask=opsm, non_finite="unit", log_clamp=80.0)


def check_keys(owner: str, config: JsonMapping, keys: JsonMapping) -> JsonObject:
    unknown = sorted(set(config) - set(keys))
    if unknown:
        raise ConfigError(f"{owner}: unknown keys {', '.join(unknown)}; known are {', '.join(keys)}")
    return {**keys, **config}


def require_one_of(key: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{key}: {value!r} is not one of {', '.join(map(repr, known))}")


def _split(text: object) -> list[str]:
    return [part.strip() for part in str(text).split(",") if part.strip()]


def _range(owner: str, value: object) -> tuple[float | None, float]:
    """verl's threshold: a number, or "lower_upper" in a string."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(f"{owner}: {value!r} is not a number or 'lower_upper'")
    try:
        parts = [float(part) for part in value.split("_", 1)] if isinstance(value, str) else [float(value)]
    except ValueError as error:
        raise ConfigError(f"{owner}: {value!r} is not a number or 'lower_upper'") from error
    if any(part <= 0 for part in parts):
        raise ConfigError(f"{owner}: {value!r} must be positive")
    return (parts[0], parts[1]) if len(parts) == 2 else (None, parts[0])
