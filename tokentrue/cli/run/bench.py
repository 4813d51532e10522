"""tokentrue bench NAME: prints the ratios that one run of a benchmark measured."""

from __future__ import annotations

import json
import platform
from importlib import import_module
from typing import TYPE_CHECKING, Annotated

import typer

from tokentrue.errors import ConfigError

if TYPE_CHECKING:
    from tokentrue.bench import Report

NAMES = ("render", "samples", "gateway", "engine", "mismatch")


def command(
    name: Annotated[str, typer.Argument(help="one of: " + ", ".join(NAMES))],
    quick: Annotated[bool, typer.Option("--quick", help="smaller sizes, for a smoke test")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the report as JSON")] = False,
    sets: Annotated[
        list[str] | None, typer.Option("--set", help="gateway: measure a second gateway with this setting, too")
    ] = None,
) -> int:
    """Measure ratios in one run on this machine."""
    if name not in NAMES:
        raise ConfigError(f"no benchmark {name!r}; choose one of {', '.join(NAMES)}")
    if sets and name != "gateway":
        raise ConfigError("--set is for `bench gateway`")
    more = {"settings": sets} if sets else {}
    reports: list[Report] = import_module(f"tokentrue.bench.{name}").run(quick=quick, **more)
    machine = f"{platform.processor() or platform.machine()}, Python {platform.python_version()}"
    if as_json:
        shaped = [{"title": r.title, "columns": r.columns, "rows": r.rows, "notes": r.notes} for r in reports]
        print(json.dumps({"machine": machine, "reports": shaped}, indent=1, default=str))
        return 0
    for report in reports:
        show(report)
    print(f"measured on: {machine}")
    return 0


def show(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=report.title)
    for column in report.columns:
        table.add_column(column)
    for row in report.rows:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row))
    console = Console()
    console.print(table)
    for note in report.notes:
        console.print(f"  {note}", highlight=False)
