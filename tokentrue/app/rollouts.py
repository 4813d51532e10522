"""The settings and files of `tokentrue rollout`, the rounds of a training run, evaluation on fixed tasks.
`samples.jsonl` and `rollouts.jsonl` (a line per rollout) hold whole groups only, so that missing ones can be run later.
A group is done when each of its rollouts has a line; its samples are written first."""

import json
import os
import shutil
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from tokentrue.app.background import embedded_gateway
from tokentrue.app.configuration import as_mapping
from tokentrue.app.wiring import ADMIN_KEY, EngineConfig, ModelConfig, ServeConfig, ServerConfig
from tokentrue.environments import (
    Plan,
    Rollout,
    RolloutConfig,
    Sessions,
    Task,
    derive_seed,
    load_environment,
    plan_groups,
    player_in,
    run_groups,
)
from tokentrue.environments.http import GatewaySessions
from tokentrue.errors import ConfigError, EngineError
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.plain_json import dumps, loads, read_numbered_lines
from tokentrue.records import record
from tokentrue.samples import sample_from_json
from tokentrue.samples.images import ImageFolder
from tokentrue.sessions.journal.database import describe_store, is_postgres
from tokentrue.types import AtLeastOne, Sample

AGENT_DEFAULTS: JsonMapping = {
    "rollout.environment": "agent",
    "rollout.tasks": 1_000_000,  # all of the file
    "rollout.max_tokens": 4096,
    "rollout.concurrency": 4,
    "rollout.timeout_s": 1800.0,
}


@record
class RolloutRun:
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    url: str | None = None
    out: Path = Path("out/rollout")
    store: str | None = None
    gateways: AtLeastOne = 2  # with --ray: gateway actors, each with its engine
    workers: AtLeastOne = 2  # with --ray: rollout actors
    nodes: AtLeastOne = 1  # with --ray: nodes that share the gateways and workers, at least one of each on every node

    def __post_init__(self) -> None:
        if self.nodes > 1 and not self.is_shared:
            raise ConfigError(f"nodes={self.nodes} needs a record that every node reaches: --set store=postgresql://…")

    @property
    def is_shared(self) -> bool:
        return is_postgres(self.store or "")


def agent_settings(
    agent: str | None, tasks: Path | None, score: str | None, sandbox: str | None, out: Path | None
) -> tuple[JsonObject, JsonMapping]:
    if agent is None:
        if tasks is not None or score is not None or sandbox is not None:
            raise ConfigError("--tasks, --score and --sandbox belong to --agent")
        return {}, {}
    given = {"agent": agent, "tasks": None if tasks is None else str(tasks), "score": score, "sandbox": sandbox}
    given["transcripts"] = str((out or RolloutRun().out) / "transcripts")
    return {f"rollout.options.{name}": value for name, value in given.items()}, AGENT_DEFAULTS


def plan_rollouts(config: RolloutConfig) -> list[Plan]:
    environment = load_environment(config.environment, config.options)
    tasks = environment.tasks(config.tasks, seed=config.seed, split=config.split)
    return plan_groups(tasks, n=config.group_size, seed=config.seed)


def describe_environment(config: RolloutConfig) -> list[str]:
    notes: Callable[[], list[str]] = getattr(load_environment(config.environment, config.options), "notes", list)
    return notes()


def remember(settings: RolloutRun) -> None:
    path = settings.out / "config.json"
    shown = replace(settings, store=None if settings.store is None else describe_store(settings.store))
    text = json.dumps(as_mapping(shown), indent=1, sort_keys=True)
    if path.exists():
        before, now = json.loads(path.read_text())["rollout"], json.loads(text)["rollout"]
        if changed := sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key)):
            named = ", ".join(f"rollout.{key}" for key in changed)
            raise ConfigError(f"{settings.out} holds a run with another {named}; choose another --out")
    path.write_text(text)


class Recorder:
    def __init__(self, out: Path, plans: Sequence[Plan]) -> None:
        self._sizes = Counter(plan.group for plan in plans)
        self._groups: dict[str, list[Rollout]] = {}
        self._samples = (out / "samples.jsonl").open("ab")
        self._rollouts = (out / "rollouts.jsonl").open("ab")

    def __call__(self, rollout: Rollout) -> None:
        group = self._groups.setdefault(rollout.plan.group, [])
        group.append(rollout)
        if len(group) < self._sizes[rollout.plan.group]:
            return
        done = sorted(self._groups.pop(rollout.plan.group), key=lambda each: each.plan.index)
        samples = [sample for each in done for sample in each.samples]
        rollouts = [describe_rollout(each) for each in done]
        for file, rows in ((self._samples, samples), (self._rollouts, rollouts)):
            file.writelines(dumps(row) + b"\n" for row in rows)
            file.flush()

    def close(self) -> None:
        self._samples.close()
        self._rollouts.close()


