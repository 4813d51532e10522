"""The durable store: SQLite in WAL mode. An awaited write returns only after its commit.

One writer thread makes every write (`Writer`); reads use a separate connection. After a crash at any point every
acknowledged write is present and no write is partial. One process owns a store for writing (`lock`); one object at a
time owns a session (`claim`).
Corruption is detected: rows carry digests, sessions the number of their nodes, the store the number of its sessions,
and opening runs SQLite's `quick_check`. `Journal("memory")` is the same store without a file. `synchronous="FULL"`
also survives a loss of power.
"""

from __future__ import annotations

import asyncio
import os
import queue
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Sized
from concurrent.futures import Future
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypeVar
from weakref import WeakValueDictionary

from tokentrue.errors import JournalError, SessionConflict, SessionNotFound, TokenTrueError
from tokentrue.ids import TokenIds
from tokentrue.sessions.journal.database import Database, DuplicateKey, StoreLock, WorkerLock
from tokentrue.sessions.journal.rows import (
    COLUMNS,
    RECORD,
    Row,
    SessionRecord,
    load_record,
    node_from_row,
    record_from_values,
    row_digest,
    values_from_record,
)
from tokentrue.sessions.journal.schema import NODE_COLUMNS, VERSION, migrate, read_version, refuse_foreign
from tokentrue.sessions.tree import Tree

T = TypeVar("T")
_NODE_VALUES = attrgetter(*NODE_COLUMNS)
_INSERT_NODE = f"""
    INSERT INTO nodes(session, {", ".join(NODE_COLUMNS)}, digest) SELECT {",".join("?" * (len(NODE_COLUMNS) + 2))}
    WHERE EXISTS (SELECT 1 FROM sessions WHERE id=? AND state='open')
      AND (? IS NULL OR EXISTS (SELECT 1 FROM nodes WHERE session=? AND id=?))"""
_DAMAGED = "restore it from a backup"
DUPLICATE = (sqlite3.IntegrityError, DuplicateKey)
FIRST_TOKEN = 1


class SessionClaim:
    def __init__(self, session_id: str, turns: Sized, token: int) -> None:
        self.session_id, self.turns = session_id, turns  # the turns that its holder is generating
        self.token = token  # the session's owner when it was claimed
        self._revoked = False

    def revoke(self) -> None:
        self._revoked = True

    def check(self) -> None:
        if self._revoked:
            raise SessionConflict(f"session {self.session_id!r} was opened again: use the newer object")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSecret:
    value: bytes
    created: float


