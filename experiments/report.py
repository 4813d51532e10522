"""The report of an experiment: its claim, its table, and each metric as a curve per arm (the mean over seeds)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from tokentrue.viewer import Chart

LOGARITHMIC = ("grad_norm", "delta", "k3", "chi2")


def write_experiment_report(out: Path, name: str, table: Any) -> Path:
    """`NAME.html` beside the numbers that the experiment wrote to `NAME.json`."""
    from experiments.catalog import EXPERIMENTS
    from experiments.registry import module_of
    from tokentrue.viewer import Report, ReportTable, write_report

    held = orjson.loads((out / f"{name}.json").read_bytes())
    module = module_of(name)
    failed = [result for result in held["results"] if "error" in result]
    report = Report(
        title=f"Experiment: {name}",
        verdict=EXPERIMENTS[name].claim,
        ok=not failed,
        note=table.title,
        charts=curves(held["results"], getattr(module, "CURVES", {})),
        tables=[ReportTable(title="Arms", columns=list(table.columns), rows=[list(row) for row in table.rows])],
        facts=[
            ("measured on", str(held["machine"])),
            ("command", EXPERIMENTS[name].command),
            ("runs", str(len(held["results"]))),
        ]
        + [(f"stopped: {result['arm']}, seed {result['seed']}", str(result["error"])) for result in failed],
    )
    path = out / f"{name}.html"
    write_report(path, report)
    return path


def curves(results: Sequence[Mapping[str, Any]], wanted: Mapping[str, str]) -> list[Chart]:
    """One chart per metric, one line per arm."""
    from tokentrue.viewer import Chart

    charts: list[Chart] = []
    for key, label in wanted.items():
        series: dict[str, list[float | None]] = {}
        for arm in dict.fromkeys(result["arm"] for result in results):
            runs = [
                [row.get(key) for row in result["rows"]]
                for result in results
                if result["arm"] == arm and result.get("rows")
            ]
            if line := mean_over_runs(runs):
                series[str(arm)] = line
        if series:
            length = max(len(line) for line in series.values())
            padded = {arm: [*line, *[None] * (length - len(line))] for arm, line in series.items()}
            steps = [float(step) for step in range(length)]
            log = any(word in key for word in LOGARITHMIC)
            charts.append(Chart(title=label, x_label="step", y_label=label, x=steps, series=padded, log_y=log))
    return charts


def mean_over_runs(runs: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Step by step, over the runs that reported a finite value there."""
    line: list[float | None] = []
    for step in range(max((len(run) for run in runs), default=0)):
        values = [
            value for run in runs if step < len(run) and (value := run[step]) is not None and math.isfinite(value)
        ]
        line.append(statistics.fmean(values) if values else None)
    return line if any(value is not None for value in line) else []
