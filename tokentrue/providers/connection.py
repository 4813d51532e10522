"""HTTP/1.1 to one engine, kept to what an engine needs: keep-alive connections, one request at a time on each, bodies as they come.

A general client spends more on a request than the rest of a short turn costs; httptools (the parser that uvicorn uses) does the parsing.
Invariants: a connection goes back to the pool only after a whole answer; a request that ends in any other way closes its own.
"""

from __future__ import annotations

import asyncio
import ssl
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

import httptools

from tokentrue.errors import ConfigError

PORTS = {"http": 80, "https": 443}
IDLE_S = 60.0
LEFT_S = 1.0
COPIED_BYTES = 1 << 16


class Broken(Exception):
    """The connection could not be made, or ended before the answer did. `reused` says that it may just have been too old."""

    def __init__(self, reason: str, *, reused: bool = False) -> None:
        super().__init__(reason)
        self.reused = reused


class Silent(Exception):
    """Nothing came for longer than was allowed."""


class Connection(asyncio.Protocol):
    """One socket. What arrives is kept until it is read; `status` is set when the answer begins."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: Any = None
        self._parser: Any = httptools.HttpResponseParser(self)
        self._asked = False  # a request is out and its answer has not been taken to its end
        self._blocks: list[bytes] = []
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._silence_s = self._heard = 0.0
        self._error: Exception | None = None
        self._left: Callable[[Connection], None] | None = None
        self._served = 0
        self._leaving = False  # the timer is that of `leave`
        self._framed = self._keeps = False  # the answer says where it ends; the server keeps the connection open behind it
        self.status = 0
        self.whole = False
        self.read_enough = False  # set by a reader that wants nothing more of this answer
        self.idle_since = 0.0

    # asyncio's side
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._heard = self._loop.time()
        if not self._asked:
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(Broken(f"not HTTP: {error}"))
            self.close()
        if self._blocks or self.whole or self.status >= 300 or self._error is not None:
            self._wake()  # a bare head says nothing yet: what is behind it comes at once, or when it has been sampled

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
        if self._asked and not self.whole:
            if self.status and not self._framed:
                self.whole = True  # without a length the end of the connection is the end of the answer
            else:
                self._fail(Broken(str(exc or "the server closed the connection"), reused=self._served > 0 and not self.status))
        self._wake()
        if self._left is not None:  # whoever waits for the end of the answer waits no longer
            left, self._left = self._left, None
            left(self)

    # httptools' side
    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._framed = True

    def on_message_begin(self) -> None:
        if self.whole:
            self._keeps = False  # something behind the answer: whose it is cannot be known

    def on_headers_complete(self) -> None:
        if self.whole:
            return
        status = self._parser.get_status_code()
        self.status = status if status >= 200 else 0
        self._keeps = self._framed and self._parser.should_keep_alive()  # the parser forgets it behind the body

    def on_body(self, body: bytes) -> None:
        if not self.whole:
            self._blocks.append(body)

    def on_message_complete(self) -> None:
        self.whole = self.status > 0
        if self.whole and self._left is not None:
            self._loop.call_soon(self._left, self)
            self._left = None

    # the caller's side
    def usable(self, loop: asyncio.AbstractEventLoop) -> bool:
        return self._transport is not None and self._loop is loop and not self._transport.is_closing()

    def send(self, head: bytes, body: Sequence[bytes], *, silence_s: float) -> None:
        """All in one call of the system; what is long is not copied."""
        self._asked, self._blocks, self._error = True, [], None
        self.status, self.whole, self._framed, self._keeps, self._left = 0, False, False, False, None
        self.read_enough = False
        self._silence_s, self._heard = silence_s, self._loop.time()
        if self._timer is None:  # else the one of an earlier request is still to come, and will see that there is a new one
            self._timer = self._loop.call_later(silence_s, self._check_silence)
        if sum(map(len, body)) < COPIED_BYTES:
            self._transport.write(b"".join((head, *body)))
        else:
            self._transport.writelines((head, *body))

    async def started(self) -> int:
        """The status, as soon as there is something behind it."""
        while not self.status:
            await self._wait()
        return self.status

    async def read(self) -> bytes:
        while not self.whole:
            await self._wait()
        return self._blocks[0] if len(self._blocks) == 1 else b"".join(self._blocks)

    async def block(self) -> bytes:
        """What has come of the body since the last time; nothing at its end."""
        while not self._blocks and not self.whole:
            await self._wait()
        blocks, self._blocks = self._blocks, []
        return blocks[0] if len(blocks) == 1 else b"".join(blocks)

    def leave(self, then: Callable[[Connection], None]) -> None:
        """All that matters was read: what is left of the answer is waited for in the background, for a moment, then `then` is called."""
        self._left, self._leaving = then, True
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(LEFT_S, self.close)

    def finish(self) -> bool:
        """After an answer: whether the connection can serve another request. If not it is closed."""
        if self._leaving and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        keep = self.whole and self._keeps and self._error is None and self.usable(self._loop)
        self._asked = self._leaving = False
        if not keep:
            self.close()
        self._served += 1
        self.idle_since = self._loop.time()
        return keep

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error

    def _check_silence(self) -> None:
        self._timer = None
        if not self._asked:
            return
        left = self._heard + self._silence_s - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._check_silence)
            return
        self._fail(Silent())
        self.close()
        self._wake()


class Connections:
    """The connections to one base URL; the one used last is taken first."""

    def __init__(self, url: str, *, connect_s: float, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        if parts.scheme not in PORTS or not parts.hostname:
            raise ConfigError(f"engine url {url!r}: give http://HOST:PORT or https://HOST:PORT")
        self._host, self._port = parts.hostname, parts.port or PORTS[parts.scheme]
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._path, self._connect_s = parts.path.rstrip("/"), connect_s
        given = {"host": parts.netloc.rpartition("@")[2], **headers}
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            given.setdefault("authorization", f"Basic {b64encode(pair.encode()).decode()}")
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        self._heads: dict[tuple[str, str], bytes] = {}  # up to the length of the body, by method and path
        if any(char in "\r\n" for value in given.values() for char in value):
            raise ConfigError("a header of the engine's may not hold a line break")
        self._idle: list[Connection] = []
        self._leaving: set[Connection] = set()  # read as far as it matters; the end of the answer is on its way

    def head(self, method: str, path: str, length: int) -> bytes:
        known = self._heads.get((method, path))
        if known is None:
            known = f"{method} {self._path}{path} HTTP/1.1\r\n{self._headers}content-length: ".encode("latin-1")
            self._heads[method, path] = known
        return b"%b%d\r\n\r\n" % (known, length)

    async def take(self) -> Connection:
        loop = asyncio.get_running_loop()
        while self._idle:
            connection = self._idle.pop()
            if connection.usable(loop) and loop.time() - connection.idle_since < IDLE_S:
                return connection
            connection.close()
        return await self._connected(loop)

    async def _connected(self, loop: asyncio.AbstractEventLoop) -> Connection:
        try:
            async with asyncio.timeout(self._connect_s):
                _, made = await loop.create_connection(lambda: Connection(loop), self._host, self._port, ssl=self._tls)
        except TimeoutError as error:
            raise Broken(f"no connection in {self._connect_s:g} s") from error
        except OSError as error:
            raise Broken(error.strerror or str(error) or type(error).__name__) from error
        return made

    def give_back(self, connection: Connection, *, read: bool = False) -> None:
        """`read` says that nothing more is wanted of the answer, though its end may not have come yet."""
        self._leaving.discard(connection)
        if read and not connection.whole:
            self._leaving.add(connection)
            connection.leave(self.give_back)
        elif connection.finish():
            self._idle.append(connection)

    async def close(self) -> None:
        for connection in (*self._idle, *self._leaving):
            connection.close()
        self._idle.clear()
        self._leaving.clear()
        await asyncio.sleep(0)  # a transport lets go of its socket in the next round of the loop
