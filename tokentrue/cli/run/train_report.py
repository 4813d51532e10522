"""Report of a training run or the demo: charts of its metrics, first and last step side by side, rollouts if kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokentrue.json_types import JsonObject

if TYPE_CHECKING:
    from tokentrue.app.training import TrainRun
    from tokentrue.viewer import Chart, Report
    from tokentrue.viewer.records import RecordSource

READABLE_TOKENS = 100_000
SECONDS = {name: f"seconds/{name}" for name in ("wait", "recompute", "update", "publish")}
CHARTS = (  # title, label of the axis, {name: metric}, logarithmic
    ("Reward by step", "mean reward", {"rollouts": "reward", "held-out tasks": "eval/reward"}, False),
    ("Mismatch by step", "K3 per token", {"K3": "mismatch/k3"}, True),
    ("Gradient norm", "norm", {"norm": "update/grad_norm"}, True),
    ("Loss", "loss", {"loss": "update/loss"}, False),
    ("Staleness", "policy versions behind", {"mean": "staleness_mean", "largest": "staleness_max"}, False),
    ("Time of a step", "seconds", SECONDS, False),
)
COMPARED = (
    "reward", "mismatch/k3", "mismatch/delta_abs_mean", "update/grad_norm", "update/loss", "tokens_trained", "seconds/step",
)  # fmt: skip


def write_training_report(settings: TrainRun) -> Path | None:
    """Writes `report.html` to the run's directory; None if it has no metrics."""
    from tokentrue.app.wiring import renderer_for
    from tokentrue.viewer import write_report

    rows = read_metrics(settings.out / "metrics.jsonl")
    if not rows:
        return None
    source = _rollouts(settings)
    renderer: Any = renderer_for(settings.model)(settings.model.history) if source is not None else None
    path = settings.out / "report.html"
    report = training_report(settings, rows)
    try:
        write_report(path, report, source=source, renderer=renderer, most_tokens=READABLE_TOKENS)
    finally:
        if source is not None:
            source.close()
    return path


def read_metrics(path: Path) -> list[JsonObject]:
    """Non-finite numbers become None: null, or NaN and Infinity in files of older runs."""
    from tokentrue.plain_json import dumps, loads, read_numbered_lines

    rows: list[JsonObject] = []
    for _, line in read_numbered_lines(path) if path.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:  # a crash or a full disk left half a row
            continue
        if isinstance(row, dict) and "step" in row:
            rows.append(loads(dumps(row)))
    return rows


def _rollouts(settings: TrainRun) -> RecordSource | None:
    from tokentrue.sessions.journal import open_journal
    from tokentrue.viewer import FileSource, StoreSource

    if settings.samples is not None:
        return FileSource(settings.samples)
    store = settings.out / "sessions.sqlite"
    if not store.is_file():
        return None
    return StoreSource(open_journal(f"sqlite:{store}", read_only=True), name="newest rollouts first")


def training_report(settings: TrainRun, rows: Sequence[JsonObject]) -> Report:
    from tokentrue.viewer import Report

    first, last = rows[0], rows[-1]
    compared = sum(row.get("exact_compared", 0) for row in rows)
    differing = sum(row.get("exact_differing", 0) for row in rows)
    highlights = [
        (f"reward at step {row['step']}", f"{row['reward']:.3f}") for row in (first, last) if row["reward"] is not None
    ]
    if compared:
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
        **metrics_parts(rows),
    )


def metrics_parts(rows: Sequence[JsonObject]) -> JsonObject:
    from tokentrue.viewer import ReportTable

    def shown(value: float | None) -> float | str:
        return "not finite" if value is None else value

    first, last = rows[0], rows[-1]
    changes = [(key, shown(first[key]), shown(last[key])) for key in COMPARED if key in first and key in last]
    table = ReportTable(title="First and last step", columns=("metric", "first", "last"), rows=changes)
    return {"charts": _charts(rows), "tables": [table]}


def _charts(rows: Sequence[JsonObject]) -> list[Chart]:
    from tokentrue.viewer import Chart

    steps = [float(row["step"]) for row in rows]
    charts: list[Chart] = []
    for title, label, names, log in CHARTS:
        columns = {name: [row.get(key) for row in rows] for name, key in names.items()}
        series = {name: values for name, values in columns.items() if any(values)}
        if series:  # a metric that is 0 throughout has no curve to show
            charts.append(Chart(title=title, x_label="step", y_label=label, x=steps, series=series, log_y=log))
    return charts
