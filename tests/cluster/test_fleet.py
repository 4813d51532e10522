"""The fleet without its actors: pinning, absences waited for, one-line errors. With actors: tests/e2e/test_ray.py."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tokentrue.app.wiring import ModelConfig, ServeConfig, ServerConfig
from tokentrue.client import AsyncClient
from tokentrue.cluster import rollout as actors
from tokentrue.cluster.rollout import Fleet, require_listener
from tokentrue.environments import Plan, Rollout, RolloutConfig, Task, failed_rollout, plan_groups, run_groups
from tokentrue.environments.http import GatewaySessions
from tokentrue.errors import ConfigError, EngineUnreachable, SessionConflict

pytest.importorskip("ray")
PLANS = plan_groups([Task(task_id=f"t{i}", prompt="") for i in range(16)], n=4, seed=0)


def test_a_rollout_is_pinned_by_its_key_alone_and_gateways_share_the_load() -> None:
    fleet = object.__new__(Fleet)
    fleet.gateways, fleet._is_shared = ["a", "b", "c"], False
    found = [fleet.gateways_for(plan)[0] for plan in PLANS]
    assert found == [fleet.gateways_for(plan)[0] for plan in reversed(PLANS)][::-1]
    assert {len(fleet.gateways_for(plan)) for plan in PLANS} == {1}, "another gateway has not that session"
    fleet._is_shared = True
    assert [fleet.gateways_for(plan)[0] for plan in PLANS] == found
    assert all(sorted(fleet.gateways_for(plan)) == ["a", "b", "c"] for plan in PLANS)
    assert all(found.count(name) > len(PLANS) / 6 for name in "abc")


def test_nobody_at_an_address_is_said_at_once() -> None:
    with pytest.raises(ConfigError, match="nobody listens"):
        require_listener("127.0.0.1:1")
    with pytest.raises(ConfigError, match="nobody listens"):
        require_listener("ray://127.0.0.1:1")
    require_listener("local")
    require_listener("auto")


class Moody:
    """The gateway is away `absent` times, then there; sessions that were opened are counted."""

    def __init__(self, absent: int) -> None:
        self.absent = absent
        self.opened = 0

    def sessions(self, *_: Any, **options: Any) -> Moody:
        return self

    async def __aenter__(self) -> Moody:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    @asynccontextmanager
    async def open(self, plan: Plan) -> AsyncIterator[Any]:
        self.opened += 1
        if self.opened <= self.absent:
            raise EngineUnreachable("gone")
        yield self

    session_id = "s"
    client = None

    async def finish(self, reward: float) -> tuple[Any, Any]:
        return [{"reward": reward}], {"sampled": 1, "trained": 1}


class Agent:
    name = "agent"

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    async def run(self, client: Any, task: Task) -> float:
        if self.error is not None:
            raise self.error
        return 1.0


async def address() -> str:
    return "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("absent", "error", "opened", "said"),
    [
        (2, None, 3, None),
        (0, ValueError("the agent broke"), 1, "ValueError: the agent broke"),
        (0, ConnectionError("reset"), 99, "away"),
    ],
)
async def test_an_absence_is_waited_for_and_an_agent_s_failure_is_not(
    absent: int, error: Exception | None, opened: int, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    moody = Moody(absent)
    monkeypatch.setattr(actors, "sessions_on", moody.sessions)
    monkeypatch.setattr(actors, "PATIENCE_S", 60.0 if said is None else 4.0)
    actors.is_absence(ValueError())  # its imports take their time, and are not what is waited for here
    found = await actors.play_through(Agent(error), PLANS[0], address, RolloutConfig(), "key")
    assert found.plan == PLANS[0]
    assert found.reward == (1.0 if said is None else None)
    assert (found.error is None) if said is None else (said in (found.error or ""))
    assert ("raise self.error" in found.trace) == (said == "ValueError: the agent broke")
    assert moody.opened == opened if opened < 99 else moody.opened > 1, "an absence was not tried again"


async def test_an_absence_is_waited_for_however_long_the_rollout_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class LongAgent(Agent):
        async def run(self, client: Any, task: Task) -> float:
            if moody.opened == 1:
                await asyncio.sleep(1.2)
                raise ConnectionError("the gateway died late")
            return 1.0

    moody = Moody(0)
    monkeypatch.setattr(actors, "sessions_on", moody.sessions)
    monkeypatch.setattr(actors, "PATIENCE_S", 1.0)
    actors.is_absence(ValueError())
    found = await actors.play_through(LongAgent(), PLANS[0], address, RolloutConfig(), "key")
    assert (found.reward, moody.opened) == (1.0, 2), found.error


async def test_a_run_logs_the_tracebacks_of_its_actors(caplog: pytest.LogCaptureFixture) -> None:
    async def play(plan: Plan, gateways: Any) -> Rollout:
        return failed_rollout(plan, ValueError("the agent broke"), 0.0, session_id="s")

    worker = SimpleNamespace(play=SimpleNamespace(remote=play))
    fleet: Any = SimpleNamespace(_next_worker=itertools.cycle([worker]), gateways_for=lambda plan: [])
    groups = await run_groups(lambda plan: Fleet.play(fleet, plan), PLANS[:4])
    assert [rollout.error for rollout in groups[0]] == ["ValueError: the agent broke"] * 4
    assert caplog.text.count("failed\nValueError: the agent broke") == 4


def test_a_gateway_that_cannot_start_says_why_and_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENTRUE_ADMIN_KEY", "")  # the actor sets it
    monkeypatch.setattr(actors, "node_address", lambda: "127.0.0.1")
    settings = ServeConfig(model=ModelConfig(path="/no/such/model"), server=ServerConfig(port=0, store="memory"))
    gateway = actors.GatewayActor(settings, "key")
    with pytest.raises(RuntimeError, match=r"^\w+: .*/no/such/model") as found:
        gateway.address()
    assert not actors.is_absence(found.value)


@pytest.mark.parametrize("begun", [False, True])
async def test_an_agent_is_given_a_key_of_its_session_and_never_the_admin_key(
    begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def call(self: AsyncClient, method: str, path: str, body: Any = None) -> Any:
        if path == "/sessions" and begun:
            raise SessionConflict("this session exists")
        assert method == "POST" and (path == "/sessions" or path.endswith("/key"))
        return {"session_id": "s", "base_url": "http://g/v1", "api_key": "of the session"}

    monkeypatch.setattr(AsyncClient, "call", call)
    async with GatewaySessions("http://127.0.0.1:1", sampling={}, admin_key="of the admin", resume=True) as sessions:
        opened = sessions.open(PLANS[0])
        session = await opened.__aenter__()
        assert session.client.api_key == "of the session"
