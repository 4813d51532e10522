"""GRPO with several updates per batch and a coarse rollout: which denominator, weight and rejection stays closest to
exact rollouts."""

from __future__ import annotations

from experiments.arms import Arm
from experiments.study import REWARDS, average, worst
from tokentrue.mismatch import Correction, Reject, Weights

CURVES = {"reward": "rollout reward", "mismatch/pull_negative": "mean C(r), A < 0", "update/grad_norm": "gradient norm"}
COLUMNS = (
    *REWARDS,
    ("mean abs δ", average("mismatch/delta_abs_mean", ".1e")),
    ("C(r), A > 0", average("mismatch/pull_positive", "+.1e")),
    ("C(r), A < 0", average("mismatch/pull_negative", "+.1e")),
    ("kept", average("update/kept", ".3f")),
    ("gradient norm, largest", worst("update/grad_norm", ".2f")),
)
SOURCE = "int3"
TAU_TOKEN, TAU_SEQUENCE = 2.0, 0.05


def arms(*, quick: bool, source: str = SOURCE) -> list[Arm]:
    corr = Reject(estimator="k3", aggregate="seq_mean", upper=TAU_SEQUENCE)
    ppo = Reject(estimator="k3", aggregate="seq_mean", upper=TAU_SEQUENCE, signal="ppo_rollout")
    weights = Weights(upper=TAU_TOKEN)

    def arm(name: str, correction: Correction, source: str = source) -> Arm:
        return Arm(name=name, source=source, loss="ppo", correction=correction, minibatches=4)

    made = [
        arm("exact", Correction(), "none"),
        arm("recompute", Correction()),
        arm("bypass", Correction(denominator="rollout")),
        arm("TIS", Correction(weights=weights)),
        arm("rejection by r_corr", Correction(denominator="rollout", reject=(corr,))),
        arm("rejection by r_ppo", Correction(denominator="rollout", reject=(ppo,))),
        arm("TIS + rejection by r_corr", Correction(weights=weights, reject=(corr,))),
    ]
    return [made[0], made[1], made[6]] if quick else made
