"""slime's own rollout code: `generate_and_rm_group` with our generate function, then its conversion to training data.

`slime.ray.rollout` needs sglang, which is not there: its conversion is compiled from its source and run without the
rest of that module.
"""

from __future__ import annotations

import ast
import asyncio
import sys
from argparse import Namespace
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from common import GATEWAY, MODEL, TASKS, count_equal, record, routed, solve_twice, tell
from slime.observability.rollout_data_utils import validate_rollout_routed_experts_for_replay
from slime.rollout import sglang_rollout
from slime.utils.data import get_source
from slime.utils.types import Sample

from tokentrue.integrations.slime import _filled, generate_function, group_rewards
from tokentrue.samples.trainer_rows import slime_row


async def agent(client: Any, sample: Any) -> float:
    return await solve_twice(client, sample.prompt) + 0.01 * sample.index  # rewards of a group differ


generate = generate_function(agent, **GATEWAY, seed=2)

ARGS = Namespace(
    hf_checkpoint=MODEL, sglang_server_concurrency=8, rollout_num_gpus=1, rollout_num_gpus_per_engine=1, rollout_temperature=1.0,
    rollout_top_p=1.0, rollout_top_k=-1, rollout_max_response_len=256, rollout_stop=None, rollout_stop_token_ids=None,
    rollout_skip_special_tokens=False, sglang_dp_size=1, custom_generate_function_path="slime_run.generate", group_rm=False,
    partial_rollout=False, mask_offpolicy_in_partial_rollout=False, n_samples_per_prompt=4, rollout_batch_size=2, reward_key=None,
    advantage_estimator="grpo", rewards_normalization=True, grpo_std_normalization=True,
    rollout_external=False, custom_rm_path=None, rm_type=None,
)  # fmt: skip


def convert(samples: list[Any]) -> dict[str, Any]:
    """`RolloutManager._convert_samples_to_train_data`, with our post-processing of rewards."""
    from importlib.util import find_spec

    source = ast.parse((Path(find_spec("slime.ray").submodule_search_locations[0]) / "rollout.py").read_text())
    manager = next(node for node in source.body if isinstance(node, ast.ClassDef) and node.name == "RolloutManager")
    names = ("_convert_samples_to_train_data", "_post_process_rewards")
    found = [node for node in manager.body if getattr(node, "name", None) in names]
    space: dict[str, Any] = {"torch": torch, "Sample": Sample, "Any": Any, "get_source": get_source}
    exec(compile(ast.Module(body=found, type_ignores=[]), "rollout.py", "exec"), space)
    manager_like = SimpleNamespace(
        args=ARGS, custom_reward_post_process_func=group_rewards, custom_convert_samples_to_train_data_func=None
    )
    manager_like._post_process_rewards = lambda samples: space["_post_process_rewards"](manager_like, samples)
    return space["_convert_samples_to_train_data"](manager_like, samples)


def routing_arrives() -> bool:
    """The experts of recorded samples in slime's training data, which checks their shape for replay."""
    samples = [routed(sample) for sample in list(record().values())[:2]]
    filled = [
        _filled(Sample(group_index=0, index=i, prompt="p"), slime_row(sample)) for i, sample in enumerate(samples)
    ]
    found = convert(filled)["rollout_routed_experts"]
    replayed = Namespace(num_layers=2, moe_router_topk=2, moe_layer_freq=None)
    validate_rollout_routed_experts_for_replay(found, replayed)
    return all(
        experts.flatten().tolist() == list(array("h", sample.routed_experts.data))
        for experts, sample in zip(found, samples, strict=True)
    )


async def main() -> None:
    groups = []
    for place, prompt in enumerate(list(TASKS)[:2]):
        group = [Sample(group_index=place, index=4 * place + i, prompt=prompt) for i in range(4)]
        groups.append(
            await sglang_rollout.generate_and_rm_group(ARGS, group, {"temperature": 1.0, "top_p": 1.0, "top_k": -1})
        )
    rows = [sample for group in groups for rollout in group for sample in rollout]
    data = convert(rows)
    equal = count_equal(rows, data)
    by_rollout: dict[int, set[float]] = {}
    for rollout, reward in zip(data["rollout_ids"], data["rewards"], strict=True):
        by_rollout.setdefault(rollout, set()).add(reward)
    means = [sum(next(iter(by_rollout[4 * g + i])) for i in range(4)) for g in range(2)]
    sums = set(zip(data["rollout_ids"], data["rollout_mask_sums"], strict=True))
    one_reward = all(len(rewards) == 1 for rewards in by_rollout.values())
    is_per_rollout = len(sums) == len(by_rollout)
    tell(
        routing=routing_arrives(),
        rows=len(rows),
        equal=equal,
        rollouts=len(by_rollout),
        one_reward=one_reward,
        group_sums=means,
        mask_sums_are_of_rollouts=is_per_rollout,
    )


if __name__ == "__main__":
    sys.modules["slime_run"] = sys.modules["__main__"]
    asyncio.run(main())
