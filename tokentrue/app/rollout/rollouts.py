"""Rollouts as samples: rounds of a training run, evaluation on fixed tasks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tokentrue.environments import (
    Environment,
    Player,
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
from tokentrue.errors import EngineError
from tokentrue.json_types import JsonMapping
from tokentrue.plain_json import dumps
from tokentrue.samples import sample_from_json
from tokentrue.types import Sample

if TYPE_CHECKING:
    from tokentrue.app.rollout.settings import RolloutRun


@contextlib.asynccontextmanager
async def open_sessions(settings: RolloutRun) -> AsyncGenerator[GatewaySessions, None]:
    """On the gateway at `settings.url`, or on one started in this process."""
    from tokentrue.app.background import embedded_gateway
    from tokentrue.app.wiring import ADMIN_KEY, ServeConfig, ServerConfig

    sampling = settings.rollout.sampling
    if settings.url is not None:
        async with GatewaySessions(
            settings.url, sampling=sampling, pin=settings.rollout.pin, admin_key=os.environ.get(ADMIN_KEY)
        ) as sessions:
            yield sessions
        return
    store = settings.store or f"sqlite:{settings.out / 'sessions.sqlite'}"
    serve = ServeConfig(model=settings.model, engine=settings.engine, server=ServerConfig(port=0, store=store))
    async with (
        embedded_gateway(serve) as here,
        GatewaySessions(
            here.base_url, sampling=sampling, pin=settings.rollout.pin, admin_key=here.admin_key
        ) as sessions,
    ):
        yield sessions


@dataclass(slots=True)
class Tally:
    rollouts: int = 0
    failed: int = 0
    sampled: int = 0
    trained: int = 0

    def add(self, rollout: Rollout) -> None:
        self.rollouts += 1
        self.failed += rollout.error is not None
        self.sampled += rollout.coverage.get("sampled", 0)
        self.trained += rollout.coverage.get("trained", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One rank's part of a list; the parts in rank order are the list."""

    rank: int = 0
    world: int = 1

    def of(self, tasks: Sequence[Task]) -> Sequence[Task]:
        return tasks[len(tasks) * self.rank // self.world : len(tasks) * (self.rank + 1) // self.world]


class RolloutRounds:
    """Round j draws tasks and seeds only from the run's seed and j, so a resumed run samples the same rounds. With
    several ranks each runs whole groups of its `share`: results do not depend on which rank runs a task."""

    def __init__(
        self,
        config: RolloutConfig,
        sessions: Sessions | None = None,
        *,
        play: Player | None = None,
        on_rollout: Callable[[Rollout], None] | None = None,
        keep: Path | None = None,
        share: Share | None = None,
    ) -> None:
        """Runs rollouts in `sessions`, or by `play`. `keep` names a JSON-lines file to which every sample is
        appended."""
        self.config = config
        self.environment: Environment = load_environment(config.environment, config.options)
        self._concurrency = config.concurrency if play is None else None  # a fleet's workers limit their own
        if play is None:
            assert sessions is not None
            play = player_in(self.environment, sessions, timeout_s=config.timeout_s)
        self._play = play
        self.tally = Tally()
        self._on_rollout = on_rollout
        self._keep = keep
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
        self._require_enough(number, played)
        made = [[sample_from_json(sample) for rollout in group for sample in rollout.samples] for group in groups]
        return [group for group in made if group]

    async def _attempt(self, number: int, attempt: int, places: Sequence[int]) -> list[list[Rollout]]:
        """Attempt 0 runs the round's tasks, later ones other tasks in some of their places."""
        again = (attempt,) if attempt else ()
        tasks = self.environment.tasks(
            self.config.tasks, seed=derive_seed(self.config.seed, number, *again), split=self.config.split
        )
        drawn = [task for place, task in enumerate(self._share.of(tasks)) if place in places]
        tag = "-".join([f"round-{number:05d}", *map(str, again)])
        plans = plan_groups(drawn, n=self.config.group_size, seed=self.config.seed, tag=tag)
        groups = await run_groups(self._play, plans, concurrency=self._concurrency, on_rollout=self._add)
        if self._keep is not None:
            append_jsonl(self._keep, (sample for group in groups for rollout in group for sample in rollout.samples))
        return groups

    def _require_enough(self, number: int, played: Sequence[Sequence[Rollout]]) -> None:
        rollouts = [rollout for group in played for rollout in group]
        errors = [rollout.error for rollout in rollouts if rollout.error is not None]
        is_empty = bool(rollouts) and not any(rollout.samples for rollout in rollouts)  # a rank may have no task
        if len(errors) > self.config.max_failed * len(rollouts) or is_empty:
            first = errors[0] if errors else "no rollout made a sample"
            raise EngineError(
                f"round {number}: {len(errors)} of {len(rollouts)} rollouts failed (rollout.max_failed = {self.config.max_failed:g}); "
                f"the first said: {first}"
            )

    def counts(self, number: int) -> Mapping[str, float]:
        return self._counts.pop(number, {})

    def _add(self, rollout: Rollout) -> None:
        self.tally.add(rollout)
        if self._on_rollout is not None:
            self._on_rollout(rollout)


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


def append_jsonl(path: Path, rows: Iterable[JsonMapping]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as out:
        for row in rows:
            out.write(dumps(row) + b"\n")


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
