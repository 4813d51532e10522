"""AReaL: a rollout workflow whose episodes go through a gateway.

    trainer.train(workflow=workflow(my_agent, url="http://gateway:8000", admin_key=KEY,
    temperature=gconfig.temperature), …)

`agent(client, data)` gets the dataset's row. Every sample of an episode is a row of the returned batch, each value at
its token's own index, padded on the right.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from tokentrue.integrations.rollouts import Agent, GatewayRollouts, group_name, reward_of, scored_settings
from tokentrue.samples.trainer_rows import fill_logprobs, token_versions
from tokentrue.types import Sample


def workflow(
    agent: Agent, *, url: str, admin_key: str | None = None, temperature: float | None = None, **settings: Any
) -> Any:
    """`settings` are those of `GatewayRollouts`."""
    base: Any = import_module("areal.api").RolloutWorkflow

    rollouts = GatewayRollouts(url=url, agent=agent, admin_key=admin_key, **settings)

    class GatewayWorkflow(base):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any]:
            samples = await rollouts.run_rollout(
                data, group=group_name(data), sampling=scored_settings({"temperature": temperature})
            )
            return tensors_of(samples)

    return GatewayWorkflow()


def tensors_of(samples: Sequence[Sample]) -> dict[str, Any]:
    """`[rows, longest]` tensors; `versions` is -1 where nothing was sampled, as AReaL has it."""
    torch: Any = import_module("torch")  # AReaL has it; importing this module does not load it
    longest = max(len(sample.token_ids) for sample in samples)

    def padded(rows: Sequence[Sequence[float]], dtype: Any, value: float = 0) -> Any:
        return torch.tensor([[*row, *([value] * (longest - len(row)))] for row in rows], dtype=dtype)

    return {
        "input_ids": padded([list(sample.token_ids) for sample in samples], torch.int32),
        "logprobs": padded([fill_logprobs(sample.rollout_logprobs) for sample in samples], torch.float32),
        "loss_mask": padded([list(sample.loss_mask) for sample in samples], torch.int32),
        "versions": padded([token_versions(sample) for sample in samples], torch.int32, -1),
        "attention_mask": padded([[1] * len(sample.token_ids) for sample in samples], torch.bool),
        "rewards": torch.tensor([reward_of(sample) for sample in samples], dtype=torch.float32),
    }
