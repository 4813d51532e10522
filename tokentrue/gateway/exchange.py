"""One HTTP request and its answer, as ASGI sees them: a scope, `receive` and `send`. `http11.py` owns the socket and the order.

A body is handed over in one piece as soon as it is whole; the head of an answer goes out together with its first bytes.
"""

from __future__ import annotations

import asyncio
import http
import logging
from collections.abc import Iterable, MutableMapping
from typing import Any, Protocol

LOG = logging.getLogger("uvicorn.error")
HELD_BYTES = 1 << 20  # of a request that nobody reads yet; one read of the socket brings as much
PIECE_BYTES = 1 << 20  # a longer body is handed over in pieces of about this
COPIED_BYTES = 1 << 16  # a longer answer is not copied behind its head
STATUS_LINES = {int(status): f"HTTP/1.1 {int(status)} {status.phrase}".encode() for status in http.HTTPStatus}
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
FAILED = b"Internal Server Error"
TEXT = (b"content-type", b"text/plain; charset=utf-8")
CLOSE = (b"connection", b"close")
CHUNKED = (b"transfer-encoding", b"chunked")

Message = MutableMapping[str, Any]
RawHeaders = Iterable[tuple[bytes, bytes]]


class Connection(Protocol):
    """What an exchange needs of its socket."""

    drained: asyncio.Future[None] | None  # there while the client takes no more bytes

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]: ...

    def write(self, *parts: bytes) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def answered(self, exchange: Exchange) -> None: ...

    def close(self) -> None: ...


class Exchange:
    """`started`: some of the answer is written; `done`: all of it is; `gone`: the client has left before that."""

    started = done = gone = False
    _size = 0
    _whole = _handed = False  # the request has come in to its end; it has been given to the application to its end
    _head: bytes | None = None  # of the answer, held back until there is something behind it
    _chunked = False
    _left: int | None = None  # bytes of the answer that are still to come, where its head says how many

    def __init__(self, connection: Connection, scope: dict[str, Any], *, keep_alive: bool, expects: bool) -> None:
        """`expects`: the client waits for a word before it sends its body."""
        self.connection, self.scope, self.keep_alive, self._expects = connection, scope, keep_alive, expects
        self._body: list[bytes] = []
        self._waiters: list[asyncio.Future[None]] = []

    # What comes in.
    def take(self, body: bytes) -> None:
        if self.done:
            return  # answered without it
        self._body.append(body)
        self._size += len(body)
        if self._size >= PIECE_BYTES:
            self._wake()
        if self._size >= HELD_BYTES and not self._waiters:
            self.connection.pause_reading()

    def complete(self) -> None:
        self._whole = True
        self._wake()

    def leave(self) -> None:
        self.gone = True
        self._wake()

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters = []

    async def receive(self) -> Message:
        """The body; after it, the news that the client has left or has its answer."""
        if self._expects and not self.gone:
            self._expects = False
            self.connection.write(CONTINUE)
        while not (self.gone or self.done or (self._whole and not self._handed) or self._size >= PIECE_BYTES):
            self.connection.resume_reading()
            await self._news()
        if self.gone or self.done:
            return {"type": "http.disconnect"}
        parts, self._body, self._size = self._body, [], 0
        self._handed = self._whole
        return {"type": "http.request", "body": parts[0] if len(parts) == 1 else b"".join(parts), "more_body": not self._whole}

    async def _news(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    # What goes out.
    async def run(self, app: Any) -> None:
        try:
            await app(self.scope, self.receive, self.send)
        except asyncio.CancelledError:
            await self._fail("the server could not wait for the end of an answer")
        except BaseException as error:
            LOG.error("Exception in ASGI application\n", exc_info=error)
            await self._fail("the application failed in mid-answer")
        else:
            await self._fail("the application returned without a whole answer")

    async def _fail(self, why: str) -> None:
        """Nothing to do where the answer is out or nobody is there to hear it."""
        if self.gone or self.done:
            return
        LOG.error(why)
        if self.started or self._head is not None:
            self.connection.close()
            return
        headers = [TEXT, (b"content-length", b"%d" % len(FAILED)), CLOSE]
        await self.send({"type": "http.response.start", "status": 500, "headers": headers})
        await self.send({"type": "http.response.body", "body": FAILED})

    async def send(self, message: Message) -> None:
        while self.connection.drained is not None and not self.gone:
            await asyncio.shield(self.connection.drained)
        if self.gone:
            return
        kind = message["type"]
        if kind == "http.response.body" and not self.done and (self.started or self._head is not None):
            self._send_body(message.get("body", b""), last=not message.get("more_body", False))
        elif kind == "http.response.start" and not self.started and self._head is None:
            self._head = self._opened(message["status"], message.get("headers", ()))
        else:
            raise RuntimeError(f"ASGI message {kind!r} is out of order")

    def _opened(self, status: int, headers: RawHeaders) -> bytes:
        bare = self.scope["method"] == "HEAD" or status in (204, 304)
        fields, closes = [*self.connection.default_headers, *headers], False
        for name, value in fields:
            if name == b"content-length":
                self._left = int(value)
            elif name == b"connection" and b"close" in value.lower():
                self.keep_alive, closes = False, True
        if bare:
            self._left = 0
        elif self._left is None:
            self._chunked = self.scope["http_version"] != "1.0"  # to an older client the end of the connection is the end of the answer
            if self._chunked and CHUNKED not in fields:
                fields.append(CHUNKED)
        if not self.keep_alive and not closes:
            fields.append(CLOSE)
        return head_of(status, fields)

    def _send_body(self, body: bytes, *, last: bool) -> None:
        head, end = self._head or b"", b""
        self._head, self.started = None, True
        if self.scope["method"] == "HEAD":
            body = b""
        if self._chunked:
            end = b"0\r\n\r\n" if last else b""
            if body:
                head, end = head + b"%x\r\n" % len(body), b"\r\n" + end
        elif self._left is not None:
            self._left -= len(body)
            if self._left < 0 or (last and self._left):
                raise RuntimeError("an answer is not as long as its content-length says")
        if len(body) >= COPIED_BYTES:
            self.connection.write(head, body, end)
        elif data := head + body + end:
            self.connection.write(data)
        if last:
            self.done = True
            self._wake()
            self.connection.answered(self)


def head_of(status: int, headers: RawHeaders) -> bytes:
    """A line break inside of a header would be a header of somebody else's making."""
    lines = [STATUS_LINES.get(status) or b"HTTP/1.1 %d " % status]
    lines += [b"%b: %b" % header for header in headers]
    head = b"\r\n".join(lines)
    breaks = len(lines) - 1
    if head.count(b"\n") != breaks or head.count(b"\r") != breaks or b"\0" in head:
        raise RuntimeError("a header of the answer holds a line break")
    return head + b"\r\n\r\n"
