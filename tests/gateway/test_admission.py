"""A full gateway lets generations wait: none of many clients starves, none waits for ever, and slots are never lost."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from tokentrue.gateway.admission import AdmissionGate
from tokentrue.gateway.asgi import HttpError
from tokentrue.gateway.config import GatewayConfig, GatewayLimits


def gate(**limits: Any) -> AdmissionGate:
    return AdmissionGate(GatewayConfig(model="m", admin_key="k", limits=GatewayLimits(**limits)))


async def generate(gate: AdmissionGate, session: str, order: list[str], seconds: float = 0.001) -> None:
    async with gate.admit(session):
        order.append(session)
        await asyncio.sleep(seconds)


async def test_of_many_clients_none_starves() -> None:
    """One session sends a hundred requests before each of forty others sends one."""
    queue, order = gate(in_flight=2, queue=1000, queue_s=60), list[str]()
    greedy = [asyncio.create_task(generate(queue, "greedy", order)) for _ in range(100)]
    await asyncio.sleep(0)
    others = [asyncio.create_task(generate(queue, f"s{i}", order)) for i in range(40)]
    await asyncio.gather(*greedy, *others)
    last = max(place for place, session in enumerate(order) if session != "greedy")
    assert last < 2 + 2 * 41, "the sessions take turns"
    assert [session for session in order if session != "greedy"] == [f"s{i}" for i in range(40)], "each in its order"
    assert Counter(order)["greedy"] == 100 and (queue.in_flight, queue.queued) == (0, 0)


async def test_requests_of_one_session_keep_their_order() -> None:
    queue, order = gate(in_flight=1), list[str]()

    async def take(number: int) -> None:
        async with queue.admit("s"):
            order.append(str(number))

    await asyncio.gather(*(take(number) for number in range(20)))
    assert order == [str(number) for number in range(20)]


async def test_the_queue_is_bounded_and_has_a_deadline() -> None:
    queue = gate(in_flight=1, queue=2, queue_s=0.05)
    async with queue.admit("a"):
        answers = await asyncio.gather(*(generate(queue, "b", []) for _ in range(3)), return_exceptions=True)
    assert [answer.status for answer in answers if isinstance(answer, HttpError)] == [429, 429, 429]
    assert "2 wait" in str(answers[2]) and "limits.queue_s" in str(answers[0])
    async with queue.admit("a"):  # nothing is left behind
        assert (queue.in_flight, queue.queued) == (1, 0)


async def test_without_a_queue_a_full_gateway_refuses_at_once() -> None:
    queue = gate(in_flight=1, queue=0)
    async with queue.admit("a"):
        with pytest.raises(HttpError, match="try again"):
            await generate(queue, "b", [])


async def test_a_gateway_that_closes_refuses_what_waits() -> None:
    queue = gate(in_flight=1)
    async with queue.admit("a"):
        waiting = asyncio.create_task(generate(queue, "b", []))
        await asyncio.sleep(0)
        queue.close()
        with pytest.raises(HttpError) as refused:
            await waiting
        assert refused.value.status == 503
    assert await queue.drain(1)


@pytest.mark.parametrize("seed", range(20))
async def test_clients_that_leave_at_any_moment_lose_no_slot(seed: int) -> None:
    dice = random.Random(seed)
    queue, order = gate(in_flight=3, queue=50, queue_s=0.02), list[str]()
    tasks: list[asyncio.Task[None]] = []
    for _ in range(150):
        tasks.append(asyncio.create_task(generate(queue, f"s{dice.randrange(8)}", order, dice.random() / 500)))
        if dice.random() < 0.5:
            await asyncio.sleep(dice.random() / 1000)
        if dice.random() < 0.4:
            dice.choice(tasks).cancel()
        assert queue.in_flight <= 3 and queue.queued <= 50
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (queue.in_flight, queue.queued) == (0, 0) and await queue.drain(1)


async def test_closing_at_the_moment_when_a_client_leaves() -> None:
    queue = gate(in_flight=1)
    async with queue.admit("a"):
        leaving, staying = (asyncio.create_task(generate(queue, "b", [])) for _ in range(2))
        await asyncio.sleep(0)
        leaving.cancel()
        queue.close()
        left, refused = await asyncio.gather(leaving, staying, return_exceptions=True)
    assert isinstance(left, asyncio.CancelledError)
    assert isinstance(refused, HttpError) and refused.status == 503
    assert (queue.in_flight, queue.queued) == (0, 0)
