"""tokentrue train: the reference trainer, live or from a file of samples. In one process, or under `torchrun
--nproc-per-node=N -m tokentrue train`: every rank runs a gateway, an engine and its part of the rollouts."""

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from tokentrue.cli.common import (
    AsJson,
    ConfigFile,
    Device,
    Dtype,
    ModelName,
    OutFolder,
    Settings,
    describe_costs,
    pluralise,
    progress_bar,
    require_folder,
    rollout_log,
    show_status,
)
from tokentrue.plain_json import dumps
from tokentrue.providers.registry import IN_PROCESS, REMOTE, list_names

if TYPE_CHECKING:
    from tokentrue.app.training import SampleFile, TrainRun
    from tokentrue.train.ranks import Ranks
    from tokentrue.train.reporting import StepReport

COUNTED = {  # metric -> what the summary says of it
    "rollouts/failed": ("rollout", "failed"),
    "rollouts/timed_out": ("rollout", "timed out"),
    "rollouts/without_sample": ("rollout", "without a sample"),
    "rollouts/groups_lost": ("group", "lost"),
    "rollouts/groups_resampled": ("group", "resampled"),
    "groups_without_signal": ("group", "without signal"),
    "update/skipped": ("update", "skipped"),
}


def command(
    config: ConfigFile = None,
    out: OutFolder = None,
    samples: Annotated[Path | None, Option(help="train from this file of samples instead of live rollouts")] = None,
    steps: Annotated[int | None, Option(help="training steps")] = None,
    model: ModelName = None,
    engine: Annotated[str | None, Option(help=list_names(IN_PROCESS + REMOTE))] = None,
    device: Device = None,
    dtype: Dtype = None,
    trust: Annotated[
        bool, Option("--trust", help="with --samples: do not check certificates, masks and duplicates")
    ] = False,
    sets: Settings = None,
    as_json: AsJson = False,
) -> int:
    """Train with REINFORCE, GRPO, PPO or any loss of tokentrue.mismatch; exact, resumable, reproducible."""
    from tokentrue.app.configuration import Checks, read
    from tokentrue.app.libraries import quiet_libraries, require_device, require_device_name
    from tokentrue.app.training import SampleFile, TrainRun, check_run, loss_for

    flags = {"out": out, "samples": samples, "train.steps": steps, "model.path": model, "engine.name": engine}
    settings = read(TrainRun, config, sets or (), {**flags, "device": device, "dtype": dtype})
    checks = Checks()
    checks(require_folder, settings.out)
    checks(require_device_name, settings.device)
    check_run(checks, settings)
    checks.finish()
    file = None if settings.samples is None else SampleFile(settings.samples, settings, trust=trust)
    checks(require_device, settings.device)
    checks(loss_for, settings.loss)
    checks.finish()
    from tokentrue.train import join, leave

    quiet_libraries(settings.threads)
    ranks = join(settings.device)
    try:
        with rollout_log(settings.out):
            asyncio.run(run(replace(settings, device=ranks.device), ranks, file, as_json=as_json))
    finally:
        leave()
    return 0


