"""Where samples are written to: links stay links, devices and pipes are written into, text that a format cannot hold is
refused."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.samples.test_audit import forest
from tokentrue.errors import FileFormatError
from tokentrue.samples import export_bytes, read_samples, write_samples
from tokentrue.samples.formats import FORMATS
from tokentrue.types import Sample


@pytest.fixture
async def samples() -> list[Sample]:
    return (await forest()).samples()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("exists", [True, False])
async def test_a_link_stays_and_its_target_is_written(
    samples: list[Sample], name: str, exists: bool, tmp_path: Path
) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "s", tmp_path / "link"
    if exists:
        target.write_text("before")
    link.symlink_to(target)
    assert write_samples(samples, link, format=name) == len(samples)
    assert link.is_symlink() and list(read_samples(target)) == samples
    assert sorted(file.name for file in target.parent.iterdir()) == ["s"], "no scratch file is left behind"


@pytest.mark.parametrize("name", FORMATS)
async def test_a_pipe_is_written_into(samples: list[Sample], name: str, tmp_path: Path) -> None:
    pipe, found = tmp_path / "pipe", tmp_path / "found"
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.write_bytes(pipe.read_bytes()), daemon=True)
    reader.start()
    write_samples(samples, pipe, format=name)
    reader.join(10)
    assert stat.S_ISFIFO(pipe.lstat().st_mode) and list(read_samples(found)) == samples


async def test_a_device_is_written_into(samples: list[Sample], tmp_path: Path) -> None:
    link = tmp_path / "null"
    link.symlink_to("/dev/null")
    assert write_samples(samples, link) == len(samples)
    assert link.is_symlink() and stat.S_ISCHR(os.stat("/dev/null").st_mode)


CHILD = """
import sys
from tokentrue.samples import read_samples, write_samples
print("before", flush=True)
write_samples(list(read_samples(sys.argv[1])), sys.argv[2])
"""


async def test_standard_output_is_appended_to(samples: list[Sample], tmp_path: Path) -> None:
    """Through a link as /dev/stdout is one; not that one, which a defect here would take from the whole machine."""
    write_samples(samples, tmp_path / "s.jsonl")
    (tmp_path / "stdout").symlink_to("/proc/self/fd/1")
    with (tmp_path / "out").open("wb") as out:
        subprocess.run(
            [sys.executable, "-c", CHILD, str(tmp_path / "s.jsonl"), str(tmp_path / "stdout")], stdout=out, check=True
        )
    assert (tmp_path / "stdout").is_symlink()
    assert (tmp_path / "out").read_bytes() == b"before\n" + (tmp_path / "s.jsonl").read_bytes()


async def test_links_in_a_circle_are_refused(samples: list[Sample], tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(FileFormatError, match="cannot write"):
        write_samples(samples, tmp_path / "a")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("field", ["group", "session_id", "sample_id"])
async def test_a_lone_surrogate_is_kept_or_refused(
    samples: list[Sample], name: str, field: str, tmp_path: Path
) -> None:
    odd = replace(samples[0], **{field: "a\ud800"})
    try:
        write_samples([odd], tmp_path / "s", format=name)
    except FileFormatError as error:
        assert name in ("parquet", "verl") and r"a\ud800" in str(error)
        assert not (tmp_path / "s").exists()
        with pytest.raises(FileFormatError):
            export_bytes([odd], format=name)
    else:
        assert list(read_samples(tmp_path / "s")) == [odd]


def test_an_unknown_format_to_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("")
    with pytest.raises(FileFormatError, match="no format 'csv'"):
        list(read_samples(tmp_path / "s", format="csv"))