def describe_rollout(rollout: Rollout) -> JsonObject:
    return {
        "rollout": rollout.plan.key,
        "group": rollout.plan.group,
        "index": rollout.plan.index,
        "session_id": rollout.session_id,
        "reward": rollout.reward,
        "error": rollout.error,
        "note": rollout.note,
        "seconds": round(rollout.seconds, 4),
        "samples": len(rollout.samples),
        "sampled": rollout.coverage.get("sampled", 0),
        "trained": rollout.coverage.get("trained", 0),
    }


def read_whole_lines(path: Path) -> list[JsonObject]:
    found: list[JsonObject] = []
    for _, line in read_numbered_lines(path) if path.exists() else ():
        try:
            found.append(loads(line))
        except ValueError:
            break
    return found


def trim_to_whole_groups(out: Path, plans: Sequence[Plan], *, again: bool = False) -> set[str]:
    sizes = Counter(plan.group for plan in plans)
    lines = read_whole_lines(out / "rollouts.jsonl")
    counts = Counter(line["group"] for line in lines)
    failed = {line["group"] for line in lines if again and line["error"] is not None}
    done = {group for group, count in counts.items() if count == sizes[group]} - failed
    kept = [line for line in lines if line["group"] in done]
    sessions = {line["session_id"] for line in kept}
    samples = [sample for sample in read_whole_lines(out / "samples.jsonl") if sample["session_id"] in sessions]
    for name, rows in (("rollouts", kept), ("samples", samples)):
        beside = out / f"{name}.partial"  # a crash leaves the old file
        beside.write_bytes(b"".join(dumps(row) + b"\n" for row in rows))
        beside.replace(out / f"{name}.jsonl")
    return done


def sessions_on(url: str, config: RolloutConfig, admin_key: str | None, **options: Any) -> GatewaySessions:
    own = {"sampling": config.sampling, "pin": config.pin, "side_requests": config.side_requests}
    return GatewaySessions(url, **own, admin_key=admin_key, **options)


@asynccontextmanager
async def open_sessions(settings: RolloutRun) -> AsyncGenerator[GatewaySessions]:
    async with AsyncExitStack() as stack:
        url, admin_key = settings.url, os.environ.get(ADMIN_KEY)
        if url is None:
            store = settings.store or f"sqlite:{settings.out / 'sessions.sqlite'}"
            serve = ServeConfig(model=settings.model, engine=settings.engine, server=ServerConfig(port=0, store=store))
            here = await stack.enter_async_context(embedded_gateway(serve))
            url, admin_key = here.base_url, here.admin_key
        sessions = await stack.enter_async_context(sessions_on(url, settings.rollout, admin_key))
        yield sessions.saving(ImageFolder(settings.out / "samples.jsonl"))