class Journal:
    """Sessions and their nodes in SQLite. Writes are awaitable; reads block (run large ones in a thread).

    `lock=False` is for worker processes whose parent holds a `StoreLock`; `read_only=True` needs no lock and refuses
    writes; `check=False` skips `quick_check`, which reads the whole file.
    """

    _greatest = "max"  # SQL for the largest of several values

    def __init__(
        self,
        target: str | Path = "memory",
        *,
        synchronous: Literal["NORMAL", "FULL"] = "NORMAL",
        read_only: bool = False,
        lock: bool = True,
        check: bool = True,
    ) -> None:
        self.target = str(target)
        self.path = self.target.removeprefix("sqlite:")
        self._in_memory = self.path in ("memory", ":memory:")
        self._synchronous, self._read_only, self._closed = synchronous, read_only, False
        self._reading = threading.Lock()
        self._claims: WeakValueDictionary[str, SessionClaim] = WeakValueDictionary()  # each is kept by its holder
        self._lock = None if read_only or self._in_memory else StoreLock(self.path) if lock else WorkerLock(self.path)
        try:
            self._open(check)
        except BaseException:
            self._release_lock()
            raise

    def _open(self, check: bool) -> None:
        self._create_file()
        connection = self._connect()
        try:
            if check and not self._in_memory:
                self._check_file(connection)
        except BaseException:
            connection.close()
            raise
        self._writer = Writer(connection)
        self._reader = None if self._in_memory else self._connect()

    def _create_file(self) -> None:
        """Readable by its owner only; SQLite gives its other files the same mode."""
        # Never open an existing file outside SQLite: closing it drops the POSIX locks that SQLite holds on it in this
        # process, and a reader could then delete the WAL with the newest turns.
        if self._in_memory or self._read_only:
            return
        try:
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            pass
        except OSError as error:
            raise self._cannot_open(error) from error

    def _cannot_open(self, error: Exception) -> JournalError:
        cure = "give a writable path, or --store memory; if it was a journal, " + _DAMAGED
        return JournalError(f"cannot open the journal {self.target}: {error}; {cure}")

    def _connect(self) -> sqlite3.Connection:
        if self._read_only and not Path(self.path).is_file():
            raise JournalError(f"no journal at {self.target}")
        connection: sqlite3.Connection | None = None
        try:
            connection = sqlite3.connect(
                ":memory:" if self._in_memory else self.path, timeout=30, isolation_level=None, check_same_thread=False
            )
            refuse_foreign(connection)
            if self._read_only:
                return _readable(connection)
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute(f"PRAGMA synchronous={self._synchronous}")
            connection.execute("PRAGMA foreign_keys=ON")
            migrate(connection)
        except BaseException as error:
            if connection is not None:
                connection.close()
            if isinstance(error, sqlite3.Error):
                raise self._cannot_open(error) from error
            raise
        return connection

    def _check_file(self, db: sqlite3.Connection) -> None:
        try:
            found = db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if found != "ok":
                raise JournalError(f"the journal {self.target} is damaged: {found}; {_DAMAGED}")
            for row in db.execute(f"SELECT {', '.join(COLUMNS)}, digest FROM sessions"):
                record_from_values(row)
            counts = db.execute(
                "SELECT (SELECT count(*) FROM sessions), (SELECT count FROM totals WHERE name='sessions')"
            ).fetchone()
            nodes = db.execute(
                "SELECT (SELECT count(*) FROM nodes), (SELECT coalesce(sum(nodes), 0) FROM sessions)"
            ).fetchone()
        except sqlite3.Error as error:
            raise JournalError(f"the journal {self.target} is damaged: {error}; {_DAMAGED}") from error
        for name, (there, noted) in (("sessions", counts), ("nodes", nodes)):
            if there != noted:
                raise JournalError(
                    f"the journal {self.target} is damaged: it holds {there} {name} of {noted}; {_DAMAGED}"
                )

    def close(self) -> None:
        """Waits for queued writes."""
        self._writer.close()
        with self._reading:
            self._closed = True
            if self._reader is not None:
                self._reader.close()
        self._release_lock()

    def _release_lock(self) -> None:
        if self._lock is not None:
            self._lock.release()

    # One object writes a session at a time.
    def acquire(self, session_id: str) -> int:
        """Returns the new owner's fencing token; call it before reading a session to continue it. SQLite stores have
        one owner."""
        return FIRST_TOKEN

    def claim(self, session_id: str, turns: Sized, token: int = FIRST_TOKEN) -> SessionClaim:
        """Takes a session over: its previous holder can write no more. Raises while that holder is generating."""
        held = self._claims.get(session_id)
        if held is not None:
            if len(held.turns):
                raise SessionConflict(
                    f"session {session_id!r} is in use: another object is generating {len(held.turns)} turn(s) for it"
                )
            held.revoke()
        claim = self._claims[session_id] = SessionClaim(session_id, turns, token)
        return claim

    @property
    def lease_number(self) -> int:
        """Increases when another process may have taken this one's sessions; raises while that is unknown."""
        return 0

    # Reading and writing.
    def submit(self, write: Callable[[Database], T]) -> Future[T]:
        """The future completes after the commit of its transaction."""
        if self._read_only:
            raise JournalError(f"the journal {self.target} was opened for reading")
        return self._writer.submit(write)

    async def write(self, write: Callable[[Database], T]) -> T:
        return await asyncio.wrap_future(self.submit(write))

    def read(self, read: Callable[[Database], T]) -> T:
        if self._reader is None:
            return self._writer.submit(read).result()
        with self._reading:
            if self._closed:
                raise JournalError("the journal is closed")
            try:
                return read(self._reader)
            except sqlite3.Error as error:
                raise JournalError(f"the journal {self.target} could not be read: {error}") from error

    def read_secret(self, name: str) -> StoreSecret:
        """Created on first use and shared by every gateway on the store."""

        def write(db: Database) -> StoreSecret:
            values = (name, secrets.token_bytes(32), time.time())
            db.execute("INSERT INTO secrets(name, value, created) VALUES (?,?,?) ON CONFLICT (name) DO NOTHING", values)
            value, created = db.execute("SELECT value, created FROM secrets WHERE name=?", (name,)).fetchone()
            return StoreSecret(value=bytes(value), created=created)

        return self.submit(write).result()

    # Sessions.
    def create(self, record: SessionRecord) -> Future[None]:
        values = values_from_record(record)

        def write(db: Database) -> None:
            marks = ",".join("?" * (len(COLUMNS) + 1))
            try:
                db.execute(
                    f"INSERT INTO sessions({', '.join(COLUMNS)}, digest) VALUES ({marks})",
                    (*values, row_digest(values)),
                )
            except DUPLICATE as error:
                raise SessionConflict(f"session {record.id!r} exists already; choose another id or open it") from error
            _count_sessions(db, 1)
            self.note_owner(db, record.id)

        return self.submit(write)

    def note_owner(self, db: Database, session_id: str) -> None:
        """Called in the transaction that creates a session."""

    def check_owner(self, db: Database, session_id: str, claim: SessionClaim | None) -> None:
        """Called in the transaction of every write to a session; raises if another process owns it now."""

    async def append_nodes(self, session_id: str, rows: Sequence[Row], claim: SessionClaim | None = None) -> None:
        """Appends all rows or none. Requires an open session, an existing parent and an unused `seq`
        (compare-and-swap)."""

        def write(db: Database) -> None:
            self.check_owner(db, session_id, claim)
            _append_nodes(db, session_id, rows)

        await self.write(write)

    async def update(
        self, session_id: str, change: Callable[[SessionRecord], SessionRecord], claim: SessionClaim | None = None
    ) -> SessionRecord:
        """In one transaction."""

        def write(db: Database) -> SessionRecord:
            self.check_owner(db, session_id, claim)
            record = change(load_record(db, session_id))
            values = values_from_record(record)
            names = ", ".join(f"{name}=?" for name in (*COLUMNS[1:], "digest"))
            db.execute(f"UPDATE sessions SET {names} WHERE id=?", (*values[1:], row_digest(values), session_id))
            return record

        return await self.write(write)

    async def delete(self, session_id: str) -> None:
        await self.write(lambda db: _delete_sessions(db, [session_id]))

    async def purge(self, *, older_than_s: float, ended_only: bool = True, now: float | None = None) -> list[str]:
        """By age since their end (with `ended_only=False` also open ones, since their last turn)."""
        limit = (time.time() if now is None else now) - older_than_s

        def write(db: Database) -> list[str]:
            last_turn = "coalesce((SELECT max(created) FROM nodes WHERE session = sessions.id), 0)"
            newest = f"{self._greatest}(coalesce(ended, 0), created, {last_turn})"
            where = "state = 'ended' AND ended < ?" if ended_only else f"{newest} < ?"
            old = [row[0] for row in db.execute(f"SELECT id FROM sessions WHERE {where}", (limit,))]
            _delete_sessions(db, old)
            return old

        return await self.write(write)

    def get(self, session_id: str) -> SessionRecord:
        return self.read(lambda db: load_record(db, session_id))

    def sessions(
        self,
        *,
        offset: int = 0,
        limit: int = 100,
        state: str | None = None,
        group: str | None = None,
        after: tuple[float, str] | None = None,
    ) -> list[SessionRecord]:
        """Newest first. `after` is (creation time, id) of a session, which may be deleted by now."""
        where, values = _filter_sessions(state, group)
        if after is not None:
            where, values = f"{where} AND (created < ? OR (created = ? AND id > ?))", (*values, after[0], *after)
        sql = f"SELECT {RECORD} FROM sessions WHERE {where} ORDER BY created DESC, id LIMIT ? OFFSET ?"
        return self.read(lambda db: list(map(record_from_values, db.execute(sql, (*values, limit, offset)).fetchall())))

    def all_sessions(self, *, group: str | None = None) -> Iterator[SessionRecord]:
        """Oldest first; concurrent inserts and deletes do not disturb it."""
        last = (0.0, "")
        clause = "" if group is None else "AND grp=?"
        sql = f"SELECT {RECORD} FROM sessions WHERE (created, id) > (?, ?) {clause} ORDER BY created, id LIMIT 100"
        while page := self.read(lambda db: db.execute(sql, last if group is None else (*last, group)).fetchall()):  # noqa: B023
            records = list(map(record_from_values, page))
            yield from records
            last = (records[-1].created, records[-1].id)

    def count(self, *, state: str | None = None, group: str | None = None) -> int:
        where, values = _filter_sessions(state, group)
        return self.read(
            lambda db: int(db.execute(f"SELECT count(*) FROM sessions WHERE {where}", values).fetchone()[0])
        )

    def rows(self, session_id: str) -> list[Row]:
        """In commit order, each checked against its digest."""
        sql = f"SELECT {', '.join(NODE_COLUMNS)}, digest FROM nodes WHERE session=? ORDER BY seq"

        def read(db: Database) -> list[Row]:
            both = f"SELECT (SELECT nodes FROM sessions WHERE id=?), * FROM ({sql}) AS listed"  # one statement, one snapshot
            found = db.execute(both, (session_id, session_id)).fetchall()
            noted = found[0][0] if found else _count_noted(db, session_id)
            if noted != len(found):
                raise JournalError(
                    f"the journal is damaged: session {session_id!r} has {len(found)} nodes of {noted}; {_DAMAGED}"
                )
            return [_row_from_values(session_id, values[1:]) for values in found]

        return self.read(read)


