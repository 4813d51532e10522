"""The journal that a command is to read: is there one?"""

from __future__ import annotations

from pathlib import Path

from tokentrue.errors import FileFormatError

ADVICE = "give the path that `tokentrue serve --store sqlite:PATH` was given"
MAGIC = b"SQLite format 3\0"


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
