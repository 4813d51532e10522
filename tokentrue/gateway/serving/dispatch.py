"""Gives each new connection to the worker that owns its session.

The parent looks at the first bytes of a connection, without taking them, for a session, and passes the socket to its
owner: most clients use a connection for one session. Where the look was wrong, the worker forwards the request
(`forwarding`)."""

from __future__ import annotations

import contextlib
import itertools
import re
import socket
import time
from collections.abc import Iterable

from tokentrue.gateway.auth import SESSION_HEADER, read_key, session_from_key
from tokentrue.gateway.serving.forwarding import find_owner

LOOK_BYTES = 8192
LOOK_S = 0.5  # a client that has not sent anything by then goes to the next worker
MOST_SILENT = 256
SESSION_PATH = re.compile(rb"[A-Z]+ /sessions/([^/?\s]+)")


def find_session(head: bytes) -> str | None:
    if named := SESSION_PATH.match(head):
        return named[1].decode("latin-1")
    lines = (line.partition(b":") for line in head.split(b"\r\n")[1:])
    headers = [(name.strip().lower(), value.strip()) for name, _, value in lines]
    session_id = session_from_key(read_key(headers) or "")
    return session_id or next((value.decode("latin-1") for name, value in headers if name == SESSION_HEADER), None)


class Dispatcher:
    """`receivers[n]` is where worker `n` takes its sockets. The parent keeps both ends open: a restarted worker
    finds what was sent to the one before it."""

    def __init__(self, public: socket.socket, workers: int) -> None:
        self._public = public
        pairs = [socket.socketpair() for _ in range(workers)]
        self._senders, self.receivers = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        for each in (public, *self._senders, *self.receivers):
            each.setblocking(False)
        self._next = itertools.cycle(range(workers))
        self._silent: dict[socket.socket, float] = {}  # connections without a byte -> until when they are waited for

    @property
    def waits_for(self) -> list[socket.socket]:
        return [self._public, *self._silent] if self._public.fileno() >= 0 else []

    @property
    def timeout_s(self) -> float | None:
        return max(0.0, min(self._silent.values()) - time.monotonic()) if self._silent else None

    def dispatch(self, ready: Iterable[object]) -> None:
        """Passes on the connections among `ready` and those that have been silent for too long."""
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
