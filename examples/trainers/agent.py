"""What the trainers' examples share: an agent, which is any program that takes an OpenAI client and returns a reward;
and two groups of four rollouts, for trainers that take samples instead of asking for rollouts."""

import os

from tokentrue.integrations.rollouts import GatewayRollouts

QUESTIONS = {"What is 12 + 7?": "19", "What is 30 - 4?": "26"}


async def answer(client, question: str, expected: str) -> float:
    reply = await client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": question}], max_tokens=64
    )
    return float(expected in (reply.choices[0].message.content or ""))


async def answer_own(client, question: str) -> float:
    return await answer(client, question, QUESTIONS[question])


def run_groups():
    """The samples of all rollouts."""
    tasks = [question for question in QUESTIONS for _ in range(4)]
    rollouts = GatewayRollouts(url=os.environ["TOKENTRUE_URL"], agent=answer_own).run(tasks, groups=tasks)
    return [sample for samples in rollouts for sample in samples]
