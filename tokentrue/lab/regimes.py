"""Where mismatch might bite harder: longer horizons, a larger vocabulary, older policies, and a mixture of experts whose routing flips."""

from __future__ import annotations

from tokentrue.lab.arms import Arm
from tokentrue.lab.study import after, average, before, late, worst

CLAIM = (
    "The same source of mismatch does more harm where errors add up (longer horizons, older policies) or where a small error changes a "
    "choice (a mixture of experts). Exact rollouts do not care."
)
COMMAND = "tokentrue lab run regimes --model DIR"
CURVES = {"reward": "rollout reward", "mismatch/delta_abs_mean": "mean |δ|", "update/grad_norm": "gradient norm"}
COLUMNS = (
    ("before", before),
    ("held-out reward", after),
    ("rollout reward, last quarter", late("reward")),
    ("mean abs δ", average("mismatch/delta_abs_mean", ".1e")),
    ("lowest δ", worst("mismatch/delta_min", ".2g", low=True)),
    ("k3", average("mismatch/k3", ".1e")),
    ("routing flips", average("routing_flips", ".1%")),
    ("gradient norm, largest", worst("update/grad_norm", ".2f")),
)
SOURCES = (("exact", "none"), ("int8", "int8"), ("int4", "int4"))
LAG, LONG = 4, 5


def arms(*, quick: bool) -> list[Arm]:
    """Mixture, horizon and vocabulary want relatives of the model (DIR-moe, DIR-long, DIR-vocab); the quick version does without."""

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