def _count_noted(db: Database, session_id: str) -> int:
    noted = db.execute(
        "SELECT nodes FROM sessions WHERE id=? AND NOT EXISTS (SELECT 1 FROM nodes WHERE session=?)",
        (session_id, session_id),
    )
    return (noted.fetchone() or (0,))[0]


def _row_from_values(session_id: str, values: tuple[Any, ...]) -> Row:
    *columns, digest = values
    if digest != row_digest((session_id, *columns)):
        raise JournalError(
            f"the journal is damaged: node {columns[0]!r} of session {session_id!r} does not fit its digest; {_DAMAGED}"
        )
    return Row(**dict(zip(NODE_COLUMNS, columns, strict=True)))


def _append_nodes(db: Database, session_id: str, rows: Sequence[Row]) -> None:
    for row in rows:
        values = _NODE_VALUES(row)
        try:
            given = (
                session_id,
                *values,
                row_digest((session_id, *values)),
                session_id,
                row.parent,
                session_id,
                row.parent,
            )
            done = db.execute(_INSERT_NODE, given)
        except DUPLICATE as error:
            raise SessionConflict(
                f"another process writes session {session_id!r}: sequence number {row.seq} is taken"
            ) from error
        if done.rowcount != 1:
            raise _explain_refusal(db, session_id, row)
    db.execute("UPDATE sessions SET nodes = nodes + ? WHERE id=?", (len(rows), session_id))


