"""HTTP/1.1 on one client's socket: uvicorn runs it (`http=Http11`) in place of its own protocol, on the same parser.

uvicorn's own hands a body over in pieces, copies it more than once, stops reading in between, writes head and body apart and sets timers
for every request; that is a fifth of what a short turn costs. Of uvicorn this file uses the constructor's arguments, `ServerState`
(`connections`, `tasks`, `total_requests`, `default_headers`) and the call of `shutdown`, no more.
Invariants: answers go out in the order of their requests; an application that reads no body has at most HELD_BYTES of one kept for it;
whoever waits in `receive` hears of a client that leaves; a request that is not HTTP never reaches the application.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

import httptools

from tokentrue.gateway.exchange import CLOSE, TEXT, Exchange, head_of

LOG = logging.getLogger("uvicorn.error")
HEAD_BYTES = 1 << 18
READ_BYTES = 1 << 20  # a long conversation is read at once, where it has come
ASGI = {"version": "3.0", "spec_version": "2.3"}
REFUSAL = b"Invalid HTTP request received."


class Buffers(threading.local):
    """One for all connections of a thread's loop: what was read is taken apart before anything else is read there."""

    _buffer: memoryview | None = None

    def of_this_thread(self) -> memoryview:
        if self._buffer is None:
            self._buffer = memoryview(bytearray(READ_BYTES))
        return self._buffer


BUFFERS = Buffers()


