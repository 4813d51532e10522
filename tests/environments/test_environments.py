"""The three environments: tasks that repeat and never overlap, tools that answer, rewards that can be checked by
hand."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.environments.long_tasks import Ledger, Shop
from tests.environments.fakes import FakeClient
from tokentrue.environments import Task, ask, load_environment
from tokentrue.environments.word_problems import Calculator, apply, calculate, draw_problem, last_number
from tokentrue.errors import ConfigError

TASK = Task(task_id="t", prompt="Tom has 3 pens. Tom gets 4 more. How many now?", answer=7)


@pytest.mark.parametrize(
    "name", ["calculator", *(f"examples.environments.long_tasks:{name}" for name in ("Shop", "Ledger"))]
)
def test_tasks_repeat_and_splits_never_overlap(name: str) -> None:
    environment = load_environment(name)
    train = environment.tasks(200, seed=1)
    assert train == environment.tasks(200, seed=1)
    assert train != environment.tasks(200, seed=2)
    heldout = {task.task_id for task in environment.tasks(100, split="heldout")}
    assert len(heldout) > 90 and not heldout & {task.task_id for task in environment.tasks(2000, seed=3)}


@given(st.integers(0, 10_000), st.integers(1, 5))
def test_every_step_of_a_problem_stays_in_range_and_adds_up(seed: int, steps: int) -> None:
    problem = draw_problem(random.Random(seed), steps=steps)
    value = problem.start
    for step in problem.steps:
        value = apply(step.op, value, step.operand)
        assert value == step.value and 0 <= value <= 99
    assert problem.answer == value


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ('{"expression": "12 + 5"}', "17"),
        ('{"expression": "5-12"}', "-7"),
        ('{"expression": " 4 * 20 "}', "80"),
        ('{"expression": "2 ** 9"}', "error: write a number, an operator and a number"),
        ('{"expression": "__import__(1)"}', "error: write a number, an operator and a number"),
        ('{"expression": 7}', "error: write a number, an operator and a number"),
        ("{", "error: give an expression"),
        ("[]", "error: give an expression"),
    ],
)
def test_the_calculator_answers_whatever_it_is_asked(arguments: str, said: str) -> None:
    assert calculate(arguments) == said


def test_last_number() -> None:
    assert last_number("3 pens, so 12.") == 12
    assert last_number("it is -4") == -4
    assert last_number("none") is None


@pytest.mark.parametrize("stream", [True, False])
async def test_the_calculator_agent_calls_tools_and_is_judged_by_the_last_number(stream: bool) -> None:
    client = FakeClient(("calculator", '{"expression": "3 + 4"}'), "The answer is 7.")
    assert await Calculator(stream=stream).run(client, TASK) == 1.0
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "calculator", "arguments": '{"expression": "3 + 4"}'},
    }
    assert client.seen[1][1:] == [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "7"},
    ]
    assert await Calculator(stream=stream).run(FakeClient("The answer is 8."), TASK) == 0.0
    endless = FakeClient(*[("calculator", '{"expression": "1 + 1"}')] * 9)
    assert await Calculator(stream=stream, max_turns=3).run(endless, TASK) == 0.0
    assert len(endless.answers) == 6


async def test_an_unknown_tool_is_an_answer_not_a_crash() -> None:
    client = FakeClient(("abacus", "{}"), "7")
    assert await Calculator().run(client, TASK) == 1.0
    assert client.seen[1][-1]["content"] == "error: no tool abacus"


async def test_the_shop_returns_its_whole_list() -> None:
    (task,) = Shop().tasks(1, seed=5)
    prices = dict(line.rsplit(" ", 1) for line in task.data["listing"].splitlines())
    assert len(prices) == 24
    client = FakeClient(("prices", "{}"), f"The answer is {task.answer}.")
    assert await Shop(pages=3).run(client, task) == 1.0
    assert client.seen[1][-1]["content"].count("\n") == 3 * 24 - 1


async def test_the_ledger_compacts_into_a_fresh_context() -> None:
    (task,) = Ledger(questions=3, compact_every=2).tasks(1, seed=5)
    client = FakeClient("1", "2", "Eva has 2 keys.", f"So {task.answer}.")
    assert await Ledger(questions=3, compact_every=2).run(client, task) == 1.0
    first, second, summary, fresh = client.seen
    assert len(first) == 1 and len(second) == 3 and summary[-1]["content"] == "Summarize."
    assert len(fresh) == 1 and fresh[0]["content"].startswith("Eva has 2 keys. ")


async def test_streamed_and_whole_answers_are_the_same_message() -> None:
    for answer in ("hello", ("calculator", json.dumps({"expression": "1 + 2"}))):
        assert await ask(FakeClient(answer), [], stream=True) == await ask(FakeClient(answer), [], stream=False)


def test_an_environment_of_ones_own_and_what_is_refused() -> None:
    assert load_environment("tests.e2e.slow:SlowCalculator").name == "calculator"
    with pytest.raises(ConfigError, match="one of calculator, agent, verifiers"):
        load_environment("chess")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_environment("calculator", {"aisles": 3})
    with pytest.raises(ConfigError, match="has no name, tasks, run"):
        load_environment("collections:Counter")
