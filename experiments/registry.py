"""The experiments by name, and how one is run: `python -m experiments run NAME`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from experiments.arms import Scale
from experiments.catalog import EXPERIMENTS
from experiments.study import Table, run_seeds_guarded, run_study, table_of, write
from tokentrue.errors import ConfigError
from tokentrue.plain_json import read_numbered_lines

QUICK = {"groups": 2, "size": 4, "steps": 2, "heldout": 4, "seeds": (0,), "jobs": 1}


def module_of(name: str) -> Any:
    if name not in EXPERIMENTS:
        raise ConfigError(f"no experiment {name!r}; choose one of {', '.join(EXPERIMENTS)}")
    return import_module(EXPERIMENTS[name].module)


def notes_of(name: str) -> list[str]:
    return [f"claim tested: {EXPERIMENTS[name].claim}", f"command: `{EXPERIMENTS[name].command}`"]


def select_arms(module: Any, *, quick: bool, only: str | None) -> list[Any]:
    """`only` is a list of texts with commas between them; an arm whose name holds one of them stays."""
    return [
        arm
        for arm in module.arms(quick=quick)
        if only is None or any(text.strip() in arm.name for text in only.split(","))
    ]


def run_experiment(
    name: str,
    scale: Scale,
    *,
    quick: bool,
    out: Path,
    only: str | None = None,
    on_result: Callable[[Any], None] | None = None,
) -> Table:
    """Runs it, writes JSON, table and figure under `out`, and returns the table. `only` keeps arms whose name holds
    that text."""
    module = module_of(name)
    out.mkdir(parents=True, exist_ok=True)
    scale = replace(scale, **QUICK) if quick else scale
    arms = select_arms(module, quick=quick, only=only)
    if not arms:
        raise ConfigError(
            f"--only {only!r} fits no arm of {name}; they are {', '.join(a.name for a in module.arms(quick=quick))}"
        )

    def record(result: Any) -> None:
        with (out / f"{name}.runs.jsonl").open("a") as file:  # a study that is stopped keeps what it has
            file.write(json.dumps(result) + "\n")
        if on_result is not None:
            on_result(result)

    (out / f"{name}.runs.jsonl").unlink(missing_ok=True)
    together = hasattr(module, "run_arms")
    results = (
        run_seeds_guarded(module.run_arms, arms, scale, record)
        if together
        else run_study(arms, scale, on_result=record)
    )
    table = table_of(f"### {name}", arms, results, module.COLUMNS, notes=notes_of(name))
    write(out, name, arms, results, table, module)
    return table


def show_results(name: str, *, out: Path) -> Table:
    """The table and the figure of the runs that are on file: of a study that was stopped, or while it runs."""
    module = module_of(name)
    path = out / f"{name}.runs.jsonl"
    if not path.exists():
        raise ConfigError(f"no runs of {name} in {out}; `{EXPERIMENTS[name].command} --out {out}` makes them")
    results = [json.loads(line) for _, line in read_numbered_lines(path)]
    names = {result["arm"] for result in results}
    arms = [arm for arm in module.arms(quick=False) if arm.name in names]
    table = table_of(f"### {name}", arms, results, module.COLUMNS, notes=notes_of(name))
    write(out, name, arms, results, table, module)
    return table


def runs_of(name: str, scale: Scale, *, quick: bool, only: str | None = None) -> int:
    module = module_of(name)
    arms = select_arms(module, quick=quick, only=only)
    seeds = len(QUICK["seeds"]) if quick else len(scale.seeds)  # type: ignore[arg-type]
    return len(arms) * seeds
