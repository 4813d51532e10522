"""Writes a sample file under a temporary name (devices and pipes directly), reads any format, and audits a file before
training."""

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

from tokentrue.errors import AuditError, FileFormatError
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.protocols import find_plugins, load_plugin
from tokentrue.samples.audit import audit_exported
from tokentrue.samples.formats import FORMATS, ExportedSample, SampleFormat, read_lines, table_columns
from tokentrue.samples.images import ImageFolder
from tokentrue.types import Sample

MEDIA_TYPES = {
    ".jsonl": "application/x-ndjson",
    ".parquet": "application/vnd.apache.parquet",
    ".safetensors": "application/octet-stream",
}


def write_samples(samples: Iterable[Sample], path: str | Path, *, format: str = "jsonl") -> int:
    chosen, target = find_format(format), Path(path)
    if not target.name or target.is_dir():
        raise FileFormatError(f"cannot write {str(path)!r}: it is no file name")
    try:
        with suppress(FileNotFoundError):
            target.stat()  # a cycle of links is an OSError here, and a RuntimeError in resolve()
        if is_stream(target):
            with tempfile.TemporaryDirectory() as folder, target.open("ab") as stream:
                count = chosen.write(samples, scratch := Path(folder) / "samples")
                stream.write(scratch.read_bytes())
            return count
        target = target.resolve()
        scratch = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            count = chosen.write(samples, scratch)
            os.replace(scratch, target)
        finally:
            scratch.unlink(missing_ok=True)
        return count
    except OSError as error:
        raise FileFormatError(f"cannot write {target}: {error.strerror or error}") from error


def find_format(name: str) -> SampleFormat:
    if name in FORMATS:
        return FORMATS[name]
    plugins = find_plugins("exporters")
    if name not in plugins:
        raise FileFormatError(f"no format {name!r}; choose one of {', '.join([*FORMATS, *plugins])}")
    return load_plugin(plugins[name])


def is_stream(path: Path) -> bool:
    """A device, a pipe or an open descriptor (`/dev/stdout`), which must not be replaced."""
    linked = path.parent / path.readlink() if path.is_symlink() else path
    is_descriptor = any(os.path.realpath(each.parent).startswith("/proc/") for each in (path, linked))
    return is_descriptor or (path.exists() and not path.is_file())


def export_bytes(samples: Iterable[Sample], *, format: str) -> tuple[bytes, str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samples"
        write_samples(samples, path, format=format)
        return path.read_bytes(), MEDIA_TYPES[find_format(format).suffix]


def read_samples(path: str | Path, *, format: str | None = None) -> Iterator[Sample]:
    """Detects the format by the first row. Refuses a trainer's row that contradicts its own sample."""
    for row in read_exported(path, format=format):
        if row.differences:
            raise AuditError(
                f"{row.where}: {row.differences[0]}; `tokentrue audit {path}` lists all that does not hold"
            )
        yield row.sample


def read_all(path: str | Path) -> list[Sample]:
    return _require_some(path, list(read_samples(path)))


def _require_some(path: str | Path, samples: list[Sample]) -> list[Sample]:
    if not samples:
        raise FileFormatError(f"{path}: holds no sample")
    return samples


def read_exported(path: str | Path, *, format: str | None = None) -> Iterator[ExportedSample]:
    source = Path(path)
    if str(source).startswith(("http:", "https:", "sqlite:", "postgresql:")):
        raise FileFormatError(f"{source}: a gateway or a journal, not a file; `tokentrue samples` exports it")
    if not source.is_file():
        raise FileFormatError(f"{source}: {'is a directory; name a file in it' if source.is_dir() else 'no such file'}")
    yield from find_format(format or recognise_format(source)).read(source)


def recognise_format(path: Path) -> str:
    with path.open("rb") as file:
        start = file.read(8)
    if start == b"SQLite f":
        raise FileFormatError(f"{path}: a journal, not exported samples; `tokentrue samples` exports it")
    is_object = start.lstrip().startswith(b"{")
    # The content decides; for a damaged file, its name.
    named = "" if is_object or not start.strip() else path.suffix
    if start[:4] == b"PAR1" or named == ".parquet":
        return _find_marked(".parquet", table_columns(path)) or "verl"
    has_header = len(start) == 8 and int.from_bytes(start, "little") < path.stat().st_size
    if (has_header and not is_object) or named == ".safetensors":
        return "safetensors"
    if not is_text(start):
        raise FileFormatError(f"{path}: neither JSON lines nor parquet nor safetensors")
    row: JsonMapping = next((row for _, row in read_lines(path)), JsonObject())
    found = _find_marked(".jsonl", row)
    if found is None and "tokentrue" in row:
        raise FileFormatError(f"not a samples file: a row has {', '.join(sorted(row))}")
    return found or "jsonl"


def _find_marked(suffix: str, columns: Iterable[str]) -> str | None:
    names = set(columns)
    plugins = (find_format(name) for name in find_plugins("exporters"))  # asked last: a generator
    known = chain(FORMATS.values(), plugins)
    return next((each.name for each in known if each.suffix == suffix and each.mark in names), None)


def is_text(start: bytes) -> bool:
    try:
        start.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start > 0 and error.end == len(start)
    return b"\0" not in start


def read_sound_samples(path: str | Path, *, trust: bool = False) -> list[Sample]:
    """`trust` skips the audit of certificates, masks and duplicates."""
    if trust:
        return read_all(path)
    rows = list(read_exported(path))
    if findings := audit_exported(rows, ImageFolder(path)).findings:
        others = len(findings) - 1
        more = f", and {others} more (`tokentrue audit {path}` lists them)" if others else ""
        raise AuditError(f"{path}: {findings[0]}{more}; --trust skips these checks")
    return _require_some(path, [row.sample for row in rows])


def require_model(samples: Sequence[Sample], *, model: str, tokenizer: str | None, vocabulary: int) -> None:
    """Compares the hash of its tokenizer (None if it has none) and the number of its embeddings."""
    for sample in samples:
        recorded, why = sample.certificate.tokenizer, ""
        columns = (sample.sampling_mask, sample.top_logprobs)
        held = (sample.token_ids, *(column.token_ids for column in columns if column is not None))
        largest = max(max(ids, default=0) for ids in held)
        if tokenizer is not None and recorded != tokenizer:
            theirs, ours = (digest.removeprefix("sha256:")[:12] or "none" for digest in (recorded, tokenizer))
            why = f"was recorded with another tokenizer ({theirs}) than {model} has ({ours})"
        elif largest >= vocabulary:
            why = f"holds token id {largest}, beyond the vocabulary of {model} ({vocabulary})"
        if why:
            raise FileFormatError(f"sample {sample.sample_id} {why}; use the model that it was sampled from")
