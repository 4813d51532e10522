"""Where mismatch might hurt more: longer horizons, a larger vocabulary, older policies, and a mixture of experts whose
routing flips."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.arms import Arm
from experiments.study import DELTAS, REWARDS, average, band, before, save, worst

CURVES = {"reward": "rollout reward", "mismatch/delta_abs_mean": "mean |δ|"}
COLUMNS = (
    ("before", before),
    *REWARDS,
    *DELTAS,
    ("routing flips", average("routing_flips", ".1%")),
    ("gradient norm, largest", worst("update/grad_norm", ".2f")),
)
SOURCES = (("exact", "none"), ("int8", "int8"), ("int4", "int4"))
LAG, LONG = 4, 5


def arms(*, quick: bool) -> list[Arm]:
    """Mixture, horizon and vocabulary want relatives of the model (DIR-moe, DIR-long, DIR-vocab); the quick version
    does without."""

    def arm(regime: str, name: str, source: str, **options: object) -> Arm:
        return Arm(name=f"{regime}: {name}", source=source, loss="reinforce", baseline="whitened", **options)  # type: ignore[arg-type]

    made: list[Arm] = []
    for name, source in SOURCES:
        made.append(arm("mixture", name, source, variant="moe"))
        made.append(arm("long", name, source, variant="" if quick else "long", horizon=LONG))
        made.append(arm(f"{LAG} steps old", name, source, lag=LAG))
        made.append(arm("vocabulary", name, source, variant="vocab"))
    made.sort(key=lambda each: each.name.split(":")[0])
    return [each for each in made if not each.variant and each.source != "int8"] if quick else made


def draw(path: Path, results: Sequence[dict[str, Any]]) -> None:
    """A column per regime: reward above, mean |δ| below; a line per source with the range over seeds."""
    import matplotlib.pyplot as plt

    regimes = list(dict.fromkeys(result["arm"].split(": ")[0] for result in results))
    drawn, axes = plt.subplots(2, len(regimes), figsize=(3.4 * len(regimes), 5.2), squeeze=False, sharex=True)
    for column, regime in enumerate(regimes):
        for row, (key, label) in enumerate(CURVES.items()):
            axis = axes[row][column]
            for color, (name, _) in zip(("C0", "C1", "C3"), SOURCES, strict=True):
                band(axis, [r for r in results if r["arm"] == f"{regime}: {name}"], key, label=name, color=color)
            if row == 0:
                axis.set_title(regime)
                axis.set_ylim(0, 1)
            else:
                axis.set_yscale("symlog", linthresh=1e-5)
                axis.set_xlabel("step")
            if column == 0:
                axis.set_ylabel(label)
    axes[0][0].legend(fontsize=7)
    save(drawn, path)
