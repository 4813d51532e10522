"""OpenRLHF 0.11.2: our executor, and OpenRLHF's own conversion of a response into an `Experience`.

That conversion's module imports vllm, which is not there: modules with placeholders stand in for the imports, and
nothing of them runs.
"""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from transformers import AutoTokenizer  # looks for vllm while it is imported  # noqa: F401


class Placeholder(ModuleType):
    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace


for absent in ("vllm", "vllm.inputs", "vllm.utils"):
    sys.modules[absent] = Placeholder(absent)

from common import GATEWAY, TASKS, logprobs_of, record, sampled, solve_twice, tell  # noqa: E402
from openrlhf.trainer.ppo_utils import samples_generator  # noqa: E402

from tokentrue.integrations.openrlhf import agent_executor  # noqa: E402


async def agent(client: Any, task: Any) -> float:
    return await solve_twice(client, task["prompt"])


async def main() -> None:
    executor = agent_executor(agent, **GATEWAY)()
    settings = SimpleNamespace(temperature=1.0, top_p=1.0, top_k=-1, logprobs=1)
    found = await asyncio.gather(
        *(executor.execute(prompt, "", settings, 1024, None, None) for prompt in list(TASKS)[:2] for _ in range(2))
    )
    made = next(kind for kind in vars(samples_generator).values() if hasattr(kind, "_process_response_into_experience"))
    known = {tuple(sample.token_ids): sample for sample in record().values()}
    equal = 0
    for response in found:
        experience = made._process_response_into_experience(None, response, max_len=1024)
        sample = known[tuple(experience.sequences[0].tolist())]
        mask = experience.action_mask[0].tolist()
        numbers = sampled(experience.rollout_log_probs[0].tolist(), mask)
        equal += numbers == torch.tensor(logprobs_of(sample)).tolist() and float(experience.rewards[0]) == sample.reward
    tell(rows=len(found), equal=equal, left_out=[response["extra_logs"]["tokens_left_out"] for response in found])


if __name__ == "__main__":
    asyncio.run(main())
