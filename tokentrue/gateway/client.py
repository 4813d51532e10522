"""The client's end of a turn: its open event stream, and whether it is still there."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from tokentrue.gateway.asgi import EVENTS, ClientGone, Receive, Send
from tokentrue.gateway.dialects import Encoder, Problem
from tokentrue.types import TurnEvent

WATCH_AFTER_S = 0.1  # and at most twice that; a turn faster than this is over before its client could leave


class Line:
    """An open event stream. The status is held back until the first token is there, so that early failures keep their status."""

    def __init__(self, send: Send, encoder: Encoder) -> None:
        self._send, self._encoder = send, encoder
        self._held = b""
        self.started = False
        self.last = time.monotonic()

    async def feed(self, event: TurnEvent) -> None:
        data = self._encoder.feed(event)
        if not self.started and not event.token_ids and event.delta is None and event.reply is None:
            self._held += data
            return
        await self._write(data)

    async def _write(self, data: bytes) -> None:
        if not self.started:
            self.started = True
            data, self._held = self._held + data, b""
            await self._send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        if data:
            self.last = time.monotonic()
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def keep_alive(self) -> None:
        await self._write(self._encoder.ping)

    async def finish(self) -> None:
        await self._write(self._encoder.finish())
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def fail(self, problem: Problem) -> None:
        await self._write(self._encoder.error(problem))
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


class Watching:
    """The clients that nobody watches yet: a turn that is soon over needs no watch, and one timer for all sees to the others."""

    def __init__(self) -> None:
        self._fresh: set[Leaving] = set()
        self._older: set[Leaving] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, one: Leaving) -> None:
        self._fresh.add(one)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER_S, self._look)

    def discard(self, one: Leaving) -> None:
        self._fresh.discard(one)
        self._older.discard(one)

    def _look(self) -> None:
        for one in self._older:
            one.start()
        self._older, self._fresh, self._timer = self._fresh, set(), None
        if self._older:
            self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER_S, self._look)


class Leaving:
    """Watches for a client that goes away, and cancels the enclosed work then; `ClientGone` comes out instead.

    It starts late: most turns are over, or have begun to answer, before it is needed. On a stream it also sends the keep-alives.
    """

    def __init__(self, watching: Watching, receive: Receive, *, line: Line | None = None, every_s: float | None = None) -> None:
        self._watching, self._receive, self._line, self._every_s = watching, receive, line, every_s
        self._task: asyncio.Task[None] | None = None
        self._gone = False

    def __enter__(self) -> None:
        self._work = asyncio.current_task()
        self._watching.add(self)

    def start(self) -> None:
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            try:
                message = await asyncio.wait_for(self._receive(), self._every_s)
            except TimeoutError:
                assert self._line is not None and self._every_s is not None
                if time.monotonic() - self._line.last >= self._every_s:
                    await self._line.keep_alive()
                continue
            if message["type"] == "http.disconnect":
                self._gone = True
                assert self._work is not None
                self._work.cancel()
                return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._watching.discard(self)
        if self._task is not None:
            self._task.cancel()
        if self._gone and isinstance(error, asyncio.CancelledError):
            assert self._work is not None
            self._work.uncancel()
            raise ClientGone from None
