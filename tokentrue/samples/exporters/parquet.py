"""Parquet: the native fields as columns, or a trainer's row with the rest beside it. Log-probabilities are float64,
null where given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, cast

from tokentrue.errors import FileFormatError
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.plain_json import dumps, loads
from tokentrue.samples.exporters.base import ExportedSample
from tokentrue.samples.exporters.rows import TrainerColumns, read_trainer_row
from tokentrue.samples.shape import head_to_json, sample_from_json, sample_to_json
from tokentrue.types import Sample

_GROUP = 256
_JSON = ("spans", "metadata", "certificate", "routed_experts", "sampling_mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parquet:
    """The documented fields; those that are objects stand as JSON text."""

    name: str = "parquet"
    suffix: str = ".parquet"
    follows: str = "Apache Parquet through pyarrow"

    def write(self, samples: Iterable[Sample], path: Path) -> int:
        return write_table((self._row(sample) for sample in samples), path, native_types())

    def _row(self, sample: Sample) -> JsonObject:
        row = {"routed_experts": None, "sampling_mask": None, **sample_to_json(sample)}
        return {**row, **{name: None if row[name] is None else dumps(row[name]).decode() for name in _JSON}}

    def read(self, path: Path) -> Iterator[ExportedSample]:
        for where, row in read_table(path):
            objects = {name: json_of(row[name], f"{where}: {name}") for name in _JSON if row.get(name) is not None}
            yield ExportedSample(sample=sample_from_json({**row, **objects}, where), where=where)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerParquet:
    """A trainer's rows as a parquet table, the rest of the sample as JSON text in `tokentrue`."""

    name: str
    follows: str
    row: Callable[[Sample], JsonObject]
    columns: type[TrainerColumns]
    types: Mapping[str, str]
    suffix: str = ".parquet"

    def write(self, samples: Iterable[Sample], path: Path) -> int:
        rows = ({**self.row(sample), "tokentrue": dumps(head_to_json(sample)).decode()} for sample in samples)
        return write_table(rows, path, {**self.types, "tokentrue": "string"})

    def read(self, path: Path) -> Iterator[ExportedSample]:
        for where, row in read_table(path):
            if not isinstance(row.get("tokentrue"), str):
                raise FileFormatError(
                    f"{where}: not a samples file of tokentrue: the columns are {', '.join(sorted(row))}"
                )
            whole = {**row, "tokentrue": json_of(row["tokentrue"], f"{where}: tokentrue")}
            yield read_trainer_row(whole, make_row=self.row, columns=self.columns, added=frozenset(), where=where)


def json_of(text: str, where: str) -> Any:
    try:
        return loads(text.encode())
    except (ValueError, AttributeError, RecursionError) as error:
        raise FileFormatError(f"{where}: not JSON: {error}") from error


def native_types() -> dict[str, str]:
    text = ("sample_id", "session_id", "group", "finish_reason", *_JSON)
    lists = {"token_ids": "int32s", "loss_mask": "int8s", "rollout_logprobs": "doubles", "reward": "double"}
    return {**dict.fromkeys(text, "string"), **lists}


def _schema(types: Mapping[str, str]) -> Any:
    pa: Any = import_module("pyarrow")
    known = {
        "string": pa.string(), "double": pa.float64(), "int64": pa.int64(),
        "int32s": pa.list_(pa.int32()), "int8s": pa.list_(pa.int8()), "doubles": pa.list_(pa.float64()),
        "int16 tables": pa.list_(pa.list_(pa.list_(pa.int16()))),
        "replay": pa.struct([
            ("min_global_steps", pa.int64()), ("max_global_steps", pa.int64()), ("policy_versions", pa.list_(pa.int64())),
            ("sampling_mask_token_ids", pa.list_(pa.int32())), ("sampling_mask_offsets", pa.list_(pa.int64())),
        ]),
    }  # fmt: skip
    return pa.schema([(name, known[kind]) for name, kind in types.items()])


def write_table(rows: Iterable[JsonMapping], path: Path, types: Mapping[str, str]) -> int:
    pa: Any = import_module("pyarrow")
    pq: Any = import_module("pyarrow.parquet")
    schema, count, iterator = _schema(types), 0, iter(rows)
    with (
        path.open("wb") as file,
        pq.ParquetWriter(file, schema) as writer,
    ):  # a file: pyarrow reads a path with a colon as a URI
        while group := list(islice(iterator, _GROUP)):
            try:
                table = pa.Table.from_pylist([{name: row.get(name) for name in types} for row in group], schema=schema)
            except UnicodeEncodeError as error:
                raise FileFormatError(
                    f"parquet cannot hold the text {error.object!r} (a lone surrogate); choose jsonl"
                ) from error
            writer.write_table(table)
            count += len(group)
    return count


def table_columns(path: Path) -> list[str]:
    pa: Any = import_module("pyarrow")
    try:
        return list(import_module("pyarrow.parquet").read_schema(path).names)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise FileFormatError(f"{path}: not a parquet file, or a damaged one: {error}") from error


def read_table(path: Path) -> Iterator[tuple[str, JsonMapping]]:
    pa: Any = import_module("pyarrow")
    pq: Any = import_module("pyarrow.parquet")
    try:
        file = pq.ParquetFile(path)
        names: list[str] = file.schema_arrow.names
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise FileFormatError(f"{path}: column {twice!r} stands there twice")
        number = 0
        for batch in file.iter_batches(batch_size=_GROUP):
            for row in batch.to_pylist():
                yield f"{path.name}:row {number}", cast("JsonMapping", row)
                number += 1
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise FileFormatError(f"{path}: not a parquet file, or a damaged one: {error}") from error
