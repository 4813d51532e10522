"""The durable store: SQLite, or PostgreSQL (`postgres.py`, imported only when used). Read `journal.py` first."""

import os
import socket
from pathlib import Path
from typing import Literal

from tokentrue.errors import ConfigError
from tokentrue.sessions.journal.database import is_postgres
from tokentrue.sessions.journal.journal import Journal, StoreSecret
from tokentrue.sessions.journal.rows import Rewards, Row, SessionRecord, copy_metadata, read_reward
from tokentrue.sessions.journal.sqlite import SqliteFile, StoreLock

__all__ = [
    "Journal",
    "Rewards",
    "Row",
    "SessionRecord",
    "StoreLock",
    "StoreSecret",
    "check_store",
    "copy_metadata",
    "is_postgres",
    "open_journal",
    "read_reward",
]


def open_journal(
    store: str,
    *,
    durability: Literal["normal", "full"] = "normal",
    read_only: bool = False,
    lock: bool = True,
    name: str = "",
    address: str = "",
    lease_s: float = 15.0,
) -> Journal:
    """`sqlite:PATH`, `postgresql://…` or `memory`. `name`, `address` and `lease_s` apply to PostgreSQL."""
    require_kind(store)
    if is_postgres(store):
        from tokentrue.sessions.journal.postgres import PostgresJournal

        name = name or f"{socket.gethostname()}:{os.getpid()}"
        return PostgresJournal(store, name=name, address=address, lease_s=lease_s, read_only=read_only)
    return Journal(store, synchronous="FULL" if durability == "full" else "NORMAL", read_only=read_only, lock=lock)


def require_kind(store: str) -> None:
    if store != "memory" and not store.startswith("sqlite:") and not is_postgres(store):
        kind = store.partition(":")[0]  # not the rest, which may hold a password
        raise ConfigError(f"store must be sqlite:PATH, postgresql://… or memory, got {kind!r}")


def check_store(store: str) -> None:
    require_kind(store)
    if store.startswith("sqlite:"):
        StoreLock(store).release()
        file = SqliteFile(store, synchronous="NORMAL", read_only=True)
        if Path(file.path).exists():
            file.connect().close()
