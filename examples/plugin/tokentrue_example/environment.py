"""Tasks, an agent with an OpenAI client in hand, a reward. It knows nothing about tokens."""

import random
from typing import Any

from tokentrue.environments import Task

WORDS = ("pens", "nuts", "cards", "books", "coins")


class Echo:
    """The reward is 1 if the reply has the word that was asked for."""

    name = "echo"

    def tasks(self, count: int, *, seed: int = 0, split: str = "train") -> list[Task]:
        draw = random.Random(f"{split}/{seed}")
        words = [draw.choice(WORDS) for _ in range(count)]
        return [Task(task_id=f"echo/{word}", prompt=f"Say {word}.", data={"word": word}) for word in words]

    async def run(self, client: Any, task: Task) -> float:
        messages = [{"role": "user", "content": task.prompt}]
        reply = await client.chat.completions.create(model="policy", messages=messages)
        return float(task.data["word"] in (reply.choices[0].message.content or ""))