class Http11(asyncio.BufferedProtocol):
    """One connection. `_receiving` is the request whose bytes are coming in, `_answering` the one whose answer may go out."""

    def __init__(self, config: Any, server_state: Any, app_state: dict[str, Any], _loop: asyncio.AbstractEventLoop | None = None) -> None:
        if not config.loaded:
            config.load()
        self._app, self._server, self._app_state = config.loaded_app, server_state, app_state
        self._loop = _loop or asyncio.get_running_loop()
        self._idle_s: float = config.timeout_keep_alive
        self._parser: Any = httptools.HttpRequestParser(self)
        self._transport: Any = None
        self._base: dict[str, Any] = {"type": "http", "asgi": ASGI, "root_path": config.root_path}
        self._url, self._headers, self._head_bytes = b"", list[tuple[bytes, bytes]](), 0
        self._receiving: Exchange | None = None
        self._answering: Exchange | None = None
        self._queue: deque[Exchange] = deque()  # pipelined: their turn comes when `_answering` is done
        self._read = BUFFERS.of_this_thread()
        self._reading = True
        self._deaf = False  # what comes in is not looked at any more
        self._heard = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.drained: asyncio.Future[None] | None = None

    # asyncio's side
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._server.connections.add(self)
        server, client = (address(transport.get_extra_info(name)) for name in ("sockname", "peername"))
        self._base |= {"server": server, "client": client, "scheme": "https" if transport.get_extra_info("sslcontext") else "http"}
        self._heard = self._loop.time()
        self._timer = self._loop.call_later(self._idle_s, self._check_idle)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._read

    def buffer_updated(self, nbytes: int) -> None:
        self._take(self._read[:nbytes])

    def eof_received(self) -> None:
        """The transport closes."""

    def _take(self, data: memoryview) -> None:
        self._heard = self._loop.time()
        if self._deaf:
            return
        if self._receiving is None:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._end_with(self._queue[-1] if self._queue else self._answering)  # answered in this protocol; what follows is in another
        except httptools.HttpParserError:
            self._refuse()
            return
        if self._receiving is None and self._head_bytes > HEAD_BYTES:
            self._refuse()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        self._deaf, self._parser = True, None
        if self._timer is not None:
            self._timer.cancel()
        self._queue.clear()
        self.resume_writing()
        if self._answering is not None:
            self._answering.leave()

    def pause_writing(self) -> None:
        if self.drained is None:
            self.drained = self._loop.create_future()

    def resume_writing(self) -> None:
        if self.drained is not None:
            self.drained.set_result(None)
            self.drained = None

    # uvicorn's side
    def shutdown(self) -> None:
        """What is being answered is answered to its end; then the connection goes."""
        if self._answering is None:
            self.close()
        else:
            self._answering.keep_alive = False

    # httptools' side
    def on_message_begin(self) -> None:
        self._url, self._headers = b"", []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._receiving is None:  # behind a body it is a trailer: nobody may add to the headers from there
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        path, raw_path, query = target_of(self._url)
        version = self._parser.get_http_version()
        scope = {
            **self._base,
            "http_version": version,
            "method": self._parser.get_method().decode("ascii"),
            "path": path,
            "raw_path": raw_path,
            "query_string": query,
            "headers": self._headers,
            "state": self._app_state.copy(),
        }
        expects = dict(self._headers).get(b"expect", b"").lower() == b"100-continue"
        keep_alive = version != "1.0" and self._parser.should_keep_alive()
        self._receiving = Exchange(self, scope, keep_alive=keep_alive, expects=expects)
        if self._answering is None:
            self._start(self._receiving)
        else:
            self._queue.append(self._receiving)
            self.pause_reading()

    def on_body(self, body: bytes) -> None:
        if self._receiving is not None:
            self._receiving.take(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        if self._receiving is not None:
            received, self._receiving = self._receiving, None
            received.complete()

    # an exchange's side
    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        return self._server.default_headers

    def write(self, *parts: bytes) -> None:
        """In one call of the system."""
        if len(parts) == 1:
            self._transport.write(parts[0])
        else:
            self._transport.writelines([part for part in parts if part])

    def pause_reading(self) -> None:
        if self._reading and not self._transport.is_closing():
            self._reading = False
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._reading and not self._transport.is_closing():
            self._reading = True
            self._transport.resume_reading()

    def answered(self, exchange: Exchange) -> None:
        self._server.total_requests += 1
        self._answering = None
        self._heard = self._loop.time()
        if not exchange.keep_alive:
            self.close()
        elif self._queue:
            self._start(self._queue.popleft())
        else:
            self.resume_reading()

    def close(self) -> None:
        self._deaf = True
        self._transport.close()

    def _start(self, exchange: Exchange) -> None:
        self._answering = exchange
        task = self._loop.create_task(exchange.run(self._app))
        self._server.tasks.add(task)
        task.add_done_callback(self._server.tasks.discard)

    def _end_with(self, last: Exchange | None) -> None:
        """Nothing more is taken in; the connection goes with this answer."""
        self._deaf = True
        if last is not None:
            last.keep_alive = False

    def _refuse(self) -> None:
        """Nothing behind what is not HTTP can be understood; what is being answered is still answered."""
        self._queue.clear()
        if self._answering is not None and self._answering is not self._receiving:
            self._end_with(self._answering)
            return
        self._deaf = True
        LOG.warning("Invalid HTTP request received.")
        if self._answering is None or not self._answering.started:
            self.write(head_of(400, [TEXT, (b"content-length", b"%d" % len(REFUSAL)), CLOSE]) + REFUSAL)
        self._transport.close()

    def _check_idle(self) -> None:
        left = self._heard + self._idle_s - self._loop.time()
        if left <= 0 and self._answering is None:
            self._timer = None
            self.close()
        else:
            self._timer = self._loop.call_later(left if left > 0 else self._idle_s, self._check_idle)


@lru_cache(128)
def target_of(url: bytes) -> tuple[str, bytes, bytes]:
    """Path, raw path and query of a request line."""
    parsed = httptools.parse_url(url)
    path = parsed.path.decode("ascii")
    return unquote(path) if "%" in path else path, parsed.path, parsed.query or b""


def address(info: Any) -> tuple[str, int | None] | None:
    """As ASGI has it; a Unix socket has a path or nothing."""
    if isinstance(info, (list, tuple)):
        return str(info[0]), int(info[1])
    return (info, None) if isinstance(info, str) and info else None
