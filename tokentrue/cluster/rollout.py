"""tokentrue rollout --ray: gateways with their engines, and rollout workers, as actors. A rollout belongs to the
gateway that its key hashes to, which restores its sessions from its journal when restarted; with `nodes` they share one
PostgreSQL record, and any gateway resumes the sessions of one that died. A `RolloutActor` restarts a lost rollout in
the same session and gets the recorded replies."""

import asyncio
import contextlib
import hashlib
import itertools
import math
import os
import re
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

from tokentrue.app.rollouts import RolloutRun, sessions_on
from tokentrue.app.wiring import ADMIN_KEY, ServeConfig, ServerConfig
from tokentrue.environments import (
    Environment,
    Plan,
    Rollout,
    RolloutConfig,
    failed_rollout,
    load_environment,
    run_one,
    run_plans,
)
from tokentrue.environments.http import resumed_id
from tokentrue.errors import ConfigError, EngineError, EngineUnreachable, GatewayUnreachable, SessionConflict

JOIN_S = 30.0
PATIENCE_S = 120.0
ANSWER_S = 10.0  # after which another actor is tried instead of one that is restarting


class GatewayActor:
    """`settings` is a ServeConfig whose store outlives the process. Listens at its node's address."""

    def __init__(self, settings: ServeConfig, admin_key: str) -> None:
        os.environ[ADMIN_KEY] = admin_key
        from tokentrue.app.background import BackgroundGateway
        from tokentrue.app.libraries import quiet_libraries

        quiet_libraries(threads=1)
        here = replace(settings, server=replace(settings.server, host=node_address()))
        self._gateway = BackgroundGateway(settings=here)
        self._starting = ThreadPoolExecutor(1).submit(self._start)

    def _start(self) -> str:
        """Raises only RuntimeError: other types could look like an absent gateway."""
        try:
            return self._gateway.__enter__().url
        except Exception as error:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    def address(self) -> str:
        return self._starting.result()

    def pid(self) -> int:
        return os.getpid()


def node_address() -> str:
    return str(import_ray().util.get_node_ip_address())


class RolloutActor:
    def __init__(self, rollout: RolloutConfig, admin_key: str) -> None:
        self._config = rollout
        self._environment = load_environment(rollout.environment, rollout.options)
        self._admin_key = admin_key

    async def play(self, plan: Plan, gateways: Sequence[Any]) -> Rollout:
        """`gateways`: actor handles that can serve the session, the pinned one first."""
        find = partial(find_gateway, gateways)
        return await play_through(self._environment, plan, find, self._config, self._admin_key)

    def pid(self) -> int:
        return os.getpid()


async def find_gateway(gateways: Sequence[Any]) -> str:
    async def ask(gateway: Any) -> str:
        return await gateway.address.remote()

    for gateway in gateways[:-1]:
        with contextlib.suppress(TimeoutError, import_ray().exceptions.RayActorError):
            return await asyncio.wait_for(ask(gateway), ANSWER_S)
    return await ask(gateways[-1])


async def play_through(
    environment: Environment,
    plan: Plan,
    whereabouts: Callable[[], Awaitable[str]],
    config: RolloutConfig,
    admin_key: str,
) -> Rollout:
    """Restarts the rollout in its session while the gateway is absent, for up to `PATIENCE_S`."""
    began, end = time.perf_counter(), math.inf
    while True:
        try:
            url = await whereabouts()
            async with sessions_on(url, config, admin_key, resume=True, is_retried=is_conflict_or_absence) as sessions:
                try:
                    return await run_one(
                        environment, plan, sessions, timeout_s=config.timeout_s, is_raised=is_conflict_or_absence
                    )
                except SessionConflict:  # it had ended, and the actor that reported it died
                    session_id, reward, samples, coverage = await sessions.read_ended(plan)
            return Rollout(
                plan=plan, session_id=session_id, reward=reward, error=None, seconds=time.perf_counter() - began,
                samples=samples, coverage=coverage,
            )  # fmt: skip
        except Exception as error:
            end = min(end, time.perf_counter() + PATIENCE_S)
            if not is_absence(error) or time.perf_counter() >= end:
                said = f"the gateway was away for {PATIENCE_S:g} s: {error}" if is_absence(error) else error
                return failed_rollout(plan, said, began, session_id=resumed_id(plan))
        await asyncio.sleep(0.5)


def is_conflict_or_absence(error: Exception) -> bool:
    return isinstance(error, SessionConflict) or is_absence(error)


