"""verl 0.9.1 with `agent_loop_manager_class`: found by verl's own loader, created by its own calls, its workers in real
Ray actors. The older trainer's DataProto, and what the v1 trainer reads from the TransferQueue."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue as tq
from common import GATEWAY, TASKS, VERSION, logprobs_of, record, sampled, solve, solve_twice, tell
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl import DataProto
from verl.utils.import_utils import load_class_from_fqn
from verl_run import MODEL, equal_rows

from tokentrue.integrations.verl import agent_loop_manager

PROMPTS = list(TASKS)[:2]
GROUP = 2


async def one(client: Any, row: Any) -> float:
    return await solve(client, row["raw_prompt"][0]["content"])


async def two(client: Any, row: Any) -> float:
    return await solve_twice(client, row["raw_prompt"][0]["content"])


Manager = agent_loop_manager(one, **GATEWAY)
ManagerOfTwo = agent_loop_manager(two, **GATEWAY)


def configure(name: str, *, v1: bool) -> Any:
    rollout = "actor_rollout_ref.rollout"
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer",
            overrides=[
                f"actor_rollout_ref.model.path={MODEL}", f"{rollout}.name=vllm", f"{rollout}.prompt_length=512",
                f"{rollout}.response_length=512", f"{rollout}.calculate_log_probs=true", f"{rollout}.n={GROUP}",
                f"+{rollout}.agent.agent_loop_manager_class=verl_manager_run.{name}", f"{rollout}.agent.num_workers=2",
            ],
        )  # fmt: skip
    config.transfer_queue.enable = v1
    config.transfer_queue.backend.SimpleStorage.num_data_storage_units = 1
    OmegaConf.resolve(config)
    return config


def create(config: Any) -> Any:
    """As `RayPPOTrainer` and `TaskRunnerV1` do."""
    name = config.actor_rollout_ref.rollout.agent.agent_loop_manager_class
    clients = {"llm_client": None, "teacher_client": None, "reward_loop_worker_handles": None}
    return load_class_from_fqn(name, "AgentLoopManager").create(config=config, **clients)


def older() -> tuple[int, int]:
    rows = [prompt for prompt in PROMPTS for _ in range(GROUP)]
    columns = {
        "raw_prompt": np.array([[{"role": "user", "content": row}] for row in rows] + [None], dtype=object)[:-1],
        "uid": np.array([f"prompt-{PROMPTS.index(row)}" for row in rows], dtype=object),
        "index": np.arange(len(rows)),
        "agent_name": np.array(["single_turn_agent"] * len(rows), dtype=object),  # the dataset's choice does not count
    }
    batch = DataProto.from_dict(non_tensors=columns, meta_info={"global_steps": 1})
    made = create(configure("Manager", v1=False)).generate_sequences(batch)
    return len(made), equal_rows(made)


def newer() -> tuple[int, int]:
    config = configure("ManagerOfTwo", v1=True)
    tq.init(config.transfer_queue)
    manager = create(config)
    batch = TensorDict(
        {
            "raw_prompt": NonTensorStack(*[NonTensorData([{"role": "user", "content": row}]) for row in PROMPTS]),
            "uid": NonTensorStack(*[NonTensorData(f"uid{place}") for place in range(len(PROMPTS))]),
            "index": torch.arange(len(PROMPTS)),
            "global_steps": NonTensorData(1),
        },
        batch_size=[len(PROMPTS)],
    )
    manager.generate_sequences(batch)
    deadline = time.monotonic() + 300
    while True:
        listed = tq.kv_list(partition_id="train")["train"]
        ended = [listed.get(f"uid{place}", {}).get("status") for place in range(len(PROMPTS))]
        if all(status in ("finished", "failure") for status in ended) or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    assert ended == ["finished"] * len(PROMPTS), ended
    keys = [key for key, tag in listed.items() if tag["status"] == "success"]
    fields = ["input_ids", "response_mask", "rollout_log_probs", "extra_fields"]
    known, equal = record(), 0
    for key in keys:
        row = tq.kv_batch_get(keys=[key], partition_id="train", select_fields=fields)
        extra = row["extra_fields"]
        extra = extra[0] if isinstance(extra, list) else extra.tolist()[0]
        sample = known[extra["sample_id"]]
        mask = row["response_mask"][0].tolist()
        numbers = sampled(row["rollout_log_probs"][0].tolist(), mask)
        expected = torch.tensor(logprobs_of(sample), dtype=torch.float32).tolist()
        versions = {extra[f"{end}_global_steps"] for end in ("min", "max")}
        equal += (
            row["input_ids"][0].tolist() == list(sample.token_ids) and numbers == expected and versions == {VERSION}
        )
    tq.close()
    return len(keys), equal


if __name__ == "__main__":
    sys.modules["verl_manager_run"] = sys.modules["__main__"]
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    Path(sys.argv[1]).mkdir(exist_ok=True)
    ray.init(num_cpus=16, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}})
    rows, same = older()
    rows_v1, same_v1 = newer()
    ray.shutdown()
    tell(rows=rows, equal=same, rows_v1=rows_v1, equal_v1=same_v1)
