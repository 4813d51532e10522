"""verl: name this class in a file for `actor_rollout_ref.rollout.agent.agent_loop_config_path`:

- name: gateway
  _target_: verl_loop.GatewayLoop
"""

import os

from agent import answer

from tokentrue.integrations.verl import agent_loop


async def run_agent(client, row):
    return await answer(client, row["raw_prompt"][-1]["content"], row["reward_model"]["ground_truth"])


GatewayLoop = agent_loop(run_agent, url=os.environ["TOKENTRUE_URL"])
