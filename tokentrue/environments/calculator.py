"""Word problems with a calculator: several turns, tool calls, one right number at the end."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import islice
from typing import Any

from tokentrue.environments.base import Split, Task, digest
from tokentrue.environments.chat import work
from tokentrue.environments.problems import problems
from tokentrue.environments.tools import CALCULATOR, calculate, last_number
from tokentrue.json_types import JsonObject


class Calculator:
    """Reward 1 when the last number of the answer is right, else 0. `steps` fixes how many steps a problem has
    (otherwise one or two)."""

    name = "calculator"

    def __init__(self, *, max_turns: int = 5, stream: bool = True, steps: int | None = None) -> None:
        self.max_turns = max_turns
        self.steps = steps
        self.stream = stream

    def tasks(self, count: int, *, seed: int = 0, split: Split = "train") -> Sequence[Task]:
        drawn = islice(problems(random.Random(f"{self.name}/{split}/{seed}"), split=split, steps=self.steps), count)
        return [Task(task_id=f"{self.name}/{digest(p.text)[:12]}", prompt=p.text, answer=p.answer) for p in drawn]

    async def run(self, client: Any, task: Task) -> float:
        chat: list[JsonObject] = [{"role": "user", "content": task.prompt}]
        tools = {"calculator": (CALCULATOR, calculate)}
        answer = await work(client, chat, tools=tools, max_turns=self.max_turns, stream=self.stream)
        return float(answer is not None and last_number(answer) == task.answer)
