"""Keeps a gateway up although a chat template may hang it.

A template is code that the operator chose; Jinja's sandbox confines what it reaches, not what it costs. While one call
into C holds the interpreter, no thread and no signal handler of this process runs, so the operating system ends it:
`RenderDeadline` arms a timer whose signal has the default action. `serve_and_restart` is the parent: it holds the
listening socket and starts the gateway again, which reads its sessions from the journal.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)
PR_SET_PDEATHSIG = 1
UP = "up"


class RenderDeadline:
    """A context for one rendering on each thread. If one takes longer than `seconds`, SIGALRM ends the process."""

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


def serve_and_restart(
    serve: Callable[[Callable[[], None]], None], public: socket.socket, *, ready: Callable[[], None]
) -> int:
    """Runs `serve(say_up)` in a child process, and again where a signal ended a child that was up. Calls `ready` when
    the first one is up; returns the exit code; raises what `serve` raised."""
    # A fork, before anything is loaded: the child starts at once, and has the socket, the key and the settings.
    context = multiprocessing.get_context("fork")
    child: Any = None
    is_first, is_stopping = True, False

    def forward(number: int, _: Any) -> None:
        nonlocal is_stopping
        is_stopping = True
        public.close()  # or clients that come now would wait in its queue until the child has drained
        if child is not None and child.pid is not None:
            os.kill(child.pid, number)

    before = {number: signal.signal(number, forward) for number in SIGNALS}
    try:
        while True:
            ours, theirs = context.Pipe(duplex=False)
            child = context.Process(target=_run_child, args=(serve, theirs, os.getpid()))
            child.start()
            theirs.close()
            if is_stopping:
                child.terminate()
            with ours:
                is_up = _receive(ours) == UP
                if is_up and is_first:
                    ready()
                is_first = False
                _receive(ours)  # returns when the child has ended
            child.join()
            if child.exitcode >= 0:
                return child.exitcode
            if is_stopping or not is_up:
                return 128 - child.exitcode
            print(f"tokentrue serve: {_explain(-child.exitcode)}; starting the gateway again", file=sys.stderr)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _receive(connection: Connection) -> str | None:
    """UP, or None where the child has ended; raises the exception that ended it."""
    try:
        message: Any = connection.recv()
    except EOFError:
        return None
    if isinstance(message, Exception):
        raise message
    return message


def _explain(number: int) -> str:
    if number == signal.SIGALRM:
        return "one rendering of the chat template took longer than limits.render_s, and its process was ended"
    return f"the gateway was ended by {signal.Signals(number).name}"


def _run_child(serve: Callable[[Callable[[], None]], None], parent: Connection, parent_id: int) -> None:
    for number in SIGNALS:  # until the server has its own handlers
        signal.signal(number, signal.SIG_DFL)
    os.setpgid(0, 0)  # a terminal's Ctrl-C reaches the parent alone, which forwards it once
    _end_with_parent(parent_id)
    try:
        serve(lambda: parent.send(UP))
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            raise error from None
        parent.send(error)


def _end_with_parent(parent_id: int) -> None:
    """A killed parent takes its child along: the port and the journal's lock are free at once."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_id:  # it ended before the call
            os._exit(1)
