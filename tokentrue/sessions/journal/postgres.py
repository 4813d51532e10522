"""The journal on PostgreSQL, shared by several gateways. Each renews a lease, timed by the server's clock. A session
belongs to one gateway, under a fencing token that grows with every change of owner. Every write checks both in its
transaction: a gateway that was paused or cut off never writes after its successor."""

import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import Any, TypeVar

import psycopg
from psycopg.pq import TransactionStatus

from tokentrue.errors import InputError, JournalError, SessionElsewhere, SessionNotFound
from tokentrue.json_types import JsonObject
from tokentrue.sessions.journal.database import Database, describe_store, read_address, read_statements
from tokentrue.sessions.journal.journal import Journal, SessionClaim

T = TypeVar("T")
LEASE_S = 15.0
VERSION = 2  # 2: images
SCHEMA_LOCK = 7_036_874_417
# Notice a cut connection within seconds, and do not let a paused process keep locks. The URL takes precedence.
CONNECT: JsonObject = {
    "connect_timeout": 5,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
    "options": "-c statement_timeout=30000 -c lock_timeout=10000 -c idle_in_transaction_session_timeout=5000",
}
_ACQUIRE = """
    UPDATE sessions SET owner=?, token=token+1 WHERE id=? AND (owner IS NULL OR owner=? OR NOT EXISTS (
        SELECT 1 FROM gateways WHERE gateways.name=sessions.owner AND expires > clock_timestamp())) RETURNING token"""
_OWNER = "SELECT owner, (SELECT url FROM gateways WHERE gateways.name=sessions.owner) FROM sessions WHERE id=?"
_RENEW = """
    WITH before AS (SELECT expires > clock_timestamp() AS held FROM gateways WHERE name=?)
    INSERT INTO gateways(name, url, expires) VALUES (?, ?, clock_timestamp() + ? * interval '1 second')
    ON CONFLICT (name) DO UPDATE SET url=excluded.url, expires=excluded.expires RETURNING coalesce((SELECT held FROM before), false)"""


class Connection:
    """Adapts psycopg to `Database`: `?` marks parameters, and the next statement reopens a lost connection."""

    def __init__(self, url: str, *, read_only: bool = False) -> None:
        self._url, self._read_only = url, read_only
        self._connection = self._connect()

    def _connect(self) -> psycopg.Connection[tuple[Any, ...]]:
        settings: JsonObject = {**CONNECT, **read_address(self._url)}
        connection = psycopg.connect(autocommit=True, cursor_factory=psycopg.ClientCursor, **settings)
        connection.read_only = self._read_only
        return connection

    @property
    def in_transaction(self) -> bool:
        status = self._connection.info.transaction_status
        return status in (TransactionStatus.INTRANS, TransactionStatus.INERROR)

    def execute(self, sql: str, parameters: Sequence[Any] = (), /) -> Any:
        if sql == "BEGIN IMMEDIATE":  # SQLite's statement for a write transaction
            if self._connection.closed:
                self._connection = self._connect()
            sql = "BEGIN"
        try:
            return self._connection.execute(sql.replace("?", "%s").encode(), parameters or None)
        except psycopg.errors.UniqueViolation as error:
            raise sqlite3.IntegrityError(str(error)) from error
        except psycopg.DataError as error:
            raise InputError(f"text that PostgreSQL cannot hold: {error}") from error

    def retry_read(self, read: Callable[[Database], T]) -> T:
        try:
            return read(self)
        except psycopg.OperationalError:
            self.close()
            self._connection = self._connect()
            return read(self)

    def close(self) -> None:
        self._connection.close()


class Lease:
    """Renewed by a thread every third of its length."""

    def __init__(self, url: str, *, name: str, address: str, length_s: float) -> None:
        self._url, self._values, self._length_s = url, (name, name, address, length_s), length_s
        self._connection: Connection | None = None
        self._held_until = 0.0  # monotonic clock; earlier than the expiry on the server
        self._number = 0
        self._stopped = threading.Event()
        self.renew()
        self._thread = threading.Thread(target=self._run, name="tokentrue-lease", daemon=True)
        self._thread.start()

    @property
    def number(self) -> int:
        if time.monotonic() > self._held_until:
            raise JournalError(
                "the lease of this gateway has expired: the database does not answer; sessions resume when it does"
            )
        return self._number

    def renew(self) -> None:
        asked = time.monotonic()
        if self._connection is None:
            self._connection = Connection(self._url)
        was_held = self._connection.execute(_RENEW, self._values).fetchone()[0]
        if not was_held:  # others may have taken sessions over
            self._number += 1
        self._held_until = asked + self._length_s

    def _run(self) -> None:
        while not self._stopped.wait(self._length_s / 3):
            try:
                self.renew()
            except psycopg.Error:
                if self._connection is not None:
                    self._connection.close()
                    self._connection = None

    def release(self) -> None:
        self._stopped.set()
        self._thread.join()
        try:
            connection = self._connection or Connection(self._url)
            connection.execute("UPDATE gateways SET expires=clock_timestamp() WHERE name=?", self._values[:1])
            connection.close()
        except psycopg.Error:
            return  # it expires


