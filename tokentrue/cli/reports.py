"""A training run as the viewer's page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokentrue.cli.common import STEP_PARTS
from tokentrue.json_types import JsonObject
from tokentrue.plain_json import dumps, loads, read_numbered_lines
from tokentrue.sessions.journal import open_journal
from tokentrue.viewer import Chart, FileSource, Report, ReportTable, StoreSource, write_report

if TYPE_CHECKING:
    from tokentrue.app.training import TrainRun

PAGE_TOKENS = 100_000  # of sessions to read
CHARTS: tuple[tuple[str, str, Mapping[str, str], bool], ...] = (  # title, axis, {name: metric}, logarithmic
    ("Reward by step", "mean reward", {"rollouts": "reward", "held-out tasks": "eval/reward"}, False),
    ("Mismatch by step", "K3 per token", {"K3": "mismatch/k3"}, True),
    ("Gradient norm", "norm", {"norm": "update/grad_norm"}, True),
    ("Loss", "loss", {"loss": "update/loss"}, False),
    ("Staleness", "policy versions behind", {"mean": "staleness_mean", "largest": "staleness_max"}, False),
    ("Time of a step", "seconds", {part: f"seconds/{part}" for part in STEP_PARTS if part != "measure"}, False),
)
COMPARED = (
    "reward", "mismatch/k3", "mismatch/delta_abs_mean", "update/grad_norm", "update/loss", "tokens_trained",
    "seconds/step",
)  # fmt: skip


def write_training_report(settings: TrainRun, **changes: Any) -> Path | None:
    """None if the run has no metrics. `changes` are fields of the `Report`."""
    from tokentrue.app.wiring import renderer_for

    rows = read_metrics(settings.out / "metrics.jsonl")
    if not rows:
        return None
    source, store = None, settings.out / "sessions.sqlite"
    if settings.samples is not None:
        source = FileSource(settings.samples)
    elif store.is_file():
        source = StoreSource(open_journal(f"sqlite:{store}", read_only=True), name="newest rollouts first")
    renderer: Any = renderer_for(settings.model)(settings.model.history) if source is not None else None
    path = settings.out / "report.html"
    report = replace(training_report(settings, rows), **changes)
    try:
        write_report(path, report, source, renderer=renderer, most_tokens=PAGE_TOKENS)
    finally:
        if source is not None:
            source.close()
    return path


def read_metrics(path: Path) -> list[JsonObject]:
    rows: list[JsonObject] = []
    for _, line in read_numbered_lines(path) if path.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:  # a crash or a full disk left half a row
            continue
        if isinstance(row, dict) and "step" in row:
            rows.append(loads(dumps(row)))
    return rows


def training_report(settings: TrainRun, rows: Sequence[JsonObject]) -> Report:
    last = rows[-1]
    ends = [row for row in (rows[0], last) if row["reward"] is not None]
    highlights = [(f"reward at step {row['step']}", f"{row['reward']:.3f}") for row in ends]
    if compared := sum(row.get("exact_compared", 0) for row in rows):
        differing = sum(row.get("exact_differing", 0) for row in rows)
        highlights.append((f"of {compared:,.0f} log-probabilities differ", f"{differing:,.0f}"))
    return Report(
        title=f"Training run {settings.out.name}",
        highlights=highlights,
        facts=[
            ("model", settings.model.shown),
            ("engine", settings.engine.name),
            ("loss", settings.loss.name),
            ("steps", f"{len(rows):,}"),
            ("policy version", str(last["policy_version"])),
            ("configuration", str(last.get("run", ""))),
            ("hardware", str(last.get("hardware", ""))),
        ],
        charts=list(training_charts(rows)),
        tables=[ReportTable(title="First and last step", columns=("metric", "first", "last"), rows=compare_ends(rows))],
    )


def training_charts(rows: Sequence[JsonObject]) -> Iterator[Chart]:
    steps = [float(row["step"]) for row in rows]
    for title, label, names, log in CHARTS:
        columns = {name: [row.get(key) for row in rows] for name, key in names.items()}
        series = {name: values for name, values in columns.items() if any(values)}
        if series:  # a metric that is 0 throughout has no curve to show
            yield Chart(title=title, x_label="step", y_label=label, x=steps, series=series, log_y=log)


def compare_ends(rows: Sequence[JsonObject]) -> list[tuple[str | float, ...]]:
    known = [key for key in COMPARED if key in rows[0] and key in rows[-1]]
    return [(key, *("not finite" if row[key] is None else row[key] for row in (rows[0], rows[-1]))) for key in known]
