"""What can happen in a case, one function each. Read `STEPS` at the end for how often."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from tests.fuzz import reassemble
from tests.fuzz.case import ENGINE_AT_FAULT, Asked, Case
from tests.fuzz.dialects import ANTHROPIC, CHAT, RESPONSES, Wire, comparable
from tests.fuzz.engine import STREAM_FAULTS, VERSIONS, WHOLE_FAULTS
from tests.fuzz.gateway import Heard
from tests.fuzz.harness import TOOLS, edit
from tests.fuzz.messages import Message
from tests.fuzz.oracle import Violation, join_parts, short
from tests.fuzz.reassemble import partial_texts

Step = Callable[[Case], Awaitable[None]]
MUST_FAIL = {"error_event", "error_text_event", "garbage", "no_finish", "rewrite_final", "disagree"}


def next_messages(case: Case) -> list[Message]:
    turn = case.pick()
    return case.opening() if turn is None else case.after(turn)


async def ask_once(case: Case, asked: Asked) -> None:
    await case.ask(asked)


async def go_on(case: Case) -> None:
    """The usual turn."""
    case.plan()
    await ask_once(case, case.request(next_messages(case)))


async def several_calls(case: Case) -> None:
    """Several different calls in one turn, streamed."""
    asked = case.request(next_messages(case))
    asked.stream = True
    case.plan(case.writer.output([tool.name for tool in case.tools], calls=case.rng.choice((2, 3))))
    await ask_once(case, asked)


async def go_on_exactly(case: Case) -> None:
    """Verbatim replays, while the other settings change."""
    for _ in range(3):
        case.plan()
        turn = case.turns[-1] if case.turns else None
        asked = case.request(case.opening() if turn is None else case.after(turn), lossy=False)
        await ask_once(case, asked)


async def change_history(case: Case) -> None:
    what, messages = edit(next_messages(case), case.rng)
    case.note(f"# {what or 'nothing to edit'}")
    case.plan()
    await ask_once(case, case.request(messages, lossy=case.rng.random() < 0.5))


async def ask_again(case: Case) -> None:
    """The same turn once more, without a key: another answer, often with the same text in other ids; then the first is gone on with."""
    if not case.turns:
        return await go_on(case)
    turn = case.rng.choice(case.turns[-3:])
    asked = replace(turn.asked, key=None, n=1, stream=case.rng.random() < 0.5)
    same = turn.output is not None and case.rng.random() < 0.7
    case.plan(case.writer.again(turn.output) if same else None)
    await case.ask(asked)
    case.plan()
    await case.ask(case.request(case.after(turn), lossy=case.rng.random() < 0.3))


async def ask_with_key(case: Case) -> None:
    """A retry under the same key gets the recorded answer."""
    asked = case.request(next_messages(case))
    asked.key = f"retry-{case.session}-{case.rng.getrandbits(40):x}"
    case.plan()
    start = len(case.log)
    heard = await case.send(asked)
    case.judged(asked, heard, join_parts(case.log[start:]))
    if case.rng.random() < 0.2:
        await case.compare_with_whole(asked, heard)
    count = len(case.log)
    again = await case.send(asked)
    if again.status != 200 or len(case.log) != count:
        raise Violation("a keyed retry adds nothing", f"{again.status}, {len(case.log) - count} more generations")
    if comparable(asked.dialect, case.whole(asked, again)) != comparable(asked.dialect, case.whole(asked, heard)):
        raise Violation("a keyed retry gets the recorded answer", f"{short(again.whole or again.events)}")


async def ask_twice_at_once(case: Case) -> None:
    """Identical requests in flight are one turn; one of them may be streamed and the other not."""
    asked = case.request(next_messages(case))
    asked.key = None
    other = replace(asked, stream=not asked.stream) if case.rng.random() < 0.7 else asked
    hold, start = asyncio.Event(), len(case.log)
    case.plan(hold=hold, after=case.rng.randint(0, 3))
    case.plan(hold=hold)
    first = asyncio.ensure_future(case.send(asked))
    await until(lambda: len(case.log) > start or first.done())
    second = asyncio.ensure_future(case.send(other))
    await asyncio.sleep(0.02)
    hold.set()
    heard = await all_of([first, second])
    made = join_parts(case.log[start:])
    case.world.engine.plans[case.session].clear()
    wholes = [case.whole(asked, one) for one in heard if one.status == 200]
    if len(wholes) != 2:
        raise Violation("a good request is answered", f"{[one.status for one in heard]} {short(heard[0].whole or heard[1].whole)}")
    if len(made) == 1:
        compare(asked, other, wholes)
        case.judged(asked, heard[0], made)
        return
    case.note("# the second came too late to be joined")
    for one in made:
        case.world.judge.prompt(one.prompt, asked.messages, asked.tools, case.turns)


def compare(asked: Asked, other: Asked, wholes: Sequence[dict[str, Any]]) -> None:
    one, two = (comparable(asked.dialect, whole) for whole in wholes)
    if one != two:
        first, second = ("streamed" if request.stream else "whole" for request in (asked, other))
        raise Violation("a streamed answer is the whole answer", f"\n  {first}: {one}\n  joined, {second}: {two}")


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
        own = [s for s in made if asked.messages[-1].text in case.world.vocabulary.text(s.prompt)]
        case.judged(asked, one, own)


async def ask_for_several(case: Case) -> None:
    """n answers, sometimes with the same text; one of them is gone on with."""
    asked = case.request(next_messages(case))
    asked.dialect, asked.n = CHAT, case.rng.choice((2, 3))
    asked.fields = {"model": "m"}
    first = case.plan()
    for _ in range(asked.n - 1):
        case.plan(case.writer.again(first.output) if case.rng.random() < 0.4 else None)
    start = len(case.log)
    heard = await case.send(asked)
    made = case.judged(asked, heard, join_parts(case.log[start:]))
    case.plan()
    await case.ask(case.request(case.after(case.rng.choice(made)), lossy=case.rng.random() < 0.5))


async def fail_one_of_two(case: Case) -> None:
    """One of two streamed answers fails: a retry under the same key must not return half of them."""
    asked = case.request(next_messages(case))
    asked.dialect, asked.n, asked.stream, asked.fields = CHAT, 2, True, {"model": "m"}
    asked.key = f"half-{case.session}-{case.rng.getrandbits(40):x}"
    case.plan()
    case.plan(fault="error_event", after=2)
    heard = await case.send(asked)
    expect_failure(case, asked, heard)
    case.plan()
    case.plan()
    again = await case.send(asked)
    case.world.engine.plans[case.session].clear()
    if again.status == 200:
        if broke(asked, again):
            return
        whole = case.whole(asked, again)
        if len(whole["choices"]) != 2:
            raise Violation("n answers to n", f"a keyed retry of a request with n=2 got {len(whole['choices'])}")


def expect_failure(case: Case, asked: Asked, heard: Heard) -> None:
    """The engine is at fault: 502, or an error in mid-stream; never a whole answer."""
    if heard.status == 200 and heard.events:
        if not broke(asked, heard):
            raise Violation("an engine's fault is not hidden", f"the stream ended well; fault {case.log[-1].plan.fault}")
    elif heard.status not in ENGINE_AT_FAULT:
        raise Violation("an engine's fault is a 502", f"{heard.status} {short(heard.whole)}; fault {case.log[-1].plan.fault}")


def broke(asked: Asked, heard: Heard) -> bool:
    """The stream ended in an error."""
    try:
        reassemble.assemble(asked.dialect, heard.events)
    except reassemble.Broken:
        return True
    except reassemble.Unsound as error:
        raise Violation("a stream is sound", str(error)) from None
    return False


async def break_the_engine(case: Case) -> None:
    """The engine fails in one of many ways; what it had reported is kept; then the same is asked again."""
    rng = case.rng
    asked = case.request(next_messages(case))
    fault = rng.choice(STREAM_FAULTS if asked.stream else WHOLE_FAULTS)
    case.note(f"# fault {fault}")
    case.plan(fault=fault, after=rng.randint(0, 8))
    if fault in {"drop", "cut_event"}:
        case.plan()
    start = len(case.log)
    heard = await case.send(asked)
    case.world.engine.plans[case.session].clear()
    if (asked.stream and fault in MUST_FAIL) or fault.startswith(("malformed", "garbage")):
        expect_failure(case, asked, heard)
    elif heard.status == 200 and not asked.stream:
        case.judged(asked, heard, [one for one in join_parts(case.log[start:]) if one.parts[-1].ended == "finished"])
    elif heard.status not in {200, 400, 422, *ENGINE_AT_FAULT}:
        raise Violation("an engine's fault is a 502", f"{heard.status} {short(heard.whole)}")
    case.plan()
    await case.ask(replace(asked, key=None))


async def lose_connections(case: Case) -> None:
    """The engine's connection is lost again and again in mid-stream."""
    asked = case.request(next_messages(case))
    asked.stream, asked.key = True, None
    case.plan(drops=case.rng.choice((1, 2, 14)), after=case.rng.randint(1, 6))
    start = len(case.log)
    heard = await case.send(asked)
    case.world.engine.plans[case.session].clear()
    if heard.status == 200:
        if not broke(asked, heard):
            case.judged(asked, heard, join_parts(case.log[start:]))
    elif heard.status not in ENGINE_AT_FAULT:
        raise Violation("an engine's fault is a 502", f"{heard.status} {short(heard.whole)}")


