"""Samples on disk: write in a named format, read any of them back. A file is written beside its place and moved there
whole; a link stays a link, and a device or pipe is written into."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import cast

from tokentrue.errors import AuditError, FileFormatError
from tokentrue.json_types import JsonObject
from tokentrue.samples.exporters import EXPORTERS, ExportedSample, Exporter
from tokentrue.samples.exporters.lines import read_lines
from tokentrue.samples.exporters.parquet import table_columns
from tokentrue.types import Sample


def write_samples(samples: Iterable[Sample], path: str | Path, *, format: str = "jsonl") -> int:
    """How many samples were written."""
    exporter, target = find_exporter(format), Path(path)
    if not target.name or target.is_dir():
        raise FileFormatError(f"cannot write {str(path)!r}: it is no file name")
    try:
        with suppress(FileNotFoundError):
            target.stat()  # links in a circle are an OSError here, and a RuntimeError of resolve()
        return (
            _write_stream(exporter, samples, target)
            if is_stream(target)
            else _write_file(exporter, samples, target.resolve())
        )
    except OSError as error:
        raise FileFormatError(f"cannot write {target}: {error.strerror or error}") from error


def find_exporter(format: str) -> Exporter:
    if format not in EXPORTERS:
        raise FileFormatError(f"no format {format!r}; choose one of {', '.join(EXPORTERS)}")
    return EXPORTERS[format]


def is_stream(path: Path) -> bool:
    """Whether a path names a device, a pipe or an open descriptor (`/dev/stdout`, whatever that is): nothing that may
    be replaced."""
    linked = path.parent / path.readlink() if path.is_symlink() else path
    is_descriptor = any(os.path.realpath(each.parent).startswith("/proc/") for each in (path, linked))
    return is_descriptor or (path.exists() and not path.is_file())


def _write_stream(exporter: Exporter, samples: Iterable[Sample], target: Path) -> int:
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder) / "samples"
        count = exporter.write(samples, scratch)
        with scratch.open("rb") as whole, target.open("ab") as stream:
            shutil.copyfileobj(whole, stream)
    return count


def _write_file(exporter: Exporter, samples: Iterable[Sample], target: Path) -> int:
    scratch = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        count = exporter.write(samples, scratch)
        os.replace(scratch, target)
    finally:
        scratch.unlink(missing_ok=True)
    return count


MEDIA_TYPES = {
    ".jsonl": "application/x-ndjson",
    ".parquet": "application/vnd.apache.parquet",
    ".safetensors": "application/octet-stream",
}


def export_bytes(samples: Iterable[Sample], *, format: str) -> tuple[bytes, str]:
    """The bytes of such a file, and their media type: for an HTTP answer."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samples"
        write_samples(samples, path, format=format)
        return path.read_bytes(), MEDIA_TYPES[EXPORTERS[format].suffix]


def read_samples(path: str | Path, *, format: str | None = None) -> Iterator[Sample]:
    """The samples of a file; its format is recognised by its first row where it is not given. A trainer's row that
    contradicts its own sample is refused."""
    for row in read_exported(path, format=format):
        if row.differences:
            raise AuditError(
                f"{row.where}: {row.differences[0]}; `tokentrue audit {path}` lists all that does not hold"
            )
        yield row.sample


def read_exported(path: str | Path, *, format: str | None = None) -> Iterator[ExportedSample]:
    """The same, with the differences between a trainer's rows and their samples: what an audit reads."""
    source = Path(path)
    if not source.is_file():
        raise FileFormatError(f"{source}: no such file")
    yield from find_exporter(format or format_of(source)).read(source)


def format_of(path: Path) -> str:
    with path.open("rb") as file:
        start = file.read(8)
    named = (
        "" if start.lstrip()[:1] in (b"{", b"") else path.suffix
    )  # the content decides; a damaged file is called what its name says
    if start[:4] == b"PAR1" or named == ".parquet":
        return "parquet" if "token_ids" in table_columns(path) else "verl"
    has_header = (
        len(start) == 8
        and int.from_bytes(start, "little") < path.stat().st_size
        and not start.lstrip().startswith(b"{")
    )
    if has_header or named == ".safetensors":
        return "safetensors"
    if not is_text(start):
        raise FileFormatError(f"{path}: neither JSON lines nor parquet nor safetensors")
    first = next(read_lines(path), None)
    return "jsonl" if first is None else _format_of_row(cast("JsonObject", first[1]))


def is_text(start: bytes) -> bool:
    """Whether a file's first bytes can be UTF-8 text; the last character may be cut off."""
    try:
        start.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start > 0 and error.end == len(start)
    return b"\0" not in start


def _format_of_row(row: JsonObject) -> str:
    if "tokentrue" not in row:
        return "jsonl"
    for mark, name in (
        ("completion_ids", "trl"),
        ("response_length", "slime"),
        ("mask", "prime-rl"),
        ("loss_fn_inputs", "tinker"),
    ):
        if mark in row:
            return name
    raise FileFormatError(f"not a samples file: a row has {', '.join(sorted(row))}")
