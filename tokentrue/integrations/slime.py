"""slime and Miles: a generate function whose rollouts go through a gateway (`--custom-generate-function-path`).

All samples of a rollout are returned with one `rollout_id`. Where rollouts have several, `group_rewards`
(`--custom-reward-post-process-path`) is needed: slime itself then takes the whole batch for one group.
"""

import copy
from collections.abc import Awaitable, Callable, Sequence
from statistics import fmean, stdev
from typing import Any

import numpy as np

from tokentrue.errors import ConfigError
from tokentrue.integrations.rollouts import Agent, GatewayRollouts, group_name, scored_settings
from tokentrue.json_types import JsonMapping
from tokentrue.samples.groups import group_sessions
from tokentrue.samples.trainer_rows import slime_row

FIELDS = ("tokens", "response_length", "loss_mask", "rollout_log_probs", "weight_versions")


def generate_function(agent: Agent, *, url: str, **settings: Any) -> Callable[..., Awaitable[list[Any]]]:
    """`generate(args, sample, sampling_params, evaluation=False)`. `settings` are those of `GatewayRollouts`."""
    rollouts = GatewayRollouts(url=url, agent=agent, **settings)

    async def generate(args: Any, sample: Any, sampling_params: JsonMapping, evaluation: bool = False) -> list[Any]:
        sampling = scored_settings(sampling_params)
        if not evaluation and sampling.keys() & {"top_p", "top_k"}:
            raise ConfigError(
                "top_p and top_k change what the trainer must score; set --rollout-top-p 1 and --rollout-top-k -1"
            )
        group = group_name(sample.group_index, sample.prompt)
        found = await rollouts.run_rollout(sample, group=group, index=sample.index or 0, sampling=sampling)
        return [_filled(sample, slime_row(each)) for each in found]

    return generate


def _filled(sample: Any, recorded: JsonMapping) -> Any:
    made = copy.copy(sample)
    for name in FIELDS:
        setattr(made, name, recorded[name])
    if "rollout_routed_experts" in recorded:
        made.rollout_routed_experts = np.array(recorded["rollout_routed_experts"], np.int16)
    made.status = sample.Status(recorded["status"])
    made.metadata = {**(sample.metadata or {}), **recorded["metadata"], "session_id": recorded["session_id"]}
    made.rollout_id = sample.index if sample.rollout_id is None else sample.rollout_id
    if recorded["reward"] is not None:
        made.reward = recorded["reward"]
    return made


def group_rewards(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """Raw rewards, and rewards centred in their prompt's group, where each rollout counts once."""
    raw = [float(sample.get_reward_value(args)) for sample in samples]
    sessions = group_sessions(
        (str(sample.group_index), str(sample.rollout_id), reward) for sample, reward in zip(samples, raw, strict=True)
    )

    def centre(rewards: list[float]) -> list[float]:
        scale = stdev(rewards) + 1e-6 if args.grpo_std_normalization and len(rewards) > 1 else 1.0
        return [(reward - fmean(rewards)) / scale for reward in rewards]

    return raw, sessions.advantages(centre)
