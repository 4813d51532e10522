"""The journal that a command is to read: is there one?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tokentrue.errors import FileFormatError

if TYPE_CHECKING:
    from tokentrue.sessions import Journal

ADVICE = "give what `tokentrue serve --store` was given: sqlite:PATH or postgresql://…"
MAGIC = b"SQLite format 3\0"


def open_recorded(source: str, *, read_only: bool = True) -> Journal:
    """Of `sqlite:PATH`, PATH or `postgresql://…`; raises FileFormatError or JournalError where no journal is."""
    from tokentrue.sessions.journal import is_postgres, open_journal

    return open_journal(source if is_postgres(source) else f"sqlite:{require_journal(source)}", read_only=read_only)


def require_journal(source: str) -> Path:
    """The path of `sqlite:PATH` or PATH; raises FileFormatError where no journal is."""
    path = Path(source.removeprefix("sqlite:"))
    if not path.is_file():
        raise FileFormatError(f"no journal at {path}; {ADVICE}")
    with path.open("rb") as file:
        start = file.read(len(MAGIC))
    if start and start != MAGIC:
        raise FileFormatError(f"{path} is not a journal (no SQLite file); {ADVICE}")
    return path
