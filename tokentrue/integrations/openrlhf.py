"""OpenRLHF: an agent executor whose rollouts go through a gateway (`--train.agent_func_path`).

`agent(client, task)` gets `{"prompt": …, "label": …}`. One row per rollout: the sample that trains most tokens.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tokentrue.errors import ConfigError
from tokentrue.integrations.rollouts import (
    Agent,
    GatewayRollouts,
    group_name,
    largest,
    require_reward,
    scored_settings,
    tokens_left_out,
)
from tokentrue.json_types import JsonObject
from tokentrue.samples.trainer_rows import fill_logprobs
from tokentrue.types import Sample


def agent_executor(agent: Agent, *, url: str, admin_key: str | None = None, **settings: Any) -> type[Any]:
    """The class that OpenRLHF looks for. `settings` are those of `GatewayRollouts`."""
    base: Any = import_module("openrlhf.utils.agent").AgentExecutorBase

    rollouts = GatewayRollouts(url=url, agent=agent, admin_key=admin_key, **settings)

    class AgentExecutor(base):
        async def execute(
            self,
            prompt: Any,
            label: Any,
            sampling_params: Any,
            max_length: int,
            hf_tokenizer: Any,
            llm_engine: Any,
            images: Any = None,
        ) -> JsonObject:
            names = ("temperature", "top_p", "top_k")
            sampling = scored_settings({name: getattr(sampling_params, name, None) for name in names})
            samples = await rollouts.run_rollout(
                {"prompt": prompt, "label": label}, group=group_name(prompt), sampling=sampling
            )
            chosen = largest(samples)
            if len(chosen.token_ids) > max_length:
                raise ConfigError(
                    f"sample {chosen.sample_id} has {len(chosen.token_ids)} tokens, OpenRLHF cuts at {max_length}: "
                    "raise --data.max_len"
                )
            logs = {"tokens_left_out": tokens_left_out(samples, chosen)}
            return {
                "prompt": prompt,
                "label": label,
                "images": images,
                "extra_logs": logs,
                **columns_from_sample(chosen),
            }

    return AgentExecutor


def columns_from_sample(sample: Sample) -> JsonObject:
    reward = require_reward(sample)
    return {
        "reward": reward,
        "scores": reward,
        "observation_tokens": list(sample.token_ids),
        "action_ranges": _ranges(sample.loss_mask),
        "rollout_log_probs": fill_logprobs(sample.rollout_logprobs),
        "truncated": sample.finish_reason == "length",
    }


def _ranges(mask: Any) -> list[tuple[int, int]]:
    edges = [i for i in range(len(mask) + 1) if bool(i < len(mask) and mask[i]) != bool(i > 0 and mask[i - 1])]
    return list(zip(edges[::2], edges[1::2], strict=True))
