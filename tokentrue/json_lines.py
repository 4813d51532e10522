"""Files of JSON lines. A line ends at "\\n" or "\\r\\n" and nowhere else: `str.splitlines` also cuts at U+2028, U+0085
and six more characters, which JSON strings hold as they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def read_numbered_lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, without line ends, numbered from 1."""
    # Bytes, not text: a line that a crash cut inside a character is only that line's error.
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, line.rstrip(b"\r\n")
