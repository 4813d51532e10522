"""rollout and train from the command line: resumable, reproducible, one-line errors."""

from __future__ import annotations

import json
import shutil
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from tokentrue.cli.main import run as command

pytestmark = pytest.mark.timeout(280)


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def rollout(out: Path, *more: str) -> int:
    return command(
        "rollout", ["--out", str(out), "--set", "rollout.tasks=3", "--set", "rollout.group_size=2", "--json", *more]
    )


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Of three groups of two rollouts."""
    out = tmp_path_factory.mktemp("played")
    with redirect_stdout(StringIO()) as said:
        assert rollout(out) == 0
    return json.loads(said.getvalue())


@pytest.fixture
def played(summary: dict[str, object], tmp_path: Path) -> Path:
    """A copy of what the run left."""
    return shutil.copytree(Path(str(summary["samples"])).parent, tmp_path / "played")


def test_a_rollout_is_resumed_where_it_was_cut(summary: dict[str, object], played: Path) -> None:
    assert (summary["rollouts"], summary["groups"], summary["failed"], summary["coverage"]) == (6, 3, 0, 1.0)
    samples, lines = rows(played / "samples.jsonl"), rows(played / "rollouts.jsonl")
    # a crash in the middle of the third group: half a line of samples, one of two rollouts
    (played / "samples.jsonl").write_text("".join(json.dumps(s) + "\n" for s in samples[:5]) + '{"sample_id": "ha')
    (played / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:5]))
    assert rollout(played) == 0
    again = rows(played / "samples.jsonl")
    key = "metadata"
    assert {s[key]["rollout"]: s["token_ids"] for s in again} == {s[key]["rollout"]: s["token_ids"] for s in samples}  # type: ignore[index]
    assert [s["session_id"] for s in again[:4]] == [s["session_id"] for s in samples[:4]], (
        "a whole group was played again"
    )
    assert len(again) == 6 and len(rows(played / "rollouts.jsonl")) == 6


@pytest.mark.slow
def test_a_run_that_died_in_its_first_group_plays_that_group_again(
    played: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples, lines = rows(played / "samples.jsonl"), rows(played / "rollouts.jsonl")
    (played / "samples.jsonl").write_text("".join(json.dumps(s) + "\n" for s in samples[:2]))
    (played / "rollouts.jsonl").write_text(
        json.dumps(lines[0]) + "\n"
    )  # one of two rollouts: no whole group to compare with
    assert rollout(played) == 0
    assert json.loads(capsys.readouterr().out)["rollouts"] == 6
    assert len(rows(played / "samples.jsonl")) == 6


def test_failed_groups_are_kept_and_played_again_when_asked(played: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples, lines = rows(played / "samples.jsonl"), rows(played / "rollouts.jsonl")
    lines[0] |= {"error": "ValueError: the agent broke", "reward": None}
    (played / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    capsys.readouterr()
    assert rollout(played) == 1, "a failed rollout is found wrong"
    assert json.loads(capsys.readouterr().out)["failed"] == 1
    assert rows(played / "samples.jsonl") == samples, "nothing was left to play"
    assert rollout(played, "--again") == 0
    assert json.loads(capsys.readouterr().out)["failed"] == 0
    assert [s["session_id"] for s in rows(played / "samples.jsonl")[:4]] == [s["session_id"] for s in samples[2:]]


def test_what_cannot_go_together_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rollout(tmp_path, "--ray", "local", "--url", "http://127.0.0.1:1") == 2
    assert "--url" in capsys.readouterr().err
    assert rollout(tmp_path, "--set", "workers=0") == 2
    assert "workers" in capsys.readouterr().err


def test_another_configuration_is_refused_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"rollout": {"tasks": 99}}))
    assert rollout(tmp_path) == 2
    error = capsys.readouterr().err
    assert "rollout.tasks" in error and "--out" in error and "Traceback" not in error


def test_an_unknown_key_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("train", ["--out", str(tmp_path), "--set", "optim.speed=9"]) == 2
    assert "optim.speed" in capsys.readouterr().err
    assert command("train", ["--out", str(tmp_path), "--set", "loss.correction=magic"]) == 2
    assert "no preset 'magic'" in capsys.readouterr().err


SETS = ("rollout.tasks=3", "rollout.group_size=4", "train.checkpoint_every=1", "log=[]")
TRAIN = ("--json", *(part for text in SETS for part in ("--set", text)))


CLOCKED = ("rollouts/", "speed/", "share/")


def losses(text: str) -> list[dict[str, object]]:
    """Times aside, and the counts of rollouts: a resumed run takes a round that was run before from the checkpoint."""
    found = [json.loads(line) for line in text.splitlines()]
    return [
        {key: value for key, value in row.items() if key != "seconds" and not key.startswith(CLOCKED)} for row in found
    ]


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 1])
def test_a_live_training_run_resumes_bit_for_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str], lag: int) -> None:
    settings = (*TRAIN, "--set", f"train.lag={lag}", "--set", "train.steps=3")
    assert command("train", ["--out", str(tmp_path / "whole"), *settings]) == 0
    whole = losses(capsys.readouterr().out)
    assert [row["step"] for row in whole] == [0, 1, 2]
    assert all(row["exact_differing"] == 0 for row in whole)
    assert [row["staleness_max"] for row in whole] == [0, min(1, lag), min(2, lag)]
    folder = tmp_path / "whole" / "checkpoints"
    broken = tmp_path / "broken"
    (broken / "checkpoints").mkdir(parents=True)
    (folder / "step-000002").rename(broken / "checkpoints" / "step-000002")
    assert command("train", ["--out", str(broken), *settings]) == 0
    assert losses(capsys.readouterr().out) == whole[2:]
    a, b = (path / "model.safetensors" for path in (folder / "step-000003", broken / "checkpoints" / "step-000003"))
    assert a.read_bytes() == b.read_bytes()


@pytest.mark.slow
def test_a_run_leaves_its_weights_and_can_be_made_longer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = ("rollout.tasks=2", "rollout.group_size=3")
    options = tuple(part for text in sets for part in ("--set", text))
    assert command("train", ["--out", str(tmp_path), *options, "--steps", "1"]) == 0
    shown = capsys.readouterr().out
    assert "publishing the weights took" in shown and "recompute" in shown and "0 of" in shown
    assert (tmp_path / "checkpoints" / "step-000001" / "model.safetensors").exists()
    assert command("train", ["--out", str(tmp_path), *options, "--steps", "2", "--json"]) == 0
    assert [row["step"] for row in losses(capsys.readouterr().out)] == [1]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    logged = rows(tmp_path / "metrics.jsonl")
    assert [event.step for event in board.Scalars("reward")] == [0, 1]
    assert [event.value for event in board.Scalars("reward")] == pytest.approx([row["reward"] for row in logged])
    assert command("train", ["--out", str(tmp_path), *options, "--steps", "2", "--set", "optim.lr=1e-3"]) == 2
    assert "another configuration" in capsys.readouterr().err
    assert (
        len(rows(tmp_path / "metrics.jsonl")) == 2
        and json.loads((tmp_path / "config.json").read_text())["optim"]["lr"] == 2.5e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Shop", "Ledger"])
def test_the_other_environments_are_covered_too(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert rollout(tmp_path, "--set", f"rollout.environment=examples.environments.long_tasks:{name}") == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["coverage"] == 1.0 and summary["failed"] == 0
    samples = rows(tmp_path / "samples.jsonl")
    assert len(samples) > 6 if name == "Ledger" else max(len(s["token_ids"]) for s in samples) > 150  # type: ignore[arg-type]
