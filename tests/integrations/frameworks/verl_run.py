"""verl 0.9.1, its own code from the agent loop to a gradient: AgentLoopWorker, DataProto, rollout correction, GRPO
advantages, policy loss.

The forward pass is plain transformers on a CPU; verl's FSDP workers are not run.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import GATEWAY, MODEL, TASKS, VERSION, logprobs_of, record, routed, sampled, solve, solve_twice, tell
from hydra import compose, initialize_config_module
from transformers import AutoModelForCausalLM
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, get_policy_loss_fn
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.utils.torch_functional import logprobs_from_logits
from verl.workers.config import FSDPActorConfig

from tokentrue.integrations.verl import agent_loop, output_of

GROUP = 4


async def agent(client: Any, row: Any) -> float:
    reward = await solve(client, row["raw_prompt"][0]["content"])
    return reward + 0.01 * next(PLACES)  # no two rollouts of a group have the same reward, so that there is a gradient


async def agent_of_two(client: Any, row: Any) -> float:
    return await solve_twice(client, row["raw_prompt"][0]["content"])


Loop = agent_loop(agent, **GATEWAY)
LoopOfTwo = agent_loop(agent_of_two, **GATEWAY)
PLACES = itertools.count()


def configure(folder: Path) -> Any:
    loops = folder / "loops.yaml"
    loops.write_text("- name: one\n  _target_: verl_run.Loop\n- name: two\n  _target_: verl_run.LoopOfTwo\n")
    rollout = "actor_rollout_ref.rollout"
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(
            "ppo_trainer",
            overrides=[
                f"actor_rollout_ref.model.path={MODEL}", f"{rollout}.name=vllm", f"{rollout}.prompt_length=512",
                f"{rollout}.response_length=512",
                f"{rollout}.calculate_log_probs=true", f"{rollout}.agent.agent_loop_config_path={loops}",
                f"{rollout}.agent.default_agent_loop=one", f"{rollout}.temperature=1.0",
            ],
        )  # fmt: skip


def batch_of(names: list[str]) -> DataProto:
    prompts = [prompt for prompt in list(TASKS)[:2] for _ in range(GROUP)]
    columns = {
        "raw_prompt": np.array([[{"role": "user", "content": prompt}] for prompt in prompts] + [None], dtype=object)[
            :-1
        ],
        "uid": np.array([f"prompt-{list(TASKS).index(prompt)}" for prompt in prompts], dtype=object),
        "index": np.arange(len(prompts)),
        "agent_name": np.array(names * len(prompts), dtype=object),
    }
    return DataProto.from_dict(non_tensors=columns, meta_info={"global_steps": 1})


def equal_rows(batch: DataProto) -> int:
    known = record()
    equal = 0
    for i in range(len(batch)):
        sample = known[batch.non_tensor_batch["sample_id"][i]]
        ids = batch.batch["input_ids"][i][batch.batch["attention_mask"][i].bool()].tolist()
        mask = batch.batch["response_mask"][i].tolist()
        numbers = sampled(batch.batch["rollout_log_probs"][i].tolist(), mask)
        expected = torch.tensor(logprobs_of(sample), dtype=torch.float32).tolist()
        versions = {int(batch.non_tensor_batch[f"{end}_global_steps"][i]) for end in ("min", "max")}
        is_record = ids == list(sample.token_ids) and numbers == expected and versions == {VERSION}
        equal += is_record and sum(mask) == sum(sample.loss_mask)
    return equal


def trained_besides(batch: DataProto) -> list[int]:
    """Trained tokens that the record has of each rollout outside its row."""
    known = record()
    chosen = [known[name] for name in batch.non_tensor_batch["sample_id"]]
    return [
        sum(sum(s.loss_mask) for s in known.values() if s.session_id == row.session_id) - sum(row.loss_mask)
        for row in chosen
    ]


async def routing_arrives(worker: AgentLoopWorker) -> bool:
    """The experts of a recorded sample, given two layers of them, in the rows of both of verl's trainers."""
    sample = routed(next(iter(record().values())))
    expected = torch.frombuffer(bytearray(sample.routed_experts.data), dtype=torch.int16).view(-1, 2, 2)
    newer = output_of(sample).as_dict()["routed_experts"]
    older = await worker._agent_loop_postprocess(output_of(sample), False, raw_prompt=[{"role": "user", "content": ""}])
    start = older.prompt_ids.shape[1] - len(output_of(sample).prompt_ids)
    return all(
        torch.equal(found[: len(expected)], expected) and not found[len(expected) :].any()
        for found in (newer, older.routed_experts[0, start:])
    )


def update(batch: DataProto) -> dict[str, Any]:
    """verl's advantages, correction and loss on one forward pass, and an optimiser step."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data, width = batch.batch, batch.batch["responses"].shape[1]
    logits = model(data["input_ids"], attention_mask=data["attention_mask"], position_ids=data["position_ids"]).logits
    logprobs = logprobs_from_logits(logits[:, -width - 1 : -1], data["responses"])
    mask, old = data["response_mask"].float(), logprobs.detach()
    weights, _, _ = compute_rollout_correction_and_rejection_mask(
        old, data["rollout_log_probs"], mask, rollout_is="token", rollout_is_threshold=2.0
    )
    advantages, _ = compute_grpo_outcome_advantage(data["rm_scores"], mask, batch.non_tensor_batch["uid"])
    config = FSDPActorConfig(
        strategy="fsdp", rollout_n=GROUP, ppo_micro_batch_size_per_gpu=len(batch), use_dynamic_bsz=False
    )
    config.global_batch_info.update(
        {"dp_size": 1, "batch_num_tokens": int(mask.sum()), "global_batch_size": len(batch), "loss_scale_factor": 1}
    )
    loss, _ = get_policy_loss_fn("vanilla")(
        old_log_prob=old, log_prob=logprobs, advantages=advantages, response_mask=mask, loss_agg_mode="token-mean", config=config,
        rollout_is_weights=None if weights is None else weights.batch["rollout_is_weights"],
    )  # fmt: skip
    loss.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    optimizer.step()
    worst = float(((old - data["rollout_log_probs"]) * mask).abs().max())
    columns = {
        "weights": weights.batch["rollout_is_weights"],
        "old": old,
        "rollout": data["rollout_log_probs"],
        "mask": mask,
    }
    return {"norm": norm, "worst": worst} | {name: column.tolist() for name, column in columns.items()}


async def main(folder: Path) -> None:
    worker = AgentLoopWorker(configure(folder), llm_client=None)
    batch = await worker.generate_sequences(batch_of(["one"]))
    both = await worker.generate_sequences(batch_of(["two"]))
    left_out = [int(value) for value in both.non_tensor_batch["tokens_left_out"]]
    told = update(batch)
    (folder / "verl.json").write_text(
        json.dumps({name: told.pop(name) for name in ("weights", "old", "rollout", "mask")})
    )
    tell(
        rows=len(batch),
        equal=equal_rows(batch),
        rewards=batch.batch["rm_scores"].sum(-1).tolist(),
        left_out=left_out,
        besides=trained_besides(both),
        routing=await routing_arrives(worker),
        **told,
    )


if __name__ == "__main__":
    sys.modules["verl_run"] = sys.modules["__main__"]
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    asyncio.run(main(Path(sys.argv[1])))
