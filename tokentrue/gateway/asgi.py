"""ASGI: bodies within their limits, JSON, events and errors, clients that disconnect."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, MutableMapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from starlette.types import Receive, Scope, Send

from tokentrue.errors import JournalError, TokenTrueError
from tokentrue.gateway.dialects.base import Dialect, Encoder, HttpError, encode
from tokentrue.types import TurnEvent

RawHeaders = list[tuple[bytes, bytes]]

LOG = logging.getLogger("tokentrue.gateway")
STREAM = "tokentrue.stream"  # scope key: the event stream of this request, once there is one
JSON = (b"content-type", b"application/json")
EVENTS: RawHeaders = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

LONGEST = 600


def problem_from(error: BaseException) -> HttpError:
    if isinstance(error, HttpError):
        return error
    if not isinstance(error, TokenTrueError):
        return HttpError(500, "internal", "the gateway failed on this request; its log has the cause")
    if isinstance(error, JournalError):  # its text names the store, which clients must not see
        message = "the gateway's record cannot be read or written now; send this again. The gateway's log has the cause"
        return HttpError(error.status, error.code, message, retry_after_s=1.0)
    said = str(error)[:LONGEST]
    return HttpError(error.status, error.code, said, field=error.field, retry_after_s=error.retry_after_s)


def log_line(event: str, level: int = logging.INFO, **fields: Any) -> None:
    if LOG.isEnabledFor(level):
        LOG.log(level, encode({"event": event, **fields}).decode())


class ClientGone(Exception):
    pass


class WatchedSend:
    """`status`: of the reply; 0 before that."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0

    def __call__(self, message: MutableMapping[str, Any]) -> Awaitable[None]:
        self.status = message.get("status", self.status)
        return self._send(message)


def read_header(headers: Iterable[tuple[bytes, bytes]], wanted: bytes) -> str | None:
    return next((value.strip().decode("latin-1") for name, value in headers if name == wanted and value.strip()), None)


class BodyBudget:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.used = 0

    @asynccontextmanager
    async def read(self, scope: Scope, receive: Receive, limit: int) -> AsyncGenerator[bytes]:
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            if self.used + size > self._limit:
                message = "the bodies of other requests fill the memory for them (limits.bodies_bytes); try again"
                raise HttpError(429, "too_many_bytes_in_flight", message, retry_after_s=1.0)
            taken += size
            self.used += size

        try:
            yield await read_body(scope, receive, limit, take)
        finally:
            self.used -= taken


async def read_body(scope: Scope, receive: Receive, limit: int, take: Callable[[int], None] | None = None) -> bytes:
    too_large = HttpError(413, "body_too_large", f"the body is larger than {limit} bytes (limits.body_bytes)")
    declared = read_header(scope["headers"], b"content-length")
    if declared is not None and declared.isdecimal() and int(declared) > limit:
        raise too_large
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part: bytes = message.get("body", b"")
        if part:
            parts.append(part)
            size += len(part)
            if size > limit:
                raise too_large
            if take is not None:
                take(len(part))
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def send_bytes(send: Send, status: int, body: bytes, headers: RawHeaders) -> None:
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, status: int, value: Any, *headers: tuple[bytes, bytes]) -> None:
    await send_bytes(send, status, encode(value), [JSON, *headers])


async def answer_errors(
    app: Callable[[Scope, Receive, WatchedSend], Awaitable[None]],
    scope: Scope,
    receive: Receive,
    send: WatchedSend,
    *,
    dialect: type[Dialect],
    errors: Any,
) -> None:
    """As a reply in the dialect, or as the last event of a started stream."""
    try:
        await app(scope, receive, send)
        return
    except ClientGone:
        errors.labels(dialect.name, "client_gone").inc()
        return
    except asyncio.CancelledError:  # the server is stopping and the grace period is over
        if send.status:
            return
        problem = HttpError(503, "shutting_down", "the gateway is stopping; send this again", retry_after_s=1.0)
    except Exception as error:
        problem = problem_from(error)
        if problem.status == 500:
            LOG.error("a request failed", exc_info=error)
        elif isinstance(error, JournalError):  # do not tell the client where the record is
            LOG.error("%s", error)
    errors.labels(dialect.name, problem.code).inc()
    stream: EventStream | None = scope.get(STREAM)
    if not send.status:
        # SDKs retry 409 and 429 by themselves: a conflict is permanent, a full queue is not.
        headers: RawHeaders = [(b"x-should-retry", b"false")] if problem.status == 409 else []
        if problem.retry_after_s is not None:
            headers = [(b"retry-after", b"%d" % max(1, round(problem.retry_after_s)))]
        await send_json(send, problem.status, dialect.build_error(problem), *headers)
    elif stream is not None and not stream.ended:
        await stream.end(problem)


class EventStream:
    """Holds the status back until the first token or keep-alive: early failures have their own status."""

    def __init__(self, send: Send, encoder: Encoder) -> None:
        self._send, self._encoder = send, encoder
        self._held = b""
        self._last_write = time.monotonic()
        self.started = self.ended = False

    async def feed(self, events: Sequence[TurnEvent]) -> None:
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
    def keep_alive(self, every_s: float) -> Generator[None]:
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

    async def end(self, problem: HttpError | None = None) -> None:
        await self._write(self._encoder.finish() if problem is None else self._encoder.error(problem))
        self.ended = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


@contextmanager
def cancel_on_disconnect(receive: Receive) -> Generator[None]:
    """Raises `ClientGone` in the block. The body must have been read before."""
    work = asyncio.current_task()
    assert work is not None
    disconnected = False

    async def watch() -> None:
        nonlocal disconnected
        while (await receive())["type"] != "http.disconnect":
            pass
        disconnected = True
        work.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not disconnected:
            raise
        work.uncancel()
        raise ClientGone from None
    finally:
        watcher.cancel()
