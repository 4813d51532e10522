"""The connection protocol of a store, which `sqlite3.Connection` implements, its statements and its name."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tokentrue.errors import ConfigError


class Database(Protocol):
    @property
    def in_transaction(self) -> bool: ...

    def execute(self, sql: str, parameters: Sequence[Any] = ..., /) -> Any:
        """A DB-API cursor. Raises sqlite3.IntegrityError for a second row with the same key."""
        ...

    def close(self) -> None: ...


def read_statements(name: str) -> Iterable[str]:
    text = (Path(__file__).with_name("migrations") / f"{name}.sql").read_text(encoding="utf-8")
    return filter(str.strip, text.split(";"))


def is_postgres(store: str) -> bool:
    return store.startswith(("postgresql://", "postgres://"))


def read_address(store: str) -> Mapping[str, str]:
    # An invalid URL is not quoted in the error: it may hold a password.
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    try:
        found = {name: str(value) for name, value in conninfo_to_dict(store).items() if value is not None}
    except psycopg.ProgrammingError:
        found = {"host": "@"}
    # A password with an unescaped @ or / ends up in what libpq quotes in its errors.
    port, place = found.get("port", ""), found.get("host", "") + found.get("dbname", "")
    if "@" in place or (port and not port.replace(",", "").isdecimal()):
        raise ConfigError(
            "the PostgreSQL URL of the store cannot be read; write @ : / ? # % in a user name or password as %40 %3A "
            "%2F %3F %23 %25, or set PGPASSWORD"
        )
    return found


def describe_store(store: str) -> str:
    """Without secrets: of a PostgreSQL URL only user, host and database."""
    if not is_postgres(store):
        return store
    try:
        parts = read_address(store)
    except (ConfigError, ImportError):
        return "postgresql://…"
    user, port = parts.get("user"), parts.get("port")
    place = f"{user + '@' if user else ''}{parts.get('host', '')}{':' + port if port else ''}"
    return f"postgresql://{place}/{parts.get('dbname', '')}"
