"""The table of sample file formats: `FORMATS`. To add a trainer, write `*_row` and `*_columns` in `trainer_rows.py` and
add one entry here.

Every trainer's row also carries `tokentrue`: the sample's fields that the trainer has no place for. So the sample is
read back from any row, the row is rebuilt from it, and the two are compared.
"""

import reprlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from tokentrue.errors import FileFormatError, TokenContractError
from tokentrue.json_types import JsonMapping, JsonObject, JsonValue, read_table
from tokentrue.plain_json import dumps, loads, read_numbered_lines
from tokentrue.records import record
from tokentrue.samples import trainer_rows
from tokentrue.samples.shape import decode, head_to_json, sample_from_json, sample_to_json, spread_spans
from tokentrue.samples.trainer_rows import Columns
from tokentrue.types import Sample

_GROUP = 256  # rows of a parquet table that are written or read at once
_COLUMNS: Mapping[str, Mapping[str, str]] = read_table(__file__, "columns.toml")
_TENSOR_TYPES = _COLUMNS["tensors"]


@record
class ExportedSample:
    """`differences` are the fields of a trainer's row that contradict the sample."""

    sample: Sample
    where: str
    differences: tuple[str, ...] = ()


@record
class SampleFormat:
    """`follows` names the release whose fields it writes. `mark`: the column that distinguishes its rows from others in
    the same container."""

    name: str
    suffix: Literal[".jsonl", ".parquet", ".safetensors"]
    follows: str
    mark: str
    write: Callable[[Iterable[Sample], Path], int]
    read: Callable[[Path], Iterator[ExportedSample]]


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
        row = parse_json(line, where)
        if not isinstance(row, Mapping):
            raise FileFormatError(f"{where}: a line must be a JSON object")
        yield where, cast("JsonMapping", row)


def parse_json(text: bytes, where: str) -> JsonValue:
    try:
        return loads(text)
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{where}: not JSON ({error}); JSON lines have one object per line") from error


def _import_pyarrow(module: str = "pyarrow") -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:  # 170 MB that the base install does without
        raise FileFormatError(
            "Parquet needs pyarrow, which is not installed here: pip install 'tokentrue[parquet]', or choose jsonl"
        ) from error


def _schema(types: Mapping[str, str]) -> Any:
    pa = _import_pyarrow()
    known = {
        "string": pa.string(), "json": pa.string(), "double": pa.float64(), "int64": pa.int64(),
        "int32s": pa.list_(pa.int32()), "int8s": pa.list_(pa.int8()), "doubles": pa.list_(pa.float64()),
        "int16 tables": pa.list_(pa.list_(pa.list_(pa.int16()))),
        "hashes": pa.struct([("images", pa.list_(pa.string()))]),
        "replay": pa.struct([
            ("min_global_steps", pa.int64()), ("max_global_steps", pa.int64()),
            ("policy_versions", pa.list_(pa.int64())),
            ("sampling_mask_token_ids", pa.list_(pa.int32())), ("sampling_mask_offsets", pa.list_(pa.int64())),
        ]),
    }  # fmt: skip
    return pa.schema([(name, known[kind]) for name, kind in types.items()])


def _write_table(rows: Iterable[JsonMapping], path: Path, types: Mapping[str, str]) -> int:
    pa, pq = _import_pyarrow(), _import_pyarrow("pyarrow.parquet")
    schema, count, iterator = _schema(types), 0, iter(rows)

    def cell(row: JsonMapping, name: str) -> JsonValue:
        value = row.get(name)
        return dumps(value).decode() if types[name] == "json" and value is not None else value

    # Through an open file, because pyarrow reads a path with a colon as a URI.
    with path.open("wb") as file, pq.ParquetWriter(file, schema) as writer:
        while group := list(islice(iterator, _GROUP)):
            cells = [{name: cell(row, name) for name in types} for row in group]
            try:
                table = pa.Table.from_pylist(cells, schema=schema)
            except UnicodeEncodeError as error:
                raise FileFormatError(
                    f"parquet cannot hold the text {error.object!r} (a lone surrogate); choose jsonl"
                ) from error
            writer.write_table(table)
            count += len(group)
    return count


def table_columns(path: Path) -> list[str]:
    with _reading_parquet(path) as pq:
        return list(pq.read_schema(path).names)


@contextmanager
def _reading_parquet(path: Path) -> Generator[Any, None, None]:
    pa, pq = _import_pyarrow(), _import_pyarrow("pyarrow.parquet")
    try:
        yield pq
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise FileFormatError(f"{path}: not a parquet file, or a damaged one: {error}") from error


def _read_parquet(path: Path, types: Mapping[str, str]) -> Iterator[tuple[str, JsonMapping]]:
    names = table_columns(path)
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise FileFormatError(f"{path}: column {twice!r} is there twice")
    number = 0
    with _reading_parquet(path) as pq:
        for batch in pq.ParquetFile(path).iter_batches(batch_size=_GROUP):
            for row in batch.to_pylist():
                where = f"{path.name}:row {number}"
                for name in [name for name in row if types.get(name) == "json" and row[name] is not None]:
                    if not isinstance(row[name], str):
                        raise FileFormatError(f"{where}: {name}: must be JSON text")
                    row[name] = parse_json(row[name].encode(), f"{where}: {name}")
                yield where, row
                number += 1


