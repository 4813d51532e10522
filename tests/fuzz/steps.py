"""What can happen in a case, one function each. Read `STEPS` at the end for how often."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from tests.fuzz.case import Asked, Case, all_of, next_messages, until
from tests.fuzz.faults import break_the_engine, fail_one_of_two, hang_up, lose_connections, odd_version
from tests.fuzz.harness import edit
from tests.fuzz.histories import alternate_tools, chain_responses, change_system, change_tools, start_anew
from tests.fuzz.native import Wire, read_node
from tests.fuzz.oracle import Violation, join_parts, short
from tests.fuzz.retries import ask_many_at_once, ask_twice_at_once, ask_with_key, expect_recorded, retry_as_sdks_do
from tests.fuzz.spelling import normal
from tokentrue.conformance.agents.dialects import ANTHROPIC, CHAT
from tokentrue.conformance.agents.messages import Message

Step = Callable[[Case], Awaitable[None]]


async def go_on(case: Case) -> None:
    """The usual turn."""
    case.plan()
    await case.ask(case.request(next_messages(case)))


async def several_calls(case: Case) -> None:
    """Several different calls in one turn, streamed."""
    asked = case.request(next_messages(case))
    asked.stream = True
    case.plan(case.writer.output([tool.name for tool in case.tools], calls=case.rng.choice((2, 3))))
    await case.ask(asked)


async def go_on_exactly(case: Case) -> None:
    """Verbatim replays, while the other settings change."""
    for _ in range(3):
        case.plan()
        turn = case.turns[-1] if case.turns else None
        asked = case.request(case.opening() if turn is None else case.after(turn), lossy=False)
        await case.ask(asked)


async def change_history(case: Case) -> None:
    what, messages = edit(next_messages(case), case.rng)
    if messages[-1].role == "assistant":
        messages.append(Message(role="user", text=case.some_text()))
    case.note(f"# {what or 'nothing to edit'}")
    case.plan()
    await case.ask(case.request(messages, lossy=case.rng.random() < 0.5))


async def ask_again(case: Case) -> None:
    """The same turn once more, without a key: another answer, often with the same text in other ids; then the first is
    gone on with."""
    if not case.turns:
        return await go_on(case)
    turn = case.rng.choice(case.turns[-3:])
    asked = replace(turn.asked, key=None, n=1, stream=case.rng.random() < 0.5)
    same = turn.output is not None and case.rng.random() < 0.7
    case.plan(case.writer.again(turn.output) if same else None)
    await case.ask(asked)
    case.plan()
    await case.ask(case.request(case.after(turn), lossy=case.rng.random() < 0.3))


async def ask_in_parallel(case: Case) -> None:
    """Different continuations of one turn at once."""
    turn = case.pick()
    several: list[Asked] = []
    for _ in range(case.rng.choice((2, 3))):
        messages = case.opening() if turn is None else [*case.after(turn), Message(role="user", text=case.some_text())]
        several.append(case.request(messages))
    hold, start = asyncio.Event(), len(case.log)
    for _ in several:
        case.plan(hold=hold, after=2)
    tasks = [asyncio.ensure_future(case.send(replace(asked, key=None))) for asked in several]
    await until(lambda: len(case.log) >= start + len(several) or any(task.done() for task in tasks))
    hold.set()
    heard = await all_of(tasks)
    made = join_parts(case.log[start:])
    for asked, one in zip(several, heard, strict=True):
        own = [
            s
            for s in made
            if normal(case.world.vocabulary, asked.messages[-1].text) in case.world.vocabulary.text(s.prompt)
        ]
        case.judged(asked, one, own)


async def ask_for_several(case: Case) -> None:
    """n answers, sometimes with the same text; a retry under the key gets all of them; one of them is gone on with."""
    asked = case.request(next_messages(case))
    asked.dialect, asked.n = CHAT, case.rng.choice((2, 3))
    asked.fields = {"model": "m", "seed": case.rng.randrange(1000)}
    first = case.plan()
    for _ in range(asked.n - 1):
        case.plan(case.writer.again(first.output) if case.rng.random() < 0.4 else None)
    start = len(case.log)
    heard = await case.send(asked)
    made = case.judged(asked, heard, join_parts(case.log[start:]))
    if asked.key is not None:
        await expect_recorded(case, asked, case.whole(asked, heard))
    case.plan()
    await case.ask(case.request(case.after(case.rng.choice(made)), lossy=case.rng.random() < 0.5))


async def given_twins(case: Case) -> None:
    """Two requests that differ only in an assistant message of the client's own are two requests."""
    rng = case.rng
    question, word, more = case.some_text(), case.writer.words(3), case.some_text()
    variants = [word, rng.choice((f"  {word}", f"{word}\n", f"<think>\nhm\n</think>\n\n{word}"))]
    rng.shuffle(variants)
    several: list[Asked] = []
    for text in variants:
        messages = [
            Message(role="user", text=question),
            Message(role="assistant", text=text),
            Message(role="user", text=more),
        ]
        several.append(
            replace(
                case.request(messages, lossy=False),
                dialect=CHAT,
                key=None,
                stream=False,
                wire=Wire(),
                fields={"model": "m"},
            )
        )
    start, hold = len(case.log), asyncio.Event()
    for _ in several:
        case.plan(hold=hold)
    if at_once := rng.random() < 0.5:
        tasks = [asyncio.ensure_future(case.send(asked)) for asked in several]
        await until(lambda: len(case.log) > start or any(task.done() for task in tasks))
        await asyncio.sleep(0.03)
        hold.set()
        heard = await all_of(tasks)
    else:
        hold.set()
        heard = [await case.send(asked) for asked in several]
    case.world.engine.plans[case.session].clear()
    if len(case.log) != start + 2:
        raise Violation(
            "a request is its exact text",
            f"two different requests {'at once' if at_once else ''}, {len(case.log) - start} generations",
        )
    for asked, one in zip(several, heard, strict=True):
        if one.status != 200:
            raise Violation("a good request is answered", f"{one.status} {short(one.whole)}")
        case.must_train[read_node(CHAT, one.whole)] = asked