async def run(settings: "TrainRun", ranks: "Ranks", file: "SampleFile | None", *, as_json: bool) -> None:
    from tokentrue.app.configuration import as_mapping
    from tokentrue.app.training import source_for, store_for, trainer_for
    from tokentrue.cli.reports import write_training_report
    from tokentrue.train import MetricsWriter, train
    from tokentrue.train.reporting import find_falling, replace_text

    quiet = as_json or not ranks.first
    if file is not None and ranks.first:
        print(*(f"  {note}" for note in file.notes), sep="\n", file=sys.stderr)
    with show_status(f"loading {settings.model.shown}, {settings.dtype} on {settings.device}", quiet=quiet):
        trainer, made_from = trainer_for(settings, ranks)
    store, first = store_for(settings, made_from)
    if settings.optim.lr is None:
        settings = replace(settings, optim=trainer.optim)
        if not quiet:
            print(f"  learning rate {trainer.optim.lr:g}, by the size of the model (optim.lr sets it)")
    if first and not quiet:
        print(f"  resuming at step {first}")
    costs, history = list[Mapping[str, float]](), list[Mapping[str, float]]()
    with ExitStack() as stack:
        writer = None
        if ranks.first:
            settings.out.mkdir(parents=True, exist_ok=True)
            replace_text(settings.out / "config.json", json.dumps(as_mapping(settings), indent=1, sort_keys=True))
            names = {"model": settings.model.shown, "engine": settings.engine.name, "loss": settings.loss.name}
            writer = MetricsWriter(
                settings.out,
                provenance={"run": store.run_hash, **names},
                device=settings.device,
                first_step=first,
                log=settings.log,
            )
            stack.enter_context(closing(writer))
        left = max(0, trainer.config.steps - first)
        advance = stack.enter_context(progress_bar("training", left, quiet=quiet))

        def on_step(report: "StepReport", seconds: Mapping[str, float]) -> None:
            costs.append(seconds)
            shown = report.metrics
            if writer is not None:
                writer.write(report.step, report.version, {**shown, **report.speeds}, seconds)
                if as_json:
                    row = {"step": report.step, "policy_version": report.version, **shown, **report.speeds}
                    print(dumps({**row, "seconds": dict(seconds)}).decode(), flush=True)
                history.append(shown)
                for line in find_falling(history):
                    print(f"  step {report.step}: {line}", file=sys.stderr)
            delta, speed = shown.get("mismatch/delta_abs_mean", 0.0), report.speeds["speed/tokens_per_s"]
            losses = f"loss {shown['update/loss']:+.4f}  |g| {shown['update/grad_norm']:.2f}"
            advance(f"reward {shown['reward']:.3f}  {losses}  |δ| {delta:.2g}  {speed:,.0f} tokens/s")

        async with source_for(settings, ranks, file) as (rounds, publish, evaluator):
            reports = await train(trainer, rounds, publish, store=store, evaluator=evaluator, on_step=on_step)
    page = write_training_report(settings) if ranks.first else None
    if not quiet:
        print_summary(settings, reports, describe_costs(costs), done=trainer.version)
        if page is not None:
            print(f"  report: {page}")


def print_summary(settings: "TrainRun", reports: "Sequence[StepReport]", cost_line: str, *, done: int) -> None:
    if done < settings.train.steps:
        waited = pluralise(settings.evaluation.patience, "evaluation")
        print(f"  ended after {pluralise(done, 'step')}: {waited} without gain (evaluation.patience)")
    if not reports:
        print(f"  nothing left to do: {settings.out} has {pluralise(done, 'step')}")
        return

    def total(name: str) -> int:
        return int(sum(report.metrics.get(name, 0) for report in reports))

    rewards = f"reward {reports[0].metrics['reward']:.3f} → {reports[-1].metrics['reward']:.3f}"
    print(f"  {pluralise(len(reports), 'step')}, {rewards}, policy version {reports[-1].version}")
    differing = sum(report.agreement.differing for report in reports)
    compared = sum(report.agreement.compared for report in reports)
    print(f"  exactness: {differing} of {compared:,} log-probabilities differ")
    rows = [f"{total('rows_trained'):,} of {total('rows'):,} trained"]
    rows += [f"{pluralise(total(key), noun)} {what}" for key, (noun, what) in COUNTED.items() if total(key)]
    print(f"  rows: {'; '.join(rows)}")
    print(f"  a step: {cost_line}")
    print(f"  weights in {settings.out / 'checkpoints'}; `tokentrue serve --model` takes any of them")
    board = f"; tensorboard --logdir {settings.out / 'tensorboard'}" if "tensorboard" in settings.log else ""
    print(f"  metrics in {settings.out / 'metrics.jsonl'}{board}")
