"""`metrics.jsonl` stays JSON where numbers are not finite, and stays on file where nothing can be written."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.train.test_drills import file_limit
from tokentrue.app.training import TrainRun
from tokentrue.cli.reports import read_metrics, training_report
from tokentrue.errors import TrainingError
from tokentrue.plain_json import dumps
from tokentrue.train import MetricsWriter


def writer_of(directory: Path, **more: Any) -> MetricsWriter:
    return MetricsWriter(directory, provenance={"run": "r"}, log=(), **more)


@pytest.mark.parametrize(("device", "named"), [("cpu", "threads"), ("cuda:1", "GPU cuda:1")])
def test_a_row_names_the_hardware_of_the_trainer(
    device: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device=None: f"GPU {device}")
    writer = writer_of(tmp_path, device=device)
    writer.write(0, 1, {"reward": 0.5}, {})
    writer.close()
    assert named in json.loads(writer.path.read_text())["hardware"]


def write_steps(directory: Path, count: int, *, first: int = 0) -> None:
    writer = writer_of(directory, first_step=first)
    for step in range(first, first + count):
        writer.write(step, step + 1, {"reward": 0.5}, {"step": 0.1})
    writer.close()


# ---- numbers that are not finite
# ---------------------------------------------------------------------------------------------------------
def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    writer = writer_of(tmp_path)
    writer.write(0, 1, {"reward": 0.5, "update/loss": math.nan, "update/grad_norm": math.inf}, {"step": 0.1})
    writer.close()
    (row,) = map(orjson.loads, writer.path.read_bytes().splitlines())
    assert row["update/loss"] is None and row["update/grad_norm"] is None and row["reward"] == 0.5
    assert orjson.loads(dumps({"seconds": {"step": -math.inf}})) == {"seconds": {"step": None}}


def test_a_report_of_a_run_with_skipped_updates(tmp_path: Path) -> None:
    """The first row is that of an older run, which wrote NaN; the last that of a crash."""
    writer = writer_of(tmp_path, first_step=1)
    writer.write(1, 2, {"reward": 0.5, "update/loss": math.nan, "update/grad_norm": 2.0}, {"step": 0.1})
    writer.close()
    old = '{"step": 0, "policy_version": 1, "reward": 0.25, "update/loss": NaN, "update/grad_norm": Infinity}\n'
    writer.path.write_text(old + writer.path.read_text() + '{"step": 2, "rew')
    rows = read_metrics(writer.path)
    assert [(row["step"], row["update/loss"], row["update/grad_norm"]) for row in rows] == [
        (0, None, None),
        (1, None, 2.0),
    ]
    report = training_report(TrainRun(out=tmp_path), rows)
    assert ("update/grad_norm", "not finite", 2.0) in report.tables[0].rows
    assert [text for _, text in report.highlights] == ["0.250", "0.500"]


def test_a_run_resumes_over_rows_of_an_older_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "update/loss": NaN}\n')
    write_steps(tmp_path, 1, first=1)
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1]


# ---- a full disk -------------------------------------------------------------------------------------------------------------------------
def test_a_resumed_run_that_cannot_write_leaves_the_rows_on_file(tmp_path: Path) -> None:
    write_steps(tmp_path, 20)
    path = tmp_path / "metrics.jsonl"
    before = path.read_bytes()
    with (
        file_limit(len(before) // 2),
        pytest.raises(TrainingError, match=r"metrics.jsonl: .*the file is as it was: make room") as raised,
    ):
        write_steps(tmp_path, 1, first=19)
    assert str(path) in str(raised.value)
    assert path.read_bytes() == before and not list(tmp_path.glob(".*partial"))
    write_steps(tmp_path, 2, first=19)
    assert [row["step"] for row in read_metrics(path)] == list(range(21))


def test_a_row_that_cannot_be_written_names_the_file_and_the_step(tmp_path: Path) -> None:
    write_steps(tmp_path, 3)
    path = tmp_path / "metrics.jsonl"
    writer = writer_of(tmp_path, first_step=3)
    with (
        file_limit(path.stat().st_size + 20),
        pytest.raises(TrainingError, match=r"metrics.jsonl: the row of step 3 .*: make room"),
    ):
        writer.write(3, 4, {"reward": 0.5}, {})
    writer.close()
    write_steps(tmp_path, 1, first=3)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2, 3]
