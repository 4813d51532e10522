"""SkyRL: return this from `BasePPOExp.get_generator`. `reward_spec` is the column of the dataset with the expected
answer."""

import os

from agent import answer

from tokentrue.integrations.skyrl import generator


async def run_agent(client, task):
    return await answer(client, task["prompt"][-1]["content"], task["extras"]["reward_spec"]["ground_truth"])


def make_generator(step_wise: bool = False):
    return generator(run_agent, url=os.environ["TOKENTRUE_URL"], step_wise=step_wise)
