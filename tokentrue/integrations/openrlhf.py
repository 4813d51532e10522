"""OpenRLHF: an agent executor whose rollouts go through a gateway (`--train.agent_func_path`).

`agent(client, task)` gets `{"prompt": …, "label": …}`. One row per rollout: the sample that trains most tokens.
"""

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
from tokentrue.json_types import JsonObject
from tokentrue.samples.trainer_rows import fill_logprobs, find_ranges


def agent_executor(agent: Agent, *, url: str, **settings: Any) -> type[Any]:
    """The class that OpenRLHF looks for. `settings` are those of `GatewayRollouts`."""
    base: Any = import_module("openrlhf.utils.agent").AgentExecutorBase
    rollouts = GatewayRollouts(url=url, agent=agent, **settings)

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
            task: JsonObject = {"prompt": prompt, "label": label}
            samples = await rollouts.run_rollout(task, group=group_name(prompt), sampling=sampling)
            sample, left_out = take_largest(samples)
            if len(sample.token_ids) > max_length:
                raise ConfigError(
                    f"sample {sample.sample_id} has {len(sample.token_ids)} tokens, OpenRLHF cuts at {max_length}: "
                    "raise --data.max_len"
                )
            reward = require_reward(sample)
            return {
                **task,
                "images": images,
                "extra_logs": {"tokens_left_out": left_out},
                "reward": reward,
                "scores": reward,
                "observation_tokens": list(sample.token_ids),
                "action_ranges": find_ranges(sample.loss_mask),
                "rollout_log_probs": fill_logprobs(sample.rollout_logprobs),
                "truncated": sample.finish_reason == "length",
            }

    return AgentExecutor
