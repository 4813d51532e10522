"""Running it: sockets, signals, workers. Start-up errors are one line; SIGTERM finishes or journals what is in flight.

Several workers share one listening socket, and each listens to its peers on a Unix socket in a private folder. A worker that dies is
started again; its sessions come back from the journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from tokentrue.errors import ConfigError
from tokentrue.gateway.app import Gateway
from tokentrue.gateway.http11 import Http11
from tokentrue.gateway.memory import settle_memory
from tokentrue.gateway.peers import FromPeer

BACKLOG = 4096
RESTARTS_PER_MINUTE = 10
SWITCH_S = 0.001  # a thread that builds samples or renders a long text gives way to the turns sooner


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int, *, admin_key: bool) -> socket.socket:
    """The public socket. Without an admin key only loopback may be bound."""
    if not admin_key and not is_loopback(host):
        raise ConfigError(f"refusing to bind {host}: set TOKENTRUE_ADMIN_KEY first, or bind 127.0.0.1")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise ConfigError(f"cannot resolve host {host!r}: {error.strerror}") from error
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


def log_to_stderr(*, enabled: bool) -> None:
    """One line per turn, as JSON, and warnings; the lines carry no key and no text of a conversation."""
    logger = logging.getLogger("tokentrue.gateway")
    logger.setLevel(logging.INFO if enabled else logging.WARNING)
    logger.propagate = False
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)


class _Main(uvicorn.Server):
    """A signal ends it in order, and the process then exits 0; uvicorn would raise the signal once more."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class _Quiet(uvicorn.Server):
    """A second server in the same process: the first one owns the signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _server(app: Any, *, drain_s: float, kind: type[uvicorn.Server] = _Main, lifespan: str = "on") -> uvicorn.Server:
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=Http11,  # pyright: ignore[reportArgumentType]  # a buffered protocol, which event loops take as well
        ws="none",
        lifespan=lifespan,  # pyright: ignore[reportArgumentType]
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=120,
        timeout_graceful_shutdown=int(drain_s),
    )
    return kind(config)


async def serve(
    gateway: Gateway, public: socket.socket, *, peer_socket: str | None = None, ready: Callable[[], None] | None = None
) -> None:
    """One worker, until a signal ends it."""
    drain_s = gateway.config.drain_s
    server = _server(gateway, drain_s=drain_s)
    works = [server.serve(sockets=[public])]
    inner: uvicorn.Server | None = None
    if peer_socket is not None:
        inside = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(peer_socket)
        inside.bind(peer_socket)
        inside.listen(BACKLOG)
        inner = _server(FromPeer(gateway), drain_s=drain_s, kind=_Quiet, lifespan="off")
        works.append(inner.serve(sockets=[inside]))
    running = [asyncio.ensure_future(work) for work in works]
    while not server.started and not running[0].done():
        await asyncio.sleep(0.005)
    if ready is not None and server.started:
        ready()
    await running[0]
    if inner is not None:
        inner.should_exit = True
        await running[1]


def run_worker(gateway: Gateway, public: socket.socket, *, peer_socket: str | None = None, ready: Callable[[], None] | None = None) -> None:
    """With uvloop where it is installed."""
    settle_memory()
    sys.setswitchinterval(SWITCH_S)
    try:
        import uvloop
    except ImportError:
        asyncio.run(serve(gateway, public, peer_socket=peer_socket, ready=ready))
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(gateway, public, peer_socket=peer_socket, ready=ready))


def supervise(start: Callable[..., None], settings: Any, public: socket.socket, workers: int, *, ready: Callable[[], None]) -> int:
    """Starts `start(settings, public, me, workers, folder, up)` once per worker, and again when one dies."""
    context = multiprocessing.get_context("spawn")
    folder = tempfile.mkdtemp(prefix="tokentrue-")
    up = context.Semaphore(0)
    running: dict[int, Any] = {}
    stopping = False

    def launch(me: int) -> None:
        running[me] = context.Process(target=start, args=(settings, public, me, workers, folder, up), name=f"tokentrue-worker-{me}")
        running[me].start()

    def stop(*_: Any) -> None:
        nonlocal stopping
        stopping = True

    try:
        for me in range(workers):
            launch(me)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        if not _await_start(running, up, workers, lambda: stopping):
            return 2
        ready()
        return _watch(running, launch, lambda: stopping)
    finally:
        _end(running)
        shutil.rmtree(folder, ignore_errors=True)


def _await_start(running: dict[int, Any], up: Any, workers: int, stopping: Callable[[], bool]) -> bool:
    started = 0
    while started < workers:
        if up.acquire(timeout=0.2):
            started += 1
        elif stopping() or any(process.exitcode is not None for process in running.values()):
            return False  # it has said why, in one line
    return True


def _watch(running: dict[int, Any], launch: Callable[[int], None], stopping: Callable[[], bool]) -> int:
    restarts: list[float] = []
    while not stopping():
        time.sleep(0.1)
        for me, process in list(running.items()):
            if process.exitcode is None or stopping():
                continue
            restarts = [moment for moment in restarts if moment > time.monotonic() - 60]
            if len(restarts) >= RESTARTS_PER_MINUTE:
                logging.getLogger("tokentrue.gateway").error("workers die as fast as they start; giving up")
                return 1
            restarts.append(time.monotonic())
            logging.getLogger("tokentrue.gateway").warning("worker %d ended with %s; starting it again", me, process.exitcode)
            launch(me)
    return 0


def _end(running: dict[int, Any]) -> None:
    for process in running.values():
        if process.exitcode is None:
            process.terminate()
    for process in running.values():
        process.join()
