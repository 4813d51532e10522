"""A short write on the caller's own thread, where nothing else is being written: two hops between threads cost more than the write.

Only where a commit waits for no disk (`synchronous=NORMAL` syncs at checkpoints, and those are left to the writer thread), and never so
often or so long that others feel it: writes that come thick go to the writer, which groups them, and so does everything for a while
after one that was slow.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from tokentrue.errors import JournalError, TokenTrueError

T = TypeVar("T")
APART_S = 0.0005
SLOW_S, REST_S = 0.02, 1.0


class Inline:
    """`lock` is the writer's: whoever holds it may write."""

    def __init__(self, connection: sqlite3.Connection, lock: threading.Lock) -> None:
        self.connection, self._lock = connection, lock
        self._not_before = 0.0
        self.writes = 0  # since the last checkpoint was asked for

    def attempt(self, work: Callable[[sqlite3.Connection], T]) -> tuple[T] | None:
        """The result in a tuple once it is committed; None where it would have had to wait, and then nothing was begun."""
        began = time.monotonic()
        if began < self._not_before or not self._lock.acquire(blocking=False):
            return None
        try:
            if not self._begin():
                return None
            result = self._finish(work)
        finally:
            self._lock.release()
        ended = time.monotonic()
        self._not_before = ended + (APART_S if ended - began < SLOW_S else REST_S)
        self.writes += 1
        return (result,)

    def _begin(self) -> bool:
        """False where another process is writing."""
        try:
            self.connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
        return True

    def _finish(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            result = work(self.connection)
            self.connection.execute("COMMIT")
        except BaseException as error:
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
            if isinstance(error, Exception) and not isinstance(error, TokenTrueError):
                raise JournalError(f"the journal could not be written: {error}") from error
            raise
        return result
