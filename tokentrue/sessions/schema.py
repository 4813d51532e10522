"""The journal's tables, and how an older journal becomes today's. A step is never edited after a release: add another one."""

from __future__ import annotations

import sqlite3

from tokentrue.errors import JournalError

STEPS: tuple[str, ...] = (
    # 1: sessions and their nodes.
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
    # 2: sessions are found by API key, by group and by age without reading them all.
    """
    CREATE UNIQUE INDEX sessions_by_key ON sessions(key_hash) WHERE key_hash IS NOT NULL;
    CREATE INDEX sessions_by_group ON sessions(grp);
    CREATE INDEX sessions_by_age ON sessions(state, ended);
    """,
)
VERSION = len(STEPS)


def migrate(connection: sqlite3.Connection) -> None:
    """Brings the tables to `VERSION`, each step in its own transaction; refuses a journal from the future."""
    while (version := int(connection.execute("PRAGMA user_version").fetchone()[0])) < VERSION:
        connection.execute("BEGIN IMMEDIATE")
        try:
            now = int(connection.execute("PRAGMA user_version").fetchone()[0])  # another process may have been quicker
            if now == version:
                for statement in filter(str.strip, STEPS[version].split(";")):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version={version + 1}")
            connection.execute("COMMIT")
        except BaseException:
            connection.execute("ROLLBACK")
            raise
    if version > VERSION:
        raise JournalError(f"the journal has schema {version}, this tokentrue knows {VERSION}: use a newer tokentrue")
