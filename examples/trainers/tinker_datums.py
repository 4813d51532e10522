"""Tinker: two groups of four rollouts as `Datum`s, for `forward_backward(data, "importance_sampling")`."""

import os

from agent import answer

from tokentrue.integrations.rollouts import GatewayRollouts
from tokentrue.integrations.tinker import datums

QUESTIONS = {"What is 12 + 7?": "19", "What is 30 - 4?": "26"}


async def run_agent(client, question):
    return await answer(client, question, QUESTIONS[question])


def make_datums():
    tasks = [question for question in QUESTIONS for _ in range(4)]
    rollouts = GatewayRollouts(url=os.environ["TOKENTRUE_URL"], agent=run_agent)
    return datums([sample for samples in rollouts.run(tasks, groups=tasks) for sample in samples])
