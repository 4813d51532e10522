"""Tables and figures of `experiments.grid` from the runs on file: `python -m experiments.figures [--write]`.

A run is judged by its mean held-out reward over the last half of its evaluations. Intervals are 95% t-intervals over
seeds; a difference is taken seed by seed, because runs of one seed draw the same tasks. `--write` puts the tables into
docs/lab.md between their marks and draws docs/figures/lab-grid.png, and learning.png once its arms have five seeds.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.grid import DATA, arms, late, read_runs
from experiments.study import save

T_975 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
CLAIM, SIGNIFICANT = 5, 10  # seeds
MARKS = "<!-- grid: made by python -m experiments.figures --write -->", "<!-- end of grid -->"
DOCS = Path(__file__).parent.parent / "docs"
CONTRASTS = (  # what is asked, with, without
    *((f"{source}: mismatch at all", f"{source}: bypass", "exact: exact") for source in ("kernels", "fp8", "kv8")),
    ("staleness at all", "stale: exact", "exact: exact"),
    *(
        (f"{source}: {asked}", f"{source}: {a}", f"{source}: {b}")
        for source in ("fp8", "kernels", "stale")
        for asked, a, b in (
            ("recomputing π_old, without weights", "recompute", "bypass"),
            ("TIS beside recomputation", "recompute + TIS", "recompute"),
            ("TIS beside bypass", "bypass + TIS", "bypass"),
            ("MIS beside recomputation", "MIS", "recompute"),
            ("score centering, against bypass", "score centering", "bypass"),
        )
    ),
    ("stale: exact log-probabilities, against ordinary kernels", "stale: exact", "stale: bypass"),
    ("mixture: replaying the routing, with bypass", "mixture: bypass + replay", "mixture: bypass"),
    ("mixture: replaying the routing, with recomputation", "mixture: recompute + replay", "mixture: recompute"),
)


def complete_runs(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, Mapping[str, Any]]]:
    """Runs by arm and seed: those that ended, of each arm's most frequent learning rate and length."""
    found: dict[str, dict[int, Mapping[str, Any]]] = {}
    for arm in (arm.name for arm in arms()):
        mine = [run for run in runs if run["arm"] == arm]
        if mine:
            chosen = Counter((run["lr"], run["steps"]) for run in mine).most_common(1)[0][0]
            found[arm] = {run["seed"]: run for run in mine if (run["lr"], run["steps"]) == chosen}
    return found


def interval(values: Sequence[float]) -> float:
    """Half the width of the 95% t-interval of the mean; infinite for one value."""
    if len(values) < 2:
        return math.inf
    return T_975[min(len(values) - 2, len(T_975) - 1)] * statistics.stdev(values) / math.sqrt(len(values))


def show_mean(values: Sequence[float]) -> str:
    half = interval(values)
    return f"{statistics.fmean(values):.2f}" + ("" if math.isinf(half) else f" ± {half:.2f}")


def judge(differences: Sequence[float]) -> str:
    half, number = interval(differences), len(differences)
    if number < CLAIM:
        return f"too few seeds ({number})"
    if abs(statistics.fmean(differences)) <= half:
        return "no difference shown"
    return "significant" if number >= SIGNIFICANT else "difference"


