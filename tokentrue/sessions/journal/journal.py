"""The durable store: SQLite in WAL mode. An awaited write returns only after its commit. One writer thread makes every
write; one process owns a store for writing (`lock`); one object at a time owns a session (`claim`). Corruption is
detected: rows carry digests, sessions the number of their nodes, the store the number of its sessions, and opening runs
`quick_check`. `synchronous="FULL"` also survives a loss of power."""

import asyncio
import secrets
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Literal, TypeVar
from weakref import WeakValueDictionary

from tokentrue.errors import JournalError, SessionConflict, SessionNotFound, TokenTrueError
from tokentrue.ids import TokenIds
from tokentrue.images import ImageFile, hash_image
from tokentrue.records import record
from tokentrue.sessions.journal.database import Database
from tokentrue.sessions.journal.rows import (
    COLUMNS,
    RECORD,
    Row,
    SessionRecord,
    damaged,
    node_from_row,
    record_from_values,
    row_digest,
    values_from_record,
)
from tokentrue.sessions.journal.sqlite import NODE_COLUMNS, SqliteFile, StoreLock, WorkerLock
from tokentrue.sessions.tree import Tree

T = TypeVar("T")
_INSERT_NODE = f"""
    INSERT INTO nodes(session, {NODE_COLUMNS}, digest) SELECT {",".join("?" * (len(Row._fields) + 2))}
    WHERE EXISTS (SELECT 1 FROM sessions WHERE id=? AND state='open')
      AND (? IS NULL OR EXISTS (SELECT 1 FROM nodes WHERE session=? AND id=?))"""
_INSERT_IMAGE = "INSERT INTO images(sha256, media_type, data) VALUES (?,?,?) ON CONFLICT (sha256) DO NOTHING"
_REFER_TO_IMAGE = "INSERT INTO session_images(session, sha256) VALUES (?,?) ON CONFLICT (session, sha256) DO NOTHING"
_OF_SESSION = "FROM images JOIN session_images ON session_images.sha256 = images.sha256 WHERE session_images.session=?"
FIRST_TOKEN = 1  # fencing token, which grows with each owner


class SessionClaim:
    def __init__(self, session_id: str, turns: Sized, token: int) -> None:
        self.session_id, self.turns = session_id, turns  # the turns that its holder is generating
        self.token = token  # of the owner when it was claimed
        self.is_revoked = False

    def check(self) -> None:
        if self.is_revoked:
            raise SessionConflict(f"session {self.session_id!r} was opened again: use the newer object")


@record
class StoreSecret:
    value: bytes
    created: float


