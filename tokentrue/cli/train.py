"""tokentrue train: the reference trainer, live against a gateway of its own or offline from a file of samples.

One process, or `torchrun --nproc-per-node=N -m tokentrue train --config F.toml`: rank 0 then runs gateway, engine and environment, and
all ranks train. The output directory holds checkpoints, `metrics.jsonl`, TensorBoard files and the resolved configuration.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokentrue.cli.config import as_mapping, read
from tokentrue.cli.wiring import EngineConfig, ModelConfig, small_model
from tokentrue.environments import RolloutConfig
from tokentrue.errors import ConfigError

if TYPE_CHECKING:
    from tokentrue.cli.training import Costs
    from tokentrue.mismatch import LossConfig
    from tokentrue.train import OptimConfig, Store, TrainConfig
    from tokentrue.types import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpec:
    """`name` is one of the losses of `tokentrue.mismatch.LOSSES`; `options` change its fields; `correction` names a preset."""

    name: str = "dapo"
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    correction: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSection:
    """The trainer's settings; see tokentrue.train.TrainConfig, which they become."""

    steps: int = 20
    baseline: str = "grpo"
    minibatches: int = 1
    epochs: int = 1
    micro_tokens: int = 4096
    lag: int = 0
    exact: bool = True
    drop_idle_rows: bool = True
    checkpoint_every: int = 0
    keep_checkpoints: int = 2
    groups_per_step: int = 8  # from a file; live rounds have rollout.tasks groups


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimSection:
    """AdamW; see tokentrue.train.OptimConfig."""

    lr: float = 2.5e-4
    betas: tuple[float, ...] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    schedule: str = "constant"
    warmup: int = 0
    final: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRun:
    """`samples` trains from a file; without it rounds are played live by the `rollout` section."""

    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    train: TrainSection = field(default_factory=TrainSection)
    optim: OptimSection = field(default_factory=OptimSection)
    loss: LossSpec = field(default_factory=LossSpec)
    samples: Path | None = None
    out: Path = Path("out/train")
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 2
    tensorboard: bool = True


def command(
    config: Annotated[Path | None, typer.Option("--config", help="a TOML file; flags win over it")] = None,
    out: Annotated[Path | None, typer.Option(help="output directory; a run that is there already is gone on with")] = None,
    samples: Annotated[Path | None, typer.Option(help="train from this file of samples instead of live rollouts")] = None,
    steps: Annotated[int | None, typer.Option(help="training steps")] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", help="any setting: optim.lr=1e-4")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print a JSON line per step")] = False,
) -> int:
    """Train with REINFORCE, GRPO, PPO or any loss of tokentrue.mismatch; exact, resumable, reproducible."""
    settings = read(TrainRun, config, sets or (), {"out": out, "samples": samples, "train.steps": steps})
    from tokentrue.cli.training import quiet_libraries
    from tokentrue.train import join, leave

    quiet_libraries(settings.threads)
    ranks = join(settings.device)
    try:
        asyncio.run(run(settings, ranks, as_json=as_json))
    finally:
        leave()
    return 0


async def run(settings: TrainRun, ranks: Any, *, as_json: bool = False) -> list[Any]:
    from tokentrue.cli.training import Costs, progress_bar
    from tokentrue.train import train

    trainer, run_hash = trainer_for(settings, ranks)
    store, first = store_for(settings, run_hash)
    quiet = as_json or not ranks.first
    if first and not quiet:
        print(f"  resuming at step {first}")
    costs = Costs()
    with (
        written(settings, ranks, run_hash, first) as write,
        progress_bar("training", max(0, trainer.config.steps - first), quiet=quiet) as advance,
    ):

        def heard(report: Any, seconds: Mapping[str, float]) -> None:
            costs.add(seconds)
            write(report, seconds)
            if as_json and ranks.first:
                row = {"step": report.step, "policy_version": report.version, **report.metrics, "seconds": dict(seconds)}
                print(json.dumps(row), flush=True)
            shown = report.metrics
            advance(f"reward {shown['reward']:.3f}  loss {shown['update/loss']:+.4f}  |g| {shown['update/grad_norm']:.2f}")

        async with source_for(settings, ranks) as (rounds, publish):
            reports = await train(trainer, rounds, publish, store=store, on_step=heard)
    if not quiet:
        summed_up(settings, reports, costs)
    return reports


def store_for(settings: TrainRun, run_hash: str) -> tuple[Store, int]:
    """Where checkpoints go, and the step to go on from. Another configuration's run is refused before anything of it is touched."""
    from tokentrue.samples import sample_from_json, sample_to_json
    from tokentrue.train import Store
    from tokentrue.train.checkpoint import latest, state_of

    directory = settings.out / "checkpoints"
    newest = latest(directory)
    first = 0 if newest is None else state_of(newest, run_hash=run_hash)[0]
    model_dir = Path(model_path(settings))
    return Store(directory=directory, run_hash=run_hash, model_dir=model_dir, to_json=sample_to_json, from_json=sample_from_json), first


