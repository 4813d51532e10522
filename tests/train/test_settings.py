"""Settings that cannot be meant are refused by key, NaN like any other bad number; so are those that would have no
effect."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokentrue.app.configuration import read
from tokentrue.app.training import TrainRun
from tokentrue.cli.main import run as command
from tokentrue.errors import ConfigError

BAD = [
    *(f"optim.clip_norm={value}" for value in ("nan", "0.0", "-1.0")),
    *(f"optim.eps={value}" for value in ("nan", "inf", "0.0", "-1.0")),
    *(f"optim.weight_decay={value}" for value in ("nan", "inf", "-5.0")),
    *(f"optim.lr={value}" for value in ("nan", "inf", "0.0")),
    *(f"evaluation.temperature={value}" for value in ("nan", "inf", "-1.0")),
    *(f"evaluation.solved={value}" for value in ("nan", "inf")),
    "evaluation.patience=2",
]
LIVE = [
    "evaluation.every=1",
    "evaluation.tasks=3",
]


@pytest.mark.parametrize("text", BAD)
def test_a_bad_number_is_refused_by_its_key(text: str) -> None:
    with pytest.raises(ConfigError, match=text.partition("=")[0]):
        read(TrainRun, sets=[text])


def test_the_command_says_so_with_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("train", ["--out", str(tmp_path / "out"), "--set", "optim.eps=-1.0"]) == 2
    assert "optim.eps: must be a number > 0.0, got -1.0" in capsys.readouterr().err


@pytest.mark.parametrize("text", LIVE)
def test_a_run_from_a_file_refuses_settings_of_live_runs(text: str) -> None:
    key = text.partition("=")[0]
    with pytest.raises(ConfigError, match=f"^{key}: has no effect with samples"):
        read(TrainRun, sets=["samples=samples.jsonl", text])


def test_numbers_at_the_edge_and_settings_that_a_file_uses() -> None:
    read(TrainRun, sets=["optim.clip_norm=inf", "optim.weight_decay=0.0"])
    read(
        TrainRun,
        sets=["evaluation.every=1", "evaluation.patience=2", "evaluation.solved=0.0"],
    )
    read(
        TrainRun,
        sets=[
            "samples=samples.jsonl",
            "rollout.temperature=0.7",
            "rollout.tasks=2",
            "engine.options={dtype='bfloat16'}",
        ],
    )
