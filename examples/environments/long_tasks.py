"""Two further environments that the shipped model was trained on: long tool outputs, and compaction.

tokentrue rollout --set rollout.environment=examples.environments.long_tasks:Shop        # in a clone
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import islice
from typing import Any

from tokentrue.environments import Split, Task, ask, work
from tokentrue.environments.base import choose_split
from tokentrue.environments.word_problems import (
    CALCULATOR,
    NAMES,
    THINGS,
    calculate,
    make_task,
    problems,
    reward_answer,
)
from tokentrue.json_types import JsonObject
from tokentrue.records import record

Chat = list[JsonObject]
GOODS: Sequence[str] = (
    *THINGS, "bread", "milk", "salt", "tea", "rice", "soap", "rope", "lamp", "nails", "paint", "wood", "wool", "corn",
    "beans", "pears", "honey",
)  # fmt: skip
PRICES: JsonObject = {
    "type": "function",
    "function": {"name": "prices", "description": "all prices", "parameters": {"type": "object", "properties": {}}},
}


@record
class PriceList:
    prices: tuple[tuple[str, int], ...]
    wanted: tuple[str, str]
    shop: str

    @property
    def text(self) -> str:
        return f"What do {self.wanted[0]} and {self.wanted[1]} cost together at {self.shop}'s?"

    @property
    def listing(self) -> str:
        return "\n".join(f"{thing} {price}" for thing, price in self.prices)

    @property
    def operands(self) -> tuple[int, int]:
        table = dict(self.prices)
        return table[self.wanted[0]], table[self.wanted[1]]


def draw_price_list(rng: random.Random) -> PriceList:
    goods = rng.sample(GOODS, len(GOODS))
    prices = tuple((good, rng.randint(1, 49)) for good in goods)
    first, second = rng.sample(goods, 2)
    return PriceList(prices=prices, wanted=(first, second), shop=rng.choice(NAMES))


class Shop:
    """Long tool outputs: one call returns a whole price list, of which two lines matter. `pages` repeats the list."""

    name = "shop"

    def __init__(self, *, max_turns: int = 6, pages: int = 1) -> None:
        self.max_turns, self.pages = max_turns, pages

    def tasks(self, count: int, *, seed: int = 0, split: Split = "train") -> Sequence[Task]:
        rng = random.Random(f"{self.name}/{split}/{seed}")
        found: list[Task] = []
        while len(found) < count:
            drawn = draw_price_list(rng)
            key = f"{drawn.text}\n{drawn.listing}"
            if choose_split(key) == split:
                task = make_task(self.name, drawn.text, sum(drawn.operands), key=key, listing=drawn.listing)
                found.append(task)
        return found

    async def run(self, client: Any, task: Task) -> float:
        listing = "\n".join([task.data["listing"]] * self.pages)

        def list_prices(_arguments: str) -> str:
            return listing

        tools = {"calculator": (CALCULATOR, calculate), "prices": (PRICES, list_prices)}
        chat: Chat = [{"role": "user", "content": task.prompt}]
        return reward_answer(await work(client, chat, tools=tools, max_turns=self.max_turns), task)


class Ledger:
    """Compaction: sequential questions; after every `compact_every` the harness requests a summary and continues
    from it in a fresh context. The session then has several roots, and each is one sample."""

    name = "ledger"

    def __init__(self, *, questions: int = 4, compact_every: int = 2, max_turns: int = 4) -> None:
        self.questions, self.compact_every, self.max_turns = questions, compact_every, max_turns

    def tasks(self, count: int, *, seed: int = 0, split: Split = "train") -> Sequence[Task]:
        drawn = islice(problems(random.Random(f"{self.name}/{split}/{seed}"), split=split, steps=self.questions), count)
        return [
            make_task(self.name, one.text, one.answer, opening=one.opening, told=[one.told(step) for step in one.steps])
            for one in drawn
        ]

    async def run(self, client: Any, task: Task) -> float:
        opening: str = task.data["opening"]
        chat: Chat = []
        answer: str | None = None
        for number, told in enumerate(task.data["told"]):
            if number and number % self.compact_every == 0:
                chat.append({"role": "user", "content": "Summarize."})
                summary = await ask(client, chat, tools=[CALCULATOR])
                opening, chat = summary["content"].strip() or "Nothing is known.", []
            text = f"{told} How many now?" if chat else f"{opening} {told} How many now?"
            chat.append({"role": "user", "content": text})
            answer = await work(client, chat, tools={"calculator": (CALCULATOR, calculate)}, max_turns=self.max_turns)
            if answer is None:
                return 0.0
        return reward_answer(answer, task)
