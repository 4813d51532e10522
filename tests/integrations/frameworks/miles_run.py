"""Miles: our generate function fills Miles' own `Sample`s, and Miles' own conversion makes training data of them."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from typing import Any

from common import GATEWAY, TASKS, count_equal, solve_twice, tell
from miles.ray.rollout.train_data_conversion import convert_samples_to_train_data
from miles.utils.types import Sample

from tokentrue.integrations.slime import generate_function, group_rewards

ARGS = Namespace(reward_key=None, advantage_estimator="grpo", rewards_normalization=True, grpo_std_normalization=True,
                 n_samples_per_prompt=4, rollout_batch_size=2, use_dynamic_global_batch_size=False)  # fmt: skip


async def agent(client: Any, sample: Any) -> float:
    return await solve_twice(client, sample.prompt) + 0.01 * sample.index  # rewards of a group differ


async def main() -> None:
    generate = generate_function(agent, **GATEWAY, seed=2)
    asked = [Sample(group_index=g, index=4 * g + i, prompt=p) for g, p in enumerate(list(TASKS)[:2]) for i in range(4)]
    found = await asyncio.gather(*(generate(ARGS, sample, {"temperature": 1.0}) for sample in asked))
    rows = [sample for samples in found for sample in samples]
    plain = convert_samples_to_train_data(ARGS, rows, {"prompt_group_sizes": [8, 8]}, None, None)
    data = convert_samples_to_train_data(ARGS, rows, {}, None, group_rewards)
    equal = count_equal(rows, data)
    tell(
        rows=len(rows),
        equal=equal,
        rollouts=len(set(data["rollout_ids"])),
        rewards=data["rewards"],
        own_rewards=plain["rewards"],
    )


if __name__ == "__main__":
    asyncio.run(main())
