"""The durable store: SQLite in WAL mode. Whoever awaits a write resumes only after it was committed.

One writer thread owns the writing connection. Writes that are waiting together share a transaction (group commit), each in its own
savepoint, so one that fails takes no other with it. A lone write may be done by its caller (`inline`). Reads use a connection of their
own. Kill the process at any point: every acknowledged write is there and no other is half there.
`Journal("memory")` is the same store without a file. `Journal("sqlite:PATH", synchronous="FULL")` also survives a loss of power.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypeVar

from tokentrue.errors import JournalError, SessionConflict, SessionNotFound, TokenTrueError
from tokentrue.sessions.inline import Inline
from tokentrue.sessions.rows import Row, dumps, loads
from tokentrue.sessions.schema import migrate

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], Any]
_GROUP = 512
_CHECKPOINT_EVERY = 200  # inline writes
_COLUMNS = tuple(f.name for f in fields(Row))
_VALUES = attrgetter(*_COLUMNS)
_INSERT = f"""
    INSERT INTO nodes(session, {", ".join(_COLUMNS)}) SELECT {",".join("?" * (len(_COLUMNS) + 1))}
    WHERE EXISTS (SELECT 1 FROM sessions WHERE id=? AND state='open')
      AND (? IS NULL OR EXISTS (SELECT 1 FROM nodes WHERE session=? AND id=?))"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewards:
    """`session` is the reward of the whole session; `leaves` those of single leaves; both carry free metadata."""

    session: float | None = None
    leaves: Mapping[str, float] = field(default_factory=dict[str, float])
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRecord:
    """What is known of a session besides its nodes. `sampling` are the pinned values; `key_hash` names its API key."""

    id: str
    group: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    history: str = "keep"
    training: bool = True
    template: str = ""
    tokenizer: str = ""
    key_hash: str | None = None
    state: Literal["open", "ended"] = "open"
    created: float = 0.0
    ended: float | None = None
    rewards: Rewards = field(default_factory=Rewards)


