"""The connection protocol of a store (`sqlite3.Connection` implements it, `postgres.Connection` adapts to it), its name
and its locks.

One server per SQLite store: it holds an exclusive lock on a file beside the store while the store is open for
writing; the lock ends with the process. The server's workers share a second lock. If the supervisor is killed, its
workers first finish what they generate, and the next server waits for them: two processes never write one session.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tokentrue.errors import ConfigError, JournalError


class Found(Protocol):
    @property
    def rowcount(self) -> int: ...

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...

    def __iter__(self) -> Iterator[Any]: ...


class Database(Protocol):
    @property
    def in_transaction(self) -> bool: ...

    def execute(self, sql: str, parameters: Sequence[Any] = ..., /) -> Found: ...

    def close(self) -> None: ...


class DuplicateKey(Exception):
    """PostgreSQL refused a second row with the same key (SQLite raises sqlite3.IntegrityError)."""


def is_postgres(store: str) -> bool:
    return store.startswith(("postgresql://", "postgres://"))


def read_address(store: str) -> Mapping[str, str]:
    """The connection parameters of a `postgresql://` URL, parsed by libpq."""
    # An invalid URL is not quoted in the error: it may hold a password.
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    try:
        found = {name: str(value) for name, value in conninfo_to_dict(store).items() if value is not None}
    except psycopg.ProgrammingError:
        found = {"host": "@"}
    # A password with an unescaped @ or / ends up in the host, port or database name, which libpq quotes in its errors.
    port, place = found.get("port", ""), found.get("host", "") + found.get("dbname", "")
    if "@" in place or (port and not port.replace(",", "").isdecimal()):
        raise ConfigError(
            "the PostgreSQL URL of the store cannot be read; write @ : / ? # % in a user name or password as %40 %3A "
            "%2F %3F %23 %25, or set PGPASSWORD"
        )
    return found


def describe_store(store: str) -> str:
    """The store's name without secrets: of a PostgreSQL URL only user, host and database."""
    if not is_postgres(store):
        return store
    try:
        parts = read_address(store)
    except (ConfigError, ImportError):
        return "postgresql://…"
    user, port = parts.get("user"), parts.get("port")
    place = f"{user + '@' if user else ''}{parts.get('host', '')}{':' + port if port else ''}"
    return f"postgresql://{place}/{parts.get('dbname', '')}"


ORPHANS_S = 60.0  # longer than workers need to end after their supervisor was killed


def open_lock_file(store: str | Path, suffix: str) -> int:
    # Resolved: a link to the store or to its folder names the same store.
    path = Path(f"{os.path.realpath(str(store).removeprefix('sqlite:'))}.{suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise JournalError(
            f"cannot open the journal {store}: {error}; give a writable path, or --store memory"
        ) from error


class StoreLock:
    """Taken on construction; raises if another process, or another object of this process, holds it."""

    def __init__(self, store: str | Path, *, orphans_s: float = ORPHANS_S) -> None:
        self._file: int | None = open_lock_file(store, "lock")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.read(self._file, 32).decode("ascii", "replace").strip() or "unknown"
            self.release()
            cure = "stop that server, or give each server a store of its own; samples and views need no lock"
            raise JournalError(f"the store {store} is in use by process {owner}: {cure}") from error
        os.ftruncate(self._file, 0)
        os.write(self._file, str(os.getpid()).encode())
        try:
            await_workers(store, orphans_s)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class WorkerLock:
    def __init__(self, store: str | Path) -> None:
        self._file: int | None = open_lock_file(store, "workers")
        fcntl.flock(self._file, fcntl.LOCK_SH)

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def await_workers(store: str | Path, seconds: float) -> None:
    file, end = open_lock_file(store, "workers"), time.monotonic() + seconds
    try:
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            if time.monotonic() > end:
                raise JournalError(f"the store {store} is in use by workers of a server that was killed: end them")
            time.sleep(0.1)
    finally:
        os.close(file)
