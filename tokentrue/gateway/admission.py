"""Admission control: generations in flight, a queue that is fair to sessions, and the pause while weights change."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from tokentrue.gateway.asgi import HttpError
from tokentrue.gateway.config import GatewayConfig


class AdmissionGate:
    def __init__(self, config: GatewayConfig) -> None:
        self._limits, self._pause_wait_s = config.limits, config.pause_wait_s
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()
        self.in_flight = self.waiting = 0
        self._queue: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # by session; the next one first
        self.closing = False

    @property
    def queued(self) -> int:
        return sum(map(len, self._queue.values()))

    @property
    def paused(self) -> bool:
        return not self._open.is_set()

    def pause(self) -> None:
        self._open.clear()

    def resume(self) -> None:
        self._open.set()

    def close(self) -> None:
        self.closing = True
        self._open.set()
        for waiting in self._queue.values():
            for admitted in waiting:
                if not admitted.done():  # the client disconnected and its task has not run yet
                    admitted.set_exception(stopping())
        self._queue.clear()

    async def drain(self, timeout_s: float) -> bool:
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    @asynccontextmanager
    async def admit(self, session_id: str) -> AsyncGenerator[None]:
        """Call it after `wait_for_resume`."""
        if self.in_flight < self._limits.in_flight and not self._queue and not self.closing:
            self._begin()
        else:
            await self._wait_in_queue(session_id)
        try:
            yield
        finally:
            self._end()

    def _begin(self) -> None:
        self.in_flight += 1
        self._idle.clear()

    def _end(self) -> None:
        self.in_flight -= 1
        while self._queue and self.in_flight < self._limits.in_flight:
            session_id, waiting = self._queue.popitem(last=False)
            admitted = waiting.popleft()
            if waiting:
                self._queue[session_id] = waiting  # the other sessions come first
            if not admitted.done():
                self._begin()
                admitted.set_result(None)
        if not self.in_flight:
            self._idle.set()

    async def _wait_in_queue(self, session_id: str) -> None:
        if self.closing:
            raise stopping()
        if self.queued >= self._limits.queue:
            raise full(f"{self.in_flight} generations are in flight and {self.queued} wait; try again")
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.setdefault(session_id, deque()).append(admitted)
        try:
            async with asyncio.timeout(self._limits.queue_s):
                await admitted
        except BaseException as error:
            if admitted.done() and not admitted.cancelled() and admitted.exception() is None:
                self._end()  # admitted just as its client disconnected or its wait timed out
            elif (waiting := self._queue.get(session_id)) and admitted in waiting:
                waiting.remove(admitted)
                if not waiting:
                    del self._queue[session_id]
            if isinstance(error, TimeoutError):
                waited = f"none ended within {self._limits.queue_s:g} s (limits.queue_s)"
                raise full(f"{self.in_flight} generations are in flight and {waited}; try again") from None
            raise

    async def wait_for_resume(self) -> None:
        if not self.paused:
            return
        if self.waiting + self.in_flight >= self._limits.in_flight:
            raise full("paused, and enough generations wait; try again", retry_after_s=5.0)
        self.waiting += 1
        try:
            await asyncio.wait_for(self._open.wait(), self._pause_wait_s)
        except TimeoutError:
            message = "generation is paused by the administrator; try again"
            raise HttpError(503, "paused", message, retry_after_s=10.0) from None
        finally:
            self.waiting -= 1


def full(message: str, *, retry_after_s: float = 1.0) -> HttpError:
    return HttpError(429, "too_many_in_flight", message, retry_after_s=retry_after_s)


def stopping() -> HttpError:
    return HttpError(503, "shutting_down", "the gateway is shutting down; send this again", retry_after_s=1.0)
