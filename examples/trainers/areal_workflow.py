"""AReaL: pass this to `PPOTrainer.train(workflow=…)`."""

import os

from agent import answer

from tokentrue.integrations.areal import workflow


async def run_agent(client, data):
    return await answer(client, data["question"], data["answer"])


def make_workflow():
    return workflow(run_agent, url=os.environ["TOKENTRUE_URL"], temperature=1.0)
