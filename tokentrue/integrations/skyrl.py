"""SkyRL: a generator whose rollouts go through a gateway (`BasePPOExp.get_generator`).

`agent(client, task)` gets `{"prompt": messages, "env_class": …, "extras": …}`. With `step_wise_trajectories` every
sample is a row; without it SkyRL wants one row per prompt, the sample that trains most tokens.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from tokentrue.errors import ConfigError
from tokentrue.integrations.rollouts import (
    Agent,
    GatewayRollouts,
    group_name,
    require_reward,
    scored_settings,
    take_largest,
)
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.samples.trainer_rows import split
from tokentrue.types import Sample


def generator(agent: Agent, *, url: str, step_wise: bool = False, **settings: Any) -> Any:
    """`settings` are those of `GatewayRollouts`."""
    base: Any = import_module("skyrl.train.generators.base").GeneratorInterface
    rollouts = GatewayRollouts(url=url, agent=agent, **settings)

    class GatewayGenerator(base):
        async def generate(self, input_batch: JsonMapping) -> JsonObject:
            trajectories = input_batch["trajectory_ids"]
            if trajectories is None:
                raise ConfigError("the batch has no trajectory_ids, so its prompts cannot be grouped")
            step = input_batch["batch_metadata"].global_step if input_batch.get("batch_metadata") else None
            extras = input_batch["env_extras"] or [None] * len(trajectories)
            rows = zip(input_batch["prompts"], input_batch["env_classes"], extras, strict=True)
            found = await rollouts.run_async(
                [{"prompt": prompt, "env_class": kind, "extras": extra} for prompt, kind, extra in rows],
                [group_name(step, identity.instance_id) for identity in trajectories],
                [identity.repetition_id for identity in trajectories],
                scored_settings(input_batch["sampling_params"]),
            )
            return output_of(found, trajectories, step_wise=step_wise)

    return GatewayGenerator()


def output_of(rollouts: Sequence[Sequence[Sample]], trajectories: Sequence[Any], *, step_wise: bool) -> JsonObject:
    """SkyRL's columns. The reward is at the last response token, as SkyRL does with scalar rewards."""
    largest = [take_largest(samples) for samples in rollouts]
    chosen = rollouts if step_wise else [[sample] for sample, _ in largest]
    rows = [
        (sample, identity, sample is samples[-1])
        for samples, identity in zip(chosen, trajectories, strict=True)
        for sample in samples
    ]
    parts = [split(sample) for sample, _, _ in rows]
    return {
        "prompt_token_ids": [prompt for prompt, _, _, _ in parts],
        "response_ids": [response for _, response, _, _ in parts],
        "rewards": [
            [0.0] * (len(response) - 1) + [require_reward(sample)]
            for (_, response, _, _), (sample, _, _) in zip(parts, rows, strict=True)
        ],
        "loss_masks": [mask for _, _, mask, _ in parts],
        "stop_reasons": [sample.finish_reason for sample, _, _ in rows],
        "rollout_metrics": {"tokens_left_out": 0 if step_wise else sum(left_out for _, left_out in largest)},
        "rollout_logprobs": [logprobs for _, _, _, logprobs in parts],
        "trajectory_ids": [identity for _, identity, _ in rows],
        "trajectory_generation_times": None,
        "rollout_expert_indices": None,
        "is_last_step": [is_last for _, _, is_last in rows] if step_wise else None,
        "env_metrics": None,
        "pixel_values": None,
        "image_grid_thw": None,
    }
