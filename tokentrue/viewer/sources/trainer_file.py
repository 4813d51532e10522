"""The trainer's side of the comparison: JSON lines `{"sample_id": …, "logprobs": [per token, null where unknown]}`, as `tokentrue
diagnose --trainer-logprobs` takes them; an optional `"entropy"` list of the same length colours tokens by entropy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from tokentrue.errors import FileFormatError
from tokentrue.types import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerColumns:
    logprobs: Sequence[float | None]
    entropy: Sequence[float | None] | None = None

    def check(self, sample: Sample) -> None:
        for name, column in (("log-probabilities", self.logprobs), ("entropies", self.entropy)):
            if column is not None and len(column) != len(sample.token_ids):
                raise FileFormatError(f"sample {sample.sample_id}: {len(column)} trainer {name} for {len(sample.token_ids)} tokens")


def read_trainer_file(path: str | Path) -> dict[str, TrainerColumns]:
    """By sample id."""
    source = Path(path)
    if not source.is_file():
        raise FileFormatError(f"{source}: no such file")
    found: dict[str, TrainerColumns] = {}
    with source.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    row = orjson.loads(line)
                    found[row["sample_id"]] = TrainerColumns(logprobs=_floats(row["logprobs"]), entropy=_floats(row.get("entropy")))
                except (ValueError, KeyError, TypeError) as error:
                    what = f'not a JSON object with "sample_id" and "logprobs" ({error})'
                    raise FileFormatError(f"{source}:{number}: {what}") from error
    return found


def _floats(values: Any) -> list[float | None]:
    return None if values is None else [None if value is None else float(value) for value in values]  # pyright: ignore[reportReturnType]