@record
class Share:
    rank: int = 0
    world: int = 1

    def of(self, tasks: Sequence[Task]) -> Sequence[Task]:
        return tasks[len(tasks) * self.rank // self.world : len(tasks) * (self.rank + 1) // self.world]


class RoundImages:
    """Of rounds that are not trained on yet, in a folder for each round that every rank reads."""

    def __init__(self, out: Path) -> None:
        self._out = out / "rounds"

    def folder(self, number: int) -> ImageFolder:
        return ImageFolder(self._out / f"{number:06d}")

    def drop_before(self, number: int) -> None:
        for path in self._out.glob("*.images"):
            if int(path.stem) < number:
                shutil.rmtree(path, ignore_errors=True)


class RolloutRounds:
    """Round j draws tasks and seeds only from the run's seed and j, so a resumed run samples the same rounds. With
    several ranks each runs whole groups of its `share`."""

    def __init__(
        self,
        config: RolloutConfig,
        sessions: Sessions,
        *,
        on_groups: Callable[[Sequence[Sequence[Rollout]]], None] = lambda _: None,
        share: Share | None = None,
        images: RoundImages | None = None,
    ) -> None:
        """`on_groups` gets the rollouts of a round, also ones that are replaced."""
        self.config = config
        self.environment = load_environment(config.environment, config.options)
        self._sessions, self._images = sessions, images
        self._on_groups = on_groups
        self._share = share or Share()
        self._counts: dict[int, dict[str, float]] = {}

    async def play(self, number: int) -> list[list[Sample]]:
        groups = await self._attempt(number, 0, range(self.config.tasks))
        played = list(groups)
        for attempt in range(1, self.config.resample + 1):
            flat = [place for place, group in enumerate(groups) if not has_spread(group)]
            if not flat:
                break
            fresh = await self._attempt(number, attempt, flat)
            played += fresh
            for place, group in zip(flat, fresh, strict=False):
                groups[place] = group if has_spread(group) else groups[place]
        self._counts[number] = round_counts(played, groups)
        rollouts = [rollout for group in played for rollout in group]
        errors = [rollout.error for rollout in rollouts if rollout.error is not None]
        is_empty = bool(rollouts) and not any(rollout.samples for rollout in rollouts)  # a rank may have no task
        if len(errors) > self.config.max_failed * len(rollouts) or is_empty:
            first, most = errors[0] if errors else "no rollout made a sample", f"{self.config.max_failed:g}"
            failed = f"{len(errors)} of {len(rollouts)} rollouts failed (rollout.max_failed = {most})"
            raise EngineError(f"round {number}: {failed}; the first said: {first}")
        made = [[sample_from_json(sample) for rollout in group for sample in rollout.samples] for group in groups]
        return [group for group in made if group]

    async def _attempt(self, number: int, attempt: int, places: Sequence[int]) -> list[list[Rollout]]:
        """Attempt 0 runs the round's tasks, later ones other tasks in some of their places."""
        again, config = (attempt,) if attempt else (), self.config
        seed = derive_seed(config.seed, number, *again)
        tasks = self._share.of(self.environment.tasks(config.tasks, seed=seed, split=config.split))
        drawn = [task for place, task in enumerate(tasks) if place in places]
        tag = "-".join([f"round-{number:05d}", *map(str, again)])
        plans = plan_groups(drawn, n=config.group_size, seed=config.seed, tag=tag)
        sessions = self._sessions
        if self._images is not None and isinstance(sessions, GatewaySessions):
            sessions = sessions.saving(self._images.folder(number))
        play = player_in(self.environment, sessions, timeout_s=config.timeout_s)
        groups = await run_groups(play, plans, concurrency=config.concurrency)
        self._on_groups(groups)
        return groups

    def counts(self, number: int) -> Mapping[str, float]:
        return self._counts.pop(number, {})


def has_spread(group: Sequence[Rollout]) -> bool:
    """Without it, a group baseline makes every advantage 0."""
    return len({rollout.reward for rollout in group if rollout.samples}) > 1


def round_counts(played: Sequence[Sequence[Rollout]], kept: Sequence[Sequence[Rollout]]) -> dict[str, float]:
    rollouts = [rollout for group in played for rollout in group]
    errors = [rollout.error for rollout in rollouts if rollout.error is not None]
    return {
        "rollouts/played": len(rollouts),
        "rollouts/failed": len(errors),
        "rollouts/timed_out": sum(error.startswith("timed out") for error in errors),
        "rollouts/without_sample": sum(rollout.error is None and not rollout.samples for rollout in rollouts),
        "rollouts/groups_lost": sum(not any(rollout.samples for rollout in group) for group in kept),
        "rollouts/groups_resampled": len(played) - len(kept),
        "rollouts/groups_without_spread": sum(not has_spread(group) for group in kept),
    }


async def evaluate(
    config: RolloutConfig,
    sessions: Sessions,
    *,
    tasks: int,
    attempts: int = 1,
    share: Share | None = None,
    on_rollout: Callable[[Rollout], None] = lambda _: None,
) -> list[list[float]]:
    """Rewards of each fixed held-out task; a failed rollout counts 0."""
    environment = load_environment(config.environment, config.options)
    drawn = (share or Share()).of(environment.tasks(tasks, seed=0, split="heldout"))
    plans = plan_groups(drawn, n=attempts, seed=0, tag="evaluation")
    play = player_in(environment, sessions, timeout_s=config.timeout_s)
    groups = await run_groups(play, plans, concurrency=config.concurrency, on_rollout=on_rollout)
    return [[rollout.reward or 0.0 for rollout in group] for group in groups]
