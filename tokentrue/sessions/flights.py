"""Turns in the air. A turn runs in its own task and belongs to everyone who waits for it: the same request in flight is one turn,
and it is cancelled only when the last waiter has left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

from tokentrue.types import Reply, TurnEvent

T = TypeVar("T")
Work: TypeAlias = "Callable[[Flight], Coroutine[Any, Any, tuple[Reply, ...]]]"
Landed: TypeAlias = Callable[[BaseException | None], None]


class Flight:
    """One turn being generated. Where its first caller streams, events are emitted and `heard`.

    It lands inside its own task, before anyone who waits goes on: whoever hears of it finds the airspace free.
    """

    flying: ClassVar[int] = 0  # in this process

    def __init__(self, work: Work, landed: Landed, *, streamed: bool) -> None:
        Flight.flying += 1
        self.streamed = streamed
        self._events: list[TurnEvent] = []  # not yet heard
        self._listener: asyncio.Future[None] | None = None
        self.waiters = 0
        self.over = False
        self._landed = landed
        self._waiting: list[asyncio.Future[tuple[Reply, ...]]] = []
        self.task: asyncio.Task[tuple[Reply, ...]] = asyncio.create_task(self._fly(work))
        self.task.add_done_callback(self._see)

    def emit(self, event: TurnEvent) -> None:
        self._events.append(event)
        self._wake()

    def _wake(self) -> None:
        if self._listener is not None and not self._listener.done():
            self._listener.set_result(None)

    async def heard(self) -> list[TurnEvent]:
        """What was emitted since the last time, for the one caller that streams; nothing when the flight is over."""
        if not self._events and not self.over:
            self._listener = asyncio.get_running_loop().create_future()
            await self._listener
        events, self._events = self._events, []
        return events

    async def _fly(self, work: Work) -> tuple[Reply, ...]:
        try:
            replies = await work(self)
        except BaseException as error:
            self._land(error)
            raise
        self._land(None, replies)
        return replies

    def _land(self, error: BaseException | None, replies: tuple[Reply, ...] = ()) -> None:
        self.over = True
        Flight.flying -= 1
        landed, self._landed = self._landed, _nothing  # it knows this flight: without it, nothing is left for the collector
        landed(error)
        for waiter in self._waiting:
            if waiter.done():
                continue
            if error is None:
                waiter.set_result(replies)
            elif isinstance(error, asyncio.CancelledError):
                waiter.cancel()
            else:
                waiter.set_exception(error)
        self._wake()

    def _see(self, task: asyncio.Task[tuple[Reply, ...]]) -> None:
        if not task.cancelled():
            task.exception()  # seen: every waiter gets it, and there may be none left
        elif not self.over:
            self._land(asyncio.CancelledError())  # before its first step

    async def result(self) -> tuple[Reply, ...]:
        """Wait as one of several."""
        self.join()
        try:
            return await self.outcome()
        finally:
            await self.leave()

    async def outcome(self) -> tuple[Reply, ...]:
        if self.task.done():
            return self.task.result()
        waiter: asyncio.Future[tuple[Reply, ...]] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            return await waiter
        finally:
            self._waiting.remove(waiter)

    def join(self) -> None:
        """Whoever joins leaves."""
        self.waiters += 1

    async def leave(self) -> None:
        self.waiters -= 1
        if self.waiters <= 0 and not self.over:
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

    def launch(self, key: T, work: Work, landed: Landed, *, streamed: bool) -> Flight:
        """`landed` is told how it ended, with None for well."""

        def land(error: BaseException | None) -> None:
            if self._flights.get(key) is flight:
                del self._flights[key]
            landed(error)

        flight = self._flights[key] = Flight(work, land, streamed=streamed)
        return flight


def _nothing(error: BaseException | None) -> None:
    """Has landed."""


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
