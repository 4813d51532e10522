"""TRL: a `rollout_func` for `GRPOTrainer` whose rows are the gateway's record; a whole run is examples/trl_grpo.py.

TRL takes one row per rollout: the sample that trains most tokens. `tokens_left_out` counts the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tokentrue.errors import ConfigError
from tokentrue.integrations.rollouts import Agent, GatewayRollouts, group_name, take_largest
from tokentrue.json_types import JsonMapping
from tokentrue.samples.trainer_rows import trl_row

COLUMNS = ("prompt_ids", "completion_ids", "env_mask", "logprobs", "reward")


def rollout_func(
    agent: Agent, *, url: str, sampling: JsonMapping | None = None, **settings: Any
) -> Callable[[Sequence[Any], Any], dict[str, list[Any]]]:
    """`rollout_func(prompts, trainer)` for TRL: each prompt is one task for `agent(client, prompt)`.

    `settings` are those of `GatewayRollouts`. The temperature is pinned to the trainer's, because TRL scores
    completions at `args.temperature`.
    """

    def run(prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        pinned = {"temperature": trainer.args.temperature, **(sampling or {})}
        rollouts = GatewayRollouts(url=url, agent=agent, sampling=pinned, **settings)
        groups = [f"step-{trainer.state.global_step}/{group_name(prompt)}" for prompt in prompts]
        # TRL deals the rollouts of one prompt to all processes, each with as many prompts as the others.
        found = rollouts.run(prompts, groups, first=trainer.accelerator.process_index * len(prompts))
        chosen = [take_largest(samples) for samples in found]
        rows = [trl_row(sample) for sample, _ in chosen]
        columns: dict[str, list[Any]] = {name: [row[name] for row in rows] for name in COLUMNS}
        return columns | {"tokens_left_out": [left_out for _, left_out in chosen]}

    return run


def reward_from_rollout(completions: Sequence[Any], reward: Sequence[float | None], **_: Any) -> list[float]:
    """A reward function that returns what each agent returned, or what was posted to its session."""
    missing = [index for index, value in enumerate(reward) if value is None]
    if missing:
        raise ConfigError(
            f"rollouts {missing} have no reward: return a number from the agent, or use reward functions of your own"
        )
    return [float(value) for value in reward if value is not None]


def correct_with_gateway_logprobs(trainer: Any, publish: Callable[[Any, int], None]) -> None:
    """Lets TRL's importance-sampling correction read the gateway's log-probabilities, and publishes before each
    generation.

    TRL corrects only where it believes that vLLM sampled; this sets the three attributes that it looks at.
    `publish(model, step)` returns when the engine has these weights.
    """
    if not trainer.vllm_importance_sampling_correction:
        raise ConfigError("GRPOConfig.vllm_importance_sampling_correction is off; switch it on, or do not call this")

    class Publisher:
        def sync_weights(self) -> None:
            publish(trainer.accelerator.unwrap_model(trainer.model), trainer.state.global_step)

    trainer.vllm_generation = Publisher()
    trainer._last_loaded_step = -1
    trainer.use_vllm = True
