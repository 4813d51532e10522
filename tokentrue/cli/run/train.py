"""tokentrue train: the reference trainer, live against its own gateway or offline from a file of samples.

One process, or `torchrun --nproc-per-node=N -m tokentrue train --config F.toml`: every rank runs a gateway, an engine
and its part of the rollouts, and all ranks train. The output directory has checkpoints, `metrics.jsonl`, the files of
`log` and the resolved configuration.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokentrue.app.configuration import as_mapping, read
from tokentrue.app.training import TrainRun
from tokentrue.cli.options import (
    AsJson,
    ConfigFile,
    Device,
    Dtype,
    ModelName,
    OutFolder,
    RayAddress,
    RayNodes,
    Settings,
)
from tokentrue.cli.output import Costs, loading, pluralise, progress_bar, rollout_log
from tokentrue.errors import ConfigError
from tokentrue.plain_json import dumps
from tokentrue.providers.registry import IN_PROCESS, REMOTE, list_names

if TYPE_CHECKING:
    from tokentrue.train.ranks import Ranks
    from tokentrue.train.reporting import StepReport


def command(
    config: ConfigFile = None,
    out: OutFolder = None,
    samples: Annotated[
        Path | None, typer.Option(help="train from this file of samples instead of live rollouts")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="training steps")] = None,
    model: ModelName = None,
    engine: Annotated[str | None, typer.Option(help=list_names(IN_PROCESS + REMOTE))] = None,
    device: Device = None,
    dtype: Dtype = None,
    ray: RayAddress = None,
    nodes: RayNodes = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="with --samples: do not check certificates, masks and duplicates")
    ] = False,
    sets: Settings = None,
    as_json: AsJson = False,
) -> int:
    """Train with REINFORCE, GRPO, PPO or any loss of tokentrue.mismatch; exact, resumable, reproducible."""
    flags = {"out": out, "samples": samples, "train.steps": steps, "model.path": model, "engine.name": engine}
    settings = read(TrainRun, config, sets or (), {**flags, "device": device, "dtype": dtype, "ray.nodes": nodes})
    if nodes is not None and ray is None:
        raise ConfigError("--nodes belongs to --ray")
    check_can_make(settings.out)  # before anything is loaded: report a bad path at once
    from tokentrue.app.libraries import quiet_libraries, require_device
    from tokentrue.train import join, leave

    quiet_libraries(settings.threads)
    require_device(settings.device)
    ranks = join(settings.device)
    settings = replace(settings, device=ranks.device)
    try:
        with rollout_log(settings.out):
            asyncio.run(run(settings, ranks, ray=ray, as_json=as_json, trust=trust))
    finally:
        leave()
    return 0


async def run(
    settings: TrainRun, ranks: Ranks, *, ray: str | None = None, as_json: bool = False, trust: bool = False
) -> list[StepReport]:
    from tokentrue.app.training import file_for, source_for, store_for, trainer_for
    from tokentrue.cli.run.train_report import write_training_report
    from tokentrue.cluster.training import source_on_ray
    from tokentrue.train import train

    file = file_for(settings, trust=trust)
    if file is not None and ranks.first:
        print(*(f"  {note}" for note in file.notes), sep="\n", file=sys.stderr)
    with loading(f"{settings.model.shown}, {settings.dtype} on {settings.device}", quiet=as_json or not ranks.first):
        trainer, run_hash = trainer_for(settings, ranks)
    store, first = store_for(settings, run_hash)
    quiet = as_json or not ranks.first
    if settings.optim.lr is None:
        settings = replace(settings, optim=trainer.optim)
        if not quiet:
            print(f"  learning rate {trainer.optim.lr:g}, by the size of the model (optim.lr sets it)")
    if first and not quiet:
        print(f"  resuming at step {first}")
    costs = Costs()
    with (
        open_metrics(settings, ranks, run_hash, first) as write,
        progress_bar("training", max(0, trainer.config.steps - first), quiet=quiet) as advance,
    ):

        def on_step(report: StepReport, seconds: Mapping[str, float]) -> None:
            costs.add(seconds)
            write(report, seconds)
            if as_json and ranks.first:
                names = {"step": report.step, "policy_version": report.version}
                row = {**names, **report.metrics, **report.speeds, "seconds": dict(seconds)}
                print(dumps(row).decode(), flush=True)
            shown = report.metrics
            if shown.get("update/refused") and ranks.first:
                print(f"  {refusal_line(report)}", file=sys.stderr)
            advance(
                f"reward {shown['reward']:.3f}  loss {shown['update/loss']:+.4f}  |g| {shown['update/grad_norm']:.2f}"
            )

        source = source_for(settings, ranks, file) if ray is None else source_on_ray(settings, ranks, address=ray)
        async with source as (rounds, publish, evaluator):
            reports = await train(trainer, rounds, publish, store=store, evaluator=evaluator, on_step=on_step)
    page = write_training_report(settings) if ranks.first else None
    if not quiet:
        print_summary(settings, reports, costs)
        if page is not None:
            print(f"  report: {page}")
    return reports


@contextlib.contextmanager
def open_metrics(
    settings: TrainRun, ranks: Ranks, run_hash: str, first: int
) -> Generator[Callable[[StepReport, Mapping[str, float]], None], None, None]:
    """On rank 0, writes the resolved configuration, then one row of metrics per step."""
    if not ranks.first:
        yield lambda report, seconds: None
        return
    from tokentrue.train import MetricsWriter
    from tokentrue.train.reporting import replace_text

    settings.out.mkdir(parents=True, exist_ok=True)
    replace_text(settings.out / "config.json", json.dumps(as_mapping(settings), indent=1, sort_keys=True))
    provenance = {
        "run": run_hash,
        "model": settings.model.shown,
        "engine": settings.engine.name,
        "loss": settings.loss.name,
    }
    writer = MetricsWriter(
        settings.out, provenance=provenance, device=settings.device, first_step=first, log=settings.log
    )
    try:
        yield lambda report, seconds: writer.write(
            report.step, report.version, {**report.metrics, **report.speeds}, seconds
        )
    finally:
        writer.close()


def print_summary(settings: TrainRun, reports: list[StepReport], costs: Costs) -> None:
    if not reports:
        print(f"  nothing left to do: {settings.out} has {pluralise(settings.train.steps, 'step')}")
        return
    last = reports[-1]
    compared = sum(report.agreement.compared for report in reports)
    differing = sum(report.agreement.differing for report in reports)
    first = reports[0].metrics["reward"]
    print(
        f"  {pluralise(len(reports), 'step')}, reward {first:.3f} → {last.metrics['reward']:.3f}, policy version {last.version}"
    )
    print(f"  exactness: {differing} of {compared:,} log-probabilities differ")
    print(f"  rows: {rows_line(reports)}")
    print(f"  a step: {costs.line()}")
    print(f"  weights in {settings.out / 'checkpoints'}; `tokentrue serve --model` takes any of them")
    board = f"; tensorboard --logdir {settings.out / 'tensorboard'}" if "tensorboard" in settings.log else ""
    print(f"  metrics in {settings.out / 'metrics.jsonl'}{board}")


def refusal_line(report: StepReport) -> str:
    gain, divergence = report.metrics["acceptance/gain"], report.metrics["acceptance/divergence"]
    why = f"gain {gain:.3g}, divergence {divergence:.3g}"
    return f"step {report.step}: the engines refuse the update ({why}); the weights before it are back"


def rows_line(reports: Sequence[StepReport]) -> str:

    def total(name: str) -> int:
        return int(sum(report.metrics.get(name, 0) for report in reports))

    parts = {
        "rollouts/failed": ("rollout", "failed"),
        "rollouts/timed_out": ("rollout", "timed out"),
        "rollouts/without_sample": ("rollout", "without a sample"),
        "rollouts/groups_lost": ("group", "lost"),
        "rollouts/groups_resampled": ("group", "resampled"),
        "groups_without_signal": ("group", "without signal"),
        "update/skipped": ("update", "skipped"),
        "update/refused": ("step", "refused and undone"),
    }
    trained = f"{total('rows_trained'):,} of {total('rows'):,} trained"
    return "; ".join(
        [trained, *(f"{pluralise(total(key), noun)} {what}" for key, (noun, what) in parts.items() if total(key))]
    )


def check_can_make(folder: Path) -> None:
    """Raises what creating `folder` would raise, and creates nothing: a run that is refused later leaves no files."""
    nearest = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    kind = None if nearest.is_dir() else errno.ENOTDIR
    if kind is None and not os.access(nearest, os.W_OK):
        kind = errno.EACCES
    if kind is not None:
        raise OSError(kind, os.strerror(kind), str(folder))
