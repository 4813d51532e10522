"""`tokentrue serve`: a parent that holds the listening socket, starts the gateways and restarts killed ones. Sessions
are restored from the journal, admin settings from `AdminState`."""

import contextlib
import ctypes
import itertools
import multiprocessing
import multiprocessing.connection
import os
import pickle
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import RawValue
from typing import Any

from tokentrue.gateway.auth import SESSION_HEADER, read_key, session_from_key
from tokentrue.gateway.serving.forwarding import find_owner
from tokentrue.types import UNVERSIONED

SIGNALS = (signal.SIGTERM, signal.SIGINT)
PR_SET_PDEATHSIG = 1
RESTARTS_PER_MINUTE = 10
LOOK_BYTES = 8192
LOOK_S = 0.5  # a client that has not sent anything by then goes to the next worker
MOST_SILENT = 256
SESSION_PATH = re.compile(rb"[A-Z]+ /sessions/([^/?\s]+)")
Serve = Callable[[int, Callable[[], None]], None]


class AdminState(ctypes.Structure):
    """Shared by the parent and its gateways. A worker writes here, then asks the others to apply it. A starting worker
    reads this after it listens to the others and before it serves, so it misses nothing."""

    # No lock: a killed worker would never release it. Each value is one aligned word, written atomically.
    _fields_ = (("paused", ctypes.c_int64), ("version", ctypes.c_int64))
    paused: int
    version: int


def share_admin_state() -> AdminState:
    return RawValue(AdminState, False, UNVERSIONED)


