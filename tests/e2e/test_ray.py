"""A real local Ray with two rollout workers and two gateways; one of each is killed in the middle, and nothing is
lost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from tokentrue.app.rollouts import RolloutRun, plan_rollouts
from tokentrue.app.wiring import EngineConfig
from tokentrue.cluster.rollout import Fleet, play_all
from tokentrue.environments import Rollout, RolloutConfig

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own: unclosed sockets, a future default


@pytest.fixture(scope="module")
def cluster() -> object:
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    quiet = {"include_dashboard": False, "logging_level": "error", "log_to_driver": False}
    ray.init(address="local", _node_ip_address="127.0.0.1", num_cpus=2, object_store_memory=80_000_000, **quiet)
    yield ray
    ray.shutdown()


def play_and_kill(settings: RolloutRun, number: int) -> tuple[Fleet, list[Rollout]]:
    """Plays all rollouts on `number` gateways and workers. When some have ended, the first worker and the last gateway
    are killed."""
    plans = plan_rollouts(settings.rollout)
    fleet = Fleet(replace(settings, gateways=number, workers=number))
    ended: list[Rollout] = []
    victims = ray.get([fleet.workers[0].pid.remote(), fleet.gateways[-1].pid.remote()])
    ray.get([gateway.address.remote() for gateway in fleet.gateways])
    killed: list[float] = []

    def kill() -> None:
        while len(ended) < number:
            time.sleep(0.05)
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        killed.append(len(ended))

    killer = threading.Thread(target=kill)
    killer.start()
    asyncio.run(play_all(fleet, plans, ended.append))
    killer.join()
    assert killed[0] < len(plans), "everything had ended before anything was killed"
    assert ray.get([fleet.workers[0].pid.remote(), fleet.gateways[-1].pid.remote()]) != victims
    assert sorted(rollout.plan.key for rollout in ended) == sorted(plan.key for plan in plans)
    assert [rollout.error for rollout in ended] == [None] * len(plans)
    fleet.stop()
    return fleet, ended


def test_killed_actors_cost_no_rollout(cluster: object, tmp_path: Path) -> None:
    """Without a model, whose start takes most of the time of the test below."""
    script = tmp_path / "script.jsonl"
    script.write_text(json.dumps({"text": "the answer is 4"}))
    config = RolloutConfig(environment="tests.e2e.slow:SlowCalculator", tasks=2, group_size=2, concurrency=1)
    engine = EngineConfig(name="scripted", script=str(script), options={"loop": True})
    _, ended = play_and_kill(RolloutRun(rollout=config, engine=engine, out=tmp_path), 1)
    texts = {tuple(sample["token_ids"][-3:]) for rollout in ended for sample in rollout.samples}
    assert len(texts) == 1 and all(rollout.samples for rollout in ended)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_actors_cost_no_token(cluster: object, tmp_path: Path) -> None:
    config = RolloutConfig(
        environment="tests.e2e.slow:SlowCalculator", tasks=4, group_size=3, concurrency=4, timeout_s=600
    )
    fleet, ended = play_and_kill(RolloutRun(rollout=config, out=tmp_path), 2)
    lost = [part for rollout in ended for part in rollout.coverage["untrained"]]
    assert all(0 < part["tokens"] <= config.max_tokens and part["why"] for part in lost), (
        "more than the turn in flight was lost"
    )
    assert {gateway_number(fleet, rollout) for rollout in ended} == {0, 1}
    expected = undisturbed(config, tmp_path / "quiet")
    found = {rollout.plan.key: tokens(rollout) for rollout in ended}
    assert found == expected, "a rollout that lived through a crash sampled other tokens than an undisturbed one"


@pytest.mark.slow
def test_the_log_has_the_tracebacks_of_actors(
    cluster: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokentrue.cli.main import run

    sets = (
        "rollout.environment=tests.e2e.slow:BrokenCalculator",
        "rollout.tasks=1",
        "rollout.group_size=2",
        "gateways=1",
        "workers=1",
    )
    code = run(
        "rollout", ["--ray", "auto", "--out", str(tmp_path), *(part for each in sets for part in ("--set", each))]
    )
    log = tmp_path / "rollouts.log"
    said = " ".join(capsys.readouterr().out.split())
    assert code == 1 and f"tracebacks in {log}" in said
    assert log.read_text().count('raise ValueError("the agent broke")') == 2


def gateway_number(fleet: Fleet, rollout: Rollout) -> int:
    return fleet.gateways.index(fleet.gateways_for(rollout.plan)[0])


def tokens(rollout: Rollout) -> list[list[int]]:
    return [list(sample["token_ids"]) for sample in rollout.samples]


def undisturbed(config: RolloutConfig, out: Path) -> dict[str, list[list[int]]]:
    """The same rollouts in one process, without Ray."""
    from tokentrue.cli.rollout import play

    ended: list[Rollout] = []
    asyncio.run(
        play(RolloutRun(rollout=config, out=out, store="memory"), plan_rollouts(config), ended.append, quiet=True)
    )
    return {rollout.plan.key: tokens(rollout) for rollout in ended}
