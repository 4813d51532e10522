"""The calculator with a pause before every tool result, so that there is a middle in which something can die; and one
that raises."""

from __future__ import annotations

import asyncio
from typing import Any

from tokentrue.environments import Task, work
from tokentrue.environments.word_problems import CALCULATOR, Calculator, calculate, last_number


class BrokenCalculator(Calculator):
    async def run(self, client: Any, task: Task) -> float:
        raise ValueError("the agent broke")


class SlowCalculator(Calculator):
    async def run(self, client: Any, task: Task) -> float:
        await asyncio.sleep(1.0)
        chat: list[dict[str, Any]] = [{"role": "user", "content": task.prompt}]
        for _ in range(4):
            answer = await work(client, chat, tools={"calculator": (CALCULATOR, calculate)}, max_turns=1)
            if answer is not None:
                return float(last_number(answer) == task.answer)
            await asyncio.sleep(1.0)
        return 0.0
