"""Long tool outputs: one call returns a whole price list, of which two lines matter."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from tokentrue.environments.base import Split, Task, choose_split, digest
from tokentrue.environments.chat import work
from tokentrue.environments.problems import draw_price_list
from tokentrue.environments.tools import CALCULATOR, PRICES, calculate, last_number


class Shop:
    """Reward 1 when the sum of the two prices is right. `pages` repeats the list under further headings to lengthen the
    output."""

    name = "shop"

    def __init__(self, *, max_turns: int = 6, pages: int = 1) -> None:
        self.max_turns = max_turns
        self.pages = pages

    def tasks(self, count: int, *, seed: int = 0, split: Split = "train") -> Sequence[Task]:
        rng = random.Random(f"{self.name}/{split}/{seed}")
        found: list[Task] = []
        while len(found) < count:
            prices = draw_price_list(rng)
            key = f"{prices.text}\n{prices.listing}"
            if choose_split(key) == split:
                data = {"listing": prices.listing}
                found.append(
                    Task(task_id=f"{self.name}/{digest(key)[:12]}", prompt=prices.text, answer=prices.answer, data=data)
                )
        return found

    async def run(self, client: Any, task: Task) -> float:
        listing = "\n".join([task.data["listing"]] * self.pages)

        def list_prices(arguments: str) -> str:
            del arguments
            return listing

        tools = {"calculator": (CALCULATOR, calculate), "prices": (PRICES, list_prices)}
        answer = await work(client, [{"role": "user", "content": task.prompt}], tools=tools, max_turns=self.max_turns)
        return float(answer is not None and last_number(answer) == task.answer)