def is_absence(trouble: BaseException) -> bool:
    """True if a gateway or its actor was unreachable; False for a refusal or a failed agent."""
    import httpx
    import openai

    sdk = (openai.APIConnectionError, openai.InternalServerError, httpx.TransportError)
    gone = (EngineUnreachable, GatewayUnreachable, import_ray().exceptions.RayActorError, ConnectionError)
    return isinstance(trouble, (*sdk, *gone))


class Fleet:
    def __init__(self, settings: RolloutRun) -> None:
        self._ray, self._is_shared = import_ray(), settings.is_shared
        places = find_nodes(self._ray, settings.nodes) if settings.nodes > 1 else []
        admin_key = secrets.token_hex(20)
        anywhere = {"max_restarts": -1, "num_cpus": 0, "scheduling_strategy": "SPREAD"}
        gpus = 1 if str(settings.engine.options.get("device", "cpu")).startswith("cuda") else 0
        gateway_class = self._ray.remote(**anywhere, max_concurrency=64, num_gpus=gpus)(GatewayActor)
        at_once = settings.rollout.concurrency
        worker_class = self._ray.remote(**anywhere, max_task_retries=-1, max_concurrency=at_once)(RolloutActor)

        def start(kind: Any, count: int, given: Callable[[int], object]) -> list[Any]:
            numbers = range(max(count, len(places)))
            return [place(kind, places, number).remote(given(number), admin_key) for number in numbers]

        self.gateways = start(gateway_class, settings.gateways, partial(serve_config, settings))
        self.workers = start(worker_class, settings.workers, lambda _: settings.rollout)
        self._next_worker = itertools.cycle(self.workers)

    def gateways_for(self, plan: Plan) -> list[Any]:
        first = int(hashlib.sha256(plan.key.encode()).hexdigest()[:8], 16) % len(self.gateways)
        return [*self.gateways[first:], *self.gateways[:first]] if self._is_shared else [self.gateways[first]]

    async def play(self, plan: Plan) -> Rollout:
        try:
            return await next(self._next_worker).play.remote(plan, self.gateways_for(plan))
        except self._ray.exceptions.RayError as error:
            said = str(error).strip().splitlines()[-1]
            raise EngineError(f"Ray could not run the rollouts: {said}") from error

    def stop(self) -> None:
        for actor in (*self.workers, *self.gateways):
            self._ray.kill(actor)


def find_nodes(ray: Any, count: int) -> list[str]:
    end = time.monotonic() + JOIN_S
    while len(alive := sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])) < count:
        if time.monotonic() > end:
            raise ConfigError(f"nodes={count}: the Ray cluster has {len(alive)}")
        time.sleep(0.5)
    return alive[:count]


def place(actor_class: Any, nodes: Sequence[str], number: int) -> Any:
    if not nodes:
        return actor_class
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(nodes[number % len(nodes)], soft=True)
    return actor_class.options(scheduling_strategy=strategy)


def serve_config(settings: RolloutRun, number: int) -> ServeConfig:
    own = f"sqlite:{(settings.out / f'gateway-{number}.sqlite').resolve()}"
    store = str(settings.store) if settings.is_shared else own
    return ServeConfig(model=settings.model, engine=settings.engine, server=ServerConfig(port=0, store=store))


def play_on_ray(
    settings: RolloutRun, plans: Sequence[Plan], *, address: str, on_rollout: Callable[[Rollout], None]
) -> None:
    with attach(address):
        fleet = Fleet(settings)
        try:
            asyncio.run(play_all(fleet, plans, on_rollout))
        finally:
            fleet.stop()


async def play_all(fleet: Fleet, plans: Sequence[Plan], on_rollout: Callable[[Rollout], None]) -> None:
    async for rollout in run_plans(fleet.play, plans):
        on_rollout(rollout)


@contextlib.contextmanager
def attach(address: str) -> Generator[Any]:
    """This process's Ray, or a connection to `address` for the block; `local` starts one here."""
    ray = import_ray()
    mine = not ray.is_initialized()
    if mine:
        quiet = {"include_dashboard": False, "logging_level": "error", "log_to_driver": False}
        # a local Ray stays on loopback; without an address, Ray would look for one that runs, or has run, here
        where = {"address": address, **({"_node_ip_address": "127.0.0.1"} if address == "local" else {})}
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


def import_ray() -> Any:
    try:
        import_module("ray.util")
    except ImportError as error:
        raise ConfigError("--ray needs Ray: pip install 'tokentrue[ray]'") from error
    return import_module("ray")
