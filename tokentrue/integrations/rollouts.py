"""Runs an agent on tasks through a gateway, one session per rollout: what the adapters share."""

import asyncio
import hashlib
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

from tokentrue.client import AsyncClient
from tokentrue.errors import ConfigError, GatewayError
from tokentrue.images import open_image
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.pixels import processor_identity
from tokentrue.records import record
from tokentrue.samples.groups import group_of, group_sessions
from tokentrue.samples.trainer_rows import refuse_images
from tokentrue.types import Sample

Agent = Callable[[Any, Any], Awaitable[float | None] | float | None]
"""`agent(client, task)`: any program that takes an `openai.AsyncOpenAI` and a task. A number that it returns is the
reward."""


@record
class GatewayRollouts:
    """Where and how rollouts run. With a `seed`, each rollout gets one made of it, its group and its place."""

    url: str
    agent: Agent
    admin_key: str | None = None
    sampling: JsonMapping = field(default_factory=JsonObject)
    seed: int | None = None
    concurrency: int = 16
    timeout_s: float = 600.0

    def run(
        self, tasks: Sequence[Any], groups: Sequence[str], *, first: int = 0, files: dict[str, bytes] | None = None
    ) -> list[list[Sample]]:
        """Each task's samples. `first` is the place of the first task among those of all processes."""
        return asyncio.run(self.run_async(tasks, groups, range(first, first + len(tasks)), files=files))

    async def run_rollout(
        self,
        task: Any,
        *,
        group: str,
        index: int | None = None,
        sampling: JsonMapping | None = None,
        files: dict[str, bytes] | None = None,
    ) -> list[Sample]:
        """`index` is the rollout's place in the group."""
        (samples,) = await self.run_async([task], [group], [index], sampling, files)
        return samples

    async def run_async(
        self,
        tasks: Sequence[Any],
        groups: Sequence[str],
        places: Sequence[int | None],
        sampling: JsonMapping | None = None,
        files: dict[str, bytes] | None = None,
    ) -> list[list[Sample]]:
        """`sampling`: what the framework scores with; `files` gets images by hash, which are refused without it."""
        if self.seed is not None and None in places:
            raise ConfigError(
                "this trainer does not number the rollouts of a group, so one seed would make them all equal; leave "
                "it out"
            )
        slots = asyncio.Semaphore(self.concurrency)
        async with AsyncClient(self.url, self.admin_key, timeout_s=self.timeout_s) as client:

            async def run_one(task: Any, group: str, place: int | None) -> list[Sample]:
                pinned: JsonObject = {**(sampling or {}), **self.sampling}
                if self.seed is not None:
                    name = f"{self.seed}/{group}/{place}"
                    pinned["seed"] = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little") >> 1
                async with slots, client.session(group=group, sampling=pinned or None) as session:
                    reward = self.agent(session.openai(), task)
                    if inspect.isawaitable(reward):
                        reward = await asyncio.wait_for(reward, self.timeout_s)
                    if reward is not None:
                        await session.reward(float(reward))
                    samples = await session.samples()
                    for run in (run for sample in samples for run in sample.images):
                        if files is not None and run.sha256 not in files:
                            files[run.sha256] = await session.image(run.sha256)
                if not samples:
                    raise GatewayError(f"session {session.id}: the agent made no model call that can be trained on")
                for sample in samples if files is None else ():
                    refuse_images(sample, "this trainer")
                return samples

            return list(await asyncio.gather(*map(run_one, tasks, groups, places)))


def open_images(sample: Sample, files: Mapping[str, bytes], processor: Any) -> list[Any]:
    """`PIL.Image`s for a trainer with its own `processor`, whose settings must be the recorded ones: with others,
    counts and grids would not fit the ids. Backend and versions are the trainer's."""
    own = getattr(processor, "image_processor", None)
    for run in sample.images:
        found = "none" if own is None else processor_identity(own)
        ours, theirs = ((words[:1], words[-1:]) for words in (run.processor.split(), found.split()))
        if ours != theirs:
            raise ConfigError(
                f"sample {sample.sample_id} has images of the processor {run.processor!r}, the trainer's is {found!r}: "
                "use the gateway's model directory"
            )
    return [open_image(files[run.sha256]) for run in sample.images]


def take_largest(samples: Sequence[Sample]) -> tuple[Sample, int]:
    """The sample that trains the most tokens, for trainers that take one row per rollout (ties go to the last one), and
    how many tokens the others train."""
    counts = [sum(sample.loss_mask) for sample in samples]
    chosen = max(reversed(range(len(samples))), key=counts.__getitem__)
    return samples[chosen], sum(counts) - counts[chosen]


def group_name(*parts: Any) -> str:
    """The same prompt in the same step is the same group."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def scored_settings(settings: JsonMapping | None) -> JsonObject:
    """Of a framework's settings those that change the distribution that it scores with."""
    temperature, top_p, top_k = ((settings or {}).get(name) for name in ("temperature", "top_p", "top_k"))
    pinned: JsonObject = {} if temperature is None else {"temperature": float(temperature)}
    if top_p is not None and top_p < 1:
        pinned["top_p"] = float(top_p)
    if top_k is not None and top_k > 0:
        pinned["top_k"] = int(top_k)
    return pinned


def centre_rewards(samples: Sequence[Sample]) -> list[float]:
    """Each sample's session reward less the mean of its group, where every session counts once."""
    sessions = group_sessions((group_of(sample), sample.session_id, require_reward(sample)) for sample in samples)
    return sessions.advantages(lambda rewards: [reward - sum(rewards) / len(rewards) for reward in rewards])


def require_reward(sample: Sample) -> float:
    if sample.reward is None:
        raise ConfigError(f"session {sample.session_id} has no reward: return a number from the agent, or post one")
    return sample.reward
