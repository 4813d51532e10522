"""The journal that a command is to read: is there one?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tokentrue.errors import FileFormatError

if TYPE_CHECKING:
    from tokentrue.sessions import Journal

ADVICE = "give what `tokentrue serve --store` was given: sqlite:PATH or postgresql://…"
MAGIC = b"SQLite format 3\0"


def open_recorded(source: str) -> Journal:
    """Of `sqlite:PATH`, PATH or `postgresql://…`, to read; raises FileFormatError or JournalError where no journal
    is."""
    from tokentrue.sessions.journal import open_journal

    return open_journal(require_store(source), read_only=True)


def require_store(source: str) -> str:
    """The store that `sqlite:PATH`, PATH or `postgresql://…` names; raises FileFormatError where a path has no journal.
    Call it before this
    process opens the store: closing a file drops the locks that SQLite holds on it."""
    from tokentrue.sessions.journal import is_postgres

    if is_postgres(source):
        return source
    path = Path(source.removeprefix("sqlite:"))
    if not path.is_file():
        raise FileFormatError(f"no journal at {path}; {ADVICE}")
    with path.open("rb") as file:
        start = file.read(len(MAGIC))
    if start and start != MAGIC:
        raise FileFormatError(f"{path} is not a journal (no SQLite file); {ADVICE}")
    return f"sqlite:{path}"
