"""A pretrained model on tasks with one right answer: the mismatch of the field (16-bit trainer, ordinary kernels) and
what changes it.

`--model` is an instruct model's directory, `--tasks` a file for `experiments.questions`. Rollouts come from the
exact engine in the arm's dtype; "kernels" means that the trainer scores with the model's own forward pass in that
dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.arms import Arm
from experiments.study import DELTAS, REWARDS, average, band, before, late, save, worst
from tokentrue.mismatch import Correction, Weights

CURVES = {
    "reward": "rollout reward",
    "mismatch/delta_abs_mean": "mean |δ|",
    "update/grad_norm": "gradient norm",
    "mismatch/log_ppl_trainer": "-log p of sampled tokens",
}
COLUMNS = (
    ("held-out before", before),
    *REWARDS,
    *DELTAS,
    ("mean ratio", average("mismatch/ratio_mean", ".4f")),
    ("-log p, last quarter", late("mismatch/log_ppl_trainer")),
    ("gradient norm, largest", worst("update/grad_norm", ".1f")),
)
BYPASS = Correction(
    denominator="rollout"
)  # PPO's ratio against what the engine reported, as trainers do that skip the recomputation
TIS = Correction(weights=Weights(upper=2.0))


def arms(*, quick: bool) -> list[Arm]:
    made = [
        *family("GRPO", correction=BYPASS),
        *family("REINFORCE", loss="reinforce", baseline="whitened"),
        plain("GRPO, top-p 0.8, kept ids replayed", top_p=0.8, correction=BYPASS),
        plain("GRPO, top-p 0.8, kept ids dropped", top_p=0.8, correction=BYPASS, forget_masks=True),
        plain("GRPO, int8 rollouts, TIS", source="int8", correction=TIS),
        plain("GRPO, fp8 rollouts, TIS", source="fp8", correction=TIS),
        adapted("GRPO, adapter unmerged", adapter="unmerged"),
        adapted("GRPO, adapter merged", adapter="merged"),
    ]
    return [made[0], made[1], made[11]] if quick else made


def family(name: str, **loss: Any) -> list[Arm]:
    """One loss with every source of mismatch."""
    return [
        Arm(name=f"{name}, exact bf16", dtype="bfloat16", **loss),
        plain(f"{name}, bf16 kernels", **loss),
        plain(f"{name}, fp16 kernels", dtype="float16", **loss),
        plain(f"{name}, int8 rollouts", source="int8", **loss),
        plain(f"{name}, fp8 rollouts", source="fp8", **loss),
    ]


def plain(name: str, **settings: Any) -> Arm:
    return Arm(name=name, **{"dtype": "bfloat16", "scorer": "plain", **settings})


def adapted(name: str, **settings: Any) -> Arm:
    """Exact operators on both sides, so that nothing but the merging differs; adapters want a larger rate than whole
    weights."""
    return Arm(name=name, dtype="bfloat16", correction=BYPASS, lr_factor=10.0, **settings)


SOURCES = ("exact bf16", "bf16 kernels", "fp16 kernels", "int8 rollouts", "fp8 rollouts")
PANELS = {  # title -> loss and the rest of the arms' names
    "GRPO": ("GRPO", SOURCES),
    "REINFORCE": ("REINFORCE", SOURCES),
    "GRPO, corrections": (
        "GRPO",
        ("exact bf16", "int8 rollouts", "int8 rollouts, TIS", "fp8 rollouts", "fp8 rollouts, TIS"),
    ),
    "GRPO, top-p and adapters": (
        "GRPO",
        ("top-p 0.8, kept ids replayed", "top-p 0.8, kept ids dropped", "adapter unmerged", "adapter merged"),
    ),
}
SMOOTH = 10


def draw(path: Path, results: Sequence[dict[str, Any]]) -> None:
    """A column per comparison; a line per arm, its mean over seeds and over the last ten steps, with the range over
    seeds shaded."""
    import matplotlib.pyplot as plt

    known = {result["arm"] for result in results}
    panels = {
        title: kept
        for title, (loss, rest) in PANELS.items()
        if (kept := [f"{loss}, {n}" for n in rest if f"{loss}, {n}" in known])
    }
    shown = {key: label for key, label in CURVES.items() if key != "update/grad_norm"}
    drawn, axes = plt.subplots(
        len(shown), max(1, len(panels)), figsize=(4.2 * max(1, len(panels)), 7.2), squeeze=False, sharex=True
    )
    for column, (title, names) in enumerate(panels.items()):
        for axis, (key, label) in zip(axes[:, column], shown.items(), strict=True):
            for name in names:
                band(
                    axis,
                    [smooth(result, key) for result in results if result["arm"] == name],
                    key,
                    label=name.partition(", ")[2],
                )
            axis.set_ylabel(label)
            if "delta" in key:
                axis.set_yscale("symlog", linthresh=1e-3)
        axes[0][column].set_title(title)
        axes[0][column].legend(fontsize=7)
        axes[-1][column].set_xlabel("step")
    save(drawn, path)


def smooth(result: dict[str, Any], key: str) -> dict[str, Any]:
    """The run with each value of one curve replaced by the mean of the last ten."""
    values = [row.get(key, float("nan")) for row in result["rows"]]
    return {
        "rows": [
            {key: sum(part) / len(part)} for i in range(len(values)) if (part := values[max(0, i - SMOOTH + 1) : i + 1])
        ]
    }
