"""An environment of your own: tasks, an agent with an OpenAI client in hand, a reward. It knows nothing about tokens.

Needs: the extra `train`. In this directory:
  tokentrue rollout --set rollout.environment=custom_environment:Pens --set rollout.tasks=4 --out out/pens
  tokentrue train --set rollout.environment=custom_environment:Pens --steps 4 --out out/pens-run
"""

import random
import re
from typing import Any

from tokentrue.environments import Task
from tokentrue.environments.word_problems import CALCULATOR, calculate


class Pens:
    """Two questions in one conversation, with a calculator; the reward is the share of right answers."""

    name = "pens"

    def tasks(self, count: int, *, seed: int = 0, split: str = "train") -> list[Task]:
        draw = random.Random(f"{split}/{seed}")
        drawn = [(draw.randint(5, 30), draw.randint(5, 30), draw.randint(1, 9)) for _ in range(count)]
        return [
            Task(
                task_id=f"pens/{a}/{b}/{c}",
                prompt=f"Tom has {a} pens. {b} others turn up.",
                data={"numbers": [a, b, c]},
            )
            for a, b, c in drawn
        ]

    async def run(self, client: Any, task: Task) -> float:
        a, b, c = task.data["numbers"]
        messages: list[dict[str, Any]] = []
        first = await self.ask(client, messages, f"{task.prompt} How many now?")
        second = await self.ask(client, messages, f"Tom loses {c}. How many now?")
        return 0.5 * (first == a + b) + 0.5 * (second == a + b - c)

    async def ask(self, client: Any, messages: list[dict[str, Any]], question: str) -> int | None:
        """The number that the model answers with, after at most three calls of the calculator."""
        messages.append({"role": "user", "content": question})
        for _ in range(4):
            reply = await client.chat.completions.create(model="policy", messages=messages, tools=[CALCULATOR])
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                found = re.findall(r"\d+", message.content or "")
                return int(found[-1]) if found else None
            for call in message.tool_calls:
                result = calculate(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return None
