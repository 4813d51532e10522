"""tokentrue demo: gateway → agent over HTTP → samples → GRPO steps → report, on one machine."""

import asyncio
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

from typer import Option

from tokentrue.cli.common import AsJson, describe_costs, pluralise, print_json, progress_bar, require_folder, show_share
from tokentrue.hub import SMALL_MODEL, load_causal_model
from tokentrue.plain_json import dumps
from tokentrue.records import record
from tokentrue.types import Coverage

if TYPE_CHECKING:
    from tokentrue.app.training import TrainRun
    from tokentrue.environments import Rollout
    from tokentrue.environments.http import GatewaySessions
    from tokentrue.train.reporting import StepReport

STEPS = 14  # how many the reward of the demo is judged by; fewer show coverage and exactness alone
PROMISE = "the reward must rise, coverage must be 100% and no bit may differ"
STORE = "sessions.sqlite"
LEFT_BEHIND = (STORE, f"{STORE}-wal", f"{STORE}-shm", "metrics.jsonl", "samples.jsonl", "report.html")


@record
class DemoResult:
    """`ok`: reward up (if judged), every token covered, no bit different."""

    steps: int
    seed: int
    tasks: int
    is_judged: bool  # enough steps for the reward to count
    reward_before: float
    reward_after: float
    rollouts: int
    failed: int
    sampled: int
    trained: int
    compared: int
    differing: int
    seconds: float
    cost_line: str
    report: str

    @property
    def coverage(self) -> float:
        return Coverage(sampled=self.sampled, trained=self.trained).ratio

    @property
    def ok(self) -> bool:
        rose = self.reward_after > self.reward_before or not self.is_judged
        return rose and self.trained == self.sampled > 0 and self.differing == 0 and self.compared > 0


def command(
    seed: Annotated[int, Option(help="tasks and sampling follow from it, bit for bit")] = 0,
    steps: Annotated[int, Option(min=1, help="GRPO steps")] = STEPS,
    tasks: Annotated[int, Option(min=1, help="tasks per step, with 8 rollouts each")] = 8,
    heldout: Annotated[int, Option(min=1, help="held-out tasks to judge by")] = 64,
    out: Annotated[Path, Option("-o", "--out", help="directory for the report, the samples and the metrics")] = Path(
        "out/demo"
    ),
    threads: Annotated[int, Option(min=1, help="threads for the engine and the trainer")] = 2,
    as_json: AsJson = False,
) -> int:
    """A tool-calling agent over HTTP against the exact engine: rollouts, samples, GRPO, report. Under three minutes on
    two cores."""
    require_folder(out)  # before anything is loaded: report a bad path at once
    from tokentrue.app.libraries import quiet_libraries

    quiet_libraries(threads)
    result = asyncio.run(run(seed=seed, steps=steps, tasks=tasks, heldout=heldout, out=out, quiet=as_json))
    if as_json:
        print_json({**asdict(result), "coverage": result.coverage, "ok": result.ok})
    else:
        print_result(result)
    return 0 if result.ok else 1


