"""Word problems with whole numbers 0..99: the pure generator behind the environments and behind the shipped model's
training data.

Invariants: the same `random.Random` state gives the same problem; every intermediate value of a right solution lies in
0..99; a problem's split follows from its text (`base.choose_split`), so held-out texts never reach a training generator.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tokentrue.environments.base import Split, choose_split

NAMES = ("Tom", "Ana", "Ben", "Eva", "Max", "Lea", "Sam", "Ida")
THINGS = ("apples", "pens", "coins", "books", "cards", "eggs", "keys", "shells")
VERBS = {"+": "add", "-": "take", "*": "times"}
PHRASES: dict[str, tuple[str, str, str]] = {  # the last phrasing of each operator is the hard one
    "+": ("{name} gets {b} more.", "A friend gives {name} {b}.", "{b} others turn up."),
    "-": ("{name} loses {b}.", "{name} gives {b} away.", "{b} of them break."),
    "*": ("Now there are {b} times as many.", "{name} gets {b} times that.", "It happens {b} times over."),
}
HARD = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """`value = before op operand`, told by phrasing number `phrase`."""

    op: str
    operand: int
    before: int
    value: int
    phrase: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    name: str
    thing: str
    start: int
    steps: tuple[Step, ...]

    @property
    def opening(self) -> str:
        return f"{self.name} has {self.start} {self.thing}."

    def told(self, step: Step) -> str:
        return PHRASES[step.op][step.phrase].format(name=self.name, b=step.operand)

    @property
    def text(self) -> str:
        return " ".join([self.opening, *(self.told(step) for step in self.steps), "How many now?"])

    @property
    def answer(self) -> int:
        return self.steps[-1].value


def apply(op: str, left: int, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right}[op]


def draw_step(rng: random.Random, before: int) -> Step:
    """A step whose value stays in 0..99."""
    while True:
        op = rng.choice("+-*")
        operand = rng.randint(2, 5) if op == "*" else rng.randint(1, 30)
        value = apply(op, before, operand)
        if 0 <= value <= 99:
            return Step(op=op, operand=operand, before=before, value=value, phrase=rng.randrange(3))


def draw_problem(rng: random.Random, *, steps: int | None = None) -> Problem:
    count = steps if steps is not None else (1 if rng.random() < 0.4 else 2)
    start = value = rng.randint(2, 30)
    drawn: list[Step] = []
    for _ in range(count):
        step = draw_step(rng, value)
        drawn.append(step)
        value = step.value
    return Problem(name=rng.choice(NAMES), thing=rng.choice(THINGS), start=start, steps=tuple(drawn))


def problems(rng: random.Random, *, split: Split, steps: int | None = None) -> Iterator[Problem]:
    """An endless stream of problems of one split."""
    while True:
        problem = draw_problem(rng, steps=steps)
        if choose_split(problem.text) == split:
            yield problem


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceList:
    """A long list of prices and a question about two of them."""

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

    @property
    def answer(self) -> int:
        return sum(self.operands)


GOODS: Sequence[str] = (
    *THINGS,
    *[
        "bread",
        "milk",
        "salt",
        "tea",
        "rice",
        "soap",
        "rope",
        "lamp",
        "nails",
        "paint",
        "wood",
        "wool",
        "corn",
        "beans",
        "pears",
        "honey",
    ],
)


def draw_price_list(rng: random.Random) -> PriceList:
    """Every good is on the list: the answer hangs on two lines of twenty-four."""
    goods = rng.sample(GOODS, len(GOODS))
    prices = tuple((good, rng.randint(1, 49)) for good in goods)
    first, second = rng.sample(goods, 2)
    return PriceList(prices=prices, wanted=(first, second), shop=rng.choice(NAMES))
