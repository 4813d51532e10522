"""OpenRLHF: --train.agent_func_path openrlhf_agent.py"""

import os

from agent import answer

from tokentrue.integrations.openrlhf import agent_executor


async def run_agent(client, task):
    return await answer(client, task["prompt"], task["label"])


AgentExecutor = agent_executor(run_agent, url=os.environ["TOKENTRUE_URL"])
