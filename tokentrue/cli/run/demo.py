"""tokentrue demo: the whole loop on one machine. Serve → agent over HTTP, streaming → samples → GRPO steps → report.

Nothing is staged: the gateway is the one that `tokentrue serve` runs, the agent holds the real OpenAI client, the
engine is the exact one, and the numbers that are printed are those that the run measured.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokentrue.cli.report import DemoResult, write_demo_report
from tokentrue.cli.words import count_of

if TYPE_CHECKING:
    from tokentrue.environments import RolloutConfig, Sessions

STEPS = 14  # how many the reward of the demo is judged by; fewer show coverage and exactness alone


def command(
    seed: Annotated[int, typer.Option(help="tasks and sampling follow from it, bit for bit")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="GRPO steps")] = STEPS,
    tasks: Annotated[int, typer.Option(min=1, help="tasks per step, with 8 rollouts each")] = 8,
    heldout: Annotated[int, typer.Option(min=1, help="held-out tasks to judge by")] = 64,
    out: Annotated[Path, typer.Option(help="directory for the report, the samples and the metrics")] = Path("out/demo"),
    threads: Annotated[int, typer.Option(min=1, help="threads for the engine and the trainer")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> int:
    """A tool-calling agent over HTTP against the exact engine: rollouts, samples, GRPO, report. Under three minutes on
    two cores."""
    out.mkdir(parents=True, exist_ok=True)  # before anything is loaded: a bad path is said at once
    from tokentrue.app.libraries import quiet_libraries

    quiet_libraries(threads)
    result = asyncio.run(
        run(seed=seed, steps=steps, tasks=tasks, heldout=heldout, out=out, say=_say_nothing if as_json else print)
    )
    if as_json:
        print(json.dumps({**asdict(result), "coverage": result.coverage, "ok": result.ok}, indent=1))
    else:
        show(result)
    return 0 if result.ok else 1


async def run(*, seed: int, steps: int, tasks: int, heldout: int, out: Path, say: Any) -> DemoResult:
    from tokentrue.app.embedded import embedded_gateway
    from tokentrue.app.rollout.rollouts import RolloutRounds
    from tokentrue.app.wiring import ServeConfig, ServerConfig, renderer_for
    from tokentrue.cli.progress import Costs, progress_bar
    from tokentrue.environments import SMALL_MODEL, RolloutConfig
    from tokentrue.environments.http import GatewaySessions
    from tokentrue.hub import load_causal_model
    from tokentrue.mismatch import loss_named
    from tokentrue.train import MetricsWriter, OptimConfig, Publisher, TrainConfig, Trainer, config_hash, train

    began = time.perf_counter()
    fresh(out)
    rollout = RolloutConfig(tasks=tasks, group_size=8, seed=seed, timeout_s=600.0)
    config = TrainConfig(steps=steps, groups_per_step=tasks, seed=seed)
    optim, loss = OptimConfig(lr=4e-4), loss_named("dapo")
    settings = ServeConfig(server=ServerConfig(port=0, store=f"sqlite:{out / 'sessions.sqlite'}"))
    async with embedded_gateway(settings) as here:
        say(f"tokentrue demo   gateway {here.base_url}, exact engine, model {SMALL_MODEL.name}")
        trainer = Trainer(load_causal_model(SMALL_MODEL, dtype="float32"), config=config, optim=optim, loss=loss)
        greedy = {**replace(rollout, temperature=0.0).sampling}
        async with GatewaySessions(here.base_url, sampling=greedy, admin_key=here.admin_key) as sessions:
            before = await mean_reward(rollout, sessions, "before", heldout, quiet=say is not print)
        say(f"  held-out reward before   {before:.2f}   ({count_of(heldout, 'task')}, greedy)")
        provenance = {"run": config_hash(config, optim, loss, rollout), "model": "calculator", "engine": "exact"}
        writer = MetricsWriter(out, provenance=provenance)
        rows: list[dict[str, float]] = []
        costs = Costs()
        with progress_bar("training", steps, quiet=say is not print) as advance:

            def on_step(report: Any, seconds: Any) -> None:
                writer.write(report.step, report.version, report.metrics, seconds)
                costs.add(seconds)
                rows.append({**report.metrics, **{f"seconds/{k}": v for k, v in seconds.items()}})
                found = report.agreement
                advance(f"reward {report.metrics['reward']:.2f}  {found.differing} of {found.compared:,} differ")

            async with GatewaySessions(here.base_url, sampling=rollout.sampling, admin_key=here.admin_key) as sessions:
                rounds = RolloutRounds(rollout, sessions, keep=out / "samples.jsonl")
                await train(trainer, rounds, Publisher(here.provider), on_step=on_step)
        writer.close()
        async with GatewaySessions(here.base_url, sampling=greedy, admin_key=here.admin_key) as sessions:
            after = await mean_reward(rollout, sessions, "after", heldout, quiet=say is not print)
    result = DemoResult(
        model="calculator",
        parameters=sum(p.numel() for p in trainer.model.parameters()),
        steps=steps,
        seed=seed,
        is_judged=steps >= STEPS,
        tasks=heldout,
        reward_before=before,
        reward_after=after,
        rollouts=rounds.tally.rollouts,
        failed=rounds.tally.failed,
        sampled=rounds.tally.sampled,
        trained=rounds.tally.trained,
        compared=int(sum(row["exact_compared"] for row in rows)),
        differing=int(sum(row["exact_differing"] for row in rows)),
        seconds=time.perf_counter() - began,
        publish_ms=costs.publish_ms,
        shares=costs.shares,
        cost_line=costs.line(),
        report=str(out / "report.html"),
    )
    renderer = renderer_for(settings.model)(settings.model.history)
    write_demo_report(
        out / "report.html", result, rows, store=settings.server.store, samples=out / "samples.jsonl", renderer=renderer
    )
    return result


async def mean_reward(rollout: RolloutConfig, sessions: Sessions, when: str, heldout: int, *, quiet: bool) -> float:
    """Mean reward over the fixed held-out tasks, with a bar: it takes a few seconds."""
    from tokentrue.app.rollout.rollouts import evaluate
    from tokentrue.cli.progress import progress_bar

    with progress_bar(f"evaluating {when}", heldout, quiet=quiet) as advance:
        groups = await evaluate(rollout, sessions, tasks=heldout, on_rollout=lambda _: advance(""))
    return fmean(reward for group in groups for reward in group)


def fresh(out: Path) -> None:
    """Clears what an earlier demo left there, and nothing else."""
    out.mkdir(parents=True, exist_ok=True)
    for name in (
        "sessions.sqlite",
        "sessions.sqlite-wal",
        "sessions.sqlite-shm",
        "metrics.jsonl",
        "samples.jsonl",
        "report.html",
    ):
        (out / name).unlink(missing_ok=True)
    shutil.rmtree(out / "tensorboard", ignore_errors=True)


def show(result: DemoResult) -> None:
    folder = Path(result.report).parent
    print(f"  held-out reward after    {result.reward_after:.2f}   ({count_of(result.tasks, 'task')}, greedy)")
    rollouts = count_of(result.rollouts, "rollout")
    print(f"  coverage   {result.coverage:.2%}   {result.trained:,} of {result.sampled:,} sampled tokens, {rollouts}")
    print(
        f"  mismatch   {result.differing}   of {result.compared:,} log-probabilities of rollout and trainer differ in any bit"
    )
    print(f"  a step     {result.cost_line}")
    print(f"  time       {result.seconds:.0f} s for {count_of(result.steps, 'step')}")
    print(f"  report     {result.report}")
    if not result.is_judged:
        print(f"  {count_of(result.steps, 'step')} of {STEPS}: too few to judge the reward by")
    if not result.ok:
        print("  NOT AS PROMISED: the reward must rise, coverage must be 100% and no bit may differ")
    print("what to try next")
    print(f"  tokentrue audit {folder / 'samples.jsonl'}            re-check the certificates from the file alone")
    print(
        "  tokentrue serve                                 point your own agent at it: any OpenAI or Anthropic client"
    )
    print("  tokentrue diagnose SAMPLES --trainer MODEL      how far the rollout is from a trainer, and what helps")


def _say_nothing(text: str) -> None:
    del text
