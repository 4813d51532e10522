"""Dynamic sampling: groups whose rewards are all equal are replaced by groups of other tasks, up to a limit, and
counted."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from tests.train.rows import sample_of
from tokentrue.app.rollouts import RolloutRounds, Share
from tokentrue.environments import Plan, RolloutConfig, Task
from tokentrue.errors import ConfigError
from tokentrue.samples import sample_to_json
from tokentrue.types import Sample


class Coin:
    """A task is worth learning from with probability 1/2: its rollouts then have different rewards."""

    name = "coin"

    def __init__(self, chance: float = 0.5) -> None:
        self.chance = chance

    def tasks(self, count: int, *, seed: int = 0, split: str = "train") -> Sequence[Task]:
        rng = random.Random(seed)
        return [
            Task(task_id=f"t{rng.randrange(10**6)}", prompt="", data={"mixed": rng.random() < self.chance}) for _ in range(count)
        ]  # fmt: skip

    async def run(self, client: Any, task: Task) -> float:
        return float(client.index % 2) if task.data["mixed"] else 1.0


class StandInSession:
    def __init__(self, plan: Plan) -> None:
        self.session_id, self.client, self._plan = plan.key, plan, plan

    async def finish(self, reward: float) -> Any:
        ids, given = [5, 6, 7], [True, False, False]
        sample = sample_of(ids, given, [0.0, -1.0, -1.0], name=self._plan.key, group=self._plan.group, reward=reward)
        return [sample_to_json(sample)], {}


class StandInSessions:
    @contextlib.asynccontextmanager
    async def open(self, plan: Plan) -> AsyncGenerator[StandInSession, None]:
        yield StandInSession(plan)


def rounds(resample: int, chance: float = 0.5, share: Share | None = None) -> RolloutRounds:
    config = RolloutConfig(
        environment="tests.app.test_resampling:Coin",
        options={"chance": chance},
        tasks=8,
        group_size=2,
        resample=resample,
    )
    return RolloutRounds(config, StandInSessions(), share=share)


def mixed(groups: list[list[Sample]]) -> int:
    return sum(len({sample.reward for sample in group}) > 1 for group in groups)


async def test_flat_groups_are_replaced_up_to_the_limit_and_counted() -> None:
    seen = {}
    for resample in (0, 1, 8):
        source = rounds(resample)
        groups = await source.play(3)
        counts = source.counts(3)
        seen[resample] = mixed(groups)
        assert len(groups) == 8
        assert counts["rollouts/groups_without_spread"] == 8 - seen[resample]
        assert counts["rollouts/played"] == 2 * (8 + counts["rollouts/groups_resampled"])
        assert (counts["rollouts/groups_resampled"] > 0) == (resample > 0)
    assert seen[0] < seen[1] <= seen[8] == 8


async def test_a_limit_that_is_reached_keeps_the_flat_groups() -> None:
    source = rounds(2, chance=0.0)
    groups = await source.play(0)
    counts = source.counts(0)
    assert len(groups) == 8 and mixed(groups) == 0
    assert (counts["rollouts/groups_resampled"], counts["rollouts/groups_without_spread"]) == (16, 8)


async def test_a_round_is_the_same_when_it_is_played_again() -> None:
    first, second = [await rounds(4).play(5) for _ in range(2)]
    assert [[sample.session_id for sample in group] for group in first] == [
        [sample.session_id for sample in group] for group in second
    ]
    ids = [sample.session_id for group in first for sample in group]
    assert len(set(ids)) == len(ids) and any("round-00005-1/" in each for each in ids)


async def test_replacements_do_not_depend_on_the_number_of_ranks() -> None:
    whole = await rounds(4).play(5)
    parts = [await rounds(4, share=Share(rank=rank, world=3)).play(5) for rank in range(3)]
    assert [group for part in parts for group in part] == whole


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.resample"):
        RolloutConfig(resample=-1)
