"""Digests of a directory's files: made when a checkpoint is written, checked when it is loaded; ranks share the
work."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from tokentrue.errors import FileFormatError
from tokentrue.train.ranks import Ranks


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests_under(directory: Path, ranks: Ranks) -> dict[str, str]:
    """By name relative to the directory. Every rank calls it once all files are written, and hashes its share of
    them."""
    names = ranks.from_first(
        sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
    )
    mine = {name: digest_of(directory / name) for name in names[ranks.rank :: ranks.world]}
    return {name: digest for found in ranks.all_gather_object(mine) for name, digest in found.items()}


def require_digests(directory: Path, digests: Mapping[str, str], ranks: Ranks) -> None:
    """Raises FileFormatError, on every rank, where a file is not the one that was written."""
    mine = [
        name
        for name in sorted(digests)[ranks.rank :: ranks.world]
        if not (directory / name).is_file() or digest_of(directory / name) != digests[name]
    ]
    changed = sorted(name for found in ranks.all_gather_object(mine) for name in found)
    if changed:
        raise FileFormatError(
            f"{directory}: not a whole checkpoint ({changed[0]} is missing or changed); remove it to resume from an earlier one"
        )