async def prefill(case: Case) -> None:
    """A conversation that ends in an assistant message: continued as that message, or refused by name."""
    asked = case.request(
        [*next_messages(case), Message(role="assistant", text="It begins " + case.writer.words(2))], lossy=False
    )
    asked.dialect, asked.key, asked.wire, asked.fields = ANTHROPIC, None, Wire(), {"model": "m"}
    asked.messages = [replace(m, reasoning="") for m in asked.messages]
    case.plan()
    start = len(case.log)
    heard = await case.send(asked)
    case.world.engine.plans[case.session].clear()
    if heard.status not in {200, 400, 422}:
        raise Violation("a prefill is continued or refused", f"{heard.status} {short(heard.whole)}")
    if heard.status == 200:
        text = case.world.vocabulary.text(case.log[start].prompt)
        if not text.endswith(asked.messages[-1].text):
            raise Violation("a prefill is continued or refused", f"the prompt ends in {text[-120:]!r}")


async def reward_a_leaf(case: Case) -> None:
    if not case.turns:
        return await go_on(case)
    turn = case.rng.choice(case.turns)
    await case.check_record()
    status, answer = await case.world.gateway.admin(
        "POST", f"/sessions/{case.session}/reward", {"reward": 0.5, "leaf": turn.node}
    )
    case.note(f"reward {turn.node} -> {status} {short(answer)}")
    if status not in {200, 400, 404, 409}:
        raise Violation("nothing answers 500", f"reward: {status} {short(answer)}")
    await case.check_record()


STEPS: dict[Step, int] = {
    go_on: 16, several_calls: 8, go_on_exactly: 6, change_history: 8, ask_again: 6, ask_with_key: 5, ask_twice_at_once: 9,
    ask_in_parallel: 3, ask_for_several: 4, fail_one_of_two: 1, break_the_engine: 8, lose_connections: 2, hang_up: 4,
    given_twins: 3, change_tools: 4, alternate_tools: 4, start_anew: 4, chain_responses: 3, change_system: 3,
    ask_many_at_once: 3, retry_as_sdks_do: 2, prefill: 1, odd_version: 1, reward_a_leaf: 2,
}  # fmt: skip


def choose(rng: random.Random, without: Sequence[str] = ()) -> Step:
    steps = {step: weight for step, weight in STEPS.items() if step.__name__ not in without}
    return rng.choices(list(steps), weights=list(steps.values()))[0]
