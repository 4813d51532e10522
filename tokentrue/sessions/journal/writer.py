"""The writer thread: it owns the only connection that writes. Writes that are waiting together share a transaction
(group commit), each in a savepoint of its own, so one that fails takes no other with it. A write's future is done when
its transaction was committed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from tokentrue.errors import JournalError, TokenTrueError
from tokentrue.sessions.journal.database import Database

T = TypeVar("T")
Write = Callable[[Database], Any]
_LARGEST_GROUP = 512


class Writer:
    def __init__(self, connection: Database) -> None:
        self._connection = connection
        self._queue: queue.SimpleQueue[tuple[Write, Future[Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tokentrue-journal", daemon=True)
        self._thread.start()

    def submit(self, write: Callable[[Database], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise JournalError("the journal is closed")
            self._queue.put((write, future))
        return future

    def close(self) -> None:
        """Waits for what is queued."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._queue.put(None)
        self._thread.join()
        self._connection.close()

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            group = [first]
            while len(group) < _LARGEST_GROUP and not self._queue.empty():
                item = self._queue.get()
                if item is None:
                    self._write_group(group)
                    return
                group.append(item)
            self._write_group(group)

    def _write_group(self, group: list[tuple[Write, Future[Any]]]) -> None:
        outcomes: list[tuple[Future[Any], Any, BaseException | None]] = []
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            for write, future in group:
                if future.set_running_or_notify_cancel():
                    outcomes.append((future, *self._write_one(write)))
            self._connection.execute("COMMIT")
        except BaseException as error:  # the transaction failed as a whole: nothing of it may be acknowledged
            failure = (
                error
                if isinstance(error, TokenTrueError)
                else JournalError(f"the journal could not be written: {error}")
            )
            outcomes = [
                (future, None, failure)
                for _, future in group
                if future.running() or future.set_running_or_notify_cancel()
            ]
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        for future, result, error in outcomes:
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

    def _write_one(self, write: Write) -> tuple[Any, BaseException | None]:
        self._connection.execute("SAVEPOINT one")
        try:
            result = write(self._connection)
        except Exception as error:
            if not self._connection.in_transaction:
                raise  # a full disk, say: SQLite has undone the whole group
            self._connection.execute("ROLLBACK TO one")
            self._connection.execute("RELEASE one")
            known = isinstance(error, TokenTrueError)
            return None, error if known else JournalError(f"the journal could not be written: {error}")
        self._connection.execute("RELEASE one")
        return result, None