class Journal:
    """See the module. Every write has an awaitable form; reads are plain calls (run them in a thread where they may be large)."""

    def __init__(self, target: str | Path = "memory", *, synchronous: Literal["NORMAL", "FULL"] = "NORMAL") -> None:
        self.target = str(target)
        path = self.target.removeprefix("sqlite:")
        self._in_memory = path in ("memory", ":memory:")
        self._path = ":memory:" if self._in_memory else path
        self._queue: queue.SimpleQueue[tuple[Work, Future[Any]] | None] = queue.SimpleQueue()
        self._lock, self._reading, self._writing = threading.Lock(), threading.Lock(), threading.Lock()
        self._closed = False
        if not self._in_memory:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._connection = self._connect(synchronous)
        self._reader = None if self._in_memory else self._connect(synchronous)
        self._inline = self._inline_writer(synchronous)
        self._writer = threading.Thread(target=self._write_loop, name="tokentrue-journal", daemon=True)
        self._writer.start()

    def _inline_writer(self, synchronous: str) -> Inline | None:
        if synchronous != "NORMAL":
            return None
        if self._in_memory:
            return Inline(self._connection, self._writing)
        connection = self._connect(synchronous)
        connection.execute("PRAGMA busy_timeout=0")  # opening may wait for another process; a write may not
        connection.execute("PRAGMA wal_autocheckpoint=0")
        return Inline(connection, self._writing)

    def _connect(self, synchronous: str) -> sqlite3.Connection:
        try:
            connection = sqlite3.connect(self._path, timeout=30, isolation_level=None, check_same_thread=False)
        except sqlite3.Error as error:
            raise self._cannot_open(error) from error
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute(f"PRAGMA synchronous={'FULL' if synchronous == 'FULL' else 'NORMAL'}")
            connection.execute("PRAGMA foreign_keys=ON")
            migrate(connection)
        except BaseException as error:
            connection.close()
            if isinstance(error, sqlite3.Error):
                raise self._cannot_open(error) from error
            raise
        return connection

    def _cannot_open(self, error: sqlite3.Error) -> JournalError:
        return JournalError(f"cannot open the journal {self.target}: {error}; give a writable path, or --store memory")

    # The writer.
    def submit(self, work: Callable[[sqlite3.Connection], T]) -> Future[T]:
        """Queue a write. The future is done when the transaction that holds it was committed."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise JournalError("the journal is closed")
            self._queue.put((work, future))
        return future

    async def write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        done = self.write_now(work)
        return done[0] if done is not None else await asyncio.wrap_future(self.submit(work))

    def write_now(self, work: Callable[[sqlite3.Connection], T]) -> tuple[T] | None:
        """The result of a write that was committed right here; None where it has to be queued."""
        if self._inline is None or self._closed or not self._queue.empty():
            return None
        done = self._inline.attempt(work)
        if self._inline.writes >= _CHECKPOINT_EVERY and not self._in_memory:
            self._inline.writes = 0
            self.submit(_nothing)  # wakes the writer
        return done

    def _write_loop(self) -> None:
        while (first := self._queue.get()) is not None:
            group, stop = [first], False
            while len(group) < _GROUP:
                try:
                    item = self._queue.get_nowait()
                except queue.Empty:
                    break
                if item is None:
                    stop = True
                    break
                group.append(item)
            with self._writing:
                self._write_group(group)
            if any(work is _nothing for work, _ in group):
                with contextlib.suppress(sqlite3.Error):  # the next one will do
                    self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")  # hinders no writer
            if stop:
                return

    def _write_group(self, group: list[tuple[Work, Future[Any]]]) -> None:
        outcomes: list[tuple[Future[Any], Any, BaseException | None]] = []
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            for work, future in group:
                if future.set_running_or_notify_cancel():
                    outcomes.append((future, *self._write_one(work)))
            self._connection.execute("COMMIT")
        except BaseException as error:  # the transaction failed as a whole: nothing of it may be acknowledged
            failure = error if isinstance(error, TokenTrueError) else JournalError(f"the journal could not be written: {error}")
            outcomes = [(future, None, failure) for _, future in group if future.running() or future.set_running_or_notify_cancel()]
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        for future, result, error in outcomes:
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

    def _write_one(self, work: Work) -> tuple[Any, BaseException | None]:
        self._connection.execute("SAVEPOINT one")
        try:
            result = work(self._connection)
        except Exception as error:
            if not self._connection.in_transaction:
                raise  # a full disk, say: SQLite has undone the whole group
            self._connection.execute("ROLLBACK TO one")
            self._connection.execute("RELEASE one")
            known = isinstance(error, TokenTrueError)
            return None, error if known else JournalError(f"the journal could not be written: {error}")
        self._connection.execute("RELEASE one")
        return result, None

    def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        if self._reader is None:
            return self.submit(work).result()
        with self._reading:
            if self._closed:
                raise JournalError("the journal is closed")
            try:
                return work(self._reader)
            except sqlite3.Error as error:
                raise JournalError(f"the journal {self.target} could not be read: {error}") from error

    def close(self) -> None:
        """Waits for what is queued."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._queue.put(None)
        self._writer.join()
        with self._writing:
            self._connection.close()
            if self._inline is not None:
                self._inline.connection.close()
        with self._reading:
            if self._reader is not None:
                self._reader.close()

    # Sessions.
    def create(self, record: SessionRecord) -> Future[None]:
        def work(db: sqlite3.Connection) -> None:
            try:
                db.execute(
                    "INSERT INTO sessions(id, grp, state, key_hash, created, ended, body) VALUES (?,?,?,?,?,?,?)",
                    (record.id, record.group, record.state, record.key_hash, record.created, record.ended, _body(record)),
                )
            except sqlite3.IntegrityError as error:
                raise SessionConflict(f"session {record.id!r} exists already; choose another id or open it") from error

        return self.submit(work)

    async def append(self, session_id: str, row: Row) -> None:
        """Compare-and-swap: the session is open, the parent is there, the place `seq` is free; or nothing happens."""
        await self.write(lambda db: _append(db, session_id, row))

    async def append_all(self, session_id: str, rows: Sequence[Row]) -> None:
        """All or none: the n choices of one request."""
        await self.write(lambda db: _append_all(db, session_id, rows))

    def append_now(self, session_id: str, rows: Sequence[Row]) -> bool:
        """`append_all`, committed right here; False where it has to be queued, and then nothing was written."""
        return self.write_now(lambda db: _append_all(db, session_id, rows)) is not None

    async def update(self, session_id: str, change: Callable[[SessionRecord], SessionRecord]) -> SessionRecord:
        """Read, change and write a session's record in one transaction."""

        def work(db: sqlite3.Connection) -> SessionRecord:
            record = change(_load_record(db, session_id))
            db.execute(
                "UPDATE sessions SET grp=?, state=?, key_hash=?, ended=?, body=? WHERE id=?",
                (record.group, record.state, record.key_hash, record.ended, _body(record), session_id),
            )
            return record

        return await self.write(work)

    async def delete(self, session_id: str) -> None:
        """Removes the session and everything sampled in it."""

        def work(db: sqlite3.Connection) -> None:
            if not db.execute("DELETE FROM sessions WHERE id=?", (session_id,)).rowcount:
                raise SessionNotFound(f"no session {session_id!r}")

        await self.write(work)

    async def purge(self, *, older_than_s: float, ended_only: bool = True, now: float | None = None) -> list[str]:
        """Removes sessions by age (since they ended; with `ended_only=False` also open ones, since their last turn)."""
        limit = (time.time() if now is None else now) - older_than_s

        def work(db: sqlite3.Connection) -> list[str]:
            newest = "max(coalesce(ended, 0), created, coalesce((SELECT max(created) FROM nodes WHERE session = sessions.id), 0))"
            where = "state = 'ended' AND ended < ?" if ended_only else f"{newest} < ?"
            gone = [row[0] for row in db.execute(f"SELECT id FROM sessions WHERE {where}", (limit,))]
            db.executemany("DELETE FROM sessions WHERE id=?", [(name,) for name in gone])
            return gone

        return await self.write(work)

    def get(self, session_id: str) -> SessionRecord:
        return self.read(lambda db: _load_record(db, session_id))

    def find_key(self, key_hash: str) -> str | None:
        """The session whose API key has this hash."""

        def work(db: sqlite3.Connection) -> str | None:
            row = db.execute("SELECT id FROM sessions WHERE key_hash=?", (key_hash,)).fetchone()
            return None if row is None else str(row[0])

        return self.read(work)

    def sessions(self, *, offset: int = 0, limit: int = 100, state: str | None = None, group: str | None = None) -> list[SessionRecord]:
        """Newest first."""
        clauses = [(column, value) for column, value in (("state", state), ("grp", group)) if value is not None]
        where = " AND ".join(["1", *(f"{column}=?" for column, _ in clauses)])
        sql = f"SELECT id FROM sessions WHERE {where} ORDER BY created DESC, id LIMIT ? OFFSET ?"
        values = [value for _, value in clauses]
        return self.read(lambda db: [_load_record(db, row[0]) for row in db.execute(sql, (*values, limit, offset)).fetchall()])

    def all_sessions(self, *, group: str | None = None) -> Iterator[SessionRecord]:
        """Oldest first, page by page: sessions that are added meanwhile do not disturb it."""
        last = (0.0, "")
        clause = "" if group is None else "AND grp=?"
        sql = f"SELECT created, id FROM sessions WHERE (created, id) > (?, ?) {clause} ORDER BY created, id LIMIT 100"
        while page := self.read(lambda db: db.execute(sql, last if group is None else (*last, group)).fetchall()):  # noqa: B023
            yield from (self.get(name) for _, name in page)
            last = page[-1]

    def count(self) -> int:
        return self.read(lambda db: int(db.execute("SELECT count(*) FROM sessions").fetchone()[0]))

    def rows(self, session_id: str) -> list[Row]:
        """The nodes of a session in the order of their commits."""
        sql = f"SELECT {', '.join(_COLUMNS)} FROM nodes WHERE session=? ORDER BY seq"
        return self.read(lambda db: [Row(**dict(zip(_COLUMNS, row, strict=True))) for row in db.execute(sql, (session_id,))])


