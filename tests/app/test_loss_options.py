"""Every field of the loss and of its correction can be set in the configuration file, and a wrong one is named."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from tokentrue.app.configuration import read
from tokentrue.app.training import LossSpec, TrainRun, loss_for
from tokentrue.errors import ConfigError
from tokentrue.mismatch import (
    LOSSES,
    PRESETS,
    Correction,
    LossConfig,
    Normalise,
    Penalty,
    Reject,
    Weights,
    loss_named,
)


def plain(value: Any) -> Any:
    """What TOML would hold; "none" stands for None."""
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [plain(each) for each in value]
    return "none" if value is None else value


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_written_out(name: str) -> None:
    spec = LossSpec(name="reinforce", correction=plain(PRESETS[name]), options={"surrogate": "none"})
    assert loss_for(spec).correction == PRESETS[name]


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_can_be_written_out(name: str) -> None:
    wanted = loss_named(name)
    options = plain(wanted)
    correction = options.pop("correction")
    assert loss_for(LossSpec(name="ppo", options=options, correction=correction)) == wanted


def test_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_text("""
[optim]
lr = 1e-5
[train]
baseline = "grpo_batch"
[train.advantages]
epsilon = 1e-4
[train.overlong]
mask = true
[loss]
name = "dapo"
[loss.options]
clip_high = 0.3
entropy_coefficient = 0.01
[loss.options.penalty]
coefficient = 0.02
ceiling = 10
clamp = "none"
[loss.correction]
preset = "decoupled_token_is"
loss_counts = "kept"
[loss.correction.weights]
upper = 3.0
normalise = { over = "kept" }
[[loss.correction.reject]]
estimator = "k3"
aggregate = "seq_mean"
upper = 0.001
""")
    run = read(TrainRun, path)
    made = loss_for(run.loss)
    assert run.train.advantages.epsilon == 1e-4 and run.train.overlong.mask
    assert made.clip_high == 0.3 and made.penalty == Penalty(coefficient=0.02, ceiling=10.0, clamp=None)
    assert made.correction.loss_counts == "kept"
    assert made.correction.weights == dataclasses.replace(
        PRESETS["decoupled_token_is"].weights or Weights(upper=1.0), upper=3.0, normalise=Normalise()
    )
    assert made.correction.reject == (Reject(estimator="k3", aggregate="seq_mean", upper=0.001),)


def test_the_files_of_the_documentation(tmp_path: Path) -> None:
    docs = Path(__file__).parent.parent.parent / "docs"
    pages = "".join((docs / name).read_text() for name in ("training.md", "training-reference.md"))
    blocks = re.findall(r"```toml[^\n]*\n(.*?)```", pages, flags=re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        (tmp_path / "train.toml").write_text(block)
        run = read(TrainRun, tmp_path / "train.toml")
        loss_for(run.loss)


def test_a_table_without_preset_changes_the_losss_own_correction() -> None:
    made = loss_for(LossSpec(name="m2po", correction={"second_moment": {"threshold": 0.1}}))
    own = loss_named("m2po").correction
    assert own.second_moment is not None
    assert made.correction == dataclasses.replace(
        own, second_moment=dataclasses.replace(own.second_moment, threshold=0.1)
    )
    weights = {"mode": "clip", "upper": 2.0, "lower": 0.5}
    both = loss_for(
        LossSpec(
            name="dapo",
            options={"surrogate": "reinforce"},
            correction={"weights": {**weights, "signal": "ppo_rollout"}},
        )
    )
    assert both == LossConfig(
        correction=Correction(
            surrogate="reinforce", weights=Weights(mode="clip", upper=2.0, lower=0.5, signal="ppo_rollout")
        ),
        surrogate="reinforce",
        clip_low=0.2,
        clip_high=0.28,
    )


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"name": "dpo"}, r"loss\.name: no loss 'dpo'"),
        ({"options": {"clip": 0.2}}, r"loss\.options\.clip: unknown key; known here: aggregate"),
        ({"options": {"clip_high": "wide"}}, r"loss\.options\.clip_high: must be a number, got 'wide'"),
        ({"options": {"penalty": {"coefficient": 0.1, "kind": "k3"}}}, r"loss\.options\.penalty\.kind: unknown key"),
        ({"options": {"penalty": {}}}, r"loss\.options\.penalty\.coefficient: is needed"),
        ({"options": {"penalty": {"coefficient": -1}}}, r"loss\.options\.penalty\.coefficient: must be a number >= 0"),
        ({"options": {"aggregate": "mean"}}, r"loss\.options\.aggregate: must be one of token_mean"),
        ({"options": {"correction": {}}}, r"loss\.options\.correction: belongs to loss\.correction"),
        ({"correction": "tis"}, r"loss\.correction: no preset 'tis'"),
        ({"correction": {"preset": "tis"}}, r"loss\.correction: no preset 'tis'"),
        ({"correction": {"preset": ["tis"]}}, r"loss\.correction: no preset \['tis'\]"),
        ({"correction": {"weight": {}}}, r"loss\.correction\.weight: unknown key"),
        (
            {"correction": {"weights": {"normalise": {"share": 1}}}},
            r"loss\.correction\.weights\.normalise\.share: unknown key",
        ),
        (
            {"correction": {"reject": [{"estimator": "k9", "aggregate": "token"}]}},
            r"correction\.reject\[0\]\.estimator: must be",
        ),
        ({"correction": {"reject": {"estimator": "k3"}}}, r"loss\.correction\.reject: must be a list"),
        ({"correction": {"weights": {"upper": 0.5}}}, r"loss\.correction\.weights: .*must hold 1"),
        ({"correction": {"denominator": "rollout", "weights": {"upper": 2.0}}}, r"loss\.correction: .*count it twice"),
    ],
)
def test_what_is_wrong_is_named(spec: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        loss_for(LossSpec(**spec))
