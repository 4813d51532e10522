"""Tables and figures of `experiments.grid` from the runs on file: `python -m experiments.figures [--write]`.

A run is judged by its mean held-out reward over the last half of its evaluations. Intervals are 95% t-intervals over
seeds; a difference is taken seed by seed, because runs of one seed draw the same tasks, and is significant only if
Holm's procedure over all differences of the table says so. `--write` puts the tables into docs/lab.md between their
marks and draws docs/figures/lab-grid.png and lab-learning.png.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.grid import DATA, arms, choose_rates, late, read_runs
from experiments.study import save

T_975 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
CLAIM, SIGNIFICANT = 5, 10  # seeds
FALL = 0.2  # of held-out reward, from a run's best evaluation to its last
MARKS = "<!-- grid: made by python -m experiments.figures --write -->", "<!-- end of grid -->"
DOCS = Path(__file__).parent.parent / "docs"
CONTRASTS = (  # what is asked, with, without
    *(
        (f"{source}: uncorrected, against exact", f"{source}: bypass", "exact: exact")
        for source in ("kernels", "fp8", "real fp8", "kv8")
    ),
    *(
        (f"{source}: what TIS with recomputation leaves, against exact", f"{source}: recompute + TIS", "exact: exact")
        for source in ("fp8", "real fp8", "kv8")
    ),
    ("real fp8 against simulated, uncorrected", "real fp8: bypass", "fp8: bypass"),
    ("exact: dropping PPO's clip", "exact: policy gradient", "exact: exact"),
    ("kernels: dropping PPO's clip, without weights", "kernels: policy gradient", "kernels: bypass"),
    ("fp8: dropping PPO's clip, without weights", "fp8: policy gradient", "fp8: bypass"),
    ("fp8: neither clip nor weights, against the same on exact", "fp8: policy gradient", "exact: policy gradient"),
    ("fp8: TIS, without a clip", "fp8: bypass + TIS", "fp8: policy gradient"),
    ("fp8: score centering, without a clip", "fp8: score centering", "fp8: policy gradient"),
    *(
        (f"{source}: {asked}", f"{source}: {a}", f"{source}: {b}")
        for source in ("fp8", "real fp8", "kv8", "kernels", "stale")
        for asked, a, b in (
            ("recomputing π_old, without weights", "recompute", "bypass"),
            ("TIS beside recomputation", "recompute + TIS", "recompute"),
            ("TIS in place of PPO's clip", "bypass + TIS", "bypass"),
            ("MIS beside recomputation", "MIS", "recompute"),
            ("score centering, against bypass", "score centering", "bypass"),
            ("score centering, against TIS, neither with a clip", "score centering", "bypass + TIS"),
        )
    ),
    ("staleness alone, against exact", "stale: exact", "exact: exact"),
    ("stale: exact kernels, against ordinary", "stale: exact", "stale: bypass"),
    *(
        (f"{source}: {asked}", f"{source}: {a}", b if b.startswith("mixture") else f"{source}: {b}")
        for source in ("mixture", "mixture of fp8")
        for asked, a, b in (
            ("uncorrected, against its exact", "bypass", "mixture: exact"),
            ("replaying the routing, with bypass", "bypass + replay", "bypass"),
            ("replaying the routing, with recomputation", "recompute + replay", "recompute"),
        )
    ),
)
LEARNING = {
    "exact": "exact: exact",
    "ordinary bf16 kernels, uncorrected": "kernels: bypass",
    "simulated fp8, uncorrected": "fp8: bypass",
    "real fp8 kernels, uncorrected": "real fp8: bypass",
    "simulated fp8, recompute + TIS": "fp8: recompute + TIS",
}


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


def p_value(values: Sequence[float]) -> float:
    """Of a two-sided t-test against 0. With x = √v · tan θ, Student's density is proportional to (cos θ)^(v - 1)."""
    v = len(values) - 1
    t = abs(statistics.fmean(values)) / (statistics.stdev(values) / math.sqrt(len(values)))

    def area(low: float, points: int = 2000) -> float:
        width = (math.pi / 2 - low) / points
        return width * sum(math.cos(low + (n + 0.5) * width) ** (v - 1) for n in range(points))

    return area(math.atan(t / math.sqrt(v))) / area(0.0)


