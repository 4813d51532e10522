"""Bare ASGI for model requests: read a body within its limits, send JSON, send errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Generator, Iterable, MutableMapping
from contextlib import contextmanager
from typing import Any, TypeAlias

from tokentrue.errors import (
    EngineError,
    EngineRejected,
    EngineTimeout,
    InputError,
    JournalError,
    LimitExceeded,
    MessageError,
    PromptTooLong,
    RenderError,
    SessionConflict,
    SessionElsewhere,
    SessionNotFound,
    TokenTrueError,
)
from tokentrue.gateway.dialects.base import Dialect, HttpProblem, encode

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
RawHeaders: TypeAlias = list[tuple[bytes, bytes]]

LOG = logging.getLogger("tokentrue.gateway")
STREAM = "tokentrue.stream"  # scope key: the event stream of this request, once there is one
JSON = (b"content-type", b"application/json")
EVENTS: RawHeaders = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

# Exceptions to client errors: a status, a stable code, a field, one sentence.
STATUS: tuple[tuple[type[TokenTrueError], int], ...] = (  # first match wins: children before parents
    (InputError, 400),
    (RenderError, 422),
    (SessionNotFound, 404),
    (SessionElsewhere, 503),
    (SessionConflict, 409),
    (LimitExceeded, 413),
    (JournalError, 503),
    (EngineTimeout, 504),
    (PromptTooLong, 400),
    (EngineRejected, 502),
    (EngineError, 502),
)
LONGEST = 600


class HttpError(TokenTrueError):
    """A request that the gateway itself refuses."""

    def __init__(
        self, status: int, code: str, message: str, *, field: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.problem = HttpProblem(status=status, code=code, message=message, field=field, retry_after_s=retry_after_s)


def problem_from(error: BaseException) -> HttpProblem:
    if isinstance(error, HttpError):
        return error.problem
    if not isinstance(error, TokenTrueError):
        return HttpProblem(
            status=500, code="internal", message="the gateway failed on this request; its log has the cause"
        )
    status = next((status for kind, status in STATUS if isinstance(error, kind)), 500)
    if isinstance(error, JournalError):  # its text names the store, which clients must not see
        message = "the gateway's record cannot be read or written now; send this again. The gateway's log has the cause"
        return HttpProblem(status=status, code=error.code, message=message, retry_after_s=1.0)
    field = error.field if isinstance(error, MessageError) else None
    retry = getattr(error, "retry_after_s", None)
    if isinstance(error, LimitExceeded) and retry is not None:
        status = 429
    return HttpProblem(status=status, code=error.code, message=str(error)[:LONGEST], field=field, retry_after_s=retry)


class ClientGone(Exception):
    """The client disconnected before its answer was complete."""


class WatchedSend:
    """Wraps a request's `send` and records the status of its reply; 0 before that."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0

    @property
    def started(self) -> bool:
        return self.status > 0

    def __call__(self, message: MutableMapping[str, Any]) -> Awaitable[None]:
        self.status = message.get("status", self.status)
        return self._send(message)


def read_header(headers: Iterable[tuple[bytes, bytes]], wanted: bytes) -> str | None:
    return next((value.strip().decode("latin-1") for name, value in headers if name == wanted and value.strip()), None)


class BodyBudget:
    """Limit on the bytes of request bodies held by this process, over all connections."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.used = 0

    @contextmanager
    def reserve(self) -> Generator[Callable[[int], None], None, None]:
        """Yields `take(n)`, which reserves bytes of one body; releases them on exit."""
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            if self.used + size > self._limit:
                message = "the bodies of requests in progress fill the memory set aside for them (limits.bodies_bytes); try again"
                raise HttpError(429, "too_many_bytes_in_flight", message, retry_after_s=1.0)
            taken += size
            self.used += size

        try:
            yield take
        finally:
            self.used -= taken


async def read_body(scope: Scope, receive: Receive, limit: int, take: Callable[[int], None] | None = None) -> bytes:
    """Reads the whole body; refuses it as soon as it exceeds `limit`. `take` gets the size of every part."""
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


def problem_headers(problem: HttpProblem) -> RawHeaders:
    """SDKs retry 409 and 429 by themselves: a conflict is permanent, a full queue is not."""
    if problem.retry_after_s is not None:
        return [(b"retry-after", b"%d" % max(1, round(problem.retry_after_s)))]
    return [(b"x-should-retry", b"false")] if problem.status == 409 else []


async def answer_errors(
    app: Callable[[Scope, Receive, Send], Awaitable[None]],
    scope: Scope,
    receive: Receive,
    send: Send,
    *,
    dialect: type[Dialect],
    errors: Any,
) -> None:
    """Runs `app` and turns its exceptions into a reply in the dialect, or into the last event of a started stream. A
    reply already sent stays as it is. `errors` counts them.
    """
    watched = WatchedSend(send)
    try:
        await app(scope, receive, watched)
        return
    except ClientGone:
        errors.labels(dialect.name, "client_gone").inc()
        return
    except asyncio.CancelledError:  # the server is stopping and the grace period is over
        if watched.started:
            return
        problem = HttpProblem(
            status=503, code="shutting_down", message="the gateway is stopping; send this again", retry_after_s=1.0
        )
    except Exception as error:
        problem = problem_from(error)
        if problem.status == 500:
            LOG.error("a request failed", exc_info=error)
        elif isinstance(error, JournalError):  # do not tell the client where the record is
            LOG.error("%s", error)
    errors.labels(dialect.name, problem.code).inc()
    stream = scope.get(STREAM)
    if not watched.started:
        await send_json(send, problem.status, dialect.build_error(problem), *problem_headers(problem))
    elif stream is not None and not stream.ended:
        await stream.fail(problem)