async def hang_up(case: Case) -> None:
    """The client goes away in mid-answer, and asks the same again at once."""
    asked = case.request(next_messages(case))
    asked.key = None
    hold = await leave_in_mid_answer(case, asked)
    case.plan()
    again = replace(asked, stream=case.rng.random() < 0.5)
    start = len(case.log)
    task = asyncio.ensure_future(case.send(again))
    await asyncio.wait([task], timeout=0.1)
    hold.set()  # where the second request has joined the first, which nobody had cancelled yet
    heard = await task
    made = [one for one in join_parts(case.log[start:]) if one.parts[-1].ended == "finished"]
    if not made and heard.status == 200:  # joined the first after all
        case.note("# joined")
        return
    case.judged(again, heard, made)


async def leave_in_mid_answer(case: Case, asked: Asked) -> asyncio.Event:
    """The event lets the engine go on, should it still be asked to."""
    case.world.requests += 1
    hold, start = asyncio.Event(), len(case.log)
    case.plan(hold=hold, after=case.rng.randint(1, 12))
    case.world.engine.abort_delay_s = case.rng.choice((0.0, 0.05))
    body = case.body(asked)
    case.note(f"POST {asked.dialect} and hang up: {short(body)}")
    task = asyncio.ensure_future(read_some(case, asked, body, case.rng.randint(1, 4)))
    await until(lambda: len(case.log) > start or task.done())
    if case.log[start:]:
        await case.log[start].arrived.wait()
    done, _ = await asyncio.wait([task], timeout=0.05)
    events = task.result() if done else list[Any]()
    if not done:
        task.cancel()
        await asyncio.wait([task])
    for generation in case.log[start:]:
        case.uncertain.append(generation)
        case.heard_partly.append((generation, partial_texts(asked.dialect, events)))
    return hold


