"""tokentrue train --ray: gateways with their engines, and environments, as actors; the trainer in this process.

Each version of the weights is put once into Ray's object store; every gateway loads and confirms it before anything is
sampled. A `NewestWeights` actor on the trainer's node keeps the newest for gateways that Ray restarts; if that actor
dies, the trainer puts them again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncGenerator, Iterable
from dataclasses import replace
from typing import Any

from tokentrue.app.rollouts import RolloutRounds, RolloutRun
from tokentrue.app.training import TrainRun, engine_for
from tokentrue.app.wiring import REMOTE
from tokentrue.cluster.rollout import Fleet, attach, await_actor, import_ray
from tokentrue.errors import ConfigError, EngineError

# Retries of calls whose actor died: without it Ray fails them while the actor restarts.
REPEATED = {"max_task_retries": -1}
KEEP_S = 1.0  # between two checks that `NewestWeights` still has them


class NewestWeights:
    """Actor that holds the object-store reference and version of the newest weights."""

    def __init__(self) -> None:
        self._held: tuple[list[Any], int] | None = None
        self._is_known = asyncio.Event()
        if not import_ray().get_runtime_context().was_current_actor_reconstructed:
            self._is_known.set()

    async def put(self, references: list[Any], version: int) -> None:
        """`references` is a list of one, so that Ray passes the reference and not the weights."""
        self._held = (references, version)
        self._is_known.set()

    async def get(self) -> tuple[list[Any], int] | None:
        """None before the first publication. A restarted actor waits for `put`."""
        await self._is_known.wait()
        return self._held

    async def is_known(self) -> bool:
        return self._is_known.is_set()

    async def pid(self) -> int:
        return os.getpid()


def start_newest(ray: Any, name: str) -> Any:
    """Placed on the trainer's node: without that the run ends anyway."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    alive = {"max_restarts": -1, **REPEATED, "scheduling_strategy": here}
    return ray.remote(num_cpus=0, max_concurrency=64, name=name, **alive)(NewestWeights).remote()


class FleetSink:
    """WeightSink to every gateway's engine."""

    def __init__(self, fleet: Fleet, newest: Any) -> None:
        self._fleet, self._newest = fleet, newest
        self._held: tuple[list[Any], int] | None = None

    async def publish(self, weights: Iterable[tuple[str, Any]], *, version: int) -> None:
        held = await asyncio.to_thread(lambda: {name: tensor.detach().cpu().contiguous() for name, tensor in weights})
        reference = await asyncio.to_thread(import_ray().put, held)
        self._held = ([reference], version)
        await await_actor(self._newest.put.remote(*self._held), "keep the weights")
        await asyncio.gather(*(self._publish(gateway, reference, version) for gateway in self._fleet.gateways))

    @contextlib.asynccontextmanager
    async def keep_newest(self) -> AsyncGenerator[None, None]:
        """While the block runs, puts the weights again whenever Ray restarted `NewestWeights`."""
        keeping = asyncio.create_task(self._keep())
        try:
            yield
        finally:
            keeping.cancel()

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(KEEP_S)
            with contextlib.suppress(EngineError):  # publishing says so, too
                if self._held and not await await_actor(self._newest.is_known.remote(), "keep the weights"):
                    await await_actor(self._newest.put.remote(*self._held), "keep the weights")

    async def _publish(self, gateway: Any, reference: Any, version: int) -> None:
        """If a gateway dies meanwhile, Ray restarts it with the newest weights and repeats the calls."""
        publish, read = (method.options(**REPEATED) for method in (gateway.publish, gateway.version))
        await await_actor(publish.remote(reference, version), "publish the weights")
        found = await await_actor(read.remote(), "publish the weights")
        if found != version:
            raise EngineError(f"a gateway's engine has the weights of version {found}, not of {version}")


@contextlib.asynccontextmanager
async def source_on_ray(settings: TrainRun, ranks: Any, *, address: str) -> AsyncGenerator[tuple[Any, Any, None], None]:
    """Yields rounds and the weight sink, as `tokentrue.app.training.source_for`; rank 0 has the fleet."""
    from tokentrue.train import Publisher
    from tokentrue.train.loop import NoRounds

    if not ranks.first:
        yield NoRounds(), Publisher(), None
        return
    run = fleet_settings(settings)
    with attach(address) as ray:
        name = f"newest-weights-{secrets.token_hex(8)}"
        newest = start_newest(ray, name)
        fleet = Fleet(run, gateways=run.gateways, workers=run.workers, nodes=settings.ray.nodes, newest=name)
        sink = FleetSink(fleet, newest)
        try:
            async with sink.keep_newest():
                yield RolloutRounds(settings.rollout, play=fleet.play), Publisher(sink), None
        finally:
            fleet.stop()


def fleet_settings(settings: TrainRun) -> RolloutRun:
    """The fleet's settings. Journals belong to this start alone: others may have had other weights."""
    name, evaluation = settings.engine.name, settings.evaluation
    refused = {
        f"engine {name!r}: its servers are reached from here; leave --ray out": name in REMOTE,
        "samples: rollouts of a file need no Ray": settings.samples is not None,
        "evaluation.every: not with --ray": bool(evaluation.every),
        "train.acceptance: not with --ray": settings.train.acceptance.enabled,
    }
    for why, is_so in refused.items():
        if is_so:
            raise ConfigError(f"--ray: {why}")
    journals = settings.out / f"gateways-{secrets.token_hex(4)}"
    options = {name: value for name, value in engine_for(settings).options.items() if name != "device"}
    engine = replace(settings.engine, options={**options, "device": settings.device.partition(":")[0]})
    return RolloutRun(
        rollout=settings.rollout, model=settings.model, engine=engine, out=journals, gateways=settings.ray.gateways,
        workers=settings.ray.workers,
    )  # fmt: skip
