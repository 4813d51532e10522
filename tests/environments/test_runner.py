"""The runner: bounded, timed, isolated; every planned rollout ends exactly once, in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tokentrue.environments import Plan, Split, Task, plan_groups, run_groups, run_plans, seed_of
from tokentrue.environments.http import GatewaySessions


class Session:
    def __init__(self, plan: Plan, log: list[str]) -> None:
        self.session_id = f"s-{plan.key}"
        self.client = plan
        self._log = log

    async def finish(self, reward: float) -> tuple[Sequence[Any], Mapping[str, Any]]:
        self._log.append(self.session_id)
        return [{"reward": reward}], {"sampled": 1, "trained": 1}


class Sessions:
    def __init__(self) -> None:
        self.finished: list[str] = []
        self.open_now = self.most = 0

    @asynccontextmanager
    async def open(self, plan: Plan) -> AsyncIterator[Session]:
        self.open_now += 1
        self.most = max(self.most, self.open_now)
        try:
            yield Session(plan, self.finished)
        finally:
            self.open_now -= 1


class Moody:
    """Rollout 1 of every group raises, rollout 2 hangs; the others end in reverse order."""

    name = "moody"

    def tasks(self, count: int, *, seed: int = 0, split: Split = "train") -> Sequence[Task]:
        return [Task(task_id=f"t{i}", prompt="") for i in range(count)]

    async def run(self, client: Any, task: Task) -> float:
        if client.index == 1:
            raise ValueError("the agent broke")
        await asyncio.sleep(30 if client.index == 2 else 0.02 * (5 - client.index))
        return float(client.index)


async def test_failures_and_time_outs_cost_their_own_rollout(caplog: pytest.LogCaptureFixture) -> None:
    sessions = Sessions()
    plans = plan_groups(Moody().tasks(3), n=4, seed=0)
    groups = await run_groups(Moody(), plans, sessions, concurrency=5, timeout_s=0.3)
    assert [[rollout.plan.index for rollout in group] for group in groups] == [[0, 1, 2, 3]] * 3
    for group in groups:
        assert [rollout.reward for rollout in group] == [0.0, None, None, 3.0]
        assert group[1].error == "ValueError: the agent broke"
        assert group[2].error == "timed out after 0.3 s"
        assert [len(rollout.samples) for rollout in group] == [1, 0, 0, 1]
    assert len(sessions.finished) == 6
    assert sessions.most == 5
    assert caplog.text.count("Traceback") == 3, "time-outs have none"
    assert all(f"rollout t{i}/1 failed\nTraceback" in caplog.text for i in range(3))


async def test_closing_early_cancels_what_still_runs() -> None:
    sessions = Sessions()
    plans = plan_groups(Moody().tasks(2), n=4, seed=0)
    stream = run_plans(Moody(), plans, sessions, concurrency=8, timeout_s=60)
    await anext(stream)
    await stream.aclose()
    assert sessions.open_now == 0


@pytest.mark.parametrize(
    ("asked", "pin", "said"),
    [({}, None, None), ({"pin": ("system",)}, None, ["system"]), ({"pin": ("system",)}, (), []), ({}, ("system",), ["system"])],
)
async def test_a_pin_that_is_set_reaches_the_gateway_and_an_empty_one_too(
    asked: Mapping[str, Any], pin: Sequence[str] | None, said: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []

    async def call(self: GatewaySessions, method: str, path: str, body: Any = None) -> Any:
        sent.append(body)
        return {"session_id": "s", "base_url": "http://127.0.0.1:1", "api_key": "k"}

    monkeypatch.setattr(GatewaySessions, "call", call)
    plan = plan_groups([Task(task_id="a", prompt="", data=asked)], n=1, seed=0)[0]
    async with GatewaySessions("http://127.0.0.1:1", sampling={"temperature": 0.5}, pin=pin) as sessions, sessions.open(plan):
        assert sent[0].get("pin") == said, "a session that does not say is pinned as the gateway's server.pin says"
        assert sent[0]["sampling"] == {"temperature": 0.5, "seed": plan.seed}


def test_seeds_depend_on_the_rollout_and_nothing_else() -> None:
    one = plan_groups([Task(task_id="a", prompt="")], n=2, seed=3, tag="r0")
    two = plan_groups([Task(task_id="b", prompt=""), Task(task_id="a", prompt="")], n=2, seed=3, tag="r0")
    assert [plan.seed for plan in one] == [plan.seed for plan in two[2:]]
    assert len({plan.seed for plan in two}) == 4
    assert plan_groups([Task(task_id="a", prompt="")], n=1, seed=3, tag="r1")[0].seed != one[0].seed
    assert seed_of(1, "x") == seed_of(1, "x") < 2**31
