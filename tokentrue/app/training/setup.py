"""Sets up a training run from its configuration: trainer, checkpoint store and source of batches."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tokentrue.app.background import Embedded, embedded_gateway
from tokentrue.app.rollout.rollouts import RolloutRounds, Share, evaluate
from tokentrue.app.training.sample_files import SampleFile, read_vocabulary_size
from tokentrue.app.training.settings import TrainRun, loss_for
from tokentrue.app.wiring import EngineConfig, ServeConfig, ServerConfig
from tokentrue.environments import RolloutConfig
from tokentrue.environments.http import GatewaySessions
from tokentrue.hub import load_causal_model
from tokentrue.json_types import JsonObject
from tokentrue.providers.registry import REMOTE

if TYPE_CHECKING:
    from tokentrue.train import OptimConfig, Store, TrainConfig
    from tokentrue.train.evaluation import Evaluator
    from tokentrue.train.probing import Probe, UpdateGate


def trainer_for(settings: TrainRun, ranks: Any) -> tuple[Any, str]:
    from tokentrue.train import Trainer, config_hash, shard

    config = replace(settings.train, temperature=settings.rollout.temperature, seed=settings.rollout.seed)
    if settings.samples is not None:  # the same rows repeat: waiting cannot help
        config = replace(config, max_idle_steps=0, offline=True)
    optim, loss = settings.optim, loss_for(settings.loss)

    def load() -> Any:
        return load_causal_model(settings.model_path, dtype=settings.dtype).to(settings.device)

    model = load()
    if config.checkpoint_activations:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    wants_reference = bool(config.kl.reward_coefficient) or (
        loss.penalty is not None and loss.penalty.against == "reference"
    )
    reference = shard(load().requires_grad_(False), ranks) if wants_reference else None
    trainer = Trainer(shard(model, ranks), config=config, optim=optim, loss=loss, ranks=ranks, reference=reference)
    rollout = comparable_config(settings.rollout)
    return trainer, config_hash(
        identity(config, optim), trainer.optim, loss, rollout, settings.model, RunFacts.of(settings)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    dtype: str
    device: str
    engine: str
    samples: str

    @staticmethod
    def of(settings: TrainRun) -> RunFacts:
        path = settings.samples
        samples = "" if path is None else f"{path.name} {path.stat().st_size if path.is_file() else 0}"
        engine = "" if path is not None else settings.engine.name
        return RunFacts(dtype=settings.dtype, device=settings.device.partition(":")[0], engine=engine, samples=samples)


def comparable_config(rollout: RolloutConfig) -> RolloutConfig:
    return replace(rollout, concurrency=1, timeout_s=1.0, max_failed=1.0)


def identity(config: TrainConfig, optim: OptimConfig) -> TrainConfig:
    """The part of the configuration that results depend on; with a constant rate `steps` may grow."""
    steps = 1 if optim.schedule == "constant" else config.steps
    alike: JsonObject = {
        "checkpoint_every": 0, "checkpoint_minutes": 0.0, "keep_checkpoints": 1, "shard_checkpoint_gib": 0.0, "peak_tflops": 0.0,
        "max_idle_steps": 0, "max_skipped_updates": 0, "acceptance": replace(config.acceptance, max_refused=0),
    }  # fmt: skip
    return replace(config, steps=steps, **alike)


def store_for(settings: TrainRun, run_hash: str) -> tuple[Store, int]:
    """The checkpoint store, and the step to resume at. Refuses a run of another configuration or other samples
    before changing it."""
    from tokentrue.samples import sample_from_json, sample_to_json
    from tokentrue.train import Store
    from tokentrue.train.checkpoint import file_digest, latest, read_state

    digest = "" if settings.samples is None else file_digest(settings.samples)
    directory = settings.out / "checkpoints"
    newest = latest(directory)
    first = 0 if newest is None else read_state(newest, run_hash=run_hash, samples_digest=digest)[0]
    store = Store(
        directory=directory, run_hash=run_hash, model=settings.model_path, to_json=sample_to_json, from_json=sample_from_json,
        samples_digest=digest,
    )  # fmt: skip
    return store, first


def file_for(settings: TrainRun, *, trust: bool) -> SampleFile | None:
    if settings.samples is None:
        return None
    source = SampleFile(settings.samples, model=settings.model_path, trust=trust)
    if len(source) < settings.train.groups_per_step:
        source.notes.append(
            f"train.groups_per_step is {settings.train.groups_per_step}: each step trains on all {len(source)} groups"
        )
    return source


@contextlib.asynccontextmanager
async def source_for(
    settings: TrainRun, ranks: Any, file: SampleFile | None
) -> AsyncGenerator[tuple[Any, Any, Any], None]:
    """Rounds, weight sink and evaluation. With embedded engines every rank has a gateway and an engine; otherwise
    only rank 0 reads the file or calls the servers."""
    from tokentrue.train import Publisher, SourceRounds
    from tokentrue.train.data.rounds import NoRounds

    if file is not None:
        yield SourceRounds(file, settings.train.groups_per_step) if ranks.first else NoRounds(), Publisher(), None
        return
    if not ranks.first and settings.engine.name in REMOTE:
        yield (
            NoRounds(),
            Publisher(probe=probe_for(settings, None), gate=gate_for(settings, None)),
            evaluator_for(settings, None, ranks),
        )
        return
    engine = engine_for(settings)
    store = f"sqlite:{settings.out / ('sessions.sqlite' if ranks.first else f'sessions-{ranks.rank}.sqlite')}"
    serve = ServeConfig(model=settings.model, engine=engine, server=ServerConfig(port=0, store=store))
    async with (
        embedded_gateway(serve) as here,
        open_run_sessions(here, settings.rollout) as sessions,
    ):
        publisher = Publisher(
            here.provider, probe=probe_for(settings, here.provider), gate=gate_for(settings, here.provider)
        )
        rounds = RolloutRounds(settings.rollout, sessions, share=share_for(settings, ranks))
        yield rounds, publisher, evaluator_for(settings, here, ranks)


def share_for(settings: TrainRun, ranks: Any) -> Share:
    return Share() if settings.engine.name in REMOTE else Share(rank=ranks.rank, world=ranks.world)


def open_run_sessions(here: Embedded, rollout: RolloutConfig) -> GatewaySessions:
    return GatewaySessions(
        here.base_url, sampling=rollout.sampling, pin=rollout.pin, admin_key=here.admin_key, purge=True
    )


def evaluator_for(settings: TrainRun, here: Embedded | None, ranks: Any) -> Evaluator | None:
    from tokentrue.train.evaluation import Evaluator

    wanted = settings.evaluation
    if not wanted.every:
        return None
    greedy = replace(settings.rollout, temperature=wanted.temperature)

    async def play() -> list[list[float]]:
        if here is None:
            return []
        async with open_run_sessions(here, greedy) as sessions:
            return await evaluate(
                greedy, sessions, tasks=wanted.tasks, attempts=wanted.attempts, share=share_for(settings, ranks)
            )

    return Evaluator(wanted, play, ranks)


def engine_for(settings: TrainRun) -> EngineConfig:
    """Embedded on the trainer's device, or remote, with a shared folder for weights."""
    options = dict(settings.engine.options)
    if settings.engine.name == "exact":
        options = {"device": settings.device, "dtype": settings.dtype, **options}
    elif settings.engine.name in REMOTE:
        options = {"weights_dir": str((settings.out / "published").absolute()), **options}
    return replace(settings.engine, options=options)


def probe_for(settings: TrainRun, pool: Any) -> Probe | None:
    """Remote engines are probed after every publication; the exact engine is compared at every token of every step."""
    from tokentrue.train.probing import Probe

    if settings.engine.name not in REMOTE:
        return None
    return Probe(lambda: pool.in_use, vocabulary=read_vocabulary_size(settings.model_path))


def gate_for(settings: TrainRun, pool: Any) -> UpdateGate | None:
    from tokentrue.train.probing import UpdateGate

    wanted = settings.train.acceptance
    return UpdateGate(wanted, lambda: pool.in_use) if wanted.enabled else None
