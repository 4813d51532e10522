"""What a turn leaves for later is never seen missing, and a turn that is over leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from tests.turn.test_matching import session_of
from tests.turn.test_turn import heard
from tests.turn.world import OPENING, TOOLS, sampled_turn
from tokentrue.sessions import Limits
from tokentrue.sessions.flights import Flight
from tokentrue.sessions.spare_time import Meanwhile, afterwards
from tokentrue.types import TurnRequest


def answer(number: int) -> Any:
    return sampled_turn(number, tokens=160, name="own")


async def test_a_turn_is_in_the_tree_as_soon_as_anyone_looks() -> None:
    session, _ = session_of(answer(1))
    reply = await session.chat(OPENING, TOOLS)
    assert reply.node not in session._tree.nodes  # nobody had to wait for it
    assert reply.node in session.tree.nodes and len(session.samples()) == 1


async def test_a_turn_enters_the_tree_by_itself_when_the_answer_is_out() -> None:
    session, _ = session_of(answer(1))
    reply = await session.chat(OPENING, TOOLS)
    for _ in range(3):
        await asyncio.sleep(0)
    assert reply.node in session._tree.nodes


async def test_a_turn_that_was_answered_is_no_longer_in_flight() -> None:
    session, _ = session_of(answer(1), answer(2), limits=Limits(max_in_flight=1))
    first = await session.chat(OPENING, TOOLS)
    second = await session.chat(OPENING, TOOLS)
    assert first.node != second.node and second.root == "retry"


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_turn_leaves_nothing_to_the_collector(streamed: bool) -> None:
    session, _ = session_of(answer(1))
    gc.collect()
    gc.disable()
    try:
        request = TurnRequest(messages=OPENING, tools=TOOLS)
        await (heard(session, request) if streamed else session.turn(request))
        for _ in range(3):
            await asyncio.sleep(0)
        assert not [thing for thing in gc.get_objects() if type(thing) is Flight]
    finally:
        gc.enable()


async def test_meanwhile_works_in_the_next_round_or_when_asked_and_once() -> None:
    done: list[int] = []

    def work() -> int:
        done.append(1)
        return len(done)

    soon, asked = Meanwhile(work), Meanwhile(work)
    assert asked.result() == 1 and done == [1]
    await asyncio.sleep(0)
    assert done == [1, 1] and (soon.result(), asked.result()) == (2, 1)


async def test_what_fails_meanwhile_fails_where_it_is_asked_for() -> None:
    def work() -> None:
        raise ValueError("broken")

    meanwhile = Meanwhile(work)
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match="broken"):
        meanwhile.result()


async def test_afterwards_is_behind_whoever_was_woken_in_the_same_round() -> None:
    order: list[str] = []
    woken = asyncio.get_running_loop().create_future()

    async def waiter() -> None:
        await woken
        order.append("answer")

    task = asyncio.create_task(waiter())
    await asyncio.sleep(0)
    afterwards(lambda: order.append("work"))
    woken.set_result(None)
    await task
    await asyncio.sleep(0)
    assert order == ["answer", "work"]
