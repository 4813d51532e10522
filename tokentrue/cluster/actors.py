"""The two actor classes; importing this needs Ray.

A restarted `GatewayActor` restores its sessions from its journal; with a shared PostgreSQL record, any gateway resumes
the sessions of one that died. A `RolloutActor` restarts a lost rollout in the same session and gets the recorded
replies, so a death costs only the current turn of the affected rollouts.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from tokentrue.environments import Plan, Rollout, failed_rollout, load_environment, run_one
from tokentrue.environments.http import GatewaySessions, resumed_id
from tokentrue.errors import SessionConflict

PATIENCE_S = 120.0
ANSWER_S = 10.0  # after which another actor is tried instead of one that is restarting


class GatewayActor:
    """`settings` is a ServeConfig whose store outlives the process. Listens at its node's address. `newest` names the
    `NewestWeights` actor of a training run: its weights are loaded before `address` returns.
    """

    def __init__(self, settings: Any, admin_key: str, threads: int = 1, newest: str = "") -> None:
        os.environ["TOKENTRUE_ADMIN_KEY"] = admin_key
        from tokentrue.app.background import BackgroundGateway
        from tokentrue.app.libraries import quiet_libraries

        quiet_libraries(threads)
        self._newest = newest
        self._version = 0  # of the last published weights
        here = replace(settings, server=replace(settings.server, host=node_address()))
        self._gateway = BackgroundGateway(settings=here)
        self._starting = ThreadPoolExecutor(1).submit(self._start)

    def _start(self) -> str:
        """Returns the address. Raises only RuntimeError: other types could look like an absent gateway."""
        try:
            self._gateway.__enter__()
            if self._newest:
                self._load_newest()
            return self._gateway.url
        except Exception as error:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    def _load_newest(self) -> None:
        import ray

        here: Any = ray
        held = here.get(here.get_actor(self._newest).get.remote())
        if held is not None:
            (reference,), version = held
            self._load(here.get(reference), version)

    def _load(self, weights: Mapping[str, Any], version: int) -> None:
        self._gateway.publish(weights, version=version)
        self._version = version

    def address(self) -> str:
        return self._starting.result()

    def publish(self, weights: Mapping[str, Any], version: int) -> None:
        self.address()
        self._load(weights, version)

    def version(self) -> int:
        self.address()
        return self._version

    def pid(self) -> int:
        return os.getpid()


def node_address() -> str:
    import ray

    util: Any = ray.util
    return str(util.get_node_ip_address())


class RolloutActor:
    def __init__(self, rollout: Any, admin_key: str) -> None:
        self._config = rollout
        self._environment = load_environment(rollout.environment, rollout.options)
        self._admin_key = admin_key

    async def play(self, plan: Plan, gateways: Sequence[Any]) -> Rollout:
        """`gateways`: actor handles that can serve the session, the pinned one first."""
        return await play_through(
            self._environment, plan, lambda: find_gateway(gateways), self._config, self._admin_key
        )

    def pid(self) -> int:
        return os.getpid()


async def find_gateway(gateways: Sequence[Any]) -> str:
    """Address of the first gateway whose actor answers; waits if there is only one."""
    import ray.exceptions

    async def ask(gateway: Any) -> str:
        return await gateway.address.remote()

    for gateway in gateways[:-1]:
        with contextlib.suppress(TimeoutError, ray.exceptions.RayActorError):
            return await asyncio.wait_for(ask(gateway), ANSWER_S)
    return await ask(gateways[-1])


async def play_through(
    environment: Any, plan: Plan, whereabouts: Callable[[], Awaitable[str]], config: Any, admin_key: str
) -> Rollout:
    """Runs one rollout; restarts it in its session while the gateway is absent, for up to `PATIENCE_S`."""
    began, end = time.perf_counter(), math.inf
    while True:
        try:
            address = await whereabouts()
            async with GatewaySessions(
                address,
                sampling=config.sampling,
                pin=config.pin,
                admin_key=admin_key,
                resume=True,
                is_retried=is_conflict_or_absence,
            ) as sessions:
                try:
                    return await run_one(
                        environment, plan, sessions, timeout_s=config.timeout_s, is_raised=is_conflict_or_absence
                    )
                except SessionConflict:  # it had ended, and the actor that reported it died
                    session_id, reward, samples, coverage = await sessions.read_ended(plan)
            return Rollout(
                plan=plan, session_id=session_id, reward=reward, error=None, seconds=time.perf_counter() - began, samples=samples,
                coverage=coverage,
            )  # fmt: skip
        except Exception as error:
            if not is_absence(error):
                return failed_rollout(plan, error, began, session_id=resumed_id(plan))
            end = min(end, time.perf_counter() + PATIENCE_S)
            if time.perf_counter() >= end:
                said = f"the gateway was away for {PATIENCE_S:g} s: {error}"
                return failed_rollout(plan, said, began, session_id=resumed_id(plan))
        await asyncio.sleep(0.5)


def is_conflict_or_absence(error: Exception) -> bool:
    return isinstance(error, SessionConflict) or is_absence(error)


def is_absence(trouble: BaseException) -> bool:
    """True if a gateway or its actor was unreachable; False for a refusal or a failed agent."""
    import httpx
    import openai
    import ray.exceptions

    from tokentrue.errors import EngineUnreachable, GatewayUnreachable

    kinds = (
        openai.APIConnectionError,
        openai.InternalServerError,
        httpx.TransportError,
        EngineUnreachable,
        GatewayUnreachable,
        ray.exceptions.RayActorError,
        ConnectionError,
    )
    return isinstance(trouble, kinds)
