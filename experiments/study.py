"""A study: arms × seeds in processes of their own, one table, one figure, all numbers on file.

Every experiment is a module with `arms(quick)` and `COLUMNS`, listed in catalog.py; it is run by `run_study` and shown
by `table_of`.
"""

from __future__ import annotations

import json
import platform
import statistics
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from experiments.arms import Arm, Engines, Scale, run_arm

Result = dict[str, Any]
Column = tuple[str, Callable[[Sequence[Result]], str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """`rows` hold one cell per column, as text."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def as_text(self) -> str:
        """Markdown: it reads as it is, and goes into docs unchanged."""
        lines = ["| " + " | ".join(self.columns) + " |", "|" + "---|" * len(self.columns)]
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        return "\n".join([self.title, "", *lines, "", *self.notes])


def run_study(arms: Sequence[Arm], scale: Scale, *, on_result: Callable[[Result], None] | None = None) -> list[Result]:
    """Every arm with every seed. An arm that dies is a result too: its error is in the table."""
    plan = [(arm, seed) for arm in arms for seed in scale.seeds]
    results: list[Result] = []
    for result in _each(plan, scale):
        results.append(result)
        if on_result is not None:
            on_result(result)
    order = {arm.name: number for number, arm in enumerate(arms)}
    return sorted(results, key=lambda result: (order[result["arm"]], result["seed"]))


def _each(plan: Sequence[tuple[Arm, int]], scale: Scale) -> Iterator[Result]:
    if scale.jobs == 1:
        for arm, seed in plan:
            yield run_guarded(arm, scale, seed)
        return
    with ProcessPoolExecutor(max_workers=scale.jobs, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(run_guarded, arm, scale, seed) for arm, seed in plan]):
            yield done.result()


def run_guarded(arm: Arm, scale: Scale, seed: int, engines: Engines | None = None) -> Result:
    facts = {"arm": arm.name, "seed": seed, **provenance(scale)}
    try:
        return {**facts, **run_arm(arm, scale, seed, engines)}
    except Exception as error:  # recorded, shown, and the other arms go on
        return {**facts, "error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc(), "rows": []}


def run_arms_guarded(
    run: Callable[[Sequence[Arm], Scale, int], list[Result]], arms: Sequence[Arm], scale: Scale, seed: int
) -> list[Result]:
    return [{**provenance(scale), **result} for result in run(arms, scale, seed)]


def run_seeds_guarded(
    run: Callable[[Sequence[Arm], Scale, int], list[Result]],
    arms: Sequence[Arm],
    scale: Scale,
    on_result: Callable[[Result], None] | None,
) -> list[Result]:
    """For experiments whose arms share their rollouts: one process per seed."""
    results: list[Result] = []

    def take(found: list[Result]) -> None:
        results.extend(found)
        for result in found:
            if on_result is not None:
                on_result(result)

    if scale.jobs == 1:
        for seed in scale.seeds:
            take(run_arms_guarded(run, arms, scale, seed))
    else:
        with ProcessPoolExecutor(max_workers=scale.jobs, mp_context=get_context("spawn")) as pool:
            for done in as_completed([pool.submit(run_arms_guarded, run, arms, scale, seed) for seed in scale.seeds]):
                take(done.result())
    order = {arm.name: number for number, arm in enumerate(arms)}
    return sorted(results, key=lambda result: (order[result["arm"]], result["seed"]))


def table_of(
    title: str, arms: Sequence[Arm], results: Sequence[Result], columns: Sequence[Column], notes: Sequence[str] = ()
) -> Table:
    rows: list[list[str]] = []
    for arm in arms:
        mine = [result for result in results if result["arm"] == arm.name]
        good = [result for result in mine if "error" not in result]
        cells = [arm.name, *(show(good) if good else "–" for _, show in columns)]
        if len(good) < len(mine):
            cells[0] += (
                f" ({len(mine) - len(good)} of {len(mine)} stopped: {next(r['error'] for r in mine if 'error' in r)[:80]})"
            )
        rows.append(cells)
    return Table(title=title, columns=["arm", *(name for name, _ in columns)], rows=rows, notes=notes)


# ---- cells -----------------------------------------------------------------------------------------------------------------------------
def format_mean_range(values: Sequence[float], form: str = ".3f") -> str:
    """Mean and range over seeds; one number where there is no range to show."""
    if not values:
        return "–"
    if not any(values):
        return "0"
    if format(min(values), form) == format(max(values), form):
        return format(values[0], form)
    return f"{statistics.fmean(values):{form}} [{min(values):{form}}, {max(values):{form}}]"


def curves_of(results: Sequence[Result], name: str) -> list[list[float]]:
    """The runs' curves of one metric, without runs that never reported it."""
    found = [[row[name] for row in result["rows"] if name in row] for result in results]
    return [curve for curve in found if curve]


def after(results: Sequence[Result]) -> str:
    return format_mean_range([result["after"] for result in results], ".2f")


def before(results: Sequence[Result]) -> str:
    return format_mean_range([result["before"] for result in results], ".2f")


def late(name: str, form: str = ".2f", share: float = 0.25) -> Callable[[Sequence[Result]], str]:
    """The mean of a curve over its last quarter."""

    def show(results: Sequence[Result]) -> str:
        found = curves_of(results, name)
        return format_mean_range([statistics.fmean(curve[-max(1, int(len(curve) * share)) :]) for curve in found], form)

    return show


def worst(name: str, form: str = ".2g", low: bool = False) -> Callable[[Sequence[Result]], str]:
    """The extreme of a curve over the whole run."""

    def show(results: Sequence[Result]) -> str:
        pick = min if low else max
        return format_mean_range([pick(curve) for curve in curves_of(results, name)], form)

    return show


def average(name: str, form: str = ".2g") -> Callable[[Sequence[Result]], str]:
    def show(results: Sequence[Result]) -> str:
        return format_mean_range([statistics.fmean(curve) for curve in curves_of(results, name)], form)

    return show


# Columns that several experiments have.
REWARDS: tuple[Column, ...] = (("held-out reward", after), ("rollout reward, last quarter", late("reward")))
DELTAS: tuple[Column, ...] = (
    ("mean abs δ", average("mismatch/delta_abs_mean", ".1e")),
    ("lowest δ", worst("mismatch/delta_min", ".2g", low=True)),
    ("k3", average("mismatch/k3", ".1e")),
)


# ---- output ----------------------------------------------------------------------------------------------------------------------------
def write(out: Path, name: str, arms: Sequence[Arm], results: Sequence[Result], table: Table, module: Any) -> None:
    """All numbers, the table, and the figure where matplotlib is installed."""
    out.mkdir(parents=True, exist_ok=True)
    where = measured_on(results)
    (out / f"{name}.json").write_text(
        json.dumps(
            {"experiment": name, "machine": where, "arms": [repr(arm) for arm in arms], "results": list(results)}
        )
    )
    (out / f"{name}.md").write_text(table.as_text() + f"\n\nmeasured on: {where}\n")
    good = [result for result in results if "error" not in result]
    if good and can_draw():
        draw = getattr(module, "draw", None)
        if draw is not None:
            draw(out / f"{name}.png", good)
        else:
            figure(out / f"{name}.png", arms, good, module.CURVES)


def can_draw() -> bool:
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    return True


def figure(path: Path, arms: Sequence[Arm], results: Sequence[Result], curves: Mapping[str, str]) -> None:
    """One panel per curve; a line per arm, its mean over seeds, with the range shaded."""
    import matplotlib.pyplot as plt

    drawn, axes = plt.subplots(1, len(curves), figsize=(5.2 * len(curves), 3.6), squeeze=False)
    for axis, (key, label) in zip(axes[0], curves.items(), strict=True):
        for arm in arms:
            band(axis, [r for r in results if r["arm"] == arm.name], key, label=arm.name)
        axis.set_xlabel("step")
        axis.set_title(label)
        if any(word in key for word in ("grad_norm", "delta", "k3", "chi2")):
            axis.set_yscale("symlog", linthresh=1e-6)
    axes[0][0].legend(fontsize=7)
    save(drawn, path)


def band(axis: Any, results: Sequence[Result], key: str, **style: Any) -> None:
    """The mean of the runs' curves as a line, their range shaded."""
    runs = [[row.get(key, float("nan")) for row in result["rows"]] for result in results if result["rows"]]
    if not runs:
        return
    columns = list(zip(*runs, strict=False))
    (line,) = axis.plot(range(len(columns)), [statistics.fmean(c) for c in columns], linewidth=1.4, **style)
    axis.fill_between(
        range(len(columns)), [min(c) for c in columns], [max(c) for c in columns], alpha=0.12, color=line.get_color()
    )


def save(drawn: Any, path: Path) -> None:
    """A small file: few colours are enough for lines."""
    import io

    import matplotlib.pyplot as plt
    from PIL import Image

    drawn.tight_layout()
    buffer = io.BytesIO()
    drawn.savefig(buffer, dpi=100)
    plt.close(drawn)
    Image.open(buffer).convert("RGB").quantize(96).save(path, optimize=True)


def provenance(scale: Scale) -> Result:
    """Where and how a run was made: beside every result, so that a file of runs needs nothing else."""
    import torch

    where = torch.cuda.get_device_name() if scale.device == "cuda" else platform.processor() or platform.machine()
    return {
        "machine": f"{where}, torch {torch.__version__}",
        "model": Path(scale.model).name,
        "lr": scale.lr,
        "steps": scale.steps,
        "rollouts": [scale.groups, scale.size],
    }


def measured_on(results: Sequence[Result]) -> str:
    def said(key: str) -> str:
        return ", ".join(dict.fromkeys(str(result[key]) for result in results if key in result)) or "?"

    seeds = sorted({result["seed"] for result in results})
    return f"{said('machine')}; model {said('model')}, lr {said('lr')}, {said('steps')} steps of {said('rollouts')} rollouts; seeds {seeds}"
