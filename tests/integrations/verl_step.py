"""One whole step of verl 0.9.1 and of our trainer, from the same weights and rows; prints how far their parameters are
apart afterwards.

verl's own: RayPPOTrainer's calls, the actor's worker with its FSDP2 engine, log-probabilities, advantages, rollout
correction, loss, clipping of the gradient, AdamW. Ours: a platform for the CPU, which verl lets plugins register, and
calls to the workers in this process instead of through Ray. It runs in verl's environment, with the same torch for
both.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from verl.models.transformers import monkey_patch
from verl.plugin.platform import set_platform
from verl.plugin.platform.platform_cuda import PlatformCUDA

from tests.integrations.step_rows import GROUPS, OPTIM, PROMPT, SIZE, distance, our_step, policy, rows
from tests.train.rows import small_model
from tokentrue.environments import SMALL_MODEL
from tokentrue.mismatch import Correction, LossConfig, Penalty
from tokentrue.types import Sample

# verl 0.9.1 looks for TRL's model with a value head, which TRL 1.16 has no more; there is no critic here.
monkey_patch.is_trl_available = lambda: False  # type: ignore[assignment]
LENGTH = 64
TOKEN_IS = {"rollout_is": "token", "rollout_is_threshold": 1.2}


class PlatformCpu(PlatformCUDA):
    """verl on a machine without accelerator."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = SimpleNamespace(  # what its workers ask of torch.cuda
        is_available=lambda: False,
        max_memory_allocated=lambda: 0,
        max_memory_reserved=lambda: 0,
        memory_allocated=lambda: 0,
        memory_reserved=lambda: 0,
        mem_get_info=lambda: (0, 0),
        empty_cache=lambda: None,
        synchronize=lambda: None,
        get_device_name=lambda: "CPU",
        current_device=lambda: "cpu",
    )

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def communication_backend_name(self) -> str:
        return "gloo"


# Name: (verl's settings, our loss, our trainer's settings).
Case = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
CASES: Mapping[str, Case] = {
    "grpo": ({"actor.loss_agg_mode": "seq-mean-token-mean"}, {"aggregate": "seq_mean_token_mean"}, {}),
    "dapo": ({"actor.clip_ratio_high": 0.28}, {"clip_high": 0.28}, {}),
    "dr_grpo": (
        {
            "norm_adv_by_std_in_grpo": False,
            "actor.loss_agg_mode": "seq-mean-token-sum-norm",
            "actor.loss_scale_factor": LENGTH,
        },
        {"aggregate": "fixed_length", "fixed_length": LENGTH},
        {"baseline": "dr_grpo"},
    ),
    "penalty": (
        {"actor.use_kl_loss": True, "actor.kl_loss_coef": 0.05, "actor.kl_loss_type": "low_var_kl"},
        {"penalty": Penalty(coefficient=0.05, estimator="k3", tokens="valid", ceiling=10.0)},
        {},
    ),
    "entropy": ({"actor.entropy_coeff": 0.01}, {"entropy_coefficient": 0.01}, {}),
    "token_is": ({"rollout_correction": TOKEN_IS}, {"correction": Correction.from_verl(TOKEN_IS)}, {}),
}


def configure(models: Path, options: Mapping[str, Any], *, updates: int, micro: int) -> Any:
    from hydra import compose, initialize_config_module

    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    betas = f"[{OPTIM.betas[0]},{OPTIM.betas[1]}]"
    precision = "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"
    settings: dict[str, Any] = {
        "actor_rollout_ref.model.path": models / "policy",
        "actor_rollout_ref.model.use_remove_padding": False,
        "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        f"{rollout}.name": "vllm",
        f"{rollout}.n": SIZE,
        f"{rollout}.temperature": 1.0,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": 4,
        f"{actor}.strategy": "fsdp2",
        f"{actor}.ppo_mini_batch_size": GROUPS,
        f"{actor}.ppo_epochs": updates,
        f"{actor}.ppo_micro_batch_size_per_gpu": GROUPS * SIZE // micro,
        f"{actor}.use_torch_compile": False,
        f"{actor}.fsdp_config.use_torch_compile": False,
        f"+{actor}.fsdp_config.mixed_precision": precision,
        f"{actor}.optim.lr": OPTIM.lr,
        f"{actor}.optim.betas": betas,
        f"{actor}.optim.weight_decay": 0.0,
        f"{actor}.optim.clip_grad": OPTIM.clip_norm,
        f"{actor}.optim.override_optimizer_config": f"{{eps:{OPTIM.eps}}}",
        f"{actor}.optim.total_training_steps": updates,
        **{f"actor_rollout_ref.{key}": value for key, value in options.items() if key.startswith("actor.")},
    }
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=[f"{key}={value}" for key, value in settings.items()])


