"""tokentrue audit FILE: re-checks certificates, prefix identity and coverage of exported samples, from the file
alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tokentrue.cli.words import count_of
from tokentrue.json_types import JsonObject


def command(
    file: Annotated[Path, typer.Argument(help="exported samples, in any of tokentrue's formats")],
    as_json: Annotated[bool, typer.Option("--json", help="print the findings as JSON")] = False,
    limit: Annotated[int, typer.Option("--limit", help="findings to print")] = 20,
) -> int:
    """Re-check exported samples; exit 1 where something does not hold, and say where."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from tokentrue.samples import AuditFinding, audit_exported, read_exported

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, transient=True, disable=as_json or not sys.stderr.isatty()) as progress:
        task = progress.add_task(f"reading {file.name}")

        def counted() -> Any:
            for number, row in enumerate(read_exported(file), start=1):
                progress.update(task, description=f"{count_of(number, 'sample')} of {file.name}")
                yield row

        result = audit_exported(counted())
    if not result.samples:
        result.findings.append(AuditFinding(sample=file.name, what="holds no sample: there is nothing to check"))
    if as_json:
        print(json.dumps(_report(result), indent=1))
    else:
        _show(result, limit)
    return 0 if result.ok else 1


def _report(result: Any) -> JsonObject:
    findings = [{"sample": f.sample, "what": f.what, "start": f.start, "end": f.end} for f in result.findings]
    counts = {name: getattr(result, name) for name in ("ok", "samples", "tokens", "sampled", "trained", "coverage")}
    return {**counts, "sessions": len(result.sessions), "findings": findings}


def _show(result: Any, limit: int) -> None:
    for finding in result.findings[:limit]:
        print(str(finding).encode(errors="backslashreplace").decode())  # a damaged name may hold what UTF-8 cannot
    if len(result.findings) > limit:
        print(f"… and {len(result.findings) - limit} more (--limit)")
    verdict = "all of it holds" if result.ok else count_of(len(result.findings), "finding")
    print(
        f"{count_of(result.samples, 'sample')} of {count_of(len(result.sessions), 'session')}, {count_of(result.tokens, 'token')}, "
        f"{result.trained:,} trained, "
        f"coverage {result.coverage:.2%}: {verdict}"
    )
