"""tokentrue rollout --ray: gateways and rollout workers as actors.

A rollout belongs to the gateway that its key hashes to. With `nodes` the actors are spread over that many nodes and
share one record, so that other nodes resume the sessions of one that died.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import re
import secrets
import socket
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

from tokentrue.app.rollouts import RolloutRun
from tokentrue.app.wiring import ServeConfig, ServerConfig
from tokentrue.environments import Plan, Rollout, run_plans
from tokentrue.errors import ConfigError, EngineError

JOIN_S = 30.0


class Fleet:
    """The actors of one run, as Ray handles. `newest` names the actor with a training run's weights."""

    def __init__(self, settings: RolloutRun, *, gateways: int, workers: int, nodes: int = 0, newest: str = "") -> None:
        ray = import_ray()
        from tokentrue.cluster.actors import GatewayActor, RolloutActor

        self._ray, self._is_shared = ray, settings.is_shared
        wanted = nodes or settings.nodes
        places = find_nodes(ray, wanted) if wanted > 1 else []
        gateways, workers = max(gateways, len(places)), max(workers, len(places))
        admin_key = secrets.token_hex(20)
        served = [serve_config(settings, number) for number in range(gateways)]
        anywhere = {"max_restarts": -1, "num_cpus": 0, "scheduling_strategy": "SPREAD"}
        gpus = 1 if str(settings.engine.options.get("device", "cpu")).startswith("cuda") else 0
        gateway_class = ray.remote(**anywhere, max_concurrency=64, num_gpus=gpus)(GatewayActor)
        at_once = settings.rollout.concurrency
        worker_class = ray.remote(**anywhere, max_task_retries=-1, max_concurrency=at_once)(RolloutActor)
        self.gateways = [
            place(gateway_class, places, number).remote(config, admin_key, newest=newest)
            for number, config in enumerate(served)
        ]
        self.workers = [
            place(worker_class, places, number).remote(settings.rollout, admin_key) for number in range(workers)
        ]
        self._next_worker = itertools.cycle(self.workers)

    def gateways_for(self, plan: Plan) -> list[Any]:
        """The gateway that the rollout is pinned to, then those that could take over."""
        first = int(hashlib.sha256(plan.key.encode()).hexdigest()[:8], 16) % len(self.gateways)
        return [*self.gateways[first:], *self.gateways[:first]] if self._is_shared else [self.gateways[first]]

    async def play(self, plan: Plan) -> Rollout:
        worker = next(self._next_worker)
        return await await_actor(worker.play.remote(plan, self.gateways_for(plan)), "run the rollouts")

    def stop(self) -> None:
        for actor in (*self.workers, *self.gateways):
            self._ray.kill(actor)


def find_nodes(ray: Any, count: int) -> list[str]:
    """Waits for nodes that are still joining the cluster."""
    end = time.monotonic() + JOIN_S
    while len(alive := sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])) < count:
        if time.monotonic() > end:
            raise ConfigError(f"nodes={count}: the Ray cluster has {len(alive)}")
        time.sleep(0.5)
    return alive[:count]


def place(actor_class: Any, nodes: Sequence[str], number: int) -> Any:
    """Round-robin over `nodes`; any node if that one has died."""
    if not nodes:
        return actor_class
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return actor_class.options(
        scheduling_strategy=NodeAffinitySchedulingStrategy(nodes[number % len(nodes)], soft=True)
    )


def play_on_ray(
    settings: RolloutRun, plans: Sequence[Plan], *, address: str, on_rollout: Callable[[Rollout], None]
) -> None:
    with attach(address):
        fleet = Fleet(settings, gateways=settings.gateways, workers=settings.workers)
        try:
            asyncio.run(play_all(fleet, plans, on_rollout))
        finally:
            fleet.stop()


async def play_all(fleet: Fleet, plans: Sequence[Plan], on_rollout: Callable[[Rollout], None]) -> None:
    async for rollout in run_plans(fleet.play, plans):
        on_rollout(rollout)


async def await_actor(reference: Any, task: str) -> Any:
    """Returns an actor's result; raises EngineError if it cannot start."""
    try:
        return await reference
    except import_ray().exceptions.RayError as error:
        raise EngineError(f"Ray could not {task}: {str(error).strip().splitlines()[-1]}") from error


@contextlib.contextmanager
def attach(address: str) -> Generator[Any, None, None]:
    """Yields this process's Ray, or a connection to `address` for the block; `local` starts one here."""
    ray = import_ray()
    mine = not ray.is_initialized()
    if mine:
        quiet = {"include_dashboard": False, "logging_level": "error", "log_to_driver": False}
        # a local Ray stays on loopback
        where = {"address": None, "_node_ip_address": "127.0.0.1"} if address == "local" else {"address": address}
        require_listener(address)
        try:
            ray.init(**where, **quiet)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(f"--ray {address}: no such Ray ({error}); `local` starts one here") from error
    try:
        yield ray
    finally:
        if mine:
            ray.shutdown()


def require_listener(address: str) -> None:
    """Fails fast: Ray itself retries a wrong address for minutes."""
    found = re.fullmatch(r"(?:ray://)?([^:/]+):(\d+)", address)
    if found is None:
        return
    try:
        socket.create_connection((found[1], int(found[2])), timeout=10).close()
    except OSError as error:
        raise ConfigError(f"--ray {address}: nobody listens there ({error}); `local` starts a Ray here") from error


def serve_config(settings: RolloutRun, number: int) -> ServeConfig:
    own = f"sqlite:{(settings.out / f'gateway-{number}.sqlite').resolve()}"
    store = str(settings.store) if settings.is_shared else own
    return ServeConfig(model=settings.model, engine=settings.engine, server=ServerConfig(port=0, store=store))


def import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ConfigError("--ray needs Ray: pip install 'tokentrue[ray]'") from error
    return ray
