"""tokentrue conformance: the levels of the specification against a gateway."""

import asyncio
import sys
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from tokentrue.cli.common import AsJson, ReportPage, output_report, pluralise, require_file, show_status
from tokentrue.errors import ConfigError
from tokentrue.hub import SMALL_MODEL

if TYPE_CHECKING:
    from tokentrue.conformance.run import ConformanceReport
    from tokentrue.viewer import Report


def command(
    target: Annotated[str, Argument(help="tokentrue, or a Python file with the gateway's adapter")],
    levels: Annotated[str | None, Option(help="such as 0-3,5 (default: all)")] = None,
    dialects: Annotated[str | None, Option(help="such as chat,anthropic (default: all that the target serves)")] = None,
    seed: Annotated[int, Option(help="the same seed sends the same requests")] = 1,
    turns: Annotated[int, Option(min=1, help="turns of a conversation")] = 8,
    case: Annotated[
        str | None, Option(help="replay one case, LEVEL.NAME.DIALECT.TURNS, or several with commas")
    ] = None,
    python: Annotated[
        str | None, Option(help="a Python that has the target installed (default: one is made and kept)")
    ] = None,
    as_json: AsJson = False,
    out: ReportPage = None,
) -> int:
    """Exit 0: no fatal finding. 1: a fatal finding, with the smallest conversation that shows it. 2: called wrongly, or
    the target did not start."""
    require_file("-o", out)
    from tokentrue.app.libraries import quiet_libraries
    from tokentrue.conformance.run import DIALECTS, ConformanceSettings, parse_case, parse_levels, run
    from tokentrue.conformance.target import load_target

    chosen = DIALECTS if dialects is None else tuple(dialects.split(","))
    if unknown := set(chosen) - set(DIALECTS):
        raise ConfigError(f"--dialects: no dialect {', '.join(sorted(unknown))}; choose of {', '.join(DIALECTS)}")
    settings = ConformanceSettings(dialects=chosen, turns=turns, seed=seed, case=case)
    if levels is not None:
        settings = replace(settings, levels=parse_levels(levels))
    for one in case.split(",") if case is not None else ():
        parse_case(one)
    loaded = load_target(target, python)
    if 9 in settings.levels and "9" not in loaded.not_promised and find_spec("PIL") is None:
        raise ConfigError("level 9 draws pictures: pip install 'tokentrue[images]', or --levels 0-8")
    quiet_libraries()
    with show_status(f"starting {loaded.name}", quiet=as_json or not sys.stderr.isatty()) as update:
        found = asyncio.run(run(loaded, settings, model=SMALL_MODEL, on_case=update))
    for one in found.findings if not as_json else ():
        print(f"{one.severity} {one.rule} in {one.case}: {one.detail}")
        print(f"  replay: tokentrue conformance {target} {one.replay}")
        print(*(f"    {line}\n" for line in one.conversation if one.severity == "fatal"), sep="", end="")
    tables = 2 if found.habits else 1
    output_report(report_from(found, target), out, found.to_json(), as_json=as_json, tables=tables)
    return found.exit_code


def report_from(found: "ConformanceReport", target: str) -> "Report":
    from tokentrue.viewer import Report, ReportTable

    shown, again = found.to_json(), f"tokentrue conformance {target}"
    findings = [(one.rule, one.severity, one.detail, f"{again} {one.replay}") for one in found.findings]
    talks = [(one.case, "\n".join(one.conversation)) for one in found.findings if one.conversation]
    levels: list[tuple[str, ...]] = []
    for one in shown["levels"]:
        if one["verdict"] != "not run":
            counted = [pluralise(one["cases"], "case"), *map(": ".join, one["not_promised"].items())]
            levels.append((f"{one['level']} {one['name']}", one["verdict"], one["why"] or "; ".join(counted)))
    habits = [
        (habit, dialect, f"{coverage:.1%}", rows, f"{tokens:,}", enough or "")
        for habit, dialect, coverage, rows, tokens, enough in (one.values() for one in found.habits)
    ]
    tables = [
        (f"{found.target} {found.version}", ("level", "verdict", ""), levels),
        ("Histories", ("habit", "dialect", "trained", "rows", "tokens to forward", "rows enough"), habits),
        ("Findings", ("rule", "severity", "what", "replay"), findings),
        ("Smallest conversations", ("case", "requests and answers"), talks),
    ]
    return Report(
        title=f"Conformance: {found.target} {found.version}",
        verdict=found.summary,
        ok=found.exit_code == 0,
        facts=[("command", found.command), ("seed", str(found.settings.seed)), ("engine route", found.engine)],
        tables=[ReportTable(title=title, columns=columns, rows=rows) for title, columns, rows in tables if rows],
    )