class TensorsHeader(msgspec.Struct):
    format: Literal["tokentrue samples 1"]
    samples: str  # JSON


def _write_tensors(samples: Iterable[Sample], path: Path) -> int:
    """`offsets` (one more than samples) separates the samples of a column. Log-probabilities are NaN where nothing was
    sampled; the rest is JSON in the header."""
    np: Any = import_module("numpy")
    held = list(samples)
    columns: dict[str, list[float]] = {
        "token_ids": [token for sample in held for token in sample.token_ids],
        "loss_mask": [bit for sample in held for bit in sample.loss_mask],
        "rollout_logprobs": [float("nan") if v is None else v for sample in held for v in sample.rollout_logprobs],
        "offsets": np.cumsum([0, *(len(sample.token_ids) for sample in held)], dtype=np.int64),
    }
    import_module("safetensors.numpy").save_file(
        {name: np.array(column, dtype=_TENSOR_TYPES[name]) for name, column in columns.items()},
        path,
        metadata={
            "format": "tokentrue samples 1",
            "samples": dumps([head_to_json(sample) for sample in held]).decode(),
        },
    )
    return len(held)


def _read_tensors(path: Path) -> Iterator[ExportedSample]:
    safetensors: Any = import_module("safetensors")
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            header = decode(file.metadata() or {}, TensorsHeader, f"{path.name}: header")
            heads = decode(loads(header.samples.encode()), list[JsonObject], f"{path.name}: header.samples")
            tensors = {name: file.get_tensor(name) for name in _TENSOR_TYPES}
    except (safetensors.SafetensorError, TypeError, ValueError, RecursionError, OSError) as error:
        raise FileFormatError(f"{path}: not a safetensors file of samples, or a damaged one: {error}") from error
    for name, tensor in tensors.items():
        if tensor.ndim != 1 or str(tensor.dtype) != _TENSOR_TYPES[name]:
            shown = f"{tensor.dtype} of shape {list(tensor.shape)}"
            raise FileFormatError(f"{path.name}: {name} is {shown}, must be one row of {_TENSOR_TYPES[name]}")
    ids, mask, logprobs = (tensors[name] for name in ("token_ids", "loss_mask", "rollout_logprobs"))
    offsets = tensors["offsets"].tolist()
    is_rising = offsets[:1] == [0] and all(start <= end for start, end in pairwise(offsets))
    if not is_rising or len(offsets) != len(heads) + 1 or {len(ids), len(mask), len(logprobs)} != {offsets[-1]}:
        lengths = f"{len(ids)} ids, {len(mask)} bits of the mask and {len(logprobs)} log-probabilities"
        raise FileFormatError(f"{path.name}: offsets do not separate {len(heads)} samples of {lengths}")
    for number, (head, (start, end)) in enumerate(zip(heads, pairwise(offsets), strict=True)):
        where = f"{path.name}:sample {number}"
        row = {
            **head,
            "token_ids": ids[start:end].tolist(),
            "loss_mask": mask[start:end].tolist(),
            "rollout_logprobs": [None if value != value else value for value in logprobs[start:end].tolist()],
        }
        yield ExportedSample(sample=sample_from_json(row, where), where=where)


def _rows_format(
    name: str,
    *,
    follows: str,
    mark: str,
    types: Mapping[str, str] | None,
    to_row: Callable[[Sample], JsonMapping],
    from_row: Callable[[JsonMapping, str], ExportedSample],
) -> SampleFormat:
    def write(samples: Iterable[Sample], path: Path) -> int:
        rows = map(to_row, samples)
        return write_lines(rows, path) if types is None else _write_table(rows, path, types)

    def read(path: Path) -> Iterator[ExportedSample]:
        for where, row in read_lines(path) if types is None else _read_parquet(path, types):
            yield from_row(row, where)

    suffix: Literal[".jsonl", ".parquet"] = ".jsonl" if types is None else ".parquet"
    return SampleFormat(name=name, suffix=suffix, follows=follows, mark=mark, write=write, read=read)


def _from_native_row(row: JsonMapping, where: str) -> ExportedSample:
    return ExportedSample(sample=sample_from_json(row, where), where=where)