class Journal:
    """Writes are awaitable; reads block. `lock=False` is for workers whose parent holds a `StoreLock`;
    `read_only=True` needs no lock; `check=False` skips `quick_check`, which reads the whole file."""

    _has_fencing = False  # a write with an older fencing token fails
    folder: Path | None = None  # on whose disk it is, if this machine has it

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
        file = SqliteFile(self.target, synchronous=synchronous, read_only=read_only)
        self.folder = None if file.in_memory else Path(file.path).resolve().parent
        self._lock: StoreLock | WorkerLock | None = None
        if not (read_only or file.in_memory):
            self._lock = StoreLock(file.path) if lock else WorkerLock(file.path)
        with ExitStack() as on_error:
            on_error.callback(self._release_lock)
            file.create()
            connection = on_error.enter_context(closing(file.connect()))
            if check and not file.in_memory:
                file.check(connection)
            self._start(connection, None if file.in_memory else file.connect(), read_only=read_only)
            on_error.pop_all()

    def _start(self, connection: Database, reader: Database | None, *, read_only: bool) -> None:
        self._read_only, self._closed = read_only, False
        self._claims: WeakValueDictionary[str, SessionClaim] = WeakValueDictionary()  # each is kept by its holder
        self._reading, self._reader = threading.Lock(), reader
        self._writer = Writer(connection)

    def close(self) -> None:
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
        """Returns the new owner's fencing token; call it before reading a session to continue it."""
        return FIRST_TOKEN

    def claim(self, session_id: str, turns: Sized, token: int = FIRST_TOKEN) -> SessionClaim:
        """The previous holder of the session can write no more. Without fencing, raises while that one is generating."""
        held = self._claims.get(session_id)
        if held is not None:
            if len(held.turns) and not self._has_fencing:
                raise SessionConflict(
                    f"session {session_id!r} is in use: another object is generating {len(held.turns)} turn(s) for it"
                )
            held.is_revoked = True
        claim = self._claims[session_id] = SessionClaim(session_id, turns, token)
        return claim

    @property
    def lease_number(self) -> int:
        """Increases when another process may have taken this one's sessions; raises while that is unknown."""
        return 0

    def note_owner(self, db: Database, session_id: str) -> None:
        """Called in the transaction that creates a session."""

    def check_owner(self, db: Database, session_id: str, claim: SessionClaim | None) -> None:
        """Called in the transaction of every write to a session; raises if another process owns it now."""

    def submit(self, write: Callable[[Database], T]) -> Future[T]:
        """Completes after the commit of its transaction."""
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
            return self._read_from(self._reader, read)

    def _read_from(self, reader: Any, read: Callable[[Database], T]) -> T:
        try:
            return read(reader)
        except sqlite3.Error as error:
            raise JournalError(f"the journal {self.target} could not be read: {error}") from error

    def read_secret(self, name: str) -> StoreSecret:
        def write(db: Database) -> StoreSecret:
            values = (name, secrets.token_bytes(32), time.time())
            db.execute("INSERT INTO secrets(name, value, created) VALUES (?,?,?) ON CONFLICT (name) DO NOTHING", values)
            value, created = db.execute("SELECT value, created FROM secrets WHERE name=?", (name,)).fetchone()
            return StoreSecret(value=bytes(value), created=created)

        return self.submit(write).result()

    def create(self, record: SessionRecord) -> Future[None]:
        values = values_from_record(record)

        def write(db: Database) -> None:
            try:
                db.execute(f"INSERT INTO sessions({RECORD}) VALUES ({','.join('?' * len(values))})", values)
            except sqlite3.IntegrityError as error:
                raise SessionConflict(f"session {record.id!r} exists already; choose another id or open it") from error
            _count_sessions(db, 1)
            self.note_owner(db, record.id)

        return self.submit(write)

    async def append_nodes(
        self, session_id: str, rows: Sequence[Row], claim: SessionClaim | None = None, images: Sequence[ImageFile] = ()
    ) -> None:
        """All rows, and the images that they are the first to refer to, or nothing. Requires an open session, an
        existing parent and an unused `seq`."""

        def write(db: Database) -> None:
            self.check_owner(db, session_id, claim)
            for image in sorted(images, key=lambda image: image.sha256):  # two writers must not wait for each other
                is_kept = False
                while not is_kept:
                    db.execute(_INSERT_IMAGE, (image.sha256, image.media_type, image.data))
                    is_kept = self.lock_image(db, image.sha256, "KEY SHARE")
                db.execute(_REFER_TO_IMAGE, (session_id, image.sha256))
            for row in rows:
                values = (session_id, *row)
                known = (session_id, row.parent, session_id, row.parent)
                try:
                    done = db.execute(_INSERT_NODE, (*values, row_digest(values), *known))
                except sqlite3.IntegrityError as error:
                    raise SessionConflict(
                        f"another process writes session {session_id!r}: sequence number {row.seq} is taken"
                    ) from error
                if done.rowcount != 1:
                    if load_record(db, session_id).state != "open":
                        raise SessionConflict(f"session {session_id!r} has ended")
                    raise SessionConflict(f"parent {row.parent} of node {row.id} is not in the journal")
            db.execute("UPDATE sessions SET nodes = nodes + ? WHERE id=?", (len(rows), session_id))

        await self.write(write)

    async def update(
        self, session_id: str, change: Callable[[SessionRecord], SessionRecord], claim: SessionClaim | None = None
    ) -> SessionRecord:
        def write(db: Database) -> SessionRecord:
            self.check_owner(db, session_id, claim)
            record = change(load_record(db, session_id))
            names = ", ".join(f"{name}=?" for name in (*COLUMNS[1:], "digest"))
            db.execute(f"UPDATE sessions SET {names} WHERE id=?", (*values_from_record(record)[1:], session_id))
            return record

        return await self.write(write)

    async def delete(self, session_id: str) -> None:
        await self.write(lambda db: self._delete_sessions(db, [session_id]))

    async def purge(self, *, older_than_s: float) -> list[str]:
        """Deletes sessions by age since their end; returns their ids."""
        limit = time.time() - older_than_s

        def write(db: Database) -> list[str]:
            ended = db.execute("SELECT id FROM sessions WHERE state = 'ended' AND ended < ?", (limit,))
            old = [row[0] for row in ended]
            self._delete_sessions(db, old)
            return old

        return await self.write(write)

    def _delete_sessions(self, db: Database, session_ids: Sequence[str]) -> None:
        images: set[str] = set()
        for session_id in session_ids:
            found = db.execute("SELECT sha256 FROM session_images WHERE session=?", (session_id,))
            images.update(row[0] for row in found)
            if not db.execute("DELETE FROM sessions WHERE id=?", (session_id,)).rowcount:
                raise SessionNotFound(f"no session {session_id!r}")
        for image in sorted(images):  # in the order of writers: none waits for another in a circle
            self.lock_image(db, image, "UPDATE")
            unused = "NOT EXISTS (SELECT 1 FROM session_images WHERE sha256=?)"
            db.execute(f"DELETE FROM images WHERE sha256=? AND {unused}", (image, image))
        _count_sessions(db, -len(session_ids))

    def lock_image(self, db: Database, sha256: str, strength: str) -> bool:
        """False if it is not in the store. Here one writer holds the whole store."""
        return True

    def read_image(self, session_id: str, sha256: str) -> tuple[bytes, str]:
        sql = f"SELECT data, media_type {_OF_SESSION} AND images.sha256=?"
        found = self.read(lambda db: db.execute(sql, (session_id, sha256)).fetchone())
        if found is None:
            raise SessionNotFound(f"no image {sha256!r} in session {session_id!r}")
        if hash_image(found[0]) != sha256:
            raise damaged(f"image {sha256} does not fit its hash")
        return bytes(found[0]), found[1]

    def count_image_bytes(self, session_id: str) -> int:
        sql = f"SELECT coalesce(sum(length(data)), 0) {_OF_SESSION}"
        return int(self.read(lambda db: db.execute(sql, (session_id,)).fetchone()[0]))

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
        """Newest first. `after`: (creation time, id) of a session, which may be deleted by now."""
        where, values = _filter_sessions(state, group)
        if after is not None:
            where, values = f"{where} AND (created < ? OR (created = ? AND id > ?))", (*values, after[0], *after)
        sql = f"{where} ORDER BY created DESC, id LIMIT ? OFFSET ?"
        return self._list_sessions(sql, (*values, limit, offset))

    def all_sessions(self, *, group: str | None = None) -> Iterator[SessionRecord]:
        """Oldest first; concurrent inserts and deletes do not disturb it."""
        where, values = _filter_sessions(None, group)
        sql, last = f"{where} AND (created, id) > (?, ?) ORDER BY created, id LIMIT 100", (0.0, "")
        while page := self._list_sessions(sql, (*values, *last)):
            yield from page
            last = (page[-1].created, page[-1].id)

    def _list_sessions(self, where: str, values: Sequence[Any]) -> list[SessionRecord]:
        sql = f"SELECT {RECORD} FROM sessions WHERE {where}"
        return list(map(record_from_values, self.read(lambda db: db.execute(sql, values).fetchall())))

    def count(self, *, state: str | None = None, group: str | None = None) -> int:
        where, values = _filter_sessions(state, group)
        sql = f"SELECT count(*) FROM sessions WHERE {where}"
        return int(self.read(lambda db: db.execute(sql, values).fetchone()[0]))

    def rows(self, session_id: str) -> list[Row]:
        # One statement, so one snapshot; a session without nodes has one row, of nulls.
        sql = f"""
            SELECT sessions.nodes, {", ".join(f"nodes.{name}" for name in Row._fields)}, nodes.digest
            FROM sessions LEFT JOIN nodes ON nodes.session = sessions.id WHERE sessions.id=? ORDER BY nodes.seq"""
        found = self.read(lambda db: db.execute(sql, (session_id,)).fetchall())
        rows = [values for values in found if values[1] is not None]
        if found and found[0][0] != len(rows):
            raise damaged(f"session {session_id!r} has {len(rows)} nodes of {found[0][0]}")
        return [_row_from_values(session_id, values[1:]) for values in rows]


