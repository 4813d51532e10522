"""tokentrue train and diagnose on a file of samples: grouped by name, checked, refused when it is another model's,
never silent."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokentrue.cli.main import run as command
from tokentrue.environments import SMALL_MODEL

pytestmark = pytest.mark.timeout(280)
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """Three groups of three rollouts."""
    out = tmp_path_factory.mktemp("played")
    sets = ("rollout.tasks=3", "rollout.group_size=3")
    assert command("rollout", ["--out", str(out), "--json", *(part for text in sets for part in ("--set", text))]) == 0
    return [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]


@pytest.fixture
def train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Rows, str]]:
    """Trains on rows; gives the exit code, the steps and what was said on stderr."""

    def run(rows: Rows, *more: str) -> tuple[int, Rows, str]:
        path = tmp_path / "samples.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        settings = ("--samples", str(path), "--out", str(tmp_path / "out"), "--json", "--set", "log=[]", "--steps", "1")
        code = command("train", [*settings, *more])
        said = capsys.readouterr()
        return code, [json.loads(line) for line in said.out.splitlines() if line.startswith("{")], said.err

    return run


def numbers(step: dict[str, Any]) -> dict[str, Any]:
    return {key: step[key] for key in ("reward", "rows", "rows_trained", "tokens_trained")}


def test_groups_are_found_by_name_whatever_the_order_of_rows(played: Rows, train: Any) -> None:
    code, (sorted_step,), _ = train(played, "--set", "train.groups_per_step=3")
    assert code == 0
    code, (mixed_step,), _ = train([row for i in range(3) for row in played[i::3]], "--set", "train.groups_per_step=3")
    assert code == 0
    assert numbers(mixed_step) == numbers(sorted_step) and sorted_step["rows"] == 9


def test_a_step_holds_a_group_once_where_the_file_has_too_few(played: Rows, train: Any) -> None:
    code, steps, said = train(played, "--steps", "2", "--set", "train.groups_per_step=8")
    assert code == 0 and [step["rows"] for step in steps] == [9, 9]
    assert "3 groups" in said and "groups_per_step" in said
    assert steps[0]["exact_compared"] == steps[0]["tokens_trained"] > 0 and steps[0]["exact_differing"] == 0
    assert steps[1]["exact_compared"] == 0 and steps[1]["staleness_max"] == 1


def test_rows_without_reward_are_counted_aloud(played: Rows, train: Any) -> None:
    rows = [{**row, "reward": None} if i < 2 else row for i, row in enumerate(played)]
    code, (step,), said = train(rows, "--trust")
    assert code == 0 and step["rows"] == 7
    assert "2 samples without reward" in said


@pytest.mark.parametrize("reward", [1.0, None])
def test_a_file_that_can_train_nothing_fails(played: Rows, train: Any, reward: float | None) -> None:
    code, _, said = train([{**row, "reward": reward} for row in played], "--trust")
    assert code != 0
    assert "no row" in said or "without reward" in said


def double(rows: Rows) -> Rows:
    return [*rows, rows[0]]


def trained_at(row: dict[str, Any]) -> int:
    return row["loss_mask"].index(1)


def changed(rows: Rows, column: str, change: Callable[[Any], Any]) -> Rows:
    first = {**rows[0], column: list(rows[0][column])}
    first[column][trained_at(first)] = change(first[column][trained_at(first)])
    return [first, *rows[1:]]


BREAKS: dict[str, Callable[[Rows], Rows]] = {
    "twice": double,
    "loss_mask": lambda rows: changed(rows, "loss_mask", lambda _: 2),
    "token_ids": lambda rows: changed(rows, "token_ids", lambda value: value + 1),
    "rollout_logprobs": lambda rows: changed(rows, "rollout_logprobs", lambda value: value * 0.5 - 0.1),
}


# A changed id or log-probability breaks the chain of its turn.
WORDS = dict.fromkeys(("token_ids", "rollout_logprobs"), "ids, log-probabilities, versions, images or the order")


@pytest.mark.parametrize("what", BREAKS)
def test_what_does_not_hold_is_refused_unless_trusted(played: Rows, train: Any, what: str) -> None:
    code, steps, said = train(BREAKS[what](played), "--set", "train.exact=false")
    assert code == 2 and not steps, said
    assert WORDS.get(what, what) in said and len(said.strip().splitlines()) == 1
    assert ("--trust" in said) == (what != "loss_mask"), "a mask holds 0 and 1, trusted or not"


def test_trusted_rows_train_but_a_mask_is_still_zero_or_one(played: Rows, train: Any) -> None:
    code, steps, _ = train(BREAKS["token_ids"](played), "--set", "train.exact=false", "--trust")
    assert code == 0 and steps[0]["rows"] == 9
    code, steps, said = train(BREAKS["loss_mask"](played), "--set", "train.exact=false", "--trust")
    assert code == 2 and "loss_mask" in said


@pytest.fixture
def other_model(tmp_path: Path) -> Path:
    """The shipped model under another tokenizer: one merge less."""
    target = tmp_path / "other"
    shutil.copytree(SMALL_MODEL, target)
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:-1]
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    return target


def test_another_models_samples_are_refused_in_one_line(
    played: Rows, train: Any, other_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, said = train(played, "--set", f"model.path={other_model}")
    assert code == 2 and "tokenizer" in said and len(said.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists(), "a refused run left files"
    assert command("diagnose", [str(tmp_path / "samples.jsonl"), "--trainer", str(other_model)]) == 2
    said = capsys.readouterr().err
    assert "tokenizer" in said and len(said.strip().splitlines()) == 1


def test_ids_beyond_the_vocabulary_are_refused_in_one_line(played: Rows, train: Any) -> None:
    rows = changed(played, "token_ids", lambda _: 50_000)
    code, _, said = train(rows, "--trust")
    assert code == 2 and "50000" in said and "vocabulary" in said and len(said.strip().splitlines()) == 1
