"""REINFORCE with batch-whitened advantages, no clipping and no correction: rollouts exact, and mismatched in the ways
of the field."""

from __future__ import annotations

from experiments.arms import Arm
from experiments.study import DELTAS, REWARDS, worst

CURVES = {"reward": "rollout reward", "mismatch/delta_abs_mean": "mean |δ|", "update/grad_norm": "gradient norm"}
COLUMNS = (
    *REWARDS,
    *DELTAS,
    ("gradient norm, largest", worst("update/grad_norm", ".2f")),
)


def arms(*, quick: bool) -> list[Arm]:
    def arm(name: str, source: str, scorer: str = "exact") -> Arm:
        return Arm(name=name, source=source, scorer=scorer, loss="reinforce", baseline="whitened")  # type: ignore[arg-type]

    made = [
        arm("exact", "none"),
        arm("other kernels", "none", "plain"),
        arm("bf16 weights", "bf16"),
        arm("fp8 weights", "fp8"),
        arm("int8 weights", "int8"),
        arm("int4 weights", "int4"),
        arm("int3 weights", "int3"),
    ]
    return [made[0], made[5]] if quick else made
