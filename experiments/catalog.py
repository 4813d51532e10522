"""The experiments by name, with their claims. No torch: `python -m experiments list` prints this table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """`module` has `arms(quick)`, `COLUMNS` and `CURVES`; `claim` is what its table supports or refutes."""

    module: str
    claim: str
    command: str


EXPERIMENTS: Mapping[str, Experiment] = {
    "retokenize": Experiment(
        module="experiments.retokenize",
        claim=(
            "Training on re-tokenised or re-rendered conversations puts the gradient on tokens that nobody sampled, with log-"
            "probabilities far below anything in the rollout; they dominate the gradient, and the policy degrades. Token-in, token-"
            "out does not have them."
        ),
        command="python -m experiments run retokenize",
    ),
    "tim-reinforce": Experiment(
        module="experiments.tim_reinforce",
        claim=(
            "With plain REINFORCE, rollouts whose probabilities differ from the trainer's bias the gradient. Small sources (other "
            "kernels, bf16, int8) leave the reward alone on a small model; coarse ones (int4, int3) do not."
        ),
        command="python -m experiments run tim-reinforce",
    ),
    "tim-grpo": Experiment(
        module="experiments.tim_grpo",
        claim=(
            "Of the ways to live with a mismatched rollout, truncated importance weights with sequence rejection on r_corr track "
            "exact rollouts best; recomputation alone hides the mismatch, and bypass mixes it into the clipped ratio."
        ),
        command="python -m experiments run tim-grpo",
    ),
    "thresholds": Experiment(
        module="experiments.thresholds",
        claim=(
            "τ_tok and τ_seq can be read off the exact reference: the right threshold is the one whose corrected gradient has the "
            "largest cosine with the gradient of exact rollouts, not one taken from another model's paper."
        ),
        command="python -m experiments run thresholds",
    ),
    "regimes": Experiment(
        module="experiments.regimes",
        claim=(
            "The same source of mismatch does more harm where errors add up (longer horizons, older policies), where there are more"
            " tokens to err on (a larger vocabulary), or where a small error changes a choice (a mixture of experts)."
        ),
        command="python -m experiments run regimes --model DIR",
    ),
    "pretrained": Experiment(
        module="experiments.pretrained",
        claim=(
            "From the literature: bf16 kernels that differ between trainer and engine destabilise training, float16 shrinks the "
            "difference by an order, equal bits hold, corrections recover; under top-p the kept ids must be replayed."
        ),
        command="python -m experiments run pretrained --model DIR --tasks FILE --lr 2e-5 --steps 100 --groups 4",
    ),
    "routing-replay": Experiment(
        module="experiments.routing_replay",
        claim=(
            "A mixture of experts whose trainer lets its own router choose has a mismatch with heavier tails than one that replays the "
            "experts of the rollout."
        ),
        command="python -m experiments run routing-replay --model DIR --steps 100",
    ),
}
