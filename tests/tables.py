"""A table at the end of a run: what tests noted with `record_property`, and why others of the folder did not run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def show_table(reporter: Any, folder: str, columns: Sequence[str]) -> None:
    """`columns` names the properties; a test that notes the first of them has a row. Nothing without such a row."""
    noted, others = [], []
    for kind in ("passed", "failed", "skipped"):
        for report in reporter.stats.get(kind, ()):
            if not hasattr(report, "nodeid") or not report.nodeid.startswith(f"{folder}/"):
                continue
            seen = dict(report.user_properties)
            name = report.nodeid.rpartition("::")[2]
            if columns[0] in seen and report.when == "call" and kind == "passed":
                noted.append([str(seen.get(column, "")) for column in columns])
            elif kind == "failed":
                others.append([name, "FAILED"])
            elif kind == "skipped":
                why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
                others.append([name, why.removeprefix("Skipped: ").replace("\n", " ")[:110]])
    if noted:
        widths = [max(map(len, column)) for column in zip(columns, *noted, strict=True)]
        reporter.section(columns[0])
        for row in [columns, *noted]:
            reporter.line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        for name, why in others:
            reporter.line(f"{name}: {why}")
