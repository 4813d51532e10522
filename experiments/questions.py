"""Questions with one right answer, from a JSON-lines file of `{"question": …, "answer": …}`: one turn, no tools.

`scripts/make_reasoning_tasks.py` writes such a file from the task generators of `reasoning-gym`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

from tokentrue.environments.base import Split, Task, choose_split, digest
from tokentrue.environments.word_problems import last_number
from tokentrue.errors import ConfigError
from tokentrue.plain_json import read_numbered_lines


class Questions:
    """Reward 1 if the reply's last number (or its last line, if the answer is not a number) is the answer, else 0.

    A question's split is determined by its text. Tasks are drawn with replacement.
    """

    name = "questions"

    def __init__(self, *, path: str) -> None:
        self.path = path

    def tasks(self, count: int, *, seed: int = 0, split: Split = "train") -> Sequence[Task]:
        known = read_questions(self.path, split)
        rng = random.Random(f"{self.name}/{split}/{seed}")
        drawn = [rng.choice(known) for _ in range(count)]
        return [Task(task_id=f"questions/{digest(q)[:12]}", prompt=q, data={"answer": answer}) for q, answer in drawn]

    async def run(self, client: Any, task: Task) -> float:
        reply = await client.chat.completions.create(
            model="tokentrue", messages=[{"role": "user", "content": task.prompt}]
        )
        return float(is_right(reply.choices[0].message.content or "", str(task.data["answer"])))


def is_right(text: str, answer: str) -> bool:
    if answer.lstrip("-").isdecimal():
        return last_number(text) == int(answer)
    lines = text.strip().splitlines()
    return bool(lines) and lines[-1].strip() == answer


@cache
def read_questions(path: str, split: Split) -> tuple[tuple[str, str], ...]:
    try:
        rows = [json.loads(line) for _, line in read_numbered_lines(path)]
        found = {(str(row["question"]), str(row["answer"])) for row in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"questions: {path} is not a JSON-lines file of questions and answers: {error!r}") from error
    kept = sorted(pair for pair in found if choose_split(pair[0]) == split)
    if not kept:
        raise ConfigError(f"questions: {path} holds no question of the {split} split; write more than a few dozen")
    return tuple(kept)