async def read_some(case: Case, asked: Asked, body: object, count: int) -> list[Any]:
    """The first events of an answer; leaving closes the connection."""
    async with case.world.gateway.open(case.path(asked.dialect), body) as reading:
        async for _ in case.world.gateway.read(reading):
            if len(reading.heard.events) >= count:
                break
        reading.answer.close()
        return reading.heard.events


async def delete_in_mid_stream(case: Case) -> None:
    """The session is ended while a stream runs: what was sampled stays in the record, and nothing more is admitted."""
    asked = case.request(next_messages(case))
    asked.stream, asked.key = True, None
    hold, start = asyncio.Event(), len(case.log)
    case.plan(hold=hold, after=case.rng.randint(2, 12))
    case.world.requests += 1
    case.note(f"POST {asked.dialect}, then DELETE: {short(case.body(asked))}")
    task = asyncio.ensure_future(case.world.gateway.post(case.path(asked.dialect), case.body(asked)))
    await until(lambda: len(case.log) > start or task.done())
    if case.log[start:]:
        await case.log[start].arrived.wait()
    await asyncio.sleep(0.05)
    status, answer = await case.world.gateway.admin("DELETE", f"/sessions/{case.session}")
    case.note(f"DELETE -> {status} {short(answer)}")
    hold.set()
    heard = await task
    case.hear(heard)
    if status != 200:
        raise Violation("a session can be ended", f"{status} {short(answer)}")
    for generation in case.log[start:]:
        case.uncertain.append(generation)
        case.heard_partly.append((generation, partial_texts(asked.dialect, heard.events)))
    case.deleted = True
    after = await case.world.gateway.post(case.path(CHAT), {"model": "m", "messages": [{"role": "user", "content": "more"}]})
    if after.status not in {404, 409}:
        raise Violation("an ended session admits nothing", f"{after.status} {short(after.whole)}")