@contextlib.contextmanager
def written(settings: TrainRun, ranks: Any, run_hash: str, first: int) -> Iterator[Callable[[Any, Mapping[str, float]], None]]:
    """The resolved configuration, then a row of metrics per step; rank 0 alone writes."""
    if not ranks.first:
        yield lambda report, seconds: None
        return
    from tokentrue.train import MetricsWriter

    settings.out.mkdir(parents=True, exist_ok=True)
    (settings.out / "config.json").write_text(json.dumps(as_mapping(settings), indent=1, sort_keys=True))
    provenance = {"run": run_hash, "model": settings.model.shown, "engine": settings.engine.name, "loss": settings.loss.name}
    writer = MetricsWriter(settings.out, provenance=provenance, first_step=first, tensorboard=settings.tensorboard)
    try:
        yield lambda report, seconds: writer.write(report.step, report.version, report.metrics, seconds)
    finally:
        writer.close()


def trainer_for(settings: TrainRun, ranks: Any) -> tuple[Any, str]:
    import torch
    from transformers import AutoModelForCausalLM

    from tokentrue.train import OptimConfig, TrainConfig, Trainer, config_hash, shard

    section = {name: getattr(settings.train, name) for name in TrainSection.__dataclass_fields__}
    config = TrainConfig(**section, temperature=settings.rollout.temperature, seed=settings.rollout.seed)
    optim_section = {name: getattr(settings.optim, name) for name in OptimSection.__dataclass_fields__}
    optim = OptimConfig(**{**optim_section, "betas": tuple(settings.optim.betas)})
    loss = loss_for(settings.loss)
    if config.exact and settings.engine.name != "exact" and settings.samples is None:
        raise ConfigError(f"train.exact: engine {settings.engine.name!r} is not exact; set train.exact=false, or use the exact engine")
    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if settings.dtype not in kinds:
        raise ConfigError(f"dtype: {settings.dtype!r} is not one of {', '.join(kinds)}")

    def load() -> Any:
        loaded: Any = AutoModelForCausalLM.from_pretrained(model_path(settings), dtype=kinds[settings.dtype])
        return loaded.to(settings.device)

    model = load()
    wants_reference = loss.penalty is not None and loss.penalty.against == "reference"
    reference = load().requires_grad_(False) if wants_reference else None
    trainer = Trainer(shard(model, ranks), config=config, optim=optim, loss=loss, ranks=ranks, reference=reference)
    return trainer, config_hash(identity(config, optim), optim, loss, settings.rollout, settings.model)


def identity(config: TrainConfig, optim: OptimConfig) -> TrainConfig:
    """What of the configuration the bits hang on: a run with a constant rate may be made longer, and checkpoints may come more often."""
    steps = 1 if optim.schedule == "constant" else config.steps
    return replace(config, steps=steps, checkpoint_every=0, keep_checkpoints=1)


def model_path(settings: TrainRun) -> str:
    return settings.model.path or str(small_model())


def loss_for(spec: LossSpec) -> LossConfig:
    from tokentrue.mismatch import PRESETS, Penalty, loss_named

    options = dict(spec.options)
    if isinstance(options.get("penalty"), Mapping):
        options["penalty"] = Penalty(**options["penalty"])
    if spec.correction is not None:
        if spec.correction not in PRESETS:
            raise ConfigError(f"loss.correction: no preset {spec.correction!r}; choose one of {', '.join(PRESETS)}")
        options["correction"] = PRESETS[spec.correction]
    try:
        return loss_named(spec.name, **options)
    except TypeError as error:
        raise ConfigError(f"loss.options: {error}") from error


@contextlib.asynccontextmanager
async def source_for(settings: TrainRun, ranks: Any) -> AsyncIterator[tuple[Any, Any]]:
    """Rounds and where weights go: live on rank 0, from a file, or nothing on the other ranks."""
    from tokentrue.train import Publisher, SourceRounds

    if settings.samples is not None:
        yield SourceRounds(FileSource(settings.samples), settings.train.groups_per_step), Publisher()
        return
    if not ranks.first:
        yield None, Publisher()
        return
    from tokentrue.cli.embedded import embedded_gateway
    from tokentrue.cli.playing import GatewayRounds
    from tokentrue.cli.wiring import ServeConfig, ServerConfig
    from tokentrue.environments.http import GatewaySessions

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
        yield GatewayRounds(settings.rollout, sessions), Publisher(here.provider)


class FileSource:
    """Groups of a samples file, in its order: neighbours with the same group name belong together."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def groups(self) -> Iterator[list[Sample]]:
        from tokentrue.samples import read_samples

        for _, members in groupby(read_samples(self._path), key=lambda sample: sample.group or sample.session_id):
            scored = [sample for sample in members if sample.reward is not None]
            if scored:
                yield scored


def summed_up(settings: TrainRun, reports: list[Any], costs: Costs) -> None:
    if not reports:
        print(f"  nothing left to do: {settings.out} has all {settings.train.steps} steps")
        return
    last = reports[-1]
    compared = sum(report.agreement.compared for report in reports)
    differing = sum(report.agreement.differing for report in reports)
    first = reports[0].metrics["reward"]
    print(f"  {len(reports)} steps, reward {first:.3f} → {last.metrics['reward']:.3f}, policy version {last.version}")
    print(f"  exactness: {differing} of {compared:,} log-probabilities differ")
    print(f"  a step: {costs.line()}")
    print(f"  weights in {settings.out / 'checkpoints'}; `tokentrue serve --model` takes any of them")
    print(f"  metrics in {settings.out / 'metrics.jsonl'}; tensorboard --logdir {settings.out / 'tensorboard'}")
