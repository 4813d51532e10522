"""Turns in the air. A turn runs in its own task and belongs to everyone who waits for it: the same request in flight is one turn,
and it is cancelled only when the last waiter has left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from tokentrue.types import Reply, TurnEvent

T = TypeVar("T")


class Flight:
    """One turn being generated. `events` is filled where its first caller streams."""

    def __init__(self, work: Callable[[Flight], Coroutine[Any, Any, tuple[Reply, ...]]], *, streamed: bool) -> None:
        self.streamed = streamed
        self.events: asyncio.Queue[TurnEvent | None] = asyncio.Queue()
        self.waiters = 0
        self.task: asyncio.Task[tuple[Reply, ...]] = asyncio.create_task(work(self))
        self.task.add_done_callback(self._landed)

    def emit(self, event: TurnEvent) -> None:
        if self.streamed:
            self.events.put_nowait(event)

    def _landed(self, task: asyncio.Task[tuple[Reply, ...]]) -> None:
        if not task.cancelled():
            task.exception()  # seen: every waiter gets it, and there may be none left
        self.events.put_nowait(None)

    async def result(self) -> tuple[Reply, ...]:
        """Wait as one of several."""
        self.waiters += 1
        try:
            return await asyncio.shield(self.task)
        finally:
            await self.leave()

    async def leave(self) -> None:
        self.waiters -= 1
        if self.waiters <= 0 and not self.task.done():
            self.task.cancel()
            await asyncio.wait([self.task])


class Airspace(Generic[T]):
    """The flights of one session, by what was asked."""

    def __init__(self) -> None:
        self._flights: dict[T, Flight] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def get(self, key: T) -> Flight | None:
        return self._flights.get(key)

    def launch(self, key: T, work: Callable[[Flight], Coroutine[Any, Any, tuple[Reply, ...]]], *, streamed: bool) -> Flight:
        flight = Flight(work, streamed=streamed)
        self._flights[key] = flight

        def land(_: asyncio.Task[tuple[Reply, ...]]) -> None:
            if self._flights.get(key) is flight:
                del self._flights[key]

        flight.task.add_done_callback(land)
        return flight


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Runs `work` to its end even if the caller is cancelled meanwhile; the cancellation is delivered afterwards."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancelled = error
        except BaseException:
            break  # raised again by result(), unless we were cancelled
    if cancelled is not None:
        if not task.cancelled():
            task.exception()
        raise cancelled
    return task.result()
