"""SQLite stores: file, tables with migrations, locks. A server holds an exclusive lock beside the store, its workers
share a second one. If the supervisor is killed, its workers first finish what they generate, and the next server waits
for them: two processes never write one session."""

import contextlib
import fcntl
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

from tokentrue.errors import JournalError
from tokentrue.sessions.journal.database import read_statements
from tokentrue.sessions.journal.rows import COLUMNS, RECORD, Row, damaged, record_from_values, row_digest

NODE_COLUMNS = ", ".join(Row._fields)
ORPHANS_S = 60.0  # longer than workers need to end after their supervisor was killed


class SqliteFile:
    def __init__(self, target: str, *, synchronous: str, read_only: bool) -> None:
        self.target, self.path = target, target.removeprefix("sqlite:")
        self.in_memory = self.path in ("memory", ":memory:")
        self._synchronous, self._read_only = synchronous, read_only

    def create(self) -> None:
        """Readable by its owner only; SQLite gives its other files the same mode."""
        # Never open an existing file outside SQLite: closing it drops the POSIX locks that SQLite holds on it in this
        # process, and a reader could then delete the WAL with the newest turns.
        if self.in_memory or self._read_only:
            return
        try:
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            pass
        except OSError as error:
            raise self._cannot_open(error) from error

    def _cannot_open(self, error: Exception) -> JournalError:
        cure = "give a writable path, or --store memory; if it was a journal, restore it from a backup"
        return JournalError(f"cannot open the journal {self.target}: {error}; {cure}")

    def connect(self) -> sqlite3.Connection:
        if self._read_only and not Path(self.path).is_file():
            raise JournalError(f"no journal at {self.target}")
        with contextlib.ExitStack() as on_error:
            try:
                connection = _open(":memory:" if self.in_memory else self.path)
                on_error.callback(connection.close)
                refuse_foreign(connection)
                if self._read_only and read_version(connection) < VERSION:
                    # A reader changes no file: an older journal is copied into memory and migrated there.
                    copy = _open(":memory:")
                    connection.backup(copy)
                    connection.close()
                    connection = copy
                elif not self._read_only:
                    connection.execute("PRAGMA journal_mode=WAL")
                    connection.execute(f"PRAGMA synchronous={self._synchronous}")
                    connection.execute("PRAGMA foreign_keys=ON")
                migrate(connection)
            except sqlite3.Error as error:
                raise self._cannot_open(error) from error
            on_error.pop_all()
        return connection

    def check(self, db: sqlite3.Connection) -> None:
        try:
            found = db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if found != "ok":
                raise damaged(found, journal=self.target)
            for row in db.execute(f"SELECT {RECORD} FROM sessions"):
                record_from_values(row)
            counts = {
                name: db.execute(f"SELECT (SELECT count(*) FROM {name}), ({noted})").fetchone()
                for name, noted in (
                    ("sessions", "SELECT count FROM totals WHERE name='sessions'"),
                    ("nodes", "SELECT coalesce(sum(nodes), 0) FROM sessions"),
                )
            }
        except sqlite3.Error as error:
            raise damaged(str(error), journal=self.target) from error
        for name, (there, noted) in counts.items():
            if there != noted:
                raise damaged(f"it holds {there} {name} of {noted}", journal=self.target)


def _open(path: str) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)


class _FileLock:
    def __init__(self, store: str | Path, suffix: str) -> None:
        # A link to the store or to its folder names the same store.
        path = Path(f"{os.path.realpath(str(store).removeprefix('sqlite:'))}.{suffix}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            cure = "give a writable path, or --store memory"
            raise JournalError(f"cannot open the journal {store}: {error}; {cure}") from error

    def lock(self, operation: int) -> bool:
        """False if another process, or another object of this one, holds it."""
        try:
            fcntl.flock(self.file, operation)
        except BlockingIOError:
            return False
        except OSError as error:
            raise JournalError(f"cannot lock the journal: {error}; give a path on a file system with locks") from error
        return True

    def release(self) -> None:
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


class WorkerLock(_FileLock):
    def __init__(self, store: str | Path) -> None:
        super().__init__(store, "workers")
        self.lock(fcntl.LOCK_SH)


class StoreLock(_FileLock):
    def __init__(self, store: str | Path) -> None:
        super().__init__(store, "lock")
        try:
            if not self.lock(fcntl.LOCK_EX | fcntl.LOCK_NB):
                owner = os.read(self.file, 32).decode("ascii", "replace").strip() or "unknown"
                cure = "stop that server, or give each server a store of its own; samples and views need no lock"
                raise JournalError(f"the store {store} is in use by process {owner}: {cure}")
            os.ftruncate(self.file, 0)
            os.write(self.file, str(os.getpid()).encode())
            _wait_for_workers(store)
        except BaseException:
            self.release()
            raise


def _wait_for_workers(store: str | Path) -> None:
    workers, end = _FileLock(store, "workers"), time.monotonic() + ORPHANS_S
    try:
        while not workers.lock(fcntl.LOCK_EX | fcntl.LOCK_NB):
            if time.monotonic() > end:
                raise JournalError(f"the store {store} is in use by workers of a server that was killed: end them")
            time.sleep(0.1)
    finally:
        workers.release()


# Tables and migrations. Never edit a released step: add another one.
def _fill_digests(db: sqlite3.Connection) -> None:
    for row in db.execute(f"SELECT {', '.join(COLUMNS)} FROM sessions").fetchall():
        count = db.execute("SELECT count(*) FROM nodes WHERE session=?", (row[0],)).fetchone()[0]
        db.execute("UPDATE sessions SET digest=?, nodes=? WHERE id=?", (row_digest(row), count, row[0]))
    for place in db.execute("SELECT session, seq FROM nodes").fetchall():
        row = db.execute(f"SELECT session, {NODE_COLUMNS} FROM nodes WHERE session=? AND seq=?", place).fetchone()
        db.execute("UPDATE nodes SET digest=? WHERE session=? AND seq=?", (row_digest(row), *place))
    db.execute("INSERT INTO totals(name, count) SELECT 'sessions', count(*) FROM sessions")


STEPS: tuple[Callable[[sqlite3.Connection], None] | None, ...] = (None, None, _fill_digests, None, None)
"""What each step runs after the statements of migrations/sqlite-N.sql."""
VERSION = len(STEPS)


def read_version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def refuse_foreign(connection: sqlite3.Connection) -> None:
    """A database with tables but without our version belongs to another program."""
    version, tables = connection.execute(
        "SELECT (SELECT user_version FROM pragma_user_version), count(*) FROM sqlite_master"
    ).fetchone()
    if version == 0 and tables:
        raise JournalError("this is the database of another program, not a journal; give another path")


def migrate(connection: sqlite3.Connection) -> None:
    """Each step in a transaction; refuses a journal from a newer release."""
    while (version := read_version(connection)) < VERSION:
        connection.execute("BEGIN IMMEDIATE")
        try:
            if read_version(connection) == version:  # another process may have migrated it meanwhile
                for statement in read_statements(f"sqlite-{version + 1}"):
                    connection.execute(statement)
                if (fill := STEPS[version]) is not None:
                    fill(connection)
                connection.execute(f"PRAGMA user_version={version + 1}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
    if version > VERSION:
        raise JournalError(f"the journal has schema {version}, this tokentrue knows {VERSION}: use a newer tokentrue")
