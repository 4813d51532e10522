"""Runs a gateway process: sockets, signals, logs."""

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar

import orjson
import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tokentrue.errors import ConfigError
from tokentrue.gateway.app import Gateway
from tokentrue.gateway.asgi import LOG
from tokentrue.gateway.auth import is_weak_key
from tokentrue.gateway.config import GatewayLimits

BACKLOG = 4096
IDLE_CONNECTION_S = 120
MOST_PIPELINED = 64  # requests waiting for an earlier reply; all of one read are parsed at once
FRAMING_PER_BODY_BYTE = 8  # a chunk of one byte has at least five bytes of framing


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int, *, admin_key: str) -> socket.socket:
    """Beyond loopback the admin key must not be guessable."""
    if not is_loopback(host) and is_weak_key(admin_key):
        raise ConfigError(
            f"refusing to bind {host}: TOKENTRUE_ADMIN_KEY is too weak; use 16 random characters or more, or unset it"
        )
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise ConfigError(f"cannot resolve host {host!r}: {error.strerror}") from error
    except UnicodeError as error:
        raise ConfigError(f"{host!r} is no host name") from error
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} on {host} is in use; choose another with --port") from error
        raise ConfigError(f"cannot bind {host}:{port}: {error.strerror}") from error
    bound.set_inheritable(True)
    return bound


def find_url(host: str, bound: socket.socket) -> str:
    name = socket.gethostname() if host in {"0.0.0.0", "::"} else f"[{host}]" if ":" in host else host
    return f"http://{name}:{bound.getsockname()[1]}"


def log_to_stderr(*, enabled: bool) -> None:
    """One JSON line per turn, and warnings; never a key or conversation text."""
    LOG.setLevel(logging.INFO if enabled else logging.WARNING)
    LOG.propagate = False
    if not LOG.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(JsonLines())
        LOG.addHandler(handler)


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        if text.startswith('{"event":'):
            return f'{{"time":"{time}",{text[1:]}'
        line = {"time": time, "event": record.levelname.lower(), "message": text}
        return orjson.dumps(line).decode()


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol within `GatewayLimits`: by itself it does not limit a head or trailers, merges
    trailers into the headers, and waits forever for a head, a body and a client that reads. What exceeds a limit gets
    400 or a closed connection."""

    limits: ClassVar[GatewayLimits]
    _timer: asyncio.TimerHandle | None = None  # timeout of the head or body being received
    _write_timer: asyncio.TimerHandle | None = None
    _began = False  # a request began in the bytes that are being parsed
    _in_body = False
    _overhead = 0  # bytes of this request that are no body
    _body_bytes = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._limit_time(self.limits.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._limit_time(None)
        if self._write_timer is not None:
            self._write_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._timer is None:  # the first bytes of the next request
            self._limit_time(self.limits.head_s)
        self._began, before = False, self._body_bytes
        super().data_received(data)
        if not self._began:  # else its complete head was measured, and its next part will be
            self._overhead += len(data) - (self._body_bytes - before)
        most = self.limits.head_bytes + FRAMING_PER_BODY_BYTE * self._body_bytes
        if self._overhead > most and not self.transport.is_closing():
            self.send_400_response("Request head or framing too large.")

    def on_message_begin(self) -> None:
        self._began, self._in_body, self._overhead, self._body_bytes = True, False, 0, 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:  # a trailer is not a header
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > self.limits.head_bytes:
            raise ValueError("the head of the request is too large")  # the parser reports it as an invalid request
        if len(self.pipeline) >= MOST_PIPELINED:
            raise ValueError("too many pipelined requests")
        self._in_body = True
        self._limit_time(self.limits.body_s)
        super().on_headers_complete()
        if self.parser is not None and self.parser.should_upgrade():
            self.cycle.keep_alive = False  # another protocol may follow: close the connection after this reply

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        self._limit_time(None)
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.limits.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _limit_time(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds is not None:
            self._timer = self.loop.call_later(seconds, self._time_out)

    @property
    def _current(self) -> RequestResponseCycle | None:
        return self.cycle

    def _time_out(self) -> None:
        self._timer = None
        current = self._current
        if self._in_body or current is None or current.response_complete:
            self.transport.abort()
        else:  # a reply is being sent; the bytes of the next request wait
            self._limit_time(self.limits.head_s)

    def send_400_response(self, msg: str) -> None:
        """A complete request before what is not HTTP still gets its reply."""
        current = self._current
        if current is None or current.response_complete or (self._in_body and not current.response_started):
            super().send_400_response(msg)
        elif self._in_body:
            self.transport.abort()
        else:
            current.keep_alive = False
            self.flow.pause_reading()


def bounded_http(limits: GatewayLimits) -> type[BoundedHttp]:
    return type("BoundedHttp", (BoundedHttp,), {"limits": limits})


class Server(uvicorn.Server):
    """Exits 0 on one of `signals`; uvicorn would raise it again. Also serves connections passed through `receiver`."""

    def __init__(
        self, config: uvicorn.Config, signals: Sequence[signal.Signals], receiver: socket.socket | None
    ) -> None:
        super().__init__(config)
        self._signals, self._receiver = signals, receiver
        self._connecting: set[asyncio.Task[object]] = set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        before = {number: signal.signal(number, self.handle_exit) for number in self._signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._receiver is not None:
            asyncio.get_running_loop().add_reader(self._receiver, self._receive, self._receiver)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._receiver is not None:
            asyncio.get_running_loop().remove_reader(self._receiver)
        await super().shutdown(sockets)

    def _receive(self, receiver: socket.socket) -> None:
        _, descriptors, _, _ = socket.recv_fds(receiver, 1, 1)
        loop = asyncio.get_running_loop()
        for descriptor in descriptors:
            connection = socket.socket(fileno=descriptor)
            connection.setblocking(False)
            task = loop.create_task(loop.connect_accepted_socket(self._new_protocol, connection))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    def _new_protocol(self) -> asyncio.Protocol:
        protocol: Any = self.config.http_protocol_class
        return protocol(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)


def server_config(gateway: Gateway, *, drain_s: float) -> uvicorn.Config:
    limits = gateway.config.limits
    return uvicorn.Config(
        gateway,
        loop="uvloop",
        http=bounded_http(limits),
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        backlog=BACKLOG,
        limit_concurrency=limits.connections,
        timeout_keep_alive=IDLE_CONNECTION_S,
        timeout_graceful_shutdown=int(drain_s),
    )


def listen_to_workers(path: str) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    inside = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    inside.bind(path)
    inside.listen(BACKLOG)
    return inside


@contextlib.asynccontextmanager
async def serve_embedded(
    gateway: Gateway,
    listener: socket.socket,
    *,
    drain_s: float,
    signals: Sequence[signal.Signals] = (),
    receiver: socket.socket | None = None,
) -> AsyncGenerator[asyncio.Task[None]]:
    server = Server(server_config(gateway, drain_s=drain_s), signals, receiver)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.005)
    if serving.done():
        await serving
        raise ConfigError("the server ended before it began; its log has the cause")
    try:
        yield serving
    finally:
        server.should_exit = True
        await serving


def serve_until_signal(
    gateway: Gateway, listener: socket.socket, *, receiver: socket.socket | None, ready: Callable[[], None]
) -> None:
    async def serve() -> None:
        stops, drain_s = (signal.SIGTERM, signal.SIGINT), gateway.config.drain_s
        async with serve_embedded(gateway, listener, drain_s=drain_s, signals=stops, receiver=receiver) as serving:
            ready()
            await serving

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())