def batch_of(groups: list[list[Sample]]) -> Any:
    """verl's padded form: prompts to the left, responses to the right."""
    from verl import DataProto

    samples = [sample for group in groups for sample in group]
    count = len(samples)
    ids, mask, attended, logprobs = (
        torch.zeros(count, PROMPT + LENGTH, dtype=t) for t in (torch.int64,) * 3 + (torch.float32,)
    )
    scores = torch.zeros(count, LENGTH)
    for row, sample in enumerate(samples):
        length = len(sample.token_ids)
        ids[row, :length] = torch.tensor(list(sample.token_ids))
        mask[row, :length] = torch.tensor(list(sample.loss_mask))
        attended[row, :length] = 1
        logprobs[row, :length] = torch.tensor([0.0 if value is None else value for value in sample.rollout_logprobs])
        scores[row, length - PROMPT - 1] = sample.reward or 0.0
    tensors = {
        "prompts": ids[:, :PROMPT],
        "responses": ids[:, PROMPT:],
        "input_ids": ids,
        "attention_mask": attended,
        "position_ids": (attended.cumsum(1) - 1).clamp(min=0),
        "response_mask": mask[:, PROMPT:],
        "rollout_log_probs": logprobs[:, PROMPT:],
        "token_level_scores": scores,
        "token_level_rewards": scores.clone(),
    }
    names = [sample.group for sample in samples]
    meta = {"temperature": 1.0, "global_token_num": attended.sum(1).tolist()}
    return DataProto.from_dict(tensors=tensors, non_tensors={"uid": np.array(names, dtype=object)}, meta_info=meta)


class LocalGroup:
    """Calls one worker in this process where verl calls a group of them through Ray.

    verl's worker for references keeps its weights in pinned memory, which needs an accelerator: an actor that is not
    updated scores them.
    """

    def __init__(self, worker: Any) -> None:
        self.compute_log_prob, self.update_actor = worker.compute_log_prob, worker.update_actor
        self.compute_ref_log_prob = worker.compute_log_prob


def worker_of(config: Any, path: Path) -> Any:
    from omegaconf import OmegaConf
    from verl.workers.engine_workers import ActorRolloutRefWorker

    own = OmegaConf.create(OmegaConf.to_container(config.actor_rollout_ref, resolve=True))
    own.model.path = str(path)
    worker = ActorRolloutRefWorker(own, role="actor")
    worker.init_model()
    return worker


def their_step(
    groups: list[list[Sample]], options: Mapping[str, Any], models: Path, *, updates: int, micro: int
) -> dict[str, torch.Tensor]:
    """The part of RayPPOTrainer.fit between rollouts and the end of the step."""
    from omegaconf import OmegaConf
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer, compute_advantage
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

    config = configure(models, options, updates=updates, micro=micro)
    actor = worker_of(config, models / "policy")
    driver = SimpleNamespace(
        config=config, actor_rollout_wg=LocalGroup(actor), ref_in_actor=False, use_prefix_grouper=False
    )
    batch = batch_of(groups)
    old, _ = RayPPOTrainer._compute_old_log_prob(driver, batch)
    old.batch.pop("entropys")
    batch = batch.union(old)
    if options.get("actor.use_kl_loss"):
        driver.ref_policy_wg = LocalGroup(worker_of(config, models / "reference"))
        batch = batch.union(RayPPOTrainer._compute_ref_log_prob(driver, batch))
    if "rollout_correction" in options:
        batch, _ = compute_rollout_correction_and_add_to_batch(batch, OmegaConf.create(options["rollout_correction"]))
    batch = compute_advantage(
        batch,
        adv_estimator=options.get("adv_estimator", "grpo"),
        gamma=1.0,
        lam=1.0,
        num_repeat=SIZE,
        norm_adv_by_std_in_grpo=options.get("norm_adv_by_std_in_grpo", True),
        config=config.algorithm,
    )
    RayPPOTrainer._update_actor(driver, batch)
    weights, _ = actor.actor.engine.get_per_tensor_param()
    return {name: value.detach().clone() for name, value in weights}


def main(out: str, *chosen: str) -> None:
    """`chosen` names cases; all of them if left out."""
    torch.set_num_threads(1)
    os.environ |= {
        "VERL_ENGINE_DEVICE": "cuda",
        "WORLD_SIZE": "1",
        "RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    set_platform(PlatformCpu())
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    groups = rows()
    start = {name: value.detach() for name, value in policy().named_parameters()}
    told: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=out) as folder:
        models = Path(folder)
        write_models(models)
        for name, (theirs, mine, settings) in CASES.items():
            for updates, micro in ((1, 1), (2, 2)) if not chosen or name in chosen else ():
                found = their_step(groups, theirs, models, updates=updates, micro=micro)
                own = our_step(
                    LossConfig(dual_clip=3.0, **mine),
                    updates=updates,
                    groups=groups,
                    **{"baseline": "grpo", **settings},
                )
                told[f"{name} {updates}"] = {"apart": distance(own, found), "moved": distance(start, found)}
        if not chosen:
            without = our_step(LossConfig(dual_clip=3.0), updates=1, groups=groups, baseline="grpo")
            told["other"] = distance(without, their_step(groups, CASES["token_is"][0], models, updates=1, micro=1))
    torch.distributed.destroy_process_group()
    print("RESULT " + json.dumps(told))


def write_models(folder: Path) -> None:
    from transformers import AutoTokenizer

    for name, model in (("policy", policy()), ("reference", small_model())):
        model.save_pretrained(folder / name)
        AutoTokenizer.from_pretrained(SMALL_MODEL).save_pretrained(folder / name)


if __name__ == "__main__":
    main(*sys.argv[1:])
