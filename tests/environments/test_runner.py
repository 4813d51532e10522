"""The runner: bounded, timed, isolated; every planned rollout ends exactly once, in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.world import scripted_server
from tokentrue.app.rollouts import round_counts
from tokentrue.client import AsyncClient
from tokentrue.environments import (
    Plan,
    Split,
    Task,
    derive_seed,
    plan_groups,
    player_in,
    run_groups,
    run_one,
    run_plans,
)
from tokentrue.environments.http import GatewaySessions
from tokentrue.errors import ConfigError


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
    groups = await run_groups(player_in(Moody(), sessions, timeout_s=0.3), plans, concurrency=5)
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


class Raising:
    """Does what the task's id says, and then waits for long."""

    name = "raising"

    def tasks(self, count: int, *, seed: int = 0, split: Split = "train") -> Sequence[Task]:
        return []

    async def run(self, client: Any, task: Task) -> float:
        if task.task_id == "cancels its helper":
            helper = asyncio.create_task(asyncio.sleep(30))
            await asyncio.sleep(0)
            helper.cancel()
            await helper
        if task.task_id == "has its own limit":
            await asyncio.wait_for(asyncio.sleep(30), 0.01)
        if task.task_id == "exits":
            raise SystemExit(3)
        if task.task_id == "names a file":
            raise FileNotFoundError(b"caf\xe9".decode("utf-8", "surrogateescape"))
        await asyncio.sleep(0.05 if task.task_id == "is fine" else 30)
        return 1.0


def plan_tasks(*names: str) -> list[Plan]:
    return plan_groups([Task(task_id=name, prompt="") for name in names], n=1, seed=0)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("cancels its helper", "CancelledError"),
        ("has its own limit", "TimeoutError"),
        ("exits", "SystemExit: 3"),
        ("names a file", "FileNotFoundError: caf\\udce9"),
    ],
)
async def test_whatever_an_agent_raises_of_its_own_costs_its_own_rollout(name: str, error: str) -> None:
    groups = await run_groups(player_in(Raising(), Sessions(), timeout_s=0.5), plan_tasks(name, "hangs", "is fine"))
    own, hung, fine = [group[0] for group in groups]
    assert (own.error, hung.error, fine.error) == (error, "timed out after 0.5 s", None)
    assert own.trace.encode("utf-8").startswith(b"Traceback") and not hung.trace
    assert round_counts(groups, groups)["rollouts/timed_out"] == 1, "a limit of the agent's own is no time-out of ours"


async def test_a_cancelled_rollout_is_no_failure() -> None:
    """Neither by Ctrl-C nor by a task group, and not where the time limit ends at the same moment."""
    sessions = Sessions()
    for timeout_s in (60.0, 0.05):
        rollout = asyncio.create_task(run_one(Raising(), plan_tasks("hangs")[0], sessions, timeout_s=timeout_s))
        asyncio.get_running_loop().call_later(0.05, rollout.cancel)
        with pytest.raises(asyncio.CancelledError):
            await rollout
    running: list[asyncio.Task[Any]] = []
    with pytest.raises(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            running.append(group.create_task(run_one(Raising(), plan_tasks("hangs")[0], sessions, timeout_s=60)))
            group.create_task(raise_soon(ValueError("another task")))
    assert running[0].cancelled() and sessions.open_now == 0


async def test_no_session_of_a_failed_rollout_stays_open(tmp_path: Path) -> None:
    """Against a real gateway: timed out, raised, and cancelled; resumable ones are purged, so that they can run again."""
    server = scripted_server(tmp_path, ["unused"])
    try:
        for resume in (False, True):
            sessions = GatewaySessions(server.url, sampling={}, admin_key=server.admin_key, resume=resume)
            async with sessions:
                groups = await run_groups(
                    player_in(Raising(), sessions, timeout_s=0.5), plan_tasks("hangs", "names a file")
                )
                assert all(group[0].error for group in groups)
                if not resume:
                    playing = asyncio.create_task(run_one(Raising(), plan_tasks("h")[0], sessions, timeout_s=60))
                    await asyncio.sleep(0.5)
                    playing.cancel()
                    await asyncio.wait([playing])
            found = server.ask("GET", "/sessions")[1]["sessions"]
            assert [session["state"] for session in found] == ["ended"] * 3, "of the resumable ones none is left"
    finally:
        server.stop()


async def test_a_rollout_cancelled_while_its_session_is_created_leaves_none_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = scripted_server(tmp_path, ["unused"])
    is_created, opens = asyncio.Event(), AsyncClient.open

    async def open_slowly(self: AsyncClient, **settings: Any) -> Any:
        made = await opens(self, **settings)
        is_created.set()
        await asyncio.sleep(0.2)
        return made

    monkeypatch.setattr(AsyncClient, "open", open_slowly)
    try:
        async with GatewaySessions(server.url, sampling={}, admin_key=server.admin_key) as sessions:
            playing = asyncio.create_task(run_one(Raising(), plan_tasks("h")[0], sessions, timeout_s=60))
            await is_created.wait()
            playing.cancel()
            await asyncio.wait([playing])
            assert playing.cancelled()
        found = server.ask("GET", "/sessions")[1]["sessions"]
        assert [session["state"] for session in found] == ["ended"]
    finally:
        server.stop()


async def raise_soon(error: Exception) -> None:
    await asyncio.sleep(0.01)
    raise error


def test_an_id_that_no_file_can_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the id '\\ud800' holds a lone surrogate"):
        plan_tasks("\ud800")


async def test_closing_early_cancels_what_still_runs() -> None:
    sessions = Sessions()
    plans = plan_groups(Moody().tasks(2), n=4, seed=0)
    stream = run_plans(player_in(Moody(), sessions, timeout_s=60), plans, concurrency=8)
    await anext(stream)
    await stream.aclose()
    assert sessions.open_now == 0


@pytest.mark.parametrize(
    ("pin", "said"),
    [(None, None), ((), []), (("system",), ["system"])],
)
async def test_a_pin_that_is_set_reaches_the_gateway_and_an_empty_one_too(
    pin: Sequence[str] | None, said: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []

    async def call(self: AsyncClient, method: str, path: str, body: Any = None) -> Any:
        sent.append(body)
        return {"session_id": "s", "base_url": "http://127.0.0.1:1", "api_key": "k"}

    monkeypatch.setattr(AsyncClient, "call", call)
    plan = plan_groups([Task(task_id="a", prompt="")], n=1, seed=0)[0]
    async with (
        GatewaySessions("http://127.0.0.1:1", sampling={"temperature": 0.5}, pin=pin) as sessions,
        sessions.open(plan),
    ):
        assert sent[0].get("pin") == said, "a session that does not say is pinned as the gateway's server.pin says"
        assert sent[0]["sampling"] == {"temperature": 0.5, "seed": plan.seed}


def test_seeds_depend_on_the_rollout_and_nothing_else() -> None:
    one = plan_groups([Task(task_id="a", prompt="")], n=2, seed=3, tag="r0")
    two = plan_groups([Task(task_id="b", prompt=""), Task(task_id="a", prompt="")], n=2, seed=3, tag="r0")
    assert [plan.seed for plan in one] == [plan.seed for plan in two[2:]]
    assert len({plan.seed for plan in two}) == 4
    assert plan_groups([Task(task_id="a", prompt="")], n=1, seed=3, tag="r1")[0].seed != one[0].seed
    assert derive_seed(1, "x") == derive_seed(1, "x") < 2**31
