"""The files of a rollout: what is on file after a crash, and what is run again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokentrue.app.rollouts import Recorder, read_whole_lines, trim_to_whole_groups
from tokentrue.environments import Plan, Rollout, Task, plan_groups

PLANS = plan_groups([Task(task_id=name, prompt="") for name in ("a", "b", "c")], n=2, seed=0)


def rollout_of(plan: Plan, error: str | None) -> Rollout:
    session = f"s-{plan.key}"
    samples = [{"session_id": session, "metadata": {"text": "né"}}] if error is None else []
    return Rollout(
        plan=plan, session_id=session, reward=None if error else 1.0, error=error, seconds=0.1, samples=samples
    )


def record(out: Path, error: str | None) -> None:
    """Every group; the first rollout of `b` ends in `error`."""
    recorder = Recorder(out, PLANS)
    for plan in PLANS:
        recorder(rollout_of(plan, error if plan.key == "b/0" else None))
    recorder.close()


@pytest.mark.parametrize("text", ["cut\u2028here", "cut\u2029here", "cut\x85here", "a lone \ud800"])
def test_whatever_an_error_says_its_groups_are_on_file(tmp_path: Path, text: str) -> None:
    record(tmp_path, text)
    for _ in range(2):  # the second reads what the first wrote again
        assert trim_to_whole_groups(tmp_path, PLANS) == {"a", "b", "c"}
        assert [line["error"] for line in read_whole_lines(tmp_path / "rollouts.jsonl")] == [
            None,
            None,
            text,
            None,
            None,
            None,
        ]
        assert len(read_whole_lines(tmp_path / "samples.jsonl")) == 5


def test_a_file_that_was_cut_inside_a_character_keeps_the_lines_before(tmp_path: Path) -> None:
    record(tmp_path, "né")
    lines = (tmp_path / "rollouts.jsonl").read_bytes().split(b"\n")
    (tmp_path / "rollouts.jsonl").write_bytes(b"\n".join(lines[:2]) + b"\n" + lines[2].partition(b"\xa9")[0])
    assert trim_to_whole_groups(tmp_path, PLANS) == {"a"}
    assert [line["rollout"] for line in read_whole_lines(tmp_path / "rollouts.jsonl")] == ["a/0", "a/1"]
    assert [line["session_id"] for line in read_whole_lines(tmp_path / "samples.jsonl")] == ["s-a/0", "s-a/1"]
