"""JSON lines: the native format, and the container of the exporters whose trainers read JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from tokentrue.errors import FileFormatError
from tokentrue.json_lines import read_numbered_lines
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.plain_json import dumps, loads
from tokentrue.samples.exporters.base import ExportedSample
from tokentrue.samples.exporters.rows import TrainerColumns, read_trainer_row
from tokentrue.samples.shape import head_to_json, sample_from_json, sample_to_json
from tokentrue.types import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonLines:
    """One sample per line, the documented fields."""

    name: str = "jsonl"
    suffix: str = ".jsonl"
    follows: str = "tokentrue's own format"

    def write(self, samples: Iterable[Sample], path: Path) -> int:
        return write_lines((sample_to_json(sample) for sample in samples), path)

    def read(self, path: Path) -> Iterator[ExportedSample]:
        for where, row in read_lines(path):
            yield ExportedSample(sample=sample_from_json(row, where), where=where)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLines:
    """A trainer's rows as JSON lines. `row` makes its fields of a sample; `columns` is what a sample is read back
    from."""

    name: str
    follows: str
    row: Callable[[Sample], JsonObject]
    columns: type[TrainerColumns]
    added: frozenset[str] = frozenset()  # fields that a user adds to the row
    suffix: str = ".jsonl"

    def write(self, samples: Iterable[Sample], path: Path) -> int:
        return write_lines(({**self.row(sample), "tokentrue": head_to_json(sample)} for sample in samples), path)

    def read(self, path: Path) -> Iterator[ExportedSample]:
        for where, row in read_lines(path):
            yield read_trainer_row(row, make_row=self.row, columns=self.columns, added=self.added, where=where)


def write_lines(rows: Iterable[JsonMapping], path: Path) -> int:
    count = 0
    with path.open("wb") as file:
        for row in rows:
            file.write(dumps(row) + b"\n")
            count += 1
    return count


def read_lines(path: Path) -> Iterator[tuple[str, JsonMapping]]:
    for number, line in read_numbered_lines(path):
        where = f"{path.name}:{number}"
        try:
            row = loads(line)
        except (ValueError, RecursionError) as error:
            raise FileFormatError(f"{where}: not JSON: {error}") from error
        if not isinstance(row, Mapping):
            raise FileFormatError(f"{where}: a line must be a JSON object")
        yield where, cast("JsonMapping", row)