def holm(values: Sequence[float]) -> list[float]:
    """p-values adjusted for their number by Holm's procedure."""
    order = sorted(range(len(values)), key=lambda n: values[n])
    adjusted, highest = [0.0] * len(values), 0.0
    for rank, n in enumerate(order):
        highest = max(highest, min(1.0, values[n] * (len(values) - rank)))
        adjusted[n] = highest
    return adjusted


def judge(differences: Sequence[float], adjusted: float) -> str:
    if len(differences) < CLAIM:
        return f"too few seeds ({len(differences)})"
    if abs(statistics.fmean(differences)) <= interval(differences):
        return "no difference shown"
    return "significant" if len(differences) >= SIGNIFICANT and adjusted < 0.05 else "difference"


def has_fallen(run: Mapping[str, Any]) -> bool:
    values = [sum(found) / len(found) for _, *found in run["held_out"]]
    return values[-1] < max(values) - FALL


def table_of_arms(found: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> list[str]:
    lines = [
        "| arm | seeds | held-out reward | fell | mean abs δ | k3 | effective share | lowest δ | nll | differing bits |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for arm, runs in found.items():
        curves = [run["curves"] for run in runs.values()]
        delta, k3, ess = (
            statistics.fmean([statistics.fmean(c[key]) for c in curves]) for key in ("delta", "k3", "ess")
        )
        nll = statistics.fmean([statistics.fmean(c["nll"][len(c["nll"]) // 2 :]) for c in curves])
        differing, compared = (sum(sum(c[key]) for c in curves) for key in ("differing", "compared"))
        lowest = min(min(c["lowest"]) for c in curves)
        cells = [
            arm, len(runs), show_mean([late(run) for run in runs.values()]), sum(map(has_fallen, runs.values())),
            f"{delta:.3f}" if delta else 0, f"{k3:.4f}" if k3 else 0, f"{ess:.2f}" if ess < 1 else 1,
            f"{lowest:.1f}" if lowest else 0, f"{nll:.2f}", f"{differing:,} of {compared:,}",
        ]  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    every = [run for runs in found.values() for run in runs.values()]
    if every:
        starts: dict[str, list[float]] = {}
        for run in every:
            of = " of the mixture" if run["arm"].startswith("mixture") else ""
            starts.setdefault(of, []).append(sum(run["held_out"][0][1:]) / len(run["kinds"]))
        shown = ", ".join(f"{statistics.fmean(values):.2f}{of}" for of, values in sorted(starts.items()))
        rates, steps = (", ".join(f"{n:g}" for n in sorted({run[key] for run in every})) for key in ("lr", "steps"))
        lines += ["", f"Held-out reward before training: {shown}. Steps: {steps}. Learning rate: {rates}."]
    return lines


def table_of_rates(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of the tuning runs, by source: the mean over methods and seeds, and how many arms are best at a rate."""
    rates, best = sorted({run["lr"] for run in runs}), choose_rates(runs)
    lines = [f"| source | arms | {' | '.join(f'{rate:g}' for rate in rates)} |", "|---" * (2 + len(rates)) + "|"]
    for source in dict.fromkeys(arm.partition(": ")[0] for arm in best):
        mine = [run for run in runs if run["arm"].startswith(f"{source}: ")]
        names = {run["arm"] for run in mine}
        cells = []
        for rate in rates:
            mean = statistics.fmean([late(run) for run in mine if run["lr"] == rate])
            wins = sum(best[arm] == rate for arm in names)
            cells.append(f"{mean:.2f}" + (f", best in {wins}" if wins else ""))
        lines.append(f"| {source} | {len(names)} | {' | '.join(cells)} |")
    steps = ", ".join(str(n) for n in sorted({run["steps"] for run in runs}))
    return [*lines, "", f"{len(runs)} tuning runs of {steps} steps, {len({run['seed'] for run in runs})} seeds."]


def table_of_contrasts(found: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> list[str]:
    compared: list[tuple[str, list[float]]] = []
    for asked, a, b in CONTRASTS:
        shared = sorted(set(found.get(a, ())) & set(found.get(b, ())))
        if len(shared) > 1:
            compared.append((asked, [late(found[a][seed]) - late(found[b][seed]) for seed in shared]))
    adjusted = holm([p_value(differences) for _, differences in compared])
    lines = [
        "| question | difference in held-out reward | seeds | p | p, Holm | verdict |",
        "|---|---|---|---|---|---|",
    ]
    for (asked, differences), corrected in zip(compared, adjusted, strict=True):
        shown = f"{statistics.fmean(differences):+.2f} ± {interval(differences):.2f}"
        ps = " | ".join(f"{p:.3f}" if p >= 0.0005 else "< 0.001" for p in (p_value(differences), corrected))
        lines.append(f"| {asked} | {shown} | {len(differences)} | {ps} | {judge(differences, corrected)} |")
    chance = 0.05 * len(compared)
    lines += [
        "",
        f"{len(compared)} comparisons: of as many 95% intervals without any effect, {chance:.1f} leave out 0 on average.",
    ]
    return lines


def draw_curves(
    path: Path, panels: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]], *, across: int = 2
) -> None:
    """Held-out reward by step: a line is the mean over seeds, its shade the 95% interval."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    across = min(across, len(panels))
    size = (4.8 * across, 3.6 * -(-len(panels) // across)) if len(panels) > 1 else (7.2, 3.8)
    drawn, axes = plt.subplots(-(-len(panels) // across), across, figsize=size, squeeze=False, sharey=True)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    for axis, (title, lines) in zip(axes.flat, panels.items(), strict=False):
        for label, runs in lines.items():
            columns = list(
                zip(*([(h[0], sum(h[1:]) / len(h[1:])) for h in run["held_out"]] for run in runs), strict=True)
            )
            steps = [column[0][0] for column in columns]
            values = [[value for _, value in column] for column in columns]
            means = [statistics.fmean(column) for column in values]
            (line,) = axis.plot(steps, means, linewidth=1.6, label=f"{label}, {len(runs)} seeds")
            if len(runs) > 1:
                low, high = ([m + sign * interval(v) for m, v in zip(means, values, strict=True)] for sign in (-1, 1))
                axis.fill_between(steps, low, high, alpha=0.12, color=line.get_color(), linewidth=0)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step")
        axis.set_ylim(0, 0.8)
        axis.grid(alpha=0.25)
        axis.legend(fontsize=7, loc="lower right")
    for row in axes:
        row[0].set_ylabel("held-out reward")
    save(drawn, path)


def panels_of(found: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> dict[str, dict[str, list[Mapping[str, Any]]]]:
    sources = list(dict.fromkeys(arm.partition(": ")[0] for arm in found if not arm.startswith("exact")))
    panels: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for source in sources:
        baseline = "mixture: exact" if source.startswith("mixture") else "exact: exact"
        names = [baseline, *(arm for arm in found if arm.startswith(f"{source}: ") and arm != baseline)]
        panels[source] = {
            ("exact, fresh weights" if name == baseline else name.partition(": ")[2]): list(found[name].values())
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
    rates = table_of_rates(read_runs(DATA / "tuning.jsonl"))
    tables = [*table_of_arms(found), "", *table_of_contrasts(found), "", *rates]
    print("\n".join(tables))
    if given.write:
        page = DOCS / "lab.md"
        page.write_text(write_page(page.read_text(), tables))
        draw_curves(DOCS / "figures" / "lab-grid.png", panels_of(found))
        lines = {label: list(found[arm].values()) for label, arm in LEARNING.items() if arm in found}
        draw_curves(
            DOCS / "figures" / "lab-learning.png", {"SmolLM2-135M learns arithmetic: mean and 95% interval": lines}
        )


if __name__ == "__main__":
    main()
