"""One server per store: an exclusive lock on a file beside it, held while the store is open for writing and freed when the process ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from tokentrue.errors import JournalError


class StoreLock:
    """Taken on construction; raises where another process (or another object of this one) has it."""

    def __init__(self, store: str | Path) -> None:
        path = Path(f"{str(store).removeprefix('sqlite:')}.lock")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise JournalError(f"cannot open the journal {store}: {error}; give a writable path, or --store memory") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.read(self._file, 32).decode("ascii", "replace").strip() or "unknown"
            os.close(self._file)
            self._file = None
            cure = "stop that server, or give each server a store of its own; samples and views need no lock"
            raise JournalError(f"the store {store} is in use by process {owner}: {cure}") from error
        os.ftruncate(self._file, 0)
        os.write(self._file, str(os.getpid()).encode())

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
