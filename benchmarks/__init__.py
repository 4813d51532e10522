"""Benchmarks, run in a clone as `python -m benchmarks.NAME`: each measures ratios inside one run; no test asserts a
time."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A table of one run: `rows` are tuples in the order of `columns`; `notes` say what the ratios mean and on what
    machine."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    notes: Sequence[str] = field(default_factory=tuple)

    def as_text(self) -> str:
        table = [tuple(map(str, self.columns)), *(tuple(map(format_cell, row)) for row in self.rows)]
        widths = [max(len(row[i]) for row in table) for i in range(len(self.columns))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
        ]
        return "\n".join([self.title, *lines, *(f"  {note}" for note in self.notes), ""])


def format_cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def parser_for(name: str, description: str) -> argparse.ArgumentParser:
    """The options that every benchmark takes."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument("--quick", action="store_true", help="smaller sizes, for a smoke test")
    parser.add_argument("--json", action="store_true", help="print the reports as JSON")
    return parser


def print_reports(reports: Sequence[Report], *, as_json: bool) -> None:
    machine = f"{platform.processor() or platform.machine()}, Python {platform.python_version()}"
    if as_json:
        print(json.dumps({"machine": machine, "reports": [asdict(each) for each in reports]}, indent=1, default=str))
        return
    for report in reports:
        print(report.as_text())
    print(f"measured on: {machine}")


def main(name: str, description: str, run: Callable[..., list[Report]]) -> None:
    """The whole command of a benchmark without options of its own."""
    options = parser_for(name, description).parse_args()
    print_reports(run(quick=options.quick), as_json=options.json)
