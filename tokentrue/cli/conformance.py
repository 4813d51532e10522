"""tokentrue conformance: the levels of the specification against a gateway."""

from __future__ import annotations

import asyncio
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from tokentrue.cli.common import AsJson, ReportPage, pluralise, print_json, print_table, print_verdict, show_status
from tokentrue.errors import ConfigError

if TYPE_CHECKING:
    from tokentrue.conformance.run import ConformanceReport

COLOURS = {"pass": "green", "warn": "yellow", "fail": "bold red", "not applicable": "dim", "not run": "dim"}
MODEL = Path(__file__).parent.parent / "assets" / "calculator"


def command(
    target: Annotated[str, Argument(help="tokentrue, or a Python file with the gateway's adapter")],
    levels: Annotated[str | None, Option(help="such as 0-3,5 (default: all)")] = None,
    dialects: Annotated[str | None, Option(help="such as chat,anthropic (default: all that the target serves)")] = None,
    seed: Annotated[int, Option(help="the same seed sends the same requests")] = 1,
    turns: Annotated[int, Option(help="turns of a conversation")] = 8,
    case: Annotated[
        str | None, Option(help="replay one case, LEVEL.NAME.DIALECT.TURNS, or several with commas")
    ] = None,
    python: Annotated[
        str | None, Option(help="a Python that has the target installed (default: one is made and kept)")
    ] = None,
    as_json: AsJson = False,
    output: ReportPage = None,
) -> int:
    """Exit 0: no fatal finding. 1: a fatal finding, with the smallest conversation that shows it. 2: called wrongly, or
    the target did not start."""
    from tokentrue.app.libraries import quiet_libraries
    from tokentrue.conformance.run import DIALECTS, ConformanceSettings, parse_case, run, with_levels
    from tokentrue.conformance.target import load_target

    chosen = DIALECTS if dialects is None else tuple(dialects.split(","))
    if unknown := set(chosen) - set(DIALECTS):
        raise ConfigError(f"--dialects: no dialect {', '.join(sorted(unknown))}; choose of {', '.join(DIALECTS)}")
    if turns < 1:
        raise ConfigError("--turns: at least 1")
    settings = with_levels(ConformanceSettings(dialects=chosen, turns=turns, seed=seed, case=case), levels)
    for one in case.split(",") if case is not None else ():
        parse_case(one)
    loaded = load_target(target, python)
    if 9 in settings.levels and "9" not in loaded.not_promised and find_spec("PIL") is None:
        raise ConfigError("level 9 draws pictures: pip install 'tokentrue[images]', or --levels 0-8")
    quiet_libraries()
    with show_status(f"starting {loaded.name}", quiet=as_json or not sys.stderr.isatty()) as update:
        report = asyncio.run(run(loaded, settings, model=MODEL, on_case=update))
    if output is not None:
        from tokentrue.cli.reports import write_conformance_report

        write_conformance_report(report, target, output)
    if as_json:
        print_json(report.to_json())
    else:
        print_report(report, target)
        if output is not None:
            print(f"report: {output}")
    return report.exit_code


def print_report(report: ConformanceReport, target: str) -> None:
    shown = report.to_json()
    for one in shown["findings"]:
        print(f"{one['severity']} {one['rule']} in {one['case']}: {one['detail']}")
        print(f"  replay: tokentrue conformance {target} {one['replay']}")
        if one["severity"] == "fatal":
            print("".join(f"    {line}\n" for line in one["conversation"]), end="")
    rows = [
        (
            f"{level['level']} {level['name']}",
            (level["verdict"], COLOURS[level["verdict"]]),
            level["why"]
            or "; ".join(
                [
                    pluralise(level["cases"], "case"),
                    *(f"not {one}: {why}" for one, why in level["not_promised"].items()),
                ]
            ),
        )
        for level in shown["levels"]
        if level["verdict"] != "not run"
    ]
    print_table(f"{report.target} {report.version}", ("level", "verdict", ""), rows)
    if report.habits:
        scores = [
            (one.habit, one.dialect, f"{one.coverage:.1%}", str(one.rows), f"{one.tokens:,}") for one in report.habits
        ]
        print_table("Histories", ("habit", "dialect", "trained", "rows", "tokens to forward"), scores)
    print_verdict(report.summary, ok=report.exit_code == 0)