class RenderDeadline:
    """One rendering per thread. Beyond `seconds` SIGALRM kills the process: one call into C may hold the interpreter,
    and then no thread and no signal handler runs."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ends: dict[int, float] = {}  # by thread, the earliest first
        self._lock = threading.Lock()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def __enter__(self) -> None:
        with self._lock:
            if not self._ends:
                signal.setitimer(signal.ITIMER_REAL, self._seconds)
            self._ends[threading.get_ident()] = time.monotonic() + self._seconds

    def __exit__(self, *_: object) -> None:
        with self._lock:
            del self._ends[threading.get_ident()]
            earliest = next(iter(self._ends.values()), None)
            left = 0.0 if earliest is None else max(earliest - time.monotonic(), 0.001)
            signal.setitimer(signal.ITIMER_REAL, left)  # 0 disarms it


class Child:
    def __init__(self, serve: Serve, number: int, *, is_only: bool) -> None:
        # Fork before anything is loaded: the child starts at once and inherits socket, key and settings.
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe(duplex=False)
        self.number, self.is_up = number, False
        # An only child dies with a killed parent: the port and the journal are free at once. Workers finish what they
        # are generating; the next server waits for them.
        ends_with = signal.SIGKILL if is_only else signal.SIGTERM
        self.process = context.Process(target=_run_child, args=(serve, number, theirs, os.getpid(), ends_with))
        self.process.start()
        theirs.close()

    def has_ended(self) -> bool:
        """Receives its report; raises what ended it."""
        try:
            message: Any = self.pipe.recv()
        except EOFError:
            self.pipe.close()
            self.process.join()
            return True
        if isinstance(message, Exception):
            raise message
        self.is_up = True
        return False


def find_session(head: bytes) -> str | None:
    if named := SESSION_PATH.match(head):
        return named[1].decode("latin-1")
    lines = (line.partition(b":") for line in head.split(b"\r\n")[1:])
    headers = [(name.strip().lower(), value.strip()) for name, _, value in lines]
    session_id = session_from_key(read_key(headers) or "")
    return session_id or next((value.decode("latin-1") for name, value in headers if name == SESSION_HEADER), None)


class Dispatcher:
    """Gives each new connection to the worker that owns its session: most clients use a connection for one. The parent
    looks for it in the first bytes, without taking them; where it was wrong, the worker forwards the request.
    `receivers[n]` is where worker `n` takes its sockets. The parent keeps both ends open: a restarted worker finds what
    was sent to the one before it."""

    def __init__(self, public: socket.socket, workers: int) -> None:
        self._public = public
        pairs = [socket.socketpair() for _ in range(workers)]
        self._senders, self.receivers = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        for each in (public, *self._senders, *self.receivers):
            each.setblocking(False)
        self._next = itertools.cycle(range(workers))
        self._silent: dict[socket.socket, float] = {}  # without a byte yet -> waited for until

    @property
    def waits_for(self) -> list[socket.socket]:
        return [self._public, *self._silent] if self._public.fileno() >= 0 else []

    @property
    def timeout_s(self) -> float | None:
        return max(0.0, min(self._silent.values()) - time.monotonic()) if self._silent else None

    def dispatch(self, ready: Iterable[object]) -> None:
        for each in ready:
            if each is self._public:
                self._accept()
            elif isinstance(each, socket.socket) and each in self._silent:
                self._pass_on(each)
        now = time.monotonic()
        for late in [each for each, until in self._silent.items() if until <= now]:
            self._pass_on(late)

    def pass_on_all(self) -> None:
        """Before a fork: the child would keep the connections open."""
        for each in list(self._silent):
            self._pass_on(each)

    def close(self) -> None:
        for each in (*self._silent, *self._senders, *self.receivers):
            each.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._public.accept()
        except OSError:  # the client has gone, or the parent is stopping
            return
        connection.setblocking(False)
        self._silent[connection] = time.monotonic() + LOOK_S
        if len(self._silent) > MOST_SILENT:
            self._pass_on(next(iter(self._silent)))

    def _pass_on(self, connection: socket.socket) -> None:
        del self._silent[connection]
        with connection:
            try:
                session_id = find_session(connection.recv(LOOK_BYTES, socket.MSG_PEEK))
            except OSError:
                session_id = None
            owner = next(self._next) if session_id is None else find_owner(session_id, len(self._senders))
            # If hundreds of connections wait for the owner, another worker takes this one and forwards.
            for number in (owner, *(each for each in range(len(self._senders)) if each != owner)):
                with contextlib.suppress(OSError):
                    socket.send_fds(self._senders[number], [b"c"], [connection.fileno()])
                    return


class Supervisor:
    def __init__(self, serve: Serve, count: int, public: socket.socket, dispatcher: Dispatcher | None) -> None:
        self._serve, self._count, self._public, self._dispatcher = serve, count, public, dispatcher
        self._children: dict[int, Child] = {}
        self._restarts: list[float] = []
        self._is_stopping = False
        self._code = 0

    def run(self, ready: Callable[[], None]) -> int:
        before = {number: signal.signal(number, self._stop) for number in SIGNALS}
        is_ready = False
        try:
            for number in range(self._count):
                self._start(number)
            while self._children:
                by_pipe: dict[Any, Child] = {child.pipe: child for child in self._children.values()}
                accepting = self._dispatcher if is_ready else None
                waits_for, timeout_s = (accepting.waits_for, accepting.timeout_s) if accepting else ([], None)
                ready_now = multiprocessing.connection.wait([*by_pipe, *waits_for], timeout_s)
                if accepting is not None:
                    accepting.dispatch(ready_now)
                for child in [by_pipe[each] for each in ready_now if each in by_pipe]:
                    if child.has_ended():
                        self._replace(child)
                if not is_ready and not self._is_stopping and all(child.is_up for child in self._children.values()):
                    is_ready = True
                    ready()
            return self._code
        finally:
            for child in self._children.values():
                child.process.terminate()
            for child in self._children.values():
                child.process.join()
            if self._dispatcher is not None:
                self._dispatcher.close()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _start(self, number: int) -> None:
        if self._dispatcher is not None:
            self._dispatcher.pass_on_all()
        child = self._children[number] = Child(self._serve, number, is_only=self._count == 1)
        if self._is_stopping:
            child.process.terminate()

    def _stop(self, number: int, _: Any = None) -> None:
        self._is_stopping = True
        self._public.close()  # otherwise new clients would wait in its queue until the children have drained
        for child in list(self._children.values()):
            if child.process.pid is not None and child.process.is_alive():
                os.kill(child.process.pid, number)

    def _replace(self, child: Child) -> None:
        del self._children[child.number]
        ended_with, now = child.process.exitcode or 0, time.monotonic()
        self._restarts = [*(moment for moment in self._restarts if moment > now - 60), now]
        if self._is_stopping or not child.is_up or (ended_with >= 0 and self._count == 1):
            code = ended_with if ended_with >= 0 else 128 - ended_with
        elif len(self._restarts) > RESTARTS_PER_MINUTE:
            print("tokentrue serve: the gateway dies as fast as it starts; giving up", file=sys.stderr)
            code = 1
        else:
            print(f"tokentrue serve: {_explain(ended_with)}; starting it again", file=sys.stderr)
            self._start(child.number)
            return
        self._code = max(self._code, code)
        if not self._is_stopping:
            self._stop(signal.SIGTERM)


def _explain(exit_code: int) -> str:
    if exit_code == -signal.SIGALRM:
        return "one rendering of the chat template took longer than limits.render_s, and its process was ended"
    how = f"ended with {exit_code}" if exit_code >= 0 else f"was ended by {signal.Signals(-exit_code).name}"
    return f"a gateway process {how}"


def _run_child(serve: Serve, number: int, parent: Connection, parent_id: int, ends_with: int) -> None:
    for each in SIGNALS:  # until the server has its own handlers
        signal.signal(each, signal.SIG_DFL)
    os.setpgid(0, 0)  # a terminal's Ctrl-C reaches the parent alone, which forwards it once
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ends_with)
        if os.getppid() != parent_id:  # the parent ended before the call
            os._exit(1)
    try:
        serve(number, lambda: parent.send("up"))
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            raise error from None
        parent.send(error)