def _explain_refusal(db: Database, session_id: str, row: Row) -> Exception:
    state = db.execute("SELECT state FROM sessions WHERE id=?", (session_id,)).fetchone()
    if state is None:
        return SessionNotFound(f"no session {session_id!r}")
    if state[0] != "open":
        return SessionConflict(f"session {session_id!r} has ended")
    return SessionConflict(f"parent {row.parent} of node {row.id} is not in the journal")


def _delete_sessions(db: Database, session_ids: Sequence[str]) -> None:
    for session_id in session_ids:
        if not db.execute("DELETE FROM sessions WHERE id=?", (session_id,)).rowcount:
            raise SessionNotFound(f"no session {session_id!r}")
    _count_sessions(db, -len(session_ids))


def _filter_sessions(state: str | None, group: str | None) -> tuple[str, tuple[Any, ...]]:
    given = [(column, value) for column, value in (("state", state), ("grp", group)) if value is not None]
    return " AND ".join(["1=1", *(f"{column}=?" for column, _ in given)]), tuple(value for _, value in given)


def _count_sessions(db: Database, change: int) -> None:
    if isinstance(db, sqlite3.Connection):  # one row per store would make gateways wait for each other
        db.execute("UPDATE totals SET count = count + ? WHERE name='sessions'", (change,))


def _readable(connection: sqlite3.Connection) -> sqlite3.Connection:
    # A reader changes no file: an older journal is copied into memory and migrated there.
    if read_version(connection) >= VERSION:
        migrate(connection)  # refuses a newer one; there is nothing to do for this one
        return connection
    copy = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    connection.backup(copy)
    connection.close()
    migrate(copy)
    return copy


Write = Callable[[Database], Any]
_LARGEST_GROUP = 512


class Writer:
    """The thread that owns the only writing connection.

    Queued writes share a transaction (group commit), each in a savepoint, so a failing write does not affect the
    others. A write's future completes after the commit.
    """

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
        """Waits for queued writes."""
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
        except BaseException as error:  # the transaction failed as a whole: none of its writes may be acknowledged
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
                raise  # for example a full disk: SQLite has rolled back the whole group
            self._connection.execute("ROLLBACK TO one")
            self._connection.execute("RELEASE one")
            known = isinstance(error, TokenTrueError)
            return None, error if known else JournalError(f"the journal could not be written: {error}")
        self._connection.execute("RELEASE one")
        return result, None


def tree_from_rows(record: SessionRecord, rows: list[Row]) -> Tree:
    """Checks every node as on commit: ids, log-probabilities, prompt digest and certificate."""
    tree = Tree(template=record.template, tokenizer=record.tokenizer)
    for row in rows:
        parent = None if row.parent is None else tree.get(row.parent)
        tree.add(node_from_row(row, parent, tree.prompt_digest(parent, TokenIds.from_bytes(row.given_ids))))
    for request_key, node_ids in record.late_keys.items():
        tree.add_key(request_key, node_ids)
    return tree


def load_tree(journal: Journal, session_id: str) -> tuple[SessionRecord, Tree]:
    record = journal.get(session_id)
    return record, tree_from_rows(record, journal.rows(session_id))
