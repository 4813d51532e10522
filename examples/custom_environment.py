"""An environment of your own: tasks, an agent with an OpenAI client in hand, a reward. It knows nothing about tokens.

Run: tokentrue rollout --set rollout.environment=custom_environment:Sums --set rollout.tasks=4 --out out/sums    (in
this directory)
"""

import random
import re
from typing import Any

from tokentrue.environments import Task


class Sums:
    """One question and a second look; the reward is 1 if the last number is right, 0.5 if only the first answer was."""

    name = "sums"

    def __init__(self, *, largest: int = 40) -> None:
        self.largest = largest

    def tasks(self, count: int, *, seed: int = 0, split: str = "train") -> list[Task]:
        draw = random.Random(f"{split}/{seed}")
        pairs = [(draw.randint(1, self.largest), draw.randint(1, self.largest)) for _ in range(count)]
        return [
            Task(task_id=f"sums/{a}+{b}/{i}", prompt=f"what is {a} plus {b}?", answer=a + b)
            for i, (a, b) in enumerate(pairs)
        ]

    async def run(self, client: Any, task: Task) -> float:
        messages: list[dict[str, Any]] = [{"role": "user", "content": task.prompt}]
        answers = [await self.ask(client, messages)]
        messages.append({"role": "user", "content": "are you sure?"})
        answers.append(await self.ask(client, messages))
        right = [
            bool(found) and int(found[-1]) == task.answer
            for found in (re.findall(r"\d+", answer) for answer in answers)
        ]
        return 1.0 if right[1] else 0.5 if right[0] else 0.0

    async def ask(self, client: Any, messages: list[dict[str, Any]]) -> str:
        reply = await client.chat.completions.create(model="policy", messages=messages)
        messages.append(reply.choices[0].message.model_dump(exclude_none=True))
        return reply.choices[0].message.content or ""
