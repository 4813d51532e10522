"""Word problems with whole numbers 0..99. The shipped model was trained on the same generator; held-out texts never
reach a training generator."""

import json
import random
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from tokentrue.environments.base import Split, Task, choose_split, digest
from tokentrue.environments.chat import Chat, work
from tokentrue.json_types import JsonObject, JsonValue
from tokentrue.records import record

NAMES = ("Tom", "Ana", "Ben", "Eva", "Max", "Lea", "Sam", "Ida")
THINGS = ("apples", "pens", "coins", "books", "cards", "eggs", "keys", "shells")

PHRASES: dict[str, tuple[str, str, str]] = {
    "+": ("{name} gets {b} more.", "A friend gives {name} {b}.", "{b} others turn up."),
    "-": ("{name} loses {b}.", "{name} gives {b} away.", "{b} of them break."),
    "*": ("Now there are {b} times as many.", "{name} gets {b} times that.", "It happens {b} times over."),
}

CALCULATOR: JsonObject = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "one step",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
EXPRESSION = re.compile(r"\s*(\d{1,6})\s*([-+*])\s*(\d{1,6})\s*")


@record
class Step:
    op: str
    operand: int
    value: int
    phrase: int


@record
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


def draw_problem(rng: random.Random, *, steps: int | None = None) -> Problem:
    count = steps if steps is not None else (1 if rng.random() < 0.4 else 2)
    start = value = rng.randint(2, 30)
    drawn: list[Step] = []
    while len(drawn) < count:
        op = rng.choice("+-*")
        operand = rng.randint(2, 5) if op == "*" else rng.randint(1, 30)
        after = apply(op, value, operand)
        if 0 <= after <= 99:
            value = after
            drawn.append(Step(op=op, operand=operand, value=value, phrase=rng.randrange(3)))
    return Problem(name=rng.choice(NAMES), thing=rng.choice(THINGS), start=start, steps=tuple(drawn))


def problems(rng: random.Random, *, split: Split, steps: int | None = None) -> Iterator[Problem]:
    while True:
        problem = draw_problem(rng, steps=steps)
        if choose_split(problem.text) == split:
            yield problem


def calculate(arguments: str) -> str:
    """The value of `{"expression": "12 + 5"}`, or an error for the model: a bad call must not raise."""
    try:
        expression = json.loads(arguments)["expression"]
    except (ValueError, KeyError, TypeError):
        return "error: give an expression"
    found = EXPRESSION.fullmatch(expression) if isinstance(expression, str) else None
    if found is None:
        return "error: write a number, an operator and a number"
    return str(apply(found[2], int(found[1]), int(found[3])))


def last_number(text: str) -> int | None:
    found = re.findall(r"-?\d+", text)
    return int(found[-1]) if found else None


def make_task(environment: str, prompt: str, answer: int, *, key: str | None = None, **data: JsonValue) -> Task:
    return Task(task_id=f"{environment}/{digest(key or prompt)[:12]}", prompt=prompt, answer=answer, data=data)


def reward_answer(answer: str | None, task: Task) -> float:
    return float(answer is not None and last_number(answer) == task.answer)


class Calculator:
    """Several turns with a calculator, then one number. `steps` fixes the number of steps (default: one or two)."""

    name = "calculator"

    def __init__(self, *, max_turns: int = 5, stream: bool = True, steps: int | None = None) -> None:
        self.max_turns, self.steps, self.stream = max_turns, steps, stream

    def tasks(self, count: int, *, seed: int = 0, split: Split = "train") -> Sequence[Task]:
        drawn = islice(problems(random.Random(f"{self.name}/{split}/{seed}"), split=split, steps=self.steps), count)
        return [make_task(self.name, problem.text, problem.answer) for problem in drawn]

    async def run(self, client: Any, task: Task) -> float:
        chat: Chat = [{"role": "user", "content": task.prompt}]
        tools = {"calculator": (CALCULATOR, calculate)}
        return reward_answer(await work(client, chat, tools=tools, max_turns=self.max_turns, stream=self.stream), task)
