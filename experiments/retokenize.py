"""The same agent, trained on what it sampled and on what a round trip through text makes of it."""

from __future__ import annotations

from experiments.arms import Arm
from experiments.study import after, average, late, worst

CURVES = {
    "reward": "rollout reward",
    "mismatch/log_ppl_trainer": "-log p per trained token",
    "update/grad_norm": "gradient norm",
}
COLUMNS = (
    ("held-out reward", after),
    ("rollout reward, last quarter", late("reward")),
    ("-log p of trained tokens", average("mismatch/log_ppl_trainer", ".3f")),
    ("gradient norm, largest", worst("update/grad_norm", ".2f")),
)


def arms(*, quick: bool) -> list[Arm]:
    made = [
        Arm(name="token-in, token-out"),
        Arm(name="text encoded again", rewriting="reencode"),
        Arm(name="messages rendered again", rewriting="rerender"),
        Arm(name="messages of a JavaScript harness", rewriting="stringify"),
    ]
    return [made[0], made[3]] if quick else made