class PostgresJournal(Journal):
    """`name` is unique to this gateway, `address` the URL at which others reach it; `read_only=True` needs neither."""

    _has_fencing = True

    def __init__(
        self, target: str, *, name: str = "", address: str = "", lease_s: float = LEASE_S, read_only: bool = False
    ) -> None:
        self._url, self._name = target, name
        self.target = describe_store(target)
        self._lock = None
        self._lease: Lease | None = None
        try:
            with ExitStack() as opened:
                connection = opened.enter_context(closing(Connection(target, read_only=read_only)))
                if not read_only:
                    create_schema(connection)
                elif connection.execute("SELECT to_regclass('sessions')").fetchone()[0] is None:
                    cure = "give what `serve --store` was given"
                    raise JournalError(f"no journal at {self.target}: the database has no sessions table; {cure}")
                reader = opened.enter_context(closing(Connection(target, read_only=True)))
                if not read_only:
                    self._lease = Lease(target, name=name, address=address, length_s=lease_s)
                opened.pop_all()
        except psycopg.Error as error:
            cure = "start the server, or correct --store"
            raise JournalError(f"cannot open the journal {self.target}: {one_line(error)}; {cure}") from error
        self._start(connection, reader, read_only=read_only)

    @property
    def lease_number(self) -> int:
        return 0 if self._lease is None else self._lease.number

    def _read_from(self, reader: Connection, read: Callable[[Database], T]) -> T:
        try:
            return reader.retry_read(read)
        except psycopg.Error as error:
            raise JournalError(f"the journal {self.target} could not be read: {one_line(error)}") from error

    def close(self) -> None:
        super().close()
        if self._lease is not None:
            self._lease.release()

    # Owners.
    def note_owner(self, db: Database, session_id: str) -> None:
        db.execute("UPDATE sessions SET owner=? WHERE id=?", (self._name, session_id))

    def acquire(self, session_id: str) -> int:
        if self._lease is None:
            raise JournalError(f"the journal {self.target} was opened for reading")
        _ = self._lease.number

        def write(db: Database) -> int:
            taken = db.execute(_ACQUIRE, (self._name, session_id, self._name)).fetchone()
            if taken is None:
                raise find_owner(db, session_id)
            return int(taken[0])

        return self.submit(write).result()

    def lock_image(self, db: Database, sha256: str, strength: str) -> bool:
        """Waits for a gateway that is about to refer to it, or to delete it."""
        return db.execute(f"SELECT 1 FROM images WHERE sha256=? FOR {strength}", (sha256,)).fetchone() is not None

    def check_owner(self, db: Database, session_id: str, claim: SessionClaim | None) -> None:
        """Locks the session's row until the transaction ends."""
        if claim is None:
            return
        sql = "SELECT 1 FROM sessions WHERE id=? AND owner=? AND token=? FOR UPDATE"
        if db.execute(sql, (session_id, self._name, claim.token)).fetchone() is None:
            raise find_owner(db, session_id)


def one_line(error: psycopg.Error) -> str:
    return " ".join(str(error).split())


def find_owner(db: Database, session_id: str) -> Exception:
    found = db.execute(_OWNER, (session_id,)).fetchone()
    if found is None:
        return SessionNotFound(f"no session {session_id!r}")
    return SessionElsewhere(f"session {session_id!r} is owned by gateway {found[0]!r}; send this again", url=found[1])


def create_schema(connection: Connection) -> None:
    connection.execute("SELECT pg_advisory_lock(?)", (SCHEMA_LOCK,))
    try:
        for statement in read_statements("postgres"):
            connection.execute(statement)
        version = connection.execute("SELECT max(version) FROM schema_version").fetchone()[0]
        if version is None:
            connection.execute("INSERT INTO schema_version VALUES (?)", (VERSION,))
        elif version > VERSION:
            raise JournalError(
                f"the journal has schema {version}, this tokentrue knows {VERSION}: use a newer tokentrue"
            )
        else:
            connection.execute("UPDATE schema_version SET version=?", (VERSION,))
    finally:
        connection.execute("SELECT pg_advisory_unlock(?)", (SCHEMA_LOCK,))
