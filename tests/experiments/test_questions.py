"""Questions from a file: the split follows from the text, the reward from the answer; an odd file is an error that
names it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from experiments.questions import is_right
from tokentrue.environments import load_environment
from tokentrue.errors import ConfigError


def write(path: Path, count: int = 200) -> str:
    path.write_text("".join(json.dumps({"question": f"{i} + 1 =", "answer": str(i + 1)}) + "\n" for i in range(count)))
    return str(path)


def client(text: str) -> Any:
    async def create(**request: Any) -> Any:
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=text))])

    return SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))


async def test_tasks_repeat_and_splits_do_not_overlap(tmp_path: Path) -> None:
    environment = load_environment("experiments.questions:Questions", {"path": write(tmp_path / "q.jsonl")})
    train, held = (environment.tasks(300, seed=3, split=split) for split in ("train", "heldout"))
    assert train == environment.tasks(300, seed=3) and train != environment.tasks(300, seed=4)
    assert not {task.prompt for task in train} & {task.prompt for task in held}
    (task,) = environment.tasks(1, seed=3)
    assert await environment.run(client(f"The answer is {task.data['answer']}."), task) == 1.0
    assert await environment.run(client("I do not know."), task) == 0.0


@pytest.mark.parametrize(("text", "answer", "right"), [
    ("5 - 9 = -4", "-4", True), ("so 4", "-4", False), ("14", "4", False), ("It is:\nnus", "nus", True), ("nus or sun", "nus", False),
    ("", "nus", False),
])  # fmt: skip
def test_the_last_number_or_the_last_line_counts(text: str, answer: str, right: bool) -> None:
    assert is_right(text, answer) is right


def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    asked = [f"{i}\u2028+\u2029one\x85=" for i in range(100)]
    lines = [json.dumps({"question": question, "answer": "1"}, ensure_ascii=False) + "\n" for question in asked]
    (tmp_path / "q.jsonl").write_text("".join(lines), encoding="utf-8")
    tasks = load_environment("experiments.questions:Questions", {"path": str(tmp_path / "q.jsonl")}).tasks(50)
    assert {task.prompt for task in tasks} <= set(asked)


def test_an_odd_file_is_named(tmp_path: Path) -> None:
    for name, content in {"none.jsonl": "", "odd.jsonl": "[1]\n", "text.jsonl": "{no"}.items():
        (tmp_path / name).write_text(content)
        with pytest.raises(ConfigError, match=name):
            load_environment("experiments.questions:Questions", {"path": str(tmp_path / name)}).tasks(1)
    with pytest.raises(ConfigError, match=r"gone\.jsonl"):
        load_environment("experiments.questions:Questions", {"path": str(tmp_path / "gone.jsonl")}).tasks(1)
