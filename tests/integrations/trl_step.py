"""One whole step of TRL's GRPOTrainer and of ours, from the same weights and rows; prints how far their parameters are
apart afterwards.

Nothing of TRL is replaced but the source of its rows: padding, log-probabilities, advantages, importance weights, loss,
clipping of the gradient and AdamW are its own. A process of its own, because TRL warns about much.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from tests.integrations.step_rows import GROUPS, OPTIM, PROMPT, SIZE, distance, our_step, policy, rows
from tokentrue.environments import SMALL_MODEL
from tokentrue.integrations.trl import correct_with_gateway_logprobs, reward_from_rollout
from tokentrue.mismatch import Correction, LossConfig, Penalty
from tokentrue.types import Sample

LENGTH = 64
CASES: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"loss_type": "grpo"}, {"aggregate": "seq_mean_token_mean"}),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, {"clip_high": 0.28}),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {"aggregate": "fixed_length", "fixed_length": LENGTH}),
    "penalty": ({"loss_type": "dapo", "beta": 0.05}, {"penalty": Penalty(coefficient=0.05, estimator="unbiased", tokens="valid")}),
    "token_truncate": (
        {"loss_type": "dapo", "vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.2}, {}
    ),
}  # fmt: skip


def their_step(
    groups: list[list[Sample]], options: Mapping[str, Any], *, updates: int, out: str, micro: int
) -> dict[str, torch.Tensor]:
    settings: dict[str, Any] = {"beta": 0.0, "loss_type": "dapo", **options}
    config = GRPOConfig(
        output_dir=out, max_steps=updates, num_generations=SIZE, num_iterations=updates, scale_rewards="none", temperature=1.0,
        per_device_train_batch_size=GROUPS * SIZE // micro, gradient_accumulation_steps=micro, steps_per_generation=micro,
        learning_rate=OPTIM.lr, adam_beta1=OPTIM.betas[0], adam_beta2=OPTIM.betas[1], adam_epsilon=OPTIM.eps, weight_decay=0.0,
        max_grad_norm=OPTIM.clip_norm, lr_scheduler_type="constant", optim="adamw_torch", report_to="none", save_strategy="no",
        use_cpu=True, bf16=False, max_completion_length=LENGTH, seed=1, disable_tqdm=True, shuffle_dataset=False,
        logging_steps=1, **settings,
    )  # fmt: skip
    samples = [sample for group in groups for sample in group]

    def play(prompts: Any, trainer: Any) -> dict[str, list[Any]]:
        assert list(prompts) == [str(index // SIZE) for index in range(len(samples))]
        ids = [list(sample.token_ids) for sample in samples]
        logprobs = [[0.0 if x is None else x for x in sample.rollout_logprobs] for sample in samples]
        return {
            "prompt_ids": [row[:PROMPT] for row in ids],
            "completion_ids": [row[PROMPT:] for row in ids],
            "env_mask": [list(sample.loss_mask)[PROMPT:] for sample in samples],
            "logprobs": [row[PROMPT:] for row in logprobs],
            "reward": [sample.reward for sample in samples],
        }

    trainer = GRPOTrainer(
        model=policy(),
        processing_class=AutoTokenizer.from_pretrained(SMALL_MODEL),
        reward_funcs=reward_from_rollout,
        train_dataset=Dataset.from_list([{"prompt": str(group)} for group in range(GROUPS)]),
        args=config,
        rollout_func=play,
    )
    correct_with_gateway_logprobs(trainer, lambda model, step: None)
    trainer.train()
    assert trainer.state.global_step == updates
    return {
        name: value.detach().clone()
        for name, value in trainer.accelerator.unwrap_model(trainer.model).named_parameters()
    }


def main(out: str, *chosen: str) -> None:
    """`chosen` names cases; all of them if left out."""
    torch.set_num_threads(1)
    groups = rows()
    start = {name: value.detach() for name, value in policy().named_parameters()}
    told: dict[str, Any] = {}
    for name, (theirs, mine) in CASES.items():
        if chosen and name not in chosen:
            continue
        modes = {key: value for key, value in theirs.items() if key.startswith("vllm_")}
        loss = LossConfig(correction=Correction.from_trl(modes), **mine)
        for updates, micro in ((1, 1), (2, 2)):
            found = their_step(groups, theirs, updates=updates, out=out, micro=micro)
            own = our_step(loss, updates=updates, groups=groups)
            told[f"{name} {updates}"] = {"apart": distance(own, found), "moved": distance(start, found)}
    if chosen:
        print("RESULT " + json.dumps(told))
        return
    without = our_step(LossConfig(clip_high=0.28), updates=1, groups=groups)
    told["other"] = distance(without, their_step(groups, CASES["dapo"][0], updates=1, out=out, micro=1))
    print("RESULT " + json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
