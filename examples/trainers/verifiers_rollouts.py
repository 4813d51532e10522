"""verifiers: rollouts of any installed taskset, as samples. Here its harness runs in a process of this machine."""

import os

from tokentrue.integrations.rollouts import GatewayRollouts
from tokentrue.integrations.verifiers import VerifiersEnvironment

LOCAL = {"agent": {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}, "max_turns": 2}}


def make_samples(taskset, groups=2, size=4):
    environment = VerifiersEnvironment(taskset=taskset, env=LOCAL)
    tasks = [task for task in environment.tasks(groups) for _ in range(size)]
    rollouts = GatewayRollouts(url=os.environ["TOKENTRUE_URL"], agent=environment.run, sampling={"max_tokens": 32})
    return rollouts.run(tasks, groups=[task.task_id for task in tasks])