async def given_twins(case: Case) -> None:
    """Two requests that differ only in an assistant message of the client's own are two requests."""
    rng = case.rng
    question, word, more = case.some_text(), case.writer.words(3), case.some_text()
    variants = [word, rng.choice((f"  {word}", f"{word}\n", f"<think>\nhm\n</think>\n\n{word}"))]
    rng.shuffle(variants)
    several: list[Asked] = []
    for text in variants:
        messages = [Message(role="user", text=question), Message(role="assistant", text=text), Message(role="user", text=more)]
        several.append(replace(case.request(messages, lossy=False), dialect=CHAT, key=None, stream=False, wire=Wire(), fields={"model": "m"}))
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
        raise Violation("a request is its exact text", f"two different requests {'at once' if at_once else ''}, {len(case.log) - start} generations")
    for one in heard:
        if one.status != 200:
            raise Violation("a good request is answered", f"{one.status} {short(one.whole)}")
        case.must_train.add(one.whole["id"].removeprefix("chatcmpl-"))


async def change_tools(case: Case) -> None:
    """Other tools, the same in another order, or none."""
    tools = list(TOOLS)
    case.rng.shuffle(tools)
    before = case.tools
    case.tools = tuple(case.rng.choice((tools[:2], tools[:4], list(reversed(before)), [])))
    case.plan()
    await ask_once(case, case.request(next_messages(case)))
    if case.rng.random() < 0.5:
        case.tools = before
        case.plan()
        await ask_once(case, case.request(next_messages(case)))


async def start_anew(case: Case) -> None:
    """A sub-agent, or a summary in place of the history."""
    messages = case.opening()
    if case.turns and case.rng.random() < 0.5:
        first = case.turns[0].path
        messages = [*first[: 1 + (first[0].role == "system")], Message(role="user", text="Summary: " + case.some_text())]
    case.plan()
    await ask_once(case, case.request(messages))


async def previous_response(case: Case) -> None:
    """Responses: the history by its id."""
    turns = [turn for turn in case.turns if turn.response_id and turn.tools == case.tools]
    if not turns:
        return await go_on(case)
    turn = case.rng.choice(turns[-3:])
    messages = case.after(turn)
    case.plan()
    asked = case.request(messages, lossy=False)
    asked.dialect, asked.previous, asked.new = RESPONSES, turn.response_id, len(messages) - len(turn.path)
    asked.messages, asked.fields = messages, {"model": "m"}
    await ask_once(case, asked)


async def prefill(case: Case) -> None:
    """A conversation that ends in an assistant message: continued as that message, or refused by name."""
    asked = case.request([*next_messages(case), Message(role="assistant", text="It begins " + case.writer.words(2))], lossy=False)
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


async def odd_version(case: Case) -> None:
    """A weight version that is no small number: answered or refused, and the session stays readable."""
    asked = case.request(next_messages(case))
    asked.key = None
    case.plan().version = VERSIONS[-1]
    start = len(case.log)
    heard = await case.send(asked)
    if heard.status not in {200, *ENGINE_AT_FAULT}:
        raise Violation("a version is kept or refused", f"{heard.status} {short(heard.whole)}")
    if heard.status == 200 and (heard.whole is not None or not broke(asked, heard)):
        case.judged(asked, heard, join_parts(case.log[start:]))
        return
    case.uncertain += case.log[start:]


async def reward_a_leaf(case: Case) -> None:
    if not case.turns:
        return await go_on(case)
    turn = case.rng.choice(case.turns)
    await case.check_record()
    status, answer = await case.world.gateway.admin("POST", f"/sessions/{case.session}/reward", {"reward": 0.5, "leaf": turn.node})
    case.note(f"reward {turn.node} -> {status} {short(answer)}")
    if status not in {200, 400, 404, 409}:
        raise Violation("nothing answers 500", f"reward: {status} {short(answer)}")
    await case.check_record()


async def all_of(tasks: Sequence[asyncio.Future[Heard]]) -> list[Heard]:
    """All are awaited before the first violation is raised."""
    await asyncio.wait(tasks)
    return [task.result() for task in tasks]


async def until(condition: Callable[[], bool]) -> None:
    """For what must come sooner or later; a case that waits for ever is ended by its runner."""
    while not condition():
        await asyncio.sleep(0.002)


STEPS: dict[Step, int] = {
    go_on: 16, several_calls: 8, go_on_exactly: 6, change_history: 8, ask_again: 6, ask_with_key: 5, ask_twice_at_once: 9,
    ask_in_parallel: 3, ask_for_several: 4, fail_one_of_two: 1, break_the_engine: 8, lose_connections: 2, hang_up: 4,
    given_twins: 3, change_tools: 4, start_anew: 4, previous_response: 2, prefill: 1, odd_version: 1, reward_a_leaf: 2,
}  # fmt: skip


def choose(rng: random.Random, without: Sequence[str] = ()) -> Step:
    steps = {step: weight for step, weight in STEPS.items() if step.__name__ not in without}
    return rng.choices(list(steps), weights=list(steps.values()))[0]