def trainer_format(
    name: str,
    *,
    follows: str,
    mark: str,
    row: Callable[[Sample], JsonObject],
    columns: Callable[[JsonMapping], Columns],
    added: Set[str] = frozenset(),
    types: Mapping[str, str] | None = None,
) -> SampleFormat:
    """JSON lines, or a parquet table with columns of `types`. `added` names fields of users, which are not compared."""

    def to_row(sample: Sample) -> JsonObject:
        return {**row(sample), "tokentrue": head_to_json(sample)}

    def from_row(found: JsonMapping, where: str) -> ExportedSample:
        if "tokentrue" not in found:
            names = ", ".join(sorted(found))
            raise FileFormatError(f"{where}: not a samples file of tokentrue: the columns are {names}")
        head = decode(found["tokentrue"], JsonObject, f"{where}: tokentrue")
        fields = {key: value for key, value in found.items() if key != "tokentrue"}
        try:
            ids, mask, logprobs = columns(fields)
            whole = {  # a trainer may omit the given prefix
                "token_ids": ids,
                "loss_mask": [*[0] * (len(ids) - len(mask)), *mask],
                "rollout_logprobs": [*[None] * (len(ids) - len(logprobs)), *logprobs],
            }
            sample = _without_given_logprobs(sample_from_json({**head, **whole}, where))
            differences = tuple(find_differences(row(sample), fields, added=added))
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise FileFormatError(f"{where}: not a row of {name}: {type(error).__name__}: {error}") from error
        except TokenContractError as error:
            raise FileFormatError(f"{where}: {error}") from error
        return ExportedSample(sample=sample, where=where, differences=differences)

    return _rows_format(name, follows=follows, mark=mark, types=types, to_row=to_row, from_row=from_row)


def _without_given_logprobs(sample: Sample) -> Sample:
    is_given = spread_spans(sample, lambda span: span.kind == "given", False)
    logprobs = zip(is_given, sample.rollout_logprobs, strict=True)
    return replace(sample, rollout_logprobs=[None if given else value for given, value in logprobs])


def find_differences(
    written: JsonValue, found: JsonValue, field: str = "", *, added: Set[str] = frozenset()
) -> Iterator[str]:
    if isinstance(written, dict) and isinstance(found, dict):
        written, found = cast("JsonObject", written), cast("JsonObject", found)
        for key in {**written, **found}:
            name = f"{field}.{key}" if field else key
            if key not in found:
                if written[key] is not None:  # a file of an earlier release may lack the column
                    yield f"{name} is missing"
            elif key in written:
                yield from find_differences(written[key], found[key], name, added=added)
            elif name not in added:
                yield f"{name} is not a field of this export"
    elif isinstance(written, list) and isinstance(found, list):
        written, found = cast("list[JsonValue]", written), cast("list[JsonValue]", found)
        if len(written) != len(found):
            yield f"{field} has {len(found)} entries, the sample gives {len(written)}"
        elif written != found or _is_retyped(_kinds_in(written), _kinds_in(found)):
            pairs = enumerate(zip(written, found, strict=True))
            yield from islice(
                (what for at, pair in pairs for what in find_differences(*pair, f"{field}[{at}]", added=added)), 1
            )
    elif written != found or _is_retyped(_kinds_in([written]), _kinds_in([found])):
        # reprlib: short, however long or deep the value is
        yield f"{field} is {reprlib.repr(found)}, the sample gives {reprlib.repr(cast('JsonValue', written))}"


def _is_retyped(written: Set[type], found: Set[type]) -> bool:
    # Python treats True and 1.0 as 1; a trainer may not. A float that is written as a whole number is still equal.
    return (bool in written) != (bool in found) or (float in found and float not in written)


def _kinds_in(values: list[JsonValue]) -> set[type]:
    kinds = set(map(type, values))
    if list in kinds:
        kinds.update(*(_kinds_in(cast("list[JsonValue]", value)) for value in values if isinstance(value, list)))
    return kinds


FORMATS: Mapping[str, SampleFormat] = {
    each.name: each
    for each in (
        _rows_format(
            "jsonl", follows="tokentrue's own format", mark="certificate", types=None,
            to_row=sample_to_json, from_row=_from_native_row,
        ),
        _rows_format(
            "parquet", follows="Apache Parquet through pyarrow", mark="certificate", types=_COLUMNS["native"],
            to_row=sample_to_json, from_row=_from_native_row,
        ),
        SampleFormat(
            name="safetensors", suffix=".safetensors", follows="safetensors 0.5 or later", mark="certificate",
            write=_write_tensors, read=_read_tensors,
        ),
        trainer_format(
            "verl", follows="verl 0.9.1, AgentLoopOutput", mark="response_ids",
            row=trainer_rows.verl_row, columns=trainer_rows.verl_columns, types=_COLUMNS["verl"],
        ),
        trainer_format(
            "trl", follows="trl 1.16.0, GRPOTrainer rollout_func", mark="completion_ids",
            row=trainer_rows.trl_row, columns=trainer_rows.trl_columns,
        ),
        trainer_format(
            "slime", follows="slime, Sample.from_dict (September 2026)", mark="response_length",
            row=trainer_rows.slime_row, columns=trainer_rows.slime_columns,
        ),
        trainer_format(
            "prime-rl", follows="prime-rl, TrainingSample (September 2026)", mark="mask",
            row=trainer_rows.prime_rl_row, columns=trainer_rows.prime_rl_columns,
        ),
        trainer_format(
            "tinker", follows="tinker, Datum with a policy loss", mark="loss_fn_inputs",
            row=trainer_rows.tinker_row, columns=trainer_rows.tinker_columns,
            added=frozenset({"loss_fn_inputs.advantages"}),
        ),
    )
}  # fmt: skip
