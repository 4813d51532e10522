"""A mixture of experts in bfloat16: what the trainer's log-probabilities differ by when its own router chooses, and
when it replays the engine's choice.

`--model DIR` with the mixture in DIR-moe (scripts/make_small_model.py --experts 8). Ordinary kernels on the trainer's
side; GRPO with PPO's ratio against the engine's log-probabilities.
"""

from __future__ import annotations

from typing import Any

from experiments.arms import Arm
from experiments.study import DELTAS, REWARDS, average, before, worst
from tokentrue.mismatch import Correction

CURVES = {
    "reward": "rollout reward",
    "mismatch/delta_abs_mean": "mean |δ|",
    "mismatch/k3": "k3",
    "update/grad_norm": "gradient norm",
}
COLUMNS = (
    ("held-out before", before),
    *REWARDS,
    *DELTAS,
    ("routing flips", average("routing_flips", ".1%")),
    ("gradient norm, largest", worst("update/grad_norm", ".2f")),
)


def arms(*, quick: bool) -> list[Arm]:
    """The quick version has the dense model stand in: a router that does not exist has nothing to replay."""
    made = [
        mixture("exact", scorer="exact"),
        mixture("bf16 kernels, own routing"),
        mixture("bf16 kernels, experts replayed", routing_replay="experts"),
        mixture("bf16 kernels, experts and weights replayed", routing_replay="weights"),
        mixture("int8 rollouts, own routing", source="int8"),
        mixture("int8 rollouts, experts replayed", source="int8", routing_replay="experts"),
    ]
    return [mixture(arm.name, variant="", scorer=arm.scorer) for arm in made[:2]] if quick else made


def mixture(name: str, **settings: Any) -> Arm:
    whole = {
        "variant": "moe",
        "dtype": "bfloat16",
        "scorer": "plain",
        "correction": Correction(denominator="rollout"),
        **settings,
    }
    return Arm(name=name, **whole)
