"""Concurrent equal requests share one turn. It runs in a task, which is cancelled when its last caller leaves; from
then on the same request starts a new turn. A complete turn that is being written is not cancelled: a returning caller
joins it, so no key names two answers."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import TypeVar

from tokentrue.errors import SessionConflict
from tokentrue.images import ImageFile
from tokentrue.sessions.stages.pinning import PinnedRequest
from tokentrue.sessions.tree import Outcome
from tokentrue.types import Reply, Sampling, TurnEvent, TurnRequest

T = TypeVar("T")
Work = Coroutine[None, None, T]


class InFlightTurn:
    """If the first caller streams, `emit` buffers events."""

    def __init__(
        self, identity: bytes, request: TurnRequest, sampling: Sampling, pinned: PinnedRequest, *, streamed: bool
    ) -> None:
        self.identity, self.request, self.sampling, self.pinned = identity, request, sampling, pinned
        self.conversation, self.streamed = pinned.conversation, streamed
        self.request_keys: list[str] = []  # of all callers, the first caller's first
        self.outcome_if_cancelled: Outcome = "disconnected"
        self.is_complete = False  # sampled and parsed, not yet written
        self.new_images: Sequence[ImageFile] = ()  # that the record lacks
        self._callers, self._is_cancelled, self._is_read = 0, False, streamed
        self._events: list[TurnEvent] = []  # not read yet
        self._reader: asyncio.Future[None] | None = None  # set to wake the streaming caller

    def start(self, work: Work[tuple[Reply, ...]], group: "SingleFlight") -> None:
        self._group, self._task = group, asyncio.create_task(work)
        self._task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[tuple[Reply, ...]]) -> None:
        self._group.finish(self)
        self._wake_reader()
        if not task.cancelled():
            task.exception()  # retrieved here, because there may be no caller left to raise it to

    def emit(self, event: TurnEvent) -> None:
        if self._is_read:
            self._events.append(event)
            self._wake_reader()

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def add_caller(self, request_key: str | None) -> None:
        """The caller must `wait` or read `events`."""
        self._callers += 1
        if request_key is not None and request_key not in self.request_keys:
            self.request_keys.append(request_key)

    async def wait(self) -> tuple[Reply, ...]:
        try:
            return await self._result()
        finally:
            await self._leave()

    async def events(self) -> AsyncGenerator[list[TurnEvent]]:
        """All since the last read; raises the turn's error, if it failed."""
        try:
            while self._events or not self._task.done():
                if not self._events:
                    self._reader = asyncio.get_running_loop().create_future()
                    await self._reader
                events, self._events = self._events, []
                if events:
                    yield events
            await self._result()
        finally:
            self._is_read = False
            await self._leave()

    async def _result(self) -> tuple[Reply, ...]:
        try:
            return await asyncio.shield(self._task)
        except asyncio.CancelledError:
            if self._task.cancelled() and self.outcome_if_cancelled == "deleted":
                raise SessionConflict("the session was deleted while this turn was in flight") from None
            raise

    async def _leave(self) -> None:
        self._callers -= 1
        if self._callers <= 0:
            await self.cancel("disconnected")

    async def cancel(self, outcome: Outcome) -> None:
        if self._task.done():
            return
        # A second cancellation would interrupt the commit of what was sampled.
        if not self._is_cancelled and not self.is_complete:
            self._is_cancelled, self.outcome_if_cancelled = True, outcome
            self._group.remove(self)
            self._task.cancel()
        await asyncio.wait([self._task])


class SingleFlight:
    def __init__(self) -> None:
        self._turns: dict[bytes, InFlightTurn] = {}  # those that can be joined
        self._running: set[InFlightTurn] = set()  # and those that are being cancelled

    def __len__(self) -> int:
        return len(self._running)

    def find(self, identity: bytes) -> InFlightTurn | None:
        return self._turns.get(identity)

    def find_key(self, request_key: str) -> InFlightTurn | None:
        return next((turn for turn in self._turns.values() if request_key in turn.request_keys), None)

    def start(self, turn: InFlightTurn, work: Work[tuple[Reply, ...]]) -> None:
        self._turns[turn.identity] = turn
        self._running.add(turn)
        turn.start(work, self)

    def finish(self, turn: InFlightTurn) -> None:
        self.remove(turn)
        self._running.discard(turn)

    def remove(self, turn: InFlightTurn) -> None:
        if self._turns.get(turn.identity) is turn:
            del self._turns[turn.identity]

    async def cancel_all(self, outcome: Outcome) -> None:
        await asyncio.gather(*(turn.cancel(outcome) for turn in list(self._running)))


async def run_to_completion(work: Work[T]) -> T:
    """Even if the caller is cancelled, which is raised afterwards."""
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
            break  # raised again by result(), unless the caller was cancelled
    if cancelled is not None:
        if not task.cancelled():
            task.exception()
        raise cancelled
    return task.result()
