"""`python -m experiments list | run NAME | show NAME`: experiments with their claim, their table and their figure."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.catalog import EXPERIMENTS
from tokentrue.errors import TokenTrueError


def main() -> int:
    options = parse_options()
    try:
        if options.action == "list":
            list_experiments(as_json=options.json)
            return 0
        return show(options) if options.action == "show" else run(options)
    except TokenTrueError as error:
        print(f"experiments {options.action}: {error}", file=sys.stderr)
        return 2


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m experiments", description="Where mismatch hurts, and what helps.")
    parser.add_argument("action", choices=("list", "run", "show"), help="show: the runs on file")
    parser.add_argument("name", nargs="?", help="the experiment to run or show")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: a smoke test, not a result")
    parser.add_argument("--model", help="model directory (default: the small model that ships)")
    parser.add_argument("--tasks", help="pretrained: JSON lines of questions and answers")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--steps", type=int, help="training steps of each run")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each arm")
    parser.add_argument("--groups", type=int, help="tasks per step, 8 rollouts each")
    parser.add_argument("--lr", type=float, help="learning rate")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, each in its own process")
    parser.add_argument("--only", help="only arms whose name holds this text")
    parser.add_argument("--out", type=Path, default=Path("out/lab"), help="output directory")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    options = parser.parse_args()
    if options.action != "list" and options.name is None:
        parser.error(f"{options.action} which experiment? one of {', '.join(EXPERIMENTS)}")
    return options


def list_experiments(*, as_json: bool) -> None:
    facts = {name: {"claim": each.claim, "command": each.command} for name, each in EXPERIMENTS.items()}
    if as_json:
        print(json.dumps(facts, indent=1))
        return
    for name, each in facts.items():
        print(f"{name}\n  Claim tested: {each['claim']}\n  {each['command']}")


def show(options: argparse.Namespace) -> int:
    from experiments.registry import show_results

    print(show_results(options.name, out=options.out).as_text())
    return 0


def run(options: argparse.Namespace) -> int:
    from experiments.arms import Scale
    from experiments.registry import run_experiment, runs_of
    from experiments.report import write_experiment_report
    from tokentrue.app.libraries import quiet_libraries, require_device

    quiet_libraries()
    require_device(options.device)
    given = {key: getattr(options, key) for key in ("model", "tasks", "device", "steps", "groups", "lr", "jobs")}
    changes = {key: value for key, value in given.items() if value is not None}
    scale = replace(Scale(), seeds=tuple(range(options.seeds)), **changes)
    total, done = runs_of(options.name, scale, quick=options.quick, only=options.only), 0

    def report(result: dict[str, Any]) -> None:
        nonlocal done
        done += 1
        note = result.get("error") or (f"reward {result['after']:.2f}" if "after" in result else "")
        print(f"{done} of {total}: {result['arm']}, seed {result['seed']}: {note}"[:120], file=sys.stderr, flush=True)

    table = run_experiment(
        options.name, scale, quick=options.quick, out=options.out, only=options.only, on_result=report
    )
    page = write_experiment_report(options.out, options.name, table)
    if options.json:
        rows = [list(row) for row in table.rows]
        print(json.dumps({"title": table.title, "columns": list(table.columns), "rows": rows}, indent=1))
    else:
        print(table.as_text())
        print(f"\nnumbers, table and figure in {options.out}/{options.name}.*; report: {page}")
    return 1 if any("stopped:" in row[0] for row in table.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
