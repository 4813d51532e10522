"""tokentrue lab list | run NAME | show NAME: experiments with their claim, their table and their figure."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from tokentrue.errors import ConfigError


def command(
    action: Annotated[str, typer.Argument(help="list, run, or show (the runs on file)")],
    name: Annotated[str | None, typer.Argument(help="the experiment to run or show")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="tiny sizes: a smoke test, not a result")] = False,
    model: Annotated[str | None, typer.Option(help="model directory (default: the small model that ships)")] = None,
    tasks: Annotated[str | None, typer.Option(help="pretrained: JSON lines of questions and answers")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    steps: Annotated[int | None, typer.Option(help="training steps of each run")] = None,
    seeds: Annotated[int, typer.Option(help="runs of each arm")] = 3,
    groups: Annotated[int | None, typer.Option(help="tasks per step, 8 rollouts each")] = None,
    lr: Annotated[float | None, typer.Option(help="learning rate")] = None,
    jobs: Annotated[int, typer.Option(help="runs at a time, each in its own process")] = 2,
    only: Annotated[str | None, typer.Option(help="only arms whose name holds this text")] = None,
    out: Annotated[Path, typer.Option(help="output directory")] = Path("out/lab"),
    as_json: Annotated[bool, typer.Option("--json", help="print the table as JSON")] = False,
) -> int:
    """Run one of the lab's experiments, or list them."""
    if action == "list":
        from tokentrue.lab.catalog import EXPERIMENTS

        shown = {name: {"claim": each.claim, "command": each.command} for name, each in EXPERIMENTS.items()}
        if as_json:
            print(json.dumps(shown, indent=1))
        else:
            for each, facts in shown.items():
                print(f"{each}\n  Claim tested: {facts['claim']}\n  {facts['command']}")
        return 0
    if action not in {"run", "show"} or name is None:
        raise ConfigError(
            "say `tokentrue lab list`, `tokentrue lab run NAME`, or `tokentrue lab show NAME` for runs on file"
        )
    if action == "show":
        from tokentrue.lab.registry import show_results as shown_table

        print(shown_table(name, out=out).as_text())
        return 0
    changes = dict(
        model=model, tasks=tasks, device=device, steps=steps, groups=groups, lr=lr, seeds=tuple(range(seeds)), jobs=jobs
    )
    return run(name, quick, changes, only, out, as_json)


def run(name: str, quick: bool, changes: dict[str, Any], only: str | None, out: Path, as_json: bool) -> int:
    from tokentrue.app.devices import require_device
    from tokentrue.app.libraries import quiet_libraries
    from tokentrue.cli.progress import progress_bar
    from tokentrue.lab.arms import Scale
    from tokentrue.lab.registry import run_experiment, runs_of

    quiet_libraries()
    require_device(changes["device"])
    scale = replace(Scale(), **{key: value for key, value in changes.items() if value is not None})
    with progress_bar(name, runs_of(name, scale, quick=quick, only=only), quiet=as_json) as advance:

        def report(result: dict[str, Any]) -> None:
            note = result.get("error") or (f"reward {result['after']:.2f}" if "after" in result else "")
            advance(f"{result['arm']}, seed {result['seed']}: {note}"[:90])

        table = run_experiment(name, scale, quick=quick, out=out, only=only, on_result=report)
    from tokentrue.cli.run.lab_report import write_lab_report

    page = write_lab_report(out, name, table)
    if as_json:
        print(
            json.dumps(
                {"title": table.title, "columns": list(table.columns), "rows": [list(row) for row in table.rows]},
                indent=1,
            )
        )
    else:
        print(table.as_text())
        print(f"\nnumbers, table and figure in {out}/{name}.*; report: {page}")
    return 1 if any("stopped:" in row[0] for row in table.rows) else 0