def table_of_arms(found: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> list[str]:
    lines = [
        "| arm | seeds | lr | steps | held-out reward | mean abs δ | k3 | lowest δ | differing bits |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for arm, runs in found.items():
        first = next(iter(runs.values()))
        curves = [run["curves"] for run in runs.values()]
        delta, k3 = (statistics.fmean([statistics.fmean(c[key]) for c in curves]) for key in ("delta", "k3"))
        differing, compared = (int(sum(sum(c[key]) for c in curves)) for key in ("differing", "compared"))
        lowest = min(min(c["lowest"]) for c in curves)
        cells = [
            arm, len(runs), f"{first['lr']:g}", first["steps"], show_mean([late(run) for run in runs.values()]),
            f"{delta:.1e}" if delta else 0, f"{k3:.1e}" if k3 else 0, f"{lowest:.2g}", f"{differing:,} of {compared:,}",
        ]  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    start = [sum(run["held_out"][0][1:]) / len(run["kinds"]) for runs in found.values() for run in runs.values()]
    if start:
        lines += ["", f"Held-out reward before training: {statistics.fmean(start):.2f}."]
    return lines


def table_of_contrasts(found: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> list[str]:
    lines = [
        "| question | difference in held-out reward | seeds | lr, with and without | verdict |",
        "|---|---|---|---|---|",
    ]
    for asked, a, b in CONTRASTS:
        shared = sorted(set(found.get(a, ())) & set(found.get(b, ())))
        if shared:
            differences = [late(found[a][seed]) - late(found[b][seed]) for seed in shared]
            half = interval(differences)
            shown = f"{statistics.fmean(differences):+.2f}" + ("" if math.isinf(half) else f" ± {half:.2f}")
            rates = " / ".join(f"{found[arm][shared[0]]['lr']:g}" for arm in (a, b))
            lines.append(f"| {asked} | {shown} | {len(shared)} | {rates} | {judge(differences)} |")
    return lines


def draw_curves(path: Path, panels: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]) -> None:
    """Held-out reward by step: a line is the mean over seeds, its shade the 95% interval."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawn, axes = plt.subplots(1, len(panels), figsize=(4.4 * len(panels), 3.6), squeeze=False, sharey=True)
    for axis, (title, lines) in zip(axes[0], panels.items(), strict=True):
        for label, runs in lines.items():
            columns = list(
                zip(*([(h[0], sum(h[1:]) / len(h[1:])) for h in run["held_out"]] for run in runs), strict=True)
            )
            steps = [column[0][0] for column in columns]
            values = [[value for _, value in column] for column in columns]
            means = [statistics.fmean(column) for column in values]
            (line,) = axis.plot(steps, means, linewidth=1.4, label=f"{label}, lr {runs[0]['lr']:g}, {len(runs)} seeds")
            if len(runs) > 1:
                low, high = ([m + sign * interval(v) for m, v in zip(means, values, strict=True)] for sign in (-1, 1))
                axis.fill_between(steps, low, high, alpha=0.12, color=line.get_color())
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.set_ylim(0, 1)
        axis.legend(fontsize=7)
    axes[0][0].set_ylabel("held-out reward")
    save(drawn, path)


def panels_of(found: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> dict[str, dict[str, list[Mapping[str, Any]]]]:
    sources = list(dict.fromkeys(arm.partition(": ")[0] for arm in found if not arm.startswith("exact")))
    panels: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for source in sources:
        names = ["exact: exact", *(arm for arm in found if arm.startswith(f"{source}: "))]
        panels[source] = {
            ("exact, fresh weights" if name == "exact: exact" else name.partition(": ")[2]): list(found[name].values())
            for name in names
            if name in found
        }
    return panels


def write_page(text: str, tables: Sequence[str]) -> str:
    start, end = (text.index(mark) for mark in MARKS)
    return text[: start + len(MARKS[0])] + "\n\n" + "\n".join(tables) + "\n\n" + text[end:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA / "grid.jsonl")
    parser.add_argument("--write", action="store_true", help="into docs/")
    given = parser.parse_args()
    found = complete_runs(read_runs(given.data))
    tables = [*table_of_arms(found), "", *table_of_contrasts(found)]
    print("\n".join(tables))
    if given.write:
        page = DOCS / "lab.md"
        page.write_text(write_page(page.read_text(), tables))
        draw_curves(DOCS / "figures" / "lab-grid.png", panels_of(found))
        named = {"exact": "exact: exact", "bf16 kernels": "kernels: bypass", "fp8": "fp8: bypass"}
        lines = {label: list(found[arm].values()) for label, arm in named.items() if arm in found}
        if lines and min(map(len, lines.values())) >= CLAIM:
            draw_curves(DOCS / "figures" / "learning.png", {"SmolLM2-135M on arithmetic": lines})


if __name__ == "__main__":
    main()
