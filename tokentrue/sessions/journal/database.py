"""What the journal's statements need of a database connection. `sqlite3.Connection` fits; `postgres.Connection` is made
to fit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Protocol


class Found(Protocol):
    """The result of a statement."""

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


def mask_password(store: str) -> str:
    """A store as it may be shown."""
    return re.sub(r"(//[^:/@]*):[^@]*@", r"\1:***@", store)
