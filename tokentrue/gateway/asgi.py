"""The bare ASGI that the hot path speaks: read a body within its limit, send JSON, send events."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from tokentrue.gateway.dialects.base import Problem, encode
from tokentrue.gateway.problems import Refused

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
RawHeaders: TypeAlias = list[tuple[bytes, bytes]]

JSON = (b"content-type", b"application/json")
EVENTS: RawHeaders = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ClientGone(Exception):
    """The client went away before its answer was ready."""


def header(scope: Scope, name: bytes) -> str | None:
    for key, value in scope["headers"]:
        if key == name:
            return value.decode("latin-1")
    return None


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    declared = header(scope, b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > limit:
        raise too_large(limit)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        if part:
            parts.append(part)
            size += len(part)
            if size > limit:
                raise too_large(limit)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def too_large(limit: int) -> Refused:
    return Refused(413, "body_too_large", f"the body is larger than {limit} bytes (limits.body_bytes)")


async def send_bytes(send: Send, status: int, body: bytes, headers: RawHeaders) -> None:
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, status: int, value: Any, *headers: tuple[bytes, bytes]) -> None:
    await send_bytes(send, status, encode(value), [JSON, *headers])


def problem_headers(problem: Problem) -> RawHeaders:
    """SDKs retry 409 and 429 by themselves: a conflict will not go away, a full house will."""
    if problem.retry_after_s is not None:
        return [(b"retry-after", b"%d" % max(1, round(problem.retry_after_s)))]
    return [(b"x-should-retry", b"false")] if problem.status == 409 else []
