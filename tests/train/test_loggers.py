"""Loggers write what metrics.jsonl has, offline; a resumed run continues; what is not installed is named with its
cure."""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tokentrue.errors import ConfigError
from tokentrue.train.reporting import MetricsWriter

ROOT = Path(__file__).resolve().parents[2]
WRITE = """
import sys
from pathlib import Path
from tokentrue.train.reporting import MetricsWriter
directory, name, first = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
writer = MetricsWriter(directory, provenance={"run": "r"}, first_step=first, log=(name,))
for step in range(first, first + 2):
    writer.write(step, step, {"reward": 0.5 + step}, {"train": 1.0})
writer.close()
"""


def write_steps(out: Path, name: str, first: int) -> None:
    """Two steps, in a process of their own: both libraries keep state for a whole process."""
    env = {
        **os.environ,
        "WANDB_MODE": "offline",
        "TRACKIO_DIR": str(out / "trackio"),
        "HOME": str(out),
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-c", WRITE, str(out / "run"), name, str(first)], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


def rows_of_wandb(file: Path) -> list[dict[str, float]]:
    """The history in an offline file: a header of 7 bytes, then records of checksum, length, kind and a message. Ours
    fit one block."""
    from wandb.proto import wandb_internal_pb2

    data, rows, place = file.read_bytes(), list[dict[str, float]](), 7
    while place + 7 <= len(data):
        _, size, _ = struct.unpack_from("<IHB", data, place)
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data[place + 7 : place + 7 + size])
        if record.WhichOneof("record_type") == "history":
            rows.append(
                {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            )
        place += 7 + size
    return rows


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of wandb, at import
def test_wandb_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    write_steps(tmp_path, "wandb", 0)
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    rows = rows_of_wandb(file)
    assert [(row["_step"], row["reward"], row["seconds/train"]) for row in rows] == [(0, 0.5, 1.0), (1, 1.5, 1.0)]


@pytest.mark.slow
def test_trackio_and_a_resumed_run(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    write_steps(tmp_path, "trackio", 0)
    write_steps(tmp_path, "trackio", 2)
    with sqlite3.connect(tmp_path / "trackio" / "tokentrue.db") as database:
        rows = database.execute("SELECT step, run_name, metrics FROM metrics ORDER BY step").fetchall()
    database.close()
    assert [(step, json.loads(metrics)["reward"]) for step, _, metrics in rows] == [
        (0, 0.5),
        (1, 1.5),
        (2, 2.5),
        (3, 3.5),
    ]
    assert len({run for _, run, _ in rows}) == 1


def test_a_logger_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"wandb is not installed: pip install 'tokentrue\[wandb\]'"):
        MetricsWriter(tmp_path, provenance={}, log=("wandb",))
