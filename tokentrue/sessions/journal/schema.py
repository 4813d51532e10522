"""The journal's tables and migrations. Never edit a released step: add another one."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

from tokentrue.errors import JournalError
from tokentrue.sessions.journal.rows import COLUMNS as SESSION_COLUMNS
from tokentrue.sessions.journal.rows import row_digest

NODE_COLUMNS = (
    "id",
    "seq",
    "parent",
    "given_ids",
    "sampled_ids",
    "logprobs",
    "chain",
    "body",
    "routed_experts",
    "created",
)


def _fill_digests(db: sqlite3.Connection) -> None:
    for row in db.execute(f"SELECT {', '.join(SESSION_COLUMNS)} FROM sessions").fetchall():
        count = db.execute("SELECT count(*) FROM nodes WHERE session=?", (row[0],)).fetchone()[0]
        db.execute("UPDATE sessions SET digest=?, nodes=? WHERE id=?", (row_digest(row), count, row[0]))
    places = db.execute("SELECT session, seq FROM nodes").fetchall()
    for place in places:
        row = db.execute(
            f"SELECT session, {', '.join(NODE_COLUMNS)} FROM nodes WHERE session=? AND seq=?", place
        ).fetchone()
        db.execute("UPDATE nodes SET digest=? WHERE session=? AND seq=?", (row_digest(row), *place))
    db.execute("INSERT INTO totals(name, count) SELECT 'sessions', count(*) FROM sessions")


STEPS: tuple[tuple[str, Callable[[sqlite3.Connection], None] | None], ...] = (
    # 1: sessions and their nodes.
    (
        """
        CREATE TABLE sessions (
            id TEXT PRIMARY KEY, grp TEXT, state TEXT NOT NULL, key_hash TEXT,
            created REAL NOT NULL, ended REAL, body BLOB NOT NULL
        ) WITHOUT ROWID;
        CREATE TABLE nodes (
            session TEXT NOT NULL REFERENCES sessions(id) ON DELETE CASCADE,
            seq INTEGER NOT NULL, id TEXT NOT NULL, parent TEXT,
            given_ids BLOB NOT NULL, sampled_ids BLOB NOT NULL, logprobs BLOB NOT NULL, chain BLOB NOT NULL,
            body BLOB NOT NULL, routed_experts BLOB, created REAL NOT NULL,
            PRIMARY KEY (session, seq)
        );
        CREATE UNIQUE INDEX nodes_by_id ON nodes(session, id);
        """,
        None,
    ),
    # 2: sessions are found by API key, by group and by age without reading them all.
    (
        """
        CREATE UNIQUE INDEX sessions_by_key ON sessions(key_hash) WHERE key_hash IS NOT NULL;
        CREATE INDEX sessions_by_group ON sessions(grp);
        CREATE INDEX sessions_by_age ON sessions(state, ended);
        """,
        None,
    ),
    # 3: every row carries a digest of itself, every session the number of its nodes, and the store the number of its
    # sessions.
    (
        """
        ALTER TABLE sessions ADD COLUMN digest BLOB;
        ALTER TABLE sessions ADD COLUMN nodes INTEGER NOT NULL DEFAULT 0;
        ALTER TABLE nodes ADD COLUMN digest BLOB;
        CREATE TABLE totals (name TEXT PRIMARY KEY, count INTEGER NOT NULL) WITHOUT ROWID;
        """,
        _fill_digests,
    ),
    # 4: secrets of the store, shared by every gateway that opens it.
    ("CREATE TABLE secrets (name TEXT PRIMARY KEY, value BLOB NOT NULL, created REAL NOT NULL) WITHOUT ROWID", None),
)
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
                statements, fill = STEPS[version]
                for statement in filter(str.strip, statements.split(";")):
                    connection.execute(statement)
                if fill is not None:
                    fill(connection)
                connection.execute(f"PRAGMA user_version={version + 1}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
    if version > VERSION:
        raise JournalError(f"the journal has schema {version}, this tokentrue knows {VERSION}: use a newer tokentrue")
