"""SkyRL 0.3.0: our generator, SkyRL's own check of its output and its own batch tensors, with one and with all rows of
a rollout."""

from __future__ import annotations

import asyncio
import typing
from typing import Any

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # type: ignore[misc,assignment]  # SkyRL 0.3.0 needs it on Python 3.11

from common import GATEWAY, MODEL, TASKS, logprobs_of, record, sampled, solve_twice, tell  # noqa: E402
from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors  # noqa: E402
from skyrl.train.generators.base import TrajectoryID  # noqa: E402
from skyrl.train.utils.trainer_utils import validate_generator_output  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from tokentrue.integrations.skyrl import generator  # noqa: E402


async def agent(client: Any, task: Any) -> float:
    return await solve_twice(client, task["prompt"][0]["content"])


async def main() -> None:
    prompts = [prompt for prompt in list(TASKS)[:2] for _ in range(4)]
    batch: Any = {
        "prompts": [[{"role": "user", "content": prompt}] for prompt in prompts], "env_classes": ["calculator"] * 8, "env_extras": None,
        "sampling_params": {"temperature": 1.0}, "batch_metadata": None,
        "trajectory_ids": [TrajectoryID(prompt, place % 4) for place, prompt in enumerate(prompts)],
    }  # fmt: skip
    one = await generator(agent, **GATEWAY, seed=1).generate(batch)
    validate_generator_output(8, one)
    every = await generator(agent, **GATEWAY, seed=2, step_wise=True).generate(batch)
    validate_generator_output(8, every, step_wise=True)
    known = {tuple(sample.token_ids): sample for sample in record().values()}
    names = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "rollout_logprobs")
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    equal = 0
    for told in (one, every):
        tensors = convert_prompts_responses_to_batch_tensors(tokenizer, *(told[name] for name in names))
        ids, attention, _, rewards, masks, logprobs = tensors[:6]
        for row in range(len(ids)):
            sample = known[tuple(ids[row][attention[row].bool()].tolist())]
            expected = [float(x) for x in __import__("torch").tensor(logprobs_of(sample))]
            equal += (
                sampled(logprobs[row].tolist(), masks[row].tolist()) == expected
                and float(rewards[row].sum()) == sample.reward
            )
    tell(rows=len(one["response_ids"]) + len(every["response_ids"]), equal=equal, left_out=one["rollout_metrics"]["tokens_left_out"],
         last=sum(every["is_last_step"]))  # fmt: skip


if __name__ == "__main__":
    asyncio.run(main())
