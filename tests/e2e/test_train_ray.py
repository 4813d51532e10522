"""Training with engines and environments on a real local Ray: the same bits as in one process, also when a gateway is
killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from tokentrue.cli.main import run as command
from tokentrue.cluster import training
from tokentrue.cluster.rollout import Fleet

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Ray's own: unclosed sockets, a future default
    pytest.mark.slow,
    pytest.mark.timeout(900),
]
STEPS = 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    quiet = {"include_dashboard": False, "logging_level": "error", "log_to_driver": False}
    ray.init(address=None, _node_ip_address="127.0.0.1", num_cpus=2, object_store_memory=80_000_000, **quiet)
    yield ray
    ray.shutdown()


class SlowGateway:
    """Stands in for a gateway that takes a while to start; it has the newest weights' version then."""

    def __init__(self, newest: Any) -> None:
        time.sleep(1.0)
        held = ray.get(newest.get.remote())
        self._version = 0 if held is None else held[1]

    def publish(self, weights: Any, version: int) -> None:
        self._version = version

    def version(self) -> int:
        return self._version

    def pid(self) -> int:
        return os.getpid()


def test_a_gateway_that_is_being_started_again_gets_the_weights(cluster: Any) -> None:
    newest = training.start_newest(cluster, "newest")
    gateway = cluster.remote(num_cpus=0, max_restarts=-1, max_concurrency=64)(SlowGateway).remote(newest)
    os.kill(ray.get(gateway.pid.remote()), signal.SIGKILL)
    fleet: Any = SimpleNamespace(gateways=[gateway])
    asyncio.run(training.FleetSink(fleet, newest).publish([("w", torch.ones(2))], version=3))
    assert ray.get(gateway.version.remote()) == 3


def test_the_actor_that_knows_the_newest_weights_may_die(cluster: Any) -> None:
    """Then a gateway dies, too: it still gets them before it serves."""
    newest = training.start_newest(cluster, "newest-of-this-test")
    gateway = cluster.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(SlowGateway).remote(newest)
    fleet: Any = SimpleNamespace(gateways=[gateway])

    async def run() -> int:
        sink = training.FleetSink(fleet, newest)
        async with sink.keep_newest():
            await sink.publish([("w", torch.ones(2))], version=3)
            for actor in (newest, gateway):
                os.kill(await actor.pid.remote(), signal.SIGKILL)
            return await asyncio.wait_for(gateway.version.remote(), 60)

    assert asyncio.run(run()) == 3
    cluster.kill(newest)
    cluster.kill(gateway)


def settings(out: Path) -> list[str]:
    sets = {
        "rollout.tasks": 3, "rollout.group_size": 4, "rollout.timeout_s": 600, "train.steps": STEPS, "train.lag": 1, "optim.lr": 4e-4,
        "log": "[]", "threads": 1,
    }  # fmt: skip
    return ["--out", str(out), "--json", *(part for key, value in sets.items() for part in ("--set", f"{key}={value}"))]


def rows_on_file(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_a_run_on_ray_has_the_bits_of_one_process_and_survives_a_gateway(
    cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleets: list[Fleet] = []
    out, killed = tmp_path / "ray", list[int]()

    def note(*args: Any, **options: Any) -> Fleet:
        fleets.append(Fleet(*args, **options))
        return fleets[-1]

    def kill() -> None:
        """A gateway of the second version dies: started again, it must not have the weights of its start."""
        metrics = out / "metrics.jsonl"
        until = time.monotonic() + 600
        while not (metrics.exists() and metrics.read_text()) and time.monotonic() < until:
            time.sleep(0.05)
        killed.append(ray.get(fleets[0].gateways[0].pid.remote()))
        os.kill(killed[0], signal.SIGKILL)

    monkeypatch.setattr(training, "Fleet", note)
    killer = threading.Thread(target=kill)
    killer.start()
    code = command("train", ["--ray", "auto", *settings(out)])
    killer.join()
    said = capsys.readouterr()
    assert code == 0, said.err
    assert killed, "nothing was killed"
    rows = rows_on_file(out)
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert [row["staleness_max"] for row in rows] == [0, 1, 1]
    assert all(row["exact_differing"] == 0 and row["rollouts/failed"] == 0 for row in rows)
    assert command("train", settings(tmp_path / "alone")) == 0
    alone = rows_on_file(tmp_path / "alone")
    for name in ("reward", "update/loss", "update/grad_norm", "tokens"):
        assert [row[name] for row in rows] == [row[name] for row in alone], name
    weights = [
        (folder / "checkpoints" / "latest" / "model.safetensors").read_bytes() for folder in (out, tmp_path / "alone")
    ]
    assert weights[0] == weights[1]
