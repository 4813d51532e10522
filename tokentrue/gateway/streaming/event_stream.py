"""A client's open event stream: turn events in, the dialect's server-sent events out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from tokentrue.gateway.asgi import EVENTS, Send
from tokentrue.gateway.dialects import Encoder, HttpProblem
from tokentrue.types import TurnEvent


class EventStream:
    """Holds the status back until the first token or keep-alive, so that early failures have their own status."""

    def __init__(self, send: Send, encoder: Encoder) -> None:
        self._send, self._encoder = send, encoder
        self._held = b""
        self._last_write = time.monotonic()
        self.started = self.ended = False

    async def feed(self, events: Sequence[TurnEvent]) -> None:
        """Writes all events at once."""
        data = b"".join(map(self._encoder.feed, events))
        if self.started or any(event.token_ids or event.delta or event.reply for event in events):
            await self._write(data)
        else:
            self._held += data

    async def _write(self, data: bytes) -> None:
        if not self.started:
            self.started = True
            data, self._held = self._held + data, b""
            await self._send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        if data:
            self._last_write = time.monotonic()
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    @contextmanager
    def keep_alive(self, every_s: float) -> Generator[None, None, None]:
        """While the block runs, sends a keep-alive after every `every_s` seconds without output."""

        async def ping() -> None:
            while True:
                await asyncio.sleep(max(0.0, self._last_write + every_s - time.monotonic()))
                if time.monotonic() - self._last_write >= every_s:
                    await self._write(self._encoder.ping)

        pings = asyncio.create_task(ping())
        try:
            yield
        finally:
            pings.cancel()

    async def finish(self) -> None:
        await self._write(self._encoder.finish())
        await self._end()

    async def fail(self, problem: HttpProblem) -> None:
        """Ends a started stream with the dialect's error event."""
        await self._write(self._encoder.error(problem))
        await self._end()

    async def _end(self) -> None:
        self.ended = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
