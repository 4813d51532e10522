"""Sets up a training run from its configuration: the trainer, the checkpoint store, and where batches come from."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokentrue.app.embedded import embedded_gateway
from tokentrue.app.rollouts import RolloutRounds
from tokentrue.app.sample_files import FileSource
from tokentrue.app.train_run import TrainRun, loss_for
from tokentrue.app.wiring import EngineConfig, ServeConfig, ServerConfig
from tokentrue.environments.http import GatewaySessions

if TYPE_CHECKING:
    from tokentrue.train import OptimConfig, Store, TrainConfig


def trainer_for(settings: TrainRun, ranks: Any) -> tuple[Any, str]:
    import torch
    from transformers import AutoModelForCausalLM

    from tokentrue.train import Trainer, config_hash, shard

    config = replace(settings.train, temperature=settings.rollout.temperature, seed=settings.rollout.seed)
    if settings.samples is not None:  # the same rows come again: waiting cannot help
        config = replace(config, max_idle_steps=0)
    optim, loss = settings.optim, loss_for(settings.loss)

    def load() -> Any:
        loaded: Any = AutoModelForCausalLM.from_pretrained(settings.model_path, dtype=getattr(torch, settings.dtype))
        return loaded.to(settings.device)

    model = load()
    wants_reference = loss.penalty is not None and loss.penalty.against == "reference"
    reference = load().requires_grad_(False) if wants_reference else None
    trainer = Trainer(shard(model, ranks), config=config, optim=optim, loss=loss, ranks=ranks, reference=reference)
    return trainer, config_hash(identity(config, optim), optim, loss, settings.rollout, settings.model)


def identity(config: TrainConfig, optim: OptimConfig) -> TrainConfig:
    """The part of the configuration that results depend on: with a constant rate `steps` may grow, and checkpoints may come more often."""
    steps = 1 if optim.schedule == "constant" else config.steps
    return replace(config, steps=steps, checkpoint_every=0, keep_checkpoints=1, max_idle_steps=0)


def store_for(settings: TrainRun, run_hash: str) -> tuple[Store, int]:
    """Where checkpoints go, and the step to go on from. Another configuration's run is refused before anything of it is touched."""
    from tokentrue.samples import sample_from_json, sample_to_json
    from tokentrue.train import Store
    from tokentrue.train.checkpoint import latest, state_of

    directory = settings.out / "checkpoints"
    newest = latest(directory)
    first = 0 if newest is None else state_of(newest, run_hash=run_hash)[0]
    model_dir = Path(settings.model_path)
    return Store(directory=directory, run_hash=run_hash, model_dir=model_dir, to_json=sample_to_json, from_json=sample_from_json), first


def file_for(settings: TrainRun, *, trust: bool) -> FileSource | None:
    """The samples to train on, read and checked; None where rollouts are played live."""
    if settings.samples is None:
        return None
    source = FileSource(settings.samples, model=settings.model_path, trust=trust)
    if len(source) < settings.train.groups_per_step:
        source.notes.append(f"train.groups_per_step is {settings.train.groups_per_step}: each step trains on all {len(source)} groups")
    return source


@contextlib.asynccontextmanager
async def source_for(settings: TrainRun, ranks: Any, file: FileSource | None) -> AsyncIterator[tuple[Any, Any]]:
    """Rounds and where weights go: live on rank 0, from a file, or nothing on the other ranks."""
    from tokentrue.train import Publisher, SourceRounds

    if file is not None:
        yield SourceRounds(file, settings.train.groups_per_step), Publisher()
        return
    if not ranks.first:
        yield None, Publisher()
        return
    options = dict(settings.engine.options)
    if settings.engine.name == "exact":
        options = {"device": settings.device, "dtype": settings.dtype, **options}
    engine = EngineConfig(name=settings.engine.name, urls=settings.engine.urls, script=settings.engine.script, options=options)
    store = f"sqlite:{settings.out / 'sessions.sqlite'}"
    serve = ServeConfig(model=settings.model, engine=engine, server=ServerConfig(port=0, store=store))
    async with (
        embedded_gateway(serve) as here,
        GatewaySessions(here.base_url, sampling=settings.rollout.sampling, admin_key=here.admin_key, purge=True) as sessions,
    ):
        yield RolloutRounds(settings.rollout, sessions), Publisher(here.provider)
