"""verifiers (0.4): its environments, and the rewards of a `vf-eval` run that sampled through a gateway."""

import copy
import itertools
import json
import os
import random
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from uuid import uuid4

from tokentrue.client import Client
from tokentrue.environments.base import Split, Task, choose_split, digest
from tokentrue.errors import AgentError, ConfigError
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.plain_json import read_numbered_lines

MODEL = "policy"  # the gateway serves its one model under any name


class VerifiersEnvironment:
    """`taskset` is the id of an installed taskset; `env` is verifiers' `[env]` table. A seat runs in this machine's
    processes only if `env.agent.runtime.type = "subprocess"`."""

    name = "verifiers"

    def __init__(self, *, taskset: str | None = None, env: JsonMapping | None = None) -> None:
        try:
            loaders = import_module("verifiers.v1.utils.loaders")
        except ModuleNotFoundError as error:
            raise ConfigError("verifiers: pip install verifiers==0.4.0") from error
        settings: JsonObject = copy.deepcopy(dict(env or {}))
        if taskset is not None:
            settings["taskset"] = {**settings.get("taskset", {}), "id": taskset}
        if not settings.get("taskset", {}).get("id"):
            raise ConfigError("verifiers: name a taskset: rollout.options.taskset=ID")
        self._env: Any = loaders.load_environment(loaders.resolve_env_config(settings))

    def tasks(self, count: int, *, seed: int = 0, split: Split = "train") -> Sequence[Task]:
        """verifiers' tasks have no split: their content decides."""
        taskset = self._env.taskset
        own = (task for task in taskset if choose_split(task.key) == split)
        if not taskset.bounded:
            return [as_task(task) for task in itertools.islice(own, count)]
        chosen = list(own) or list(taskset)
        if count < len(chosen):
            chosen = random.Random(f"{self.name}/{split}/{seed}").sample(chosen, count)
        return [as_task(task) for task in chosen]

    async def run(self, client: Any, task: Task) -> float:
        """The mean reward of the episode's traces."""
        vf, env = import_module("verifiers.v1"), copy.copy(self._env)
        with key_variable(client.api_key) as variable:
            endpoint = vf.EvalClientConfig(base_url=str(client.base_url).rstrip("/"), api_key_var=variable)
            async with env.serving():
                episode = await env.run_episode(task.data["task"], vf.ModelContext(model=MODEL, client=endpoint))
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            why = f"{errors[-1].type}: {errors[-1].message}" if errors else "the episode did not complete"
            raise AgentError(f"verifiers: {why}")
        return sum(trace.reward for trace in episode.traces) / len(episode.traces)


@contextmanager
def key_variable(api_key: str) -> Generator[str]:
    """verifiers reads keys from variables, and hides those with API_KEY in their name from agents."""
    name = f"TOKENTRUE_API_KEY_{uuid4().hex}"
    os.environ[name] = api_key
    try:
        yield name
    finally:
        del os.environ[name]


def as_task(task: Any) -> Task:
    prompt = task.data.prompt
    text = prompt if isinstance(prompt, str) else json.dumps(task.data.model_dump(mode="json").get("prompt"))
    return Task(task_id=f"verifiers/{digest(task.key)[:16]}", prompt=text, data={"task": task})


def record_rewards(run: str | Path, *, url: str, admin_key: str | None = None) -> dict[str, float]:
    """Gives the sessions of a `vf-eval` run (`output_dir/run.dir`) their rewards and ends them; returns them by session
    id. A session's group is its task. Traces that did not complete get no reward."""
    rewards: dict[str, float] = {}
    with Client(url, admin_key) as client:
        for _, line in read_numbered_lines(Path(run) / "traces.jsonl"):
            for trace in json.loads(line)["traces"]:
                if trace.get("ok"):
                    given = [reward for reward in trace["rewards"].values() if reward is not None]
                    rewards[trace["id"]] = sum(reward["score"] * reward["weight"] for reward in given)
                    client.reward_session(trace["id"], rewards[trace["id"]], group=trace["task"]["key"])
                client.end_session(trace["id"])
    return rewards
