"""AReaL: a rollout workflow whose episodes go through a gateway; every sample of an episode is a row."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from tokentrue.integrations.rollouts import Agent, GatewayRollouts, group_name, require_reward, scored_settings
from tokentrue.json_types import JsonObject
from tokentrue.samples.trainer_rows import fill_logprobs, token_versions
from tokentrue.types import Sample


def workflow(agent: Agent, *, url: str, temperature: float | None = None, **settings: Any) -> Any:
    """`settings` are those of `GatewayRollouts`."""
    base: Any = import_module("areal.api").RolloutWorkflow
    rollouts = GatewayRollouts(url=url, agent=agent, **settings)

    class GatewayWorkflow(base):
        async def arun_episode(self, engine: Any, data: JsonObject) -> JsonObject:
            sampling = scored_settings({"temperature": temperature})
            return tensors_of(await rollouts.run_rollout(data, group=group_name(data), sampling=sampling))

    return GatewayWorkflow()


def tensors_of(samples: Sequence[Sample]) -> JsonObject:
    """`[rows, longest]` tensors; `versions` is -1 where nothing was sampled, as AReaL has it."""
    torch: Any = import_module("torch")  # AReaL has it; importing this module does not load it
    longest = max(len(sample.token_ids) for sample in samples)

    def padded(rows: Sequence[Sequence[float]], dtype: Any, value: float = 0) -> Any:
        return torch.tensor([[*row, *([value] * (longest - len(row)))] for row in rows], dtype=dtype)

    return {
        "input_ids": padded([sample.token_ids for sample in samples], torch.int32),
        "logprobs": padded([fill_logprobs(sample.rollout_logprobs) for sample in samples], torch.float32),
        "loss_mask": padded([sample.loss_mask for sample in samples], torch.int32),
        "versions": padded([token_versions(sample) for sample in samples], torch.int32, -1),
        "attention_mask": padded([[1] * len(sample.token_ids) for sample in samples], torch.bool),
        "rewards": torch.tensor([require_reward(sample) for sample in samples], dtype=torch.float32),
    }
