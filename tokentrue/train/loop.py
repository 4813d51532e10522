"""The loop: roll out, train, publish, with a fixed lag between the policy that samples and the policy that learns.

Round j is sampled by the weights of version max(0, j - lag), all of it: weights are published only when every round
that an older version must sample has ended. So a run repeats bit for bit whatever the timing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tokentrue.errors import EngineError, TrainingError
from tokentrue.json_types import JsonMapping
from tokentrue.train import checkpoint
from tokentrue.train.config import TrainConfig
from tokentrue.train.data.rounds import CountingRounds, Groups, Rounds
from tokentrue.train.evaluation import Evaluator
from tokentrue.train.publishing import Publisher
from tokentrue.train.reporting import StepReport, step_speeds
from tokentrue.train.trainer import Trainer
from tokentrue.types import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """Where a run keeps its checkpoints. `samples_digest` names the content of the file that it trains from."""

    directory: Path
    run_hash: str
    model: str | None  # whose tokenizer belongs to the weights
    to_json: Callable[[Sample], JsonMapping]
    from_json: Callable[[JsonMapping], Sample]
    samples_digest: str = ""


async def train(
    trainer: Trainer,
    rounds: Rounds,
    publish: Publisher,
    *,
    store: Store | None = None,
    evaluator: Evaluator | None = None,
    on_step: Callable[[StepReport, Mapping[str, float]], None] | None = None,
) -> list[StepReport]:
    """Runs the steps that are left, from the newest checkpoint in `store`, with the same result as without the break.

    Cancellation lets a step in progress finish and writes a checkpoint; so does an engine that fails.
    """
    run = Run(trainer=trainer, rounds=rounds, publish=publish, store=store, evaluator=evaluator, on_step=on_step)
    run.resume()
    await run.begin()
    try:
        for number in range(trainer.version, trainer.config.steps):
            await run.step(number)
            if evaluator is not None and evaluator.is_over:
                break
    except (asyncio.CancelledError, KeyboardInterrupt, EngineError):
        run.keep_if_possible()
        raise
    finally:
        await run.cancel_rounds()
    if store is not None and trainer.version > run.kept:
        run.keep()
    return run.reports


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedStep:
    """A step whose metrics are not written yet."""

    report: StepReport
    began: float
    waited: float


@dataclass(slots=True, kw_only=True)
class Run:
    """The state of one call of `train`."""

    trainer: Trainer
    rounds: Rounds
    publish: Publisher
    store: Store | None
    evaluator: Evaluator | None
    on_step: Callable[[StepReport, Mapping[str, float]], None] | None
    # this rank's parts
    running: dict[int, asyncio.Task[Groups]] = field(default_factory=dict[int, "asyncio.Task[Groups]"])
    finished: dict[int, Groups] = field(default_factory=dict[int, Groups])  # whole rounds
    counts: dict[int, Mapping[str, float]] = field(default_factory=dict[int, "Mapping[str, float]"])
    reports: list[StepReport] = field(default_factory=list[StepReport])
    unreported: FinishedStep | None = None
    idle: int = 0
    kept: int = 0  # the version of the newest checkpoint
    kept_at: float = field(default_factory=time.monotonic)

    def resume(self) -> None:
        path = None if self.store is None else checkpoint.latest(self.store.directory)
        if path is None or self.store is None:
            return
        loaded = checkpoint.load(self.trainer, path, run_hash=self.store.run_hash)
        if self.evaluator is not None:
            self.evaluator.restore(loaded.evaluation)
        parse = self.store.from_json
        self.finished = {
            number: [[parse(s) for s in group] for group in groups] for number, groups in loaded.rounds.items()
        }
        self.counts = dict(loaded.counts)

    async def begin(self) -> None:
        self.kept = self.trainer.version
        await self.publish.begin(self.trainer)
        if self.evaluator is not None and not self.trainer.version:
            await self.evaluator(0)

    async def step(self, number: int) -> None:
        trainer = self.trainer
        self.start_rounds(first=number)
        began = time.perf_counter()
        if number not in self.finished:
            await self.gather_round(number)
        groups = self.finished.pop(number)
        waited = time.perf_counter() - began
        before = None if self.publish.gate is None else await asyncio.to_thread(trainer.snapshot)
        self.publish.metrics, self.publish.seconds = {}, 0.0  # those of the step before
        stepping = asyncio.ensure_future(asyncio.to_thread(trainer.step, groups))
        try:
            report = await finish(stepping)
            for task in list(self.running.values()):  # rounds that older weights must sample
                await asyncio.wait([task])
            await trainer.ranks.meet()
            await self.publish.publish_step(trainer, report, groups, before)
        except BaseException:
            if before is not None:  # no checkpoint may have an update that nobody accepted: the round is trained again
                trainer.rewind(before)
                self.finished[number] = groups
            elif stepping.done() and stepping.exception() is None:
                self.unreported = FinishedStep(report=stepping.result(), began=began, waited=waited)
            raise
        self.unreported = FinishedStep(report=report, began=began, waited=waited)
        report = self.report_step(await self.evaluator(trainer.version) if self.evaluator is not None else {})
        self.idle = require_progress(report, self.idle, trainer.config)
        if self.store is not None and self.is_due():
            for waiting in sorted(self.running):
                await self.gather_round(waiting)
            self.keep()

    def report_step(self, judged: Mapping[str, float]) -> StepReport:
        """Reports the last finished step, once: its row of metrics comes before a checkpoint that has it."""
        done, self.unreported = self.unreported, None
        assert done is not None
        seconds = {
            **done.report.seconds,
            "wait": done.waited,
            "publish": self.publish.seconds,
            "step": time.perf_counter() - done.began,
        }
        metrics = {**done.report.metrics, **self.counts.pop(done.report.step, {}), **self.publish.metrics, **judged}
        speeds = {**done.report.speeds, **step_speeds(done.report, seconds)}
        report = replace(done.report, metrics=metrics, speeds=speeds)
        self.reports.append(report)
        if self.on_step is not None:
            self.on_step(report, seconds)
        return report

    def start_rounds(self, *, first: int) -> None:
        """Starts this rank's part of every round that the current weights may play."""
        config = self.trainer.config
        for number in range(first, min(first + config.lag + 1, config.steps)):
            if number not in self.running and number not in self.finished:
                self.running[number] = asyncio.create_task(self.play(number))

    async def play(self, number: int) -> Groups:
        """This rank's part of a round, by the weights that were published before it."""
        groups = await self.rounds.play(number)
        await self.publish.require_versions(f"after round {number}")
        return groups

    async def gather_round(self, number: int) -> None:
        """Puts the ranks' parts of a round together on every rank, in rank order."""

        async def take() -> Groups:
            mine = await self.running.pop(number)
            if self.publish.sinks:
                require_fresh(mine, number, lag=self.trainer.config.lag)
            return mine

        ranks = self.trainer.ranks
        mine = await ranks.together(take(), f"play its part of round {number}")
        counts = dict(self.rounds.counts(number)) if isinstance(self.rounds, CountingRounds) else {}
        parts = ranks.all_gather_object((mine, counts))
        self.finished[number] = [group for groups, _ in parts for group in groups]
        self.counts[number] = add_counts([counts for _, counts in parts])

    def is_due(self) -> bool:
        config, version = self.trainer.config, self.trainer.version
        by_clock = bool(config.checkpoint_minutes) and time.monotonic() - self.kept_at > 60 * config.checkpoint_minutes
        by_step = bool(config.checkpoint_every) and version % config.checkpoint_every == 0
        is_best = self.evaluator is not None and self.evaluator.best_version == version
        return self.trainer.ranks.from_first(by_clock or by_step or is_best or version == config.steps)

    def keep(self) -> None:
        store, evaluator = self.store, self.evaluator
        assert store is not None
        checkpoint.save(
            self.trainer,
            store.directory,
            model=store.model,
            run_hash=store.run_hash,
            rounds={
                n: [[store.to_json(sample) for sample in group] for group in groups]
                for n, groups in self.finished.items()
            },
            keep=self.trainer.config.keep_checkpoints,
            best=None if evaluator is None else evaluator.best_version,
            evaluation=None if evaluator is None else evaluator.state(),
            counts=self.counts,
            samples_digest=store.samples_digest,
        )
        self.kept, self.kept_at = self.trainer.version, time.monotonic()

    def keep_if_possible(self) -> None:
        """After an interruption, where no other rank is needed to gather the weights."""
        if self.store is not None and self.trainer.version > self.kept and self.trainer.ranks.world == 1:
            if self.unreported is not None:
                self.report_step({})
            self.keep()

    async def cancel_rounds(self) -> None:
        for task in self.running.values():
            task.cancel()
        await asyncio.gather(*self.running.values(), return_exceptions=True)


