"""AReaL 1.0.4: our workflow, AReaL's own check of a trajectory and its own padding of several into a batch."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from areal.infra.workflow_executor import check_trajectory_format
from areal.utils.data import concat_padded_tensors
from common import GATEWAY, TASKS, VERSION, logprobs_of, record, sampled, solve_twice, tell

from tokentrue.integrations.areal import workflow


async def agent(client: Any, data: Any) -> float:
    return await solve_twice(client, data["prompt"])


async def main() -> None:
    flow = workflow(agent, **GATEWAY, temperature=1.0)
    found = await asyncio.gather(
        *(flow.arun_episode(None, {"prompt": prompt}) for prompt in list(TASKS)[:2] for _ in range(2))
    )
    for trajectory in found:
        check_trajectory_format(trajectory)
    batch = concat_padded_tensors(found)
    known = {tuple(sample.token_ids): sample for sample in record().values()}
    equal = 0
    for row in range(len(batch["input_ids"])):
        sample = known[tuple(batch["input_ids"][row][batch["attention_mask"][row].bool()].tolist())]
        mask = batch["loss_mask"][row].tolist()
        numbers = sampled(batch["logprobs"][row].tolist(), mask)
        versions = set(sampled(batch["versions"][row].tolist(), mask))
        equal += numbers == torch.tensor(logprobs_of(sample)).tolist() and versions == {VERSION}
    tell(rows=len(batch["input_ids"]), equal=equal)


if __name__ == "__main__":
    asyncio.run(main())
