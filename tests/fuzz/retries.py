"""Steps about keys, equal requests in flight, SDK retries, and a gateway that is killed meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from tests.fuzz.case import Asked, Case, all_of, next_messages, until
from tests.fuzz.comparable import comparable
from tests.fuzz.engine import Generation
from tests.fuzz.oracle import Violation, join_parts, short
from tokentrue.conformance.agents.messages import Message
from tokentrue.conformance.agents.streams import Heard


async def expect_recorded(case: Case, asked: Asked, whole: dict[str, Any], **headers: str) -> None:
    """A retry under the key gets the recorded answer and adds nothing."""
    count = len(case.log)
    again = await case.send(asked, **headers)
    if again.status != 200 or len(case.log) != count:
        raise Violation(
            "a keyed retry adds nothing",
            f"{again.status}, {len(case.log) - count} more generations, {short(again.whole)}",
        )
    if comparable(asked.dialect, case.whole(asked, again)) != comparable(asked.dialect, whole):
        raise Violation(
            "a keyed retry gets the recorded answer", f"{short(whole)}\n  {short(again.whole or again.events)}"
        )


def compare(asked: Asked, other: Asked, wholes: Sequence[dict[str, Any]]) -> None:
    one, two = (comparable(asked.dialect, whole) for whole in wholes)
    if one != two:
        first, second = ("streamed" if request.stream else "whole" for request in (asked, other))
        raise Violation("a streamed answer is the whole answer", f"\n  {first}: {one}\n  joined, {second}: {two}")


async def ask_with_key(case: Case) -> None:
    """A retry under the same key gets the recorded answer; another request under it is refused."""
    asked = case.request(next_messages(case))
    asked.key = f"retry-{case.session}-{case.rng.getrandbits(40):x}"
    case.plan()
    start = len(case.log)
    heard = await case.send(asked)
    case.judged(asked, heard, join_parts(case.log[start:]))
    if case.rng.random() < 0.2:
        await case.compare_with_whole(asked, heard)
    await expect_recorded(case, asked, case.whole(asked, heard))
    if case.rng.random() < 0.3:
        await expect_conflict(case, asked)


async def expect_conflict(case: Case, asked: Asked) -> None:
    other = replace(asked, messages=[*asked.messages, Message(role="user", text=case.some_text())], stream=False)
    count = len(case.log)
    heard = await case.send(other)
    if heard.status != 409 or len(case.log) != count:
        raise Violation(
            "a key names one request", f"{heard.status} {short(heard.whole)}, {len(case.log) - count} generations"
        )


async def ask_twice_at_once(case: Case) -> None:
    """Identical requests in flight are one turn; one of them may be streamed and the other not."""
    asked = case.request(next_messages(case))
    asked.key = None
    other = replace(asked, stream=not asked.stream) if case.rng.random() < 0.7 else asked
    if case.rng.random() < 0.3:  # each with a key of its own: both keys must find the answer later
        asked = replace(asked, key=f"one-{case.session}-{case.rng.getrandbits(40):x}")
        other = replace(other, key=f"two-{case.session}-{case.rng.getrandbits(40):x}")
    await join_two(case, asked, other)


async def join_two(case: Case, asked: Asked, other: Asked) -> list[dict[str, Any]]:
    """The whole answers of two equal requests that were in flight together; none where the second came too late."""
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
        raise Violation(
            "a good request is answered", f"{[one.status for one in heard]} {short(heard[0].whole or heard[1].whole)}"
        )
    if len(made) == 1:
        compare(asked, other, wholes)
        case.judged(asked, heard[0], made)
        if other.key is not None:
            await expect_recorded(case, other, wholes[1])
        return wholes
    case.note("# the second came too late to be joined")
    for one in made:
        case.judge_prompt(asked, one)
    return []


async def ask_many_at_once(case: Case) -> None:
    """Several equal requests in flight, of which some clients leave: the others are answered, and all of them alike."""
    rng = case.rng
    asked = case.request(next_messages(case))
    several = [
        replace(
            asked,
            stream=rng.random() < 0.5,
            key=f"many-{case.session}-{index}-{rng.getrandbits(40):x}" if rng.random() < 0.5 else None,
        )
        for index in range(rng.randint(3, 5))
    ]
    hold, start = asyncio.Event(), len(case.log)
    for _ in several:
        case.plan(hold=hold, after=rng.randint(0, 6))
    tasks: list[asyncio.Task[Heard]] = []
    for request in several:
        tasks.append(asyncio.ensure_future(case.send(request)))
        await until(lambda: len(case.log) > start or any(task.done() for task in tasks))
    await case.wait_in_flight(len(several))
    leaving = rng.sample(range(len(several)), rng.randint(1, len(several) - 1))
    await leave(tasks, leaving)
    await asyncio.sleep(0.02)
    hold.set()
    stayed = [index for index in range(len(several)) if index not in leaving]
    heard = await all_of([tasks[index] for index in stayed])
    case.world.engine.plans[case.session].clear()
    made = join_parts(case.log[start:])
    if len(made) != 1:
        raise Violation("equal requests in flight are one turn", f"{len(several)} requests, {len(made)} generations")
    case.judged(several[stayed[0]], heard[0], made)
    wholes = [case.whole(several[index], one) for index, one in zip(stayed, heard, strict=True)]
    for index, whole in zip(stayed, wholes, strict=True):
        compare(several[stayed[0]], several[index], [wholes[0], whole])
        if several[index].key is not None and rng.random() < 0.5:
            await expect_recorded(case, several[index], whole)


async def leave(tasks: Sequence[asyncio.Task[Heard]], indexes: Sequence[int]) -> None:
    """These clients close their connections."""
    for index in indexes:
        tasks[index].cancel()
    await asyncio.wait([tasks[index] for index in indexes])


async def retry_as_sdks_do(case: Case) -> None:
    """The vendors' SDKs count their retries in a header: a retry after a lost answer gets it; the same body asked anew
    does not."""
    asked = case.request(next_messages(case))
    asked.key = None
    case.plan()
    start = len(case.log)
    heard = await case.send(asked, **{"x-stainless-retry-count": "0"})
    case.judged(asked, heard, join_parts(case.log[start:]))
    await expect_recorded(case, asked, case.whole(asked, heard), **{"x-stainless-retry-count": "1"})
    if case.rng.random() < 0.5:
        case.plan()
        start = len(case.log)
        anew = await case.send(asked, **{"x-stainless-retry-count": "0"})
        case.judged(asked, anew, join_parts(case.log[start:]))
        await expect_recorded(case, asked, case.whole(asked, anew), **{"x-stainless-retry-count": "2"})


@dataclass(frozen=True, slots=True, kw_only=True)
class BeforeKill:
    """What a case leaves to a gateway that is about to be killed: recorded answers, and a request that is not answered
    yet."""

    recorded: Sequence[tuple[Asked, dict[str, Any]]]
    unanswered: Asked
    task: asyncio.Task[Heard | None]
    generations: Sequence[Generation]


async def prepare_kill(case: Case) -> BeforeKill:
    asked = replace(case.request(next_messages(case)), key=f"one-{case.session}-{case.rng.getrandbits(40):x}")
    other = replace(asked, key=f"two-{case.session}-{case.rng.getrandbits(40):x}")
    wholes = await join_two(case, asked, other)
    recorded = list(zip((asked, other), wholes, strict=True)) if wholes else []
    open_one = replace(case.request(next_messages(case)), key=f"open-{case.session}-{case.rng.getrandbits(40):x}")
    start = len(case.log)
    case.plan(hold=asyncio.Event(), after=case.rng.randint(1, 8))
    task = asyncio.ensure_future(send_until_killed(case, open_one))
    await until(lambda: len(case.log) > start or task.done())
    if case.log[start:]:
        await case.log[start].arrived.wait()
    return BeforeKill(recorded=recorded, unanswered=open_one, task=task, generations=case.log[start:])


async def send_until_killed(case: Case, asked: Asked) -> Heard | None:
    try:
        return await case.send(asked)
    except (aiohttp.ClientError, ConnectionError, TimeoutError):
        return None


STOPPING = 503  # of workers whose supervisor was killed: they stop, and say that the request must be sent again


async def check_after_kill(case: Case, before: BeforeKill) -> None:
    """Every acknowledged answer is found under its keys; what was not answered is answered now, once."""
    heard = await before.task
    if heard is not None and heard.whole is not None and heard.status != STOPPING:
        raise Violation(
            "a killed gateway answers nothing that was not recorded", f"{heard.status} {short(heard.whole)}"
        )
    case.uncertain += before.generations
    case.world.engine.plans[case.session].clear()
    for asked, whole in before.recorded:
        await expect_recorded(case, asked, whole)
    case.plan()
    start = len(case.log)
    again = await case.send(before.unanswered)
    case.judged(before.unanswered, again, join_parts(case.log[start:]))
    await expect_recorded(case, before.unanswered, case.whole(before.unanswered, again))