def load_record(db: Database, session_id: str) -> SessionRecord:
    row = db.execute(f"SELECT {RECORD} FROM sessions WHERE id=?", (session_id,)).fetchone()
    if row is None:
        raise SessionNotFound(f"no session {session_id!r}")
    return record_from_values(row)


def _row_from_values(session_id: str, values: Sequence[Any]) -> Row:
    *columns, digest = values
    if digest != row_digest((session_id, *columns)):
        raise damaged(f"node {columns[0]!r} of session {session_id!r} does not fit its digest")
    return Row(*columns)


def _filter_sessions(state: str | None, group: str | None) -> tuple[str, tuple[Any, ...]]:
    given = [(column, value) for column, value in (("state", state), ("grp", group)) if value is not None]
    return " AND ".join(["1=1", *(f"{column}=?" for column, _ in given)]), tuple(value for _, value in given)


def _count_sessions(db: Database, change: int) -> None:
    if isinstance(db, sqlite3.Connection):  # one row per store would make gateways wait for each other
        db.execute("UPDATE totals SET count = count + ? WHERE name='sessions'", (change,))


Write = Callable[[Database], Any]
_LARGEST_GROUP = 512


class Writer:
    """Owns the only writing connection. Queued writes share a transaction, each in a savepoint: a failing write does
    not affect the others."""

    def __init__(self, connection: Database) -> None:
        self._connection = connection
        self._waiting: deque[tuple[Write, Future[Any]]] = deque()
        self._lock, self._is_closed = threading.Lock(), False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokentrue-journal")

    def submit(self, write: Callable[[Database], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:  # a write that is refused must not be written by a job that is still running
            if self._is_closed:
                raise JournalError("the journal is closed")
            self._waiting.append((write, future))
            self._thread.submit(self._write_waiting)
        return future

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        self._thread.shutdown()
        self._connection.close()

    def _write_waiting(self) -> None:
        if self._waiting:  # an earlier call may have written them already
            self._write_group([self._waiting.popleft() for _ in range(min(len(self._waiting), _LARGEST_GROUP))])

    def _write_group(self, group: list[tuple[Write, Future[Any]]]) -> None:
        outcomes: list[tuple[Future[Any], Any, BaseException | None]] = []
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            for write, future in group:
                if future.set_running_or_notify_cancel():
                    outcomes.append((future, *self._write_one(write)))
            self._connection.execute("COMMIT")
        except BaseException as error:  # the transaction failed as a whole: none of its writes may be acknowledged
            futures = [future for _, future in group if future.running() or future.set_running_or_notify_cancel()]
            outcomes = [(future, None, _typed(error)) for future in futures]
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
            return None, _typed(error)
        self._connection.execute("RELEASE one")
        return result, None


def _typed(error: BaseException) -> BaseException:
    return error if isinstance(error, TokenTrueError) else JournalError(f"the journal could not be written: {error}")


def tree_from_rows(record: SessionRecord, rows: list[Row]) -> Tree:
    tree = Tree(template=record.template, tokenizer=record.tokenizer)
    for row in rows:
        parent = None if row.parent is None else tree.get(row.parent)
        tree.add(node_from_row(row, parent, tree.hash_prompt(parent, TokenIds.from_bytes(row.given_ids)).digest()))
    for request_key, node_ids in record.late_keys.items():
        tree.add_key(request_key, node_ids)
    return tree


def load_tree(journal: Journal, session_id: str) -> tuple[SessionRecord, Tree]:
    record = journal.get(session_id)
    return record, tree_from_rows(record, journal.rows(session_id))