async def run(*, seed: int, steps: int, tasks: int, heldout: int, out: Path, quiet: bool) -> DemoResult:
    from tokentrue.app.background import embedded_gateway
    from tokentrue.app.rollouts import RolloutRounds, evaluate, sessions_on
    from tokentrue.app.training import TrainRun
    from tokentrue.app.wiring import ServeConfig, ServerConfig
    from tokentrue.environments import RolloutConfig
    from tokentrue.mismatch import loss_named
    from tokentrue.train import MetricsWriter, OptimConfig, Publisher, TrainConfig, Trainer, config_hash, train

    began = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    for name in LEFT_BEHIND:  # by an earlier demo
        (out / name).unlink(missing_ok=True)
    shutil.rmtree(out / "tensorboard", ignore_errors=True)
    rollout = RolloutConfig(tasks=tasks, group_size=8, seed=seed, timeout_s=600.0)
    config = TrainConfig(steps=steps, groups_per_step=tasks, seed=seed)
    optim, loss = OptimConfig(lr=4e-4), loss_named("dapo")
    settings = ServeConfig(server=ServerConfig(port=0, store=f"sqlite:{out / STORE}"))
    costs: list[Mapping[str, float]] = []
    counted: Counter[str] = Counter(rollouts=0, failed=0, sampled=0, trained=0)

    def record(groups: "Sequence[Sequence[Rollout]]") -> None:
        with (out / "samples.jsonl").open("ab") as file:
            for ended in (ended for group in groups for ended in group):
                file.writelines(dumps(sample) + b"\n" for sample in ended.samples)
                counted.update(rollouts=1, failed=int(ended.error is not None))
                counted.update({name: ended.coverage.get(name, 0) for name in ("sampled", "trained")})

    async with embedded_gateway(settings) as here:

        def open_sessions(temperature: float) -> "GatewaySessions":
            return sessions_on(here.base_url, replace(rollout, temperature=temperature), here.admin_key)

        async def measure_reward(when: str) -> float:
            with progress_bar(f"evaluating {when}", heldout, quiet=quiet, every_s=10.0) as advance:
                async with open_sessions(0.0) as sessions:
                    groups = await evaluate(rollout, sessions, tasks=heldout, on_rollout=lambda _: advance(""))
            return fmean(reward for group in groups for reward in group)

        if not quiet:
            print(f"tokentrue demo   gateway {here.base_url}, exact engine, model {SMALL_MODEL.name}")
        trainer = Trainer(load_causal_model(SMALL_MODEL, dtype="float32"), config=config, optim=optim, loss=loss)
        before = await measure_reward("before")
        if not quiet:
            print(f"  held-out reward before   {before:.2f}   ({pluralise(heldout, 'task')}, greedy)")
        provenance = {"run": config_hash(config, optim, loss, rollout), "model": "calculator", "engine": "exact"}
        writer = MetricsWriter(out, provenance=provenance)
        with progress_bar("training", steps, quiet=quiet) as advance:

            def on_step(report: "StepReport", seconds: Mapping[str, float]) -> None:
                writer.write(report.step, report.version, report.metrics, seconds)
                costs.append(seconds)
                found = report.agreement
                advance(f"reward {report.metrics['reward']:.2f}  {found.differing} of {found.compared:,} differ")

            async with open_sessions(rollout.temperature) as sessions:
                rounds = RolloutRounds(rollout, sessions, on_groups=record)
                reports = await train(trainer, rounds, Publisher(here.provider), on_step=on_step)
        writer.close()
        after = await measure_reward("after")
    result = DemoResult(
        steps=steps,
        seed=seed,
        is_judged=steps >= STEPS,
        tasks=heldout,
        reward_before=before,
        reward_after=after,
        **counted,
        compared=sum(report.agreement.compared for report in reports),
        differing=sum(report.agreement.differing for report in reports),
        seconds=time.perf_counter() - began,
        cost_line=describe_costs(costs),
        report=str(out / "report.html"),
    )
    write_demo_report(result, TrainRun(out=out))
    return result


def write_demo_report(result: DemoResult, settings: "TrainRun") -> None:
    from tokentrue.cli.reports import write_training_report

    verdict = "The reward rose, every sampled token was trained, and no log-probability differs in any bit between "
    write_training_report(
        settings,
        title="tokentrue demo",
        verdict=f"{verdict}rollout and trainer." if result.ok else f"Not as promised: {PROMISE}.",
        ok=result.ok,
        highlights=[
            (f"held-out reward before, {result.tasks} tasks", f"{result.reward_before:.3f}"),
            (f"held-out reward after {result.steps} GRPO steps", f"{result.reward_after:.3f}"),
            (f"coverage: {result.trained:,} of {result.sampled:,} sampled tokens", show_share(result.coverage)),
            (f"of {result.compared:,} log-probabilities differ", f"{result.differing:,}"),
        ],
        note="A tool-calling agent over HTTP, the exact engine, GRPO. The newest rollouts are in this file.",
    )


def print_result(result: DemoResult) -> None:
    differ = f"of {result.compared:,} log-probabilities of rollout and trainer differ in any bit"
    print(f"  held-out reward after    {result.reward_after:.2f}   ({pluralise(result.tasks, 'task')}, greedy)")
    rollouts = pluralise(result.rollouts, "rollout")
    tokens = f"{result.trained:,} of {result.sampled:,} sampled tokens"
    print(f"  coverage   {show_share(result.coverage)}   {tokens}, {rollouts}")
    print(f"  mismatch   {result.differing}   {differ}")
    print(f"  a step     {result.cost_line}")
    print(f"  time       {result.seconds:.0f} s for {pluralise(result.steps, 'step')}")
    print(f"  report     {result.report}")
    if not result.is_judged:
        print(f"  {pluralise(result.steps, 'step')} of {STEPS}: too few to judge the reward by")
    if not result.ok:
        print(f"  NOT AS PROMISED: {PROMISE}")
    out = Path(result.report).parent
    print("what to try next")
    for command, what in {
        f"tokentrue audit {out / 'samples.jsonl'}": "re-check the certificates from the file alone",
        f"tokentrue diagnose {out / 'samples.jsonl'} --trainer calculator --policy-version 0": "compare bit for bit",
        f"tokentrue view sqlite:{out / STORE} --model calculator": "tokens, turns, and what a re-render would break",
        "tokentrue serve": "point your own agent at it",
    }.items():
        print(f"  {command}\n      {what}")
