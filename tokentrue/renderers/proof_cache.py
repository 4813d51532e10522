"""Disk cache of proofs: one JSON file per template, tokenizer, settings and code version. Writes are atomic renames; an
unreadable file is proven again; without a writable directory nothing is cached."""

import json
import os
import tempfile
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from importlib import metadata
from pathlib import Path

from tokentrue.json_types import JsonMapping, is_object

VERSION = 3
_CODE = (".py", ".toml", ".jinja")
_LIBRARIES = ("jinja2", "tokenizers", "transformers")


@lru_cache
def hash_code() -> str:
    """Everything that can change a proof: this package's code and the versions of its libraries."""
    package = Path(__file__).parent
    files = sorted(path for path in package.rglob("*") if path.suffix in _CODE)
    code = b"".join(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes() for path in files)
    versions = ",".join(f"{name}=={metadata.version(name)}" for name in _LIBRARIES)
    return sha256(code + versions.encode()).hexdigest()


def find_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "tokentrue" / f"proofs-v{VERSION}"


def make_key(parts: JsonMapping) -> str:
    return sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def read(key: str) -> JsonMapping | None:
    try:
        data = json.loads((find_directory() / f"{key}.json").read_text())
    except (OSError, ValueError):
        return None
    return data if is_object(data) and {"proof", "stops"} <= data.keys() else None


def write(key: str, data: JsonMapping) -> None:
    folder = find_directory()
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, suffix=".tmp")
        with os.fdopen(handle, "w") as file:
            json.dump(data, file)
        os.replace(name, folder / f"{key}.json")
