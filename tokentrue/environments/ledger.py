"""Compaction: questions one after the other; after every two the harness asks for a summary and goes on from it in a
fresh context.

The session then holds several roots. Each is a sample of its own, and together they train every sampled token.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import islice
from typing import Any

from tokentrue.environments.base import Split, Task, digest
from tokentrue.environments.chat import Chat, ask, work
from tokentrue.environments.problems import problems
from tokentrue.environments.tools import CALCULATOR, calculate, last_number


class Ledger:
    """Reward 1 when the number after the last question is right."""

    name = "ledger"

    def __init__(self, *, questions: int = 4, compact_every: int = 2, max_turns: int = 4) -> None:
        self.questions = questions
        self.compact_every = compact_every
        self.max_turns = max_turns

    def tasks(self, count: int, *, seed: int = 0, split: Split = "train") -> Sequence[Task]:
        rng = random.Random(f"{self.name}/{split}/{seed}")
        found: list[Task] = []
        for problem in islice(problems(rng, split=split, steps=self.questions), count):
            told = [problem.told(step) for step in problem.steps]
            data = {"opening": problem.opening, "told": told}
            found.append(
                Task(
                    task_id=f"{self.name}/{digest(problem.text)[:12]}",
                    prompt=problem.text,
                    answer=problem.answer,
                    data=data,
                )
            )
        return found

    async def run(self, client: Any, task: Task) -> float:
        opening: str = task.data["opening"]
        chat: Chat = []
        answer: str | None = None
        for number, told in enumerate(task.data["told"]):
            if number and number % self.compact_every == 0:
                opening = await summary(client, chat)
                chat = []
            text = f"{told} How many now?" if chat else f"{opening} {told} How many now?"
            chat.append({"role": "user", "content": text})
            answer = await work(client, chat, tools={"calculator": (CALCULATOR, calculate)}, max_turns=self.max_turns)
            if answer is None:
                return 0.0
        return float(answer is not None and last_number(answer) == task.answer)


async def summary(client: Any, chat: Chat) -> str:
    chat.append({"role": "user", "content": "Summarize."})
    reply = await ask(client, chat, tools=[CALCULATOR])
    chat.append(reply)
    return reply["content"].strip() or "Nothing is known."
