"""What the framework scripts share: the gateway's address, an agent with a calculator, and a look at the record."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tokentrue.client import Client
from tokentrue.environments import load_environment
from tokentrue.types import RoutedExperts, Sample

GATEWAY: dict[str, Any] = {"url": os.environ["TOKENTRUE_URL"], "admin_key": os.environ["TOKENTRUE_ADMIN_KEY"]}
MODEL = os.environ["TOKENTRUE_MODEL"]
VERSION = 7  # of the weights that the test published
ENVIRONMENT = load_environment("calculator", {})
TASKS = {task.prompt: task for task in ENVIRONMENT.tasks(4, seed=5)}


async def solve(client: Any, prompt: str) -> float:
    """An agent of several turns with tool calls; its reward is 1 or 0."""
    return await ENVIRONMENT.run(client, TASKS[prompt])


async def solve_twice(client: Any, prompt: str) -> float:
    """As above, then a second conversation: one rollout with two samples."""
    reward = await ENVIRONMENT.run(client, TASKS[prompt])
    await client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": "What is 2 + 2?"}], max_tokens=16
    )
    return reward


def record() -> dict[str, Sample]:
    """Everything that the gateway recorded, by sample id."""
    with Client(**GATEWAY) as client:
        known = [state["session_id"] for state in client.sessions(limit=1000)]
        return {sample.sample_id: sample for name in known for sample in client.session_samples(name).samples}


def routed(sample: Sample) -> Sample:
    """The sample with experts of two layers, two for each input, as the engine of a MoE model would report them."""
    inputs = len(sample.token_ids) - 1
    experts = array("h", (i % 7 + 1 for i in range(4 * inputs)))
    return replace(sample, routed_experts=RoutedExperts(shape=(inputs, 2, 2), data=experts.tobytes()))


def sampled(values: Sequence[Any], mask: Sequence[Any]) -> list[Any]:
    return [value for value, bit in zip(values, mask, strict=True) if bit]


def logprobs_of(sample: Sample) -> list[float]:
    return [value for value in sample.rollout_logprobs if value is not None]


def count_equal(rows: Sequence[Any], data: Mapping[str, Sequence[Any]]) -> int:
    """Of samples in the form of slime and Miles, and the training data made of them: how many rows equal the record."""
    known = record()
    equal = 0
    for place, row in enumerate(rows):
        sample = known[row.metadata["sample_id"]]
        numbers = sampled(data["rollout_log_probs"][place], data["loss_masks"][place])
        equal += (
            data["tokens"][place] == list(sample.token_ids)
            and numbers == logprobs_of(sample)
            and row.weight_versions == [str(VERSION)]
        )
    return equal


def tell(**result: Any) -> None:
    print("RESULT " + json.dumps(result))
