"""What the journal's statements need of a database connection. `sqlite3.Connection` fits; `postgres.Connection` is made
to fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from tokentrue.errors import ConfigError


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


def read_address(store: str) -> Mapping[str, str]:
    """The connection parameters in a `postgresql://` URL, as libpq reads them. One that cannot be read is not quoted:
    it may hold a password."""
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    try:
        found = {name: str(value) for name, value in conninfo_to_dict(store).items() if value is not None}
    except psycopg.ProgrammingError:
        found = {"host": "@"}
    # A password with a bare @ or / ends up in the host, the port or the database's name, which libpq quotes in its errors.
    port, place = found.get("port", ""), found.get("host", "") + found.get("dbname", "")
    if "@" in place or (port and not port.replace(",", "").isdecimal()):
        raise ConfigError(
            "the PostgreSQL URL of the store cannot be read; write @ : / ? # % in a user name or password as %40 %3A "
            "%2F %3F %23 %25, or set PGPASSWORD"
        )
    return found


def describe_store(store: str) -> str:
    """A store as it may be shown: of a PostgreSQL URL the user, host and database alone."""
    if not is_postgres(store):
        return store
    try:
        parts = read_address(store)
    except (ConfigError, ImportError):
        return "postgresql://…"
    user, port = parts.get("user"), parts.get("port")
    place = f"{user + '@' if user else ''}{parts.get('host', '')}{':' + port if port else ''}"
    return f"postgresql://{place}/{parts.get('dbname', '')}"