def _nothing(db: sqlite3.Connection) -> None:
    """A write of nothing: the writer looks after the log when it meets one."""


def _append_all(db: sqlite3.Connection, session_id: str, rows: Sequence[Row]) -> None:
    for row in rows:
        _append(db, session_id, row)


def _append(db: sqlite3.Connection, session_id: str, row: Row) -> None:
    try:
        done = db.execute(_INSERT, (session_id, *_VALUES(row), session_id, row.parent, session_id, row.parent))
    except sqlite3.IntegrityError as error:
        raise SessionConflict(f"another process writes session {session_id!r}: place {row.seq} is taken") from error
    if done.rowcount == 1:
        return
    state = db.execute("SELECT state FROM sessions WHERE id=?", (session_id,)).fetchone()
    if state is None:
        raise SessionNotFound(f"no session {session_id!r}")
    if state[0] != "open":
        raise SessionConflict(f"session {session_id!r} has ended")
    raise SessionConflict(f"parent {row.parent} of node {row.id} is not in the journal")


def _body(record: SessionRecord) -> bytes:
    rewards = record.rewards
    return dumps(
        {
            "metadata": record.metadata,
            "sampling": record.sampling,
            "history": record.history,
            "training": record.training,
            "template": record.template,
            "tokenizer": record.tokenizer,
            "rewards": {"session": rewards.session, "leaves": rewards.leaves, "metadata": rewards.metadata},
        }
    )


def _load_record(db: sqlite3.Connection, session_id: str) -> SessionRecord:
    row = db.execute("SELECT id, grp, state, key_hash, created, ended, body FROM sessions WHERE id=?", (session_id,)).fetchone()
    if row is None:
        raise SessionNotFound(f"no session {session_id!r}")
    body = loads(row[6])
    rewards = Rewards(**body.pop("rewards"))
    return SessionRecord(id=row[0], group=row[1], state=row[2], key_hash=row[3], created=row[4], ended=row[5], rewards=rewards, **body)