async def finish(step: asyncio.Future[StepReport]) -> StepReport:
    """The step's report. A thread cannot be stopped half-way, so a cancellation waits for it."""
    try:
        return await asyncio.shield(step)
    except asyncio.CancelledError:
        await asyncio.wait([step])
        raise


def require_progress(report: StepReport, idle: int, config: TrainConfig) -> int:
    """How many steps in a row had no row to train on; raises TrainingError when they are too many."""
    idle = 0 if report.metrics["rows_trained"] else idle + 1
    if idle > config.max_idle_steps:
        rows = int(report.metrics["rows"])
        raise TrainingError(
            f"step {report.step}: no row to train on ({rows} rows, all with advantage 0), {idle} step(s) in a row; "
            "groups need sessions with different rewards (train.max_idle_steps allows more such steps)"
        )
    return idle


def require_fresh(groups: Groups, number: int, *, lag: int) -> None:
    """Raises TrainingError where a token of a round was sampled by older weights than the round's."""
    oldest = max(0, number - lag)
    for sample in (sample for group in groups for sample in group):
        for span in sample.spans:
            version = span.policy_version or 0
            if span.kind == "sampled" and version < oldest:
                raise TrainingError(
                    f"round {number}: sample {sample.sample_id} has tokens of policy version {version}, and version "
                    f"{oldest} was published "
                    f"before the round (train.lag = {lag}): an engine samples from older weights. Restart it and "
                    "resume the run"
                )


def add_counts(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for counts in parts:
        for name, value in counts.items():
            total[name] = total.get(name, 0) + value
    return total
