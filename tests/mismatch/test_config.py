"""Corrections are frozen, keep the three choices apart, refuse nonsense with a reason, and never read a range from a
string."""

from __future__ import annotations

import math
import tomllib
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.mismatch.peer_configs import from_areal, from_skyrl
from tokentrue import mismatch
from tokentrue.errors import ConfigError, InputError
from tokentrue.mismatch import (
    PRESETS,
    Correction,
    LossConfig,
    Normalise,
    OffPolicyMask,
    Outlier,
    Penalty,
    Reject,
    SecondMoment,
    Staleness,
    Veto,
    Weights,
    correct,
    diagnose,
    loss_named,
)

TOKEN = Weights(upper=2.0)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Weights(mode="mask", upper="0.5_5.0"), "never a range in a string"),
        (lambda: Weights(mode="mask", upper=True), "not a finite number"),
        (lambda: Weights(mode="clip", lower=3.0, upper=2.0), "above upper"),
        (lambda: Weights(mode="truncate", lower=0.5, upper=2.0), "no lower bound"),
        (lambda: Weights(mode="clip"), "needs a lower or an upper"),
        (lambda: Weights(mode="raw", upper=2.0), "has no bounds"),
        (lambda: Weights(level="row", upper=2.0), "'token', 'sequence', 'geometric'"),
        (lambda: Weights(upper=-1.0), "must be > 0"),
        (lambda: Weights(upper=2.0, normalise=Normalise(over="raw")), "mode 'mask'"),
        (lambda: Weights(upper=0.55), "must hold 1"),
        (lambda: Correction.from_verl({"rollout_is": "token", "rollout_is_threshold": 0.55}), "0.5_5 reads as 0.55"),
        (lambda: Normalise(level="world"), "'token', 'sequence'"),
        (lambda: Reject(estimator="k3", aggregate="seq_mean"), "nothing can be rejected"),
        (lambda: Reject(estimator="k3", aggregate="seq_mean", lower=0.1, upper=1.0), "0 is perfect agreement"),
        (lambda: Reject(estimator="k2", aggregate="token", upper=0.0), "bound > 0"),
        (lambda: Reject(estimator="k3", aggregate="geometric", upper=1.0), "use 'seq_mean'"),
        (lambda: Reject(estimator="ratio", aggregate="seq_mean", upper=2.0), "use 'geometric'"),
        (lambda: Reject(estimator="ratio", aggregate="seq_max", lower=0.5), "Outlier"),
        (lambda: Reject(estimator="ratio", aggregate="token", lower=1.1, upper=2.0), "agree exactly"),
        (lambda: Reject(estimator="k1", aggregate="seq_sum", upper=-0.1), "agree exactly"),
        (lambda: Reject(estimator="ratio", aggregate="token", upper="2"), "never a range in a string"),
        (lambda: Veto(below=2.0), "in \\(0, 1\\)"),
        (lambda: Outlier(lower=None, upper=None), "needs a lower or an upper"),
        (lambda: Outlier(lower=2.0, upper=3.0), "agree exactly"),
        (lambda: OffPolicyMask(threshold=-1.0), ">= 0"),
        (lambda: Staleness(limit=-1), ">= 0"),
        (lambda: Correction(denominator="rollout", weights=TOKEN), "count it twice"),
        (lambda: Correction(weights=Weights(upper=2.0, signal="ppo_rollout")), "drift twice"),
        (lambda: Correction(denominator="rollout", weights=TOKEN, surrogate="cispo"), "count it twice"),
        (lambda: Correction(reject=("k3",)), "tuple of Reject"),
        (lambda: Correction(log_clamp=0.0), "log_clamp"),
        (
            lambda: diagnose(torch.zeros(1, 1), torch.zeros(1, 1), non_finite="drop"),
            "'drop' is not one of 'raise', 'unit'",
        ),
        (lambda: LossConfig(correction=PRESETS["bypass_pg_is"], surrogate="ppo"), "count it twice"),
        (lambda: LossConfig(surrogate="ppo", clip_low=None), "needs clip_low"),
        (lambda: LossConfig(clip_low=1.0), "below 1"),
        (lambda: LossConfig(dual_clip=1.1), "above 1 \\+ clip_high"),
        (lambda: LossConfig(surrogate="gspo", dual_clip=3.0), "belongs to ppo"),
        (lambda: LossConfig(aggregate="fixed_length"), "fixed_length"),
        (lambda: LossConfig(fixed_length=8), "fixed_length"),
        (lambda: Penalty(coefficient=-1.0), ">= 0"),
        (lambda: Penalty(coefficient=1.0, estimator="k4"), "'unbiased'"),
        (lambda: Penalty(coefficient=1.0, clamp=0.0), "Penalty.clamp: 0.0 must be"),
        (lambda: Penalty(coefficient=1.0, ceiling=-1.0), "Penalty.ceiling: -1.0 must be"),
        (lambda: Correction.from_verl({"rollout_rs": "seq_mean_k1"}), "rollout_rs_threshold: missing"),
        (
            lambda: Correction.from_verl({"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 2.0}),
            "no option 'seq_max_k1'",
        ),
        (lambda: Correction.from_verl({"rollout_is": "token", "rollout_is_threshold": True}), "not a number"),
        (lambda: Correction.from_verl({"rolout_is": "token"}), "unknown keys rolout_is"),
        (lambda: Correction.from_miles({"use_rollout_logprobs": True, "use_tis": True}), "exclude each other"),
        (lambda: from_skyrl({"token_mask_is_threshold_low": 0.5}), "go together"),
        (
            lambda: from_areal({"use_decoupled_loss": True, "rejection_sampling": {"metric": "kl_k9"}}),
            "unknown metric",
        ),
    ],
)
def test_nonsense_is_refused_with_a_reason(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        PRESETS["decoupled_token_is"].denominator = "rollout"  # type: ignore[misc]
    with pytest.raises(TypeError):
        PRESETS["mine"] = Correction()  # type: ignore[index]


def test_presets_are_all_there() -> None:
    verl = [name for name in PRESETS if name.startswith(("decoupled_", "bypass_")) or name == "disabled"]
    assert len(verl) == 19
    assert {f"miles_config_{n}" for n in range(1, 5)} <= set(PRESETS)
    four = {"srs-k3-corr", "srs-k3-ppo", "tis-srs-k3-corr", "tis-srs-k1-corr"}
    assert four | {f"{name}-mean" for name in four} <= set(PRESETS)
    assert {"trl_default", "prime_rl_default"} <= set(PRESETS)


def test_miles_configurations_are_those_of_their_study() -> None:
    first, fourth = PRESETS["miles_config_1"], PRESETS["miles_config_4"]
    assert first.weights is not None and fourth.weights is not None
    assert (first.weights.lower, first.weights.upper, first.weights.mode) == (0.5, 2.0, "clip")
    assert (first.reject[0].lower, first.reject[0].upper, first.reject[0].aggregate) == (0.99, 1.001, "geometric")
    assert first.weights.normalise is not None and PRESETS["miles_config_3"].weights.normalise is None  # type: ignore[union-attr]
    assert fourth.weights.upper == 1.5 and not fourth.reject


def test_the_paper_s_first_configuration_keeps_signal_and_denominator_apart() -> None:
    """Reject on trainer ÷ rollout, clip current ÷ rollout, no weights: no other library can say it."""
    config = PRESETS["srs-k3-corr"]
    assert config.denominator == "rollout" and config.reject[0].signal == "corr" and config.weights is None
    assert "one extra forward pass" in config.explain()
    assert "no extra forward pass" in PRESETS["srs-k3-ppo"].explain()


@pytest.mark.parametrize(
    ("rules", "needs", "cost"),
    [
        ({"veto": Veto()}, {"old"}, "one extra"),
        ({"outlier": Outlier(signal="ppo_train")}, {"old", "current"}, "one extra"),
        ({"second_moment": SecondMoment()}, {"current", "advantages"}, "no extra"),
        ({"second_moment": SecondMoment(tokens="all")}, {"current"}, "no extra"),
        ({"off_policy_mask": OffPolicyMask(threshold=0.1)}, {"current", "advantages"}, "no extra"),
        ({"staleness": Staleness(limit=1)}, {"versions"}, "no extra"),
    ],
)
def test_a_correction_needs_what_its_rules_need(rules: Any, needs: set[str], cost: str) -> None:
    config = Correction(denominator="rollout", **rules)
    assert config.needs == needs and config.needs_current == ("current" in needs) and config.is_active
    assert f"cost: {cost} forward pass" in config.explain()
    assert Correction(**rules).explain().endswith("one extra forward pass per step for π_old")
    x = torch.zeros(1, 2)
    for missing in needs - {"old"}:
        given = {"logprobs": x, "advantages": x, "versions": x, "version": 0}
        given.pop({"current": "logprobs"}.get(missing, missing))
        with pytest.raises(InputError, match=r"(logprobs|advantages|versions, version): .*missing; \w+ needs them"):
            correct(x, x, None, config, **given)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_explains_itself(name: str) -> None:
    text = PRESETS[name].explain()
    assert text.startswith("surrogate: ") and "cost:" in text
    assert ("weights: none" in text) == (PRESETS[name].weights is None)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, "1"])
