"""What was proven at load, kept between processes: one small JSON file per template, tokenizer and settings.

Invariants: a file is written beside its place and renamed, so that a reader sees all of it or nothing; a file that cannot be read, is
damaged or is of another version is proven anew; without a writable directory nothing is kept and nothing fails.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

VERSION = 1
_DECIDING = ("ascii_words", "encoding", "messages", "proof", "spans", "splice", "stops", "template")


@lru_cache
def code_hash() -> str:
    """Of the modules that decide what is proven: a changed one makes every older proof void."""
    here = Path(__file__).parent
    return sha256(b"".join((here / f"{name}.py").read_bytes() for name in _DECIDING)).hexdigest()


def directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "tokentrue" / f"proofs-v{VERSION}"


def key_of(parts: Mapping[str, Any]) -> str:
    return sha256(json.dumps(parts, sort_keys=True, ensure_ascii=True, default=str).encode()).hexdigest()


def read(key: str) -> dict[str, Any] | None:
    try:
        data = json.loads((directory() / f"{key}.json").read_text())
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) and data.get("key") == key else None


def write(key: str, data: Mapping[str, Any]) -> None:
    folder = directory()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, suffix=".tmp")
        with os.fdopen(handle, "w") as file:
            json.dump({**data, "key": key}, file, ensure_ascii=True)
        os.replace(name, folder / f"{key}.json")
    except OSError:
        return


def file_hash(path: Path) -> str:
    """sha256 of a file; remembered by its path, size and time of change, because tokenizer files are tens of megabytes."""
    stat = path.stat()
    key = key_of({"file": str(path.resolve()), "size": stat.st_size, "changed": stat.st_mtime_ns, "inode": stat.st_ino})
    known = read(key)
    if known is not None and isinstance(known.get("sha256"), str):
        return known["sha256"]
    digest = sha256(path.read_bytes()).hexdigest()
    write(key, {"sha256": digest})
    return digest
