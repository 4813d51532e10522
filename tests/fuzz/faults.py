"""Steps in which the engine or the connection fails."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tests.fuzz.case import ENGINE_AT_FAULT, Asked, Case, next_messages, until
from tests.fuzz.engine import STREAM_FAULTS, VERSIONS, WHOLE_FAULTS
from tests.fuzz.oracle import Violation, join_parts, short
from tests.fuzz.streams import assemble_strictly
from tokentrue.conformance.agents.dialects import CHAT
from tokentrue.conformance.agents.streams import Broken, Heard, Unsound

MUST_FAIL = ("error_event", "garbage", "no_finish", "rewrite_final", "disagree", "malformed")


async def fail_one_of_two(case: Case) -> None:
    """One of two streamed answers fails: a retry under the same key must not return half of them."""
    asked = case.request(next_messages(case))
    asked.dialect, asked.n, asked.stream, asked.fields = CHAT, 2, True, {"model": "m"}
    asked.key = f"half-{case.session}-{case.rng.getrandbits(40):x}"
    case.plan()
    case.plan(fault="error_event", after=2)
    start = len(case.log)
    heard = await case.send(asked)
    expect_failure(case, asked, heard)
    case.uncertain += [one for one in case.log[start:] if not one.plan.fault]  # the other one is cancelled
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
            raise Violation(
                "an engine's fault is not hidden", f"the stream ended well; fault {case.log[-1].plan.fault}"
            )
    elif heard.status not in ENGINE_AT_FAULT:
        raise Violation(
            "an engine's fault is a 502", f"{heard.status} {short(heard.whole)}; fault {case.log[-1].plan.fault}"
        )


def broke(asked: Asked, heard: Heard) -> bool:
    """The stream ended in an error."""
    try:
        assemble_strictly(asked.dialect, heard.events)
    except Broken:
        return True
    except Unsound as error:
        raise Violation("a stream is sound", str(error)) from None
    return False


async def break_the_engine(case: Case) -> None:
    """The engine fails in one of many ways; what it had reported is kept; then the same is asked again."""
    rng = case.rng
    asked = case.request(next_messages(case))
    fault = rng.choice(STREAM_FAULTS if asked.stream else WHOLE_FAULTS)
    case.note(f"# fault {fault}")
    case.plan(fault=fault, after=rng.randint(0, 8))
    if fault == "drop" and not asked.stream:  # nothing was sampled, so that it may be asked for again
        case.plan()
    start = len(case.log)
    heard = await case.send(asked)
    case.world.engine.plans[case.session].clear()
    if fault.startswith(MUST_FAIL) or (fault == "excess" and case.log[start:] and case.log[start].plan.fault):
        expect_failure(case, asked, heard)
    elif heard.status == 200 and (heard.whole is not None or not broke(asked, heard)):
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
    async with case.world.gateway.open(case.path(asked), body) as reading:
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
    task = asyncio.ensure_future(case.world.gateway.post(case.path(asked), case.body(asked)))
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
    more = {"model": "m", "messages": [{"role": "user", "content": "more"}]}
    after = await case.world.gateway.post(case.path(replace(asked, dialect=CHAT)), more)
    if after.status not in {404, 409}:
        raise Violation("an ended session admits nothing", f"{after.status} {short(after.whole)}")


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


def partial_texts(dialect: str, events: Sequence[Any]) -> list[str]:
    """The pieces of text that a client has been sent, per field: each must be in what was sampled."""
    fields: dict[Any, str] = {}
    for event in events:
        if not isinstance(event, dict):
            continue
        for choice in event.get("choices") or ():
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                key = (choice["index"], name)
                fields[key] = fields.get(key, "") + (delta.get(name) or "")
        for candidate in event.get("candidates") or ():
            for part in candidate["content"]["parts"]:
                key = ("google", bool(part.get("thought")))
                fields[key] = fields.get(key, "") + part.get("text", "")
        kind = event.get("type")
        if kind and kind.startswith(("response.output_text.", "response.reasoning_")) and kind.endswith("text.delta"):
            key = (event["output_index"], kind)
            fields[key] = fields.get(key, "") + event["delta"]
        if kind == "content_block_delta":
            delta = event["delta"]
            key = (event["index"], delta["type"])
            fields[key] = fields.get(key, "") + (delta.get("text") or delta.get("thinking") or "")
    return [text for text in fields.values() if text]