@pytest.mark.parametrize(
    "make",
    [
        lambda bad: loss_named("grpo", entropy_coefficient=bad),
        lambda bad: loss_named("grpo", clip_high=bad),
        lambda bad: loss_named("grpo", dual_clip=bad),
        lambda bad: loss_named("dppo_tv", ratio_cap=bad),
        lambda bad: loss_named("grpo", aggregate="fixed_length", fixed_length=bad),
        lambda bad: Penalty(coefficient=bad),
        lambda bad: Penalty(coefficient=1.0, ceiling=bad),
        lambda bad: Weights(upper=bad),
        lambda bad: Reject(estimator="k3", aggregate="token", upper=bad),
        lambda bad: Veto(below=bad),
        lambda bad: Outlier(upper=bad),
        lambda bad: OffPolicyMask(threshold=bad),
        lambda bad: SecondMoment(threshold=bad),
        lambda bad: Staleness(limit=bad),
        lambda bad: Correction(log_clamp=bad),
    ],
)
def test_numbers_must_be_finite(make: Any, bad: object) -> None:
    with pytest.raises(ConfigError):
        make(bad)


def is_within(given: Any, made: Any) -> bool:
    if isinstance(given, dict):
        return all(name in made and is_within(value, made[name]) for name, value in given.items())
    if isinstance(given, list):
        return len(given) == len(made) and all(map(is_within, given, made))
    return given == made


def test_every_key_of_the_presets_is_a_field_and_no_value_is_another() -> None:
    """A misspelt key would be left out in silence."""
    tables = tomllib.loads(Path(mismatch.__file__).with_name("presets.toml").read_text(encoding="utf-8"))
    assert tables.keys() == PRESETS.keys()
    for name, table in tables.items():
        assert is_within(table, msgspec.to_builtins(PRESETS[name])), name
        assert replace(PRESETS[name]) == PRESETS[name], "it is as valid as one that is built by hand"
