"""prime-rl: two groups of four rollouts as its own `TrainingSample`s."""

import os

from agent import answer

from tokentrue.integrations.prime_rl import training_samples
from tokentrue.integrations.rollouts import GatewayRollouts

QUESTIONS = {"What is 12 + 7?": "19", "What is 30 - 4?": "26"}


async def run_agent(client, question):
    return await answer(client, question, QUESTIONS[question])


def make_samples():
    tasks = [question for question in QUESTIONS for _ in range(4)]
    rollouts = GatewayRollouts(url=os.environ["TOKENTRUE_URL"], agent=run_agent)
    return training_samples([sample for samples in rollouts.run(tasks, groups=tasks) for sample in samples])
