"""Work that nobody waits for: done while the engine samples, or when the answer is out."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from tokentrue.sessions.flights import Flight

T = TypeVar("T")

_give_way: Callable[[], None] = getattr(os, "sched_yield", lambda: None)


async def let_out() -> None:
    """Lets out what was just emitted, though more may be waiting to be done: one round of the loop for whoever sends it, one for the
    socket, and then the core to the one who was woken by it, who may be queued behind us on a machine with few."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    _give_way()


class Meanwhile(Generic[T]):
    """Done in the next round of the loop, when the request to the engine is on its way, and at the latest when it is asked for."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._result: tuple[T] | None = None
        asyncio.get_running_loop().call_soon(self._do)

    def _do(self) -> None:
        with suppress(Exception):  # raised again where the result is asked for
            self.result()

    def result(self) -> T:
        if self._result is None:
            self._result = (self._work(),)
        return self._result[0]


def afterwards(work: Callable[[], object]) -> None:
    """Runs `work` two rounds of the loop from now: in the round between, whoever waits for this turn goes on and sends the answer."""
    loop = asyncio.get_running_loop()
    loop.call_soon(loop.call_soon, _run, work)


def _run(work: Callable[[], object]) -> None:
    if not Flight.flying:
        _give_way()  # on a machine with few cores the one who was woken by our answer may be queued behind us
    work()
