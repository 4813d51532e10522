"""Roll out, train, publish, with a fixed lag between the policy that samples and the policy that learns.

Round j is sampled by the weights of version max(0, j - lag), all of it: weights are published only when every round of
an older version has ended. So a run repeats bit for bit whatever the timing.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Protocol, runtime_checkable

import msgspec

from tokentrue.errors import EngineError, FileFormatError, TrainingError
from tokentrue.protocols import SampleSource
from tokentrue.train import checkpoint
from tokentrue.train.checkpoint import Store
from tokentrue.train.config import EvaluationConfig
from tokentrue.train.publishing import Publisher
from tokentrue.train.ranks import Ranks
from tokentrue.train.reporting import StepReport, step_speeds
from tokentrue.train.rows import Groups
from tokentrue.train.trainer import Trainer

OnStep = Callable[[StepReport, Mapping[str, float]], None]
Rewards = Sequence[Sequence[float]]  # by task, one for each attempt


class Rounds(Protocol):
    """`play(j)` returns the groups of step j in a fixed order; with several ranks, this rank's part."""

    async def play(self, number: int) -> Groups: ...


@runtime_checkable
class CountingRounds(Protocol):
    def counts(self, number: int) -> Mapping[str, float]:
        """Rollouts, failures and time-outs of a round that has ended; forgets them."""
        ...


class NoRounds(Rounds):
    async def play(self, number: int) -> Groups:
        return []


class SourceRounds:
    """Recorded groups, `groups_per_step` per step and never one twice in a step; then from the start again."""

    def __init__(self, source: SampleSource, groups_per_step: int) -> None:
        self._source = source
        self._count = groups_per_step
        self._next = 0
        self._left = self._steps()

    async def play(self, number: int) -> Groups:
        if number != self._next:
            self._left = islice(self._steps(), number, None)
        taken = next(self._left, None)
        self._next = number + 1
        if taken is None:
            raise FileFormatError("the source holds no group of samples with rewards")
        return taken

    def _steps(self) -> Iterator[Groups]:
        is_empty = False
        while not is_empty:
            is_empty = True
            groups = iter(self._source.groups())
            while taken := list(islice(groups, self._count)):
                is_empty = False
                yield taken


class Evaluator:
    """Held-out reward and pass@k, the best version so far, and when to stop early. `run` runs this rank's tasks; the
    default never evaluates."""

    def __init__(
        self,
        config: EvaluationConfig | None = None,
        run: Callable[[], Awaitable[Rewards]] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.config = config or EvaluationConfig()
        self._run = run
        self._ranks = ranks or Ranks()
        self.best = -math.inf
        self.best_version: int | None = None
        self._newest: int | None = None  # version that was evaluated
        self._without_gain = 0

    async def __call__(self, version: int) -> Mapping[str, float]:
        if self._run is None or not self.is_due(version):
            return {}
        mine = await self._run()
        await self._ranks.meet()
        rewards = [attempts for part in self._ranks.all_gather_object(mine) for attempts in part]
        mean = sum(sum(attempts) / len(attempts) for attempts in rewards) / len(rewards)
        self._newest = version
        self._without_gain = 0 if mean > self.best else self._without_gain + 1
        if mean > self.best:
            self.best, self.best_version = mean, version
        found = {"eval/reward": mean, "eval/best": self.best}
        solved = [(len(attempts), sum(each >= self.config.solved for each in attempts)) for attempts in rewards]
        for k in (2**n for n in range(self.config.attempts.bit_length())):
            found[f"eval/pass@{k}"] = sum(pass_at_k(*counts, k) for counts in solved) / len(rewards)
        return found

    def is_due(self, version: int) -> bool:
        return bool(self.config.every) and version % self.config.every == 0

    def is_missing(self, version: int) -> bool:
        """Whether the evaluation of a resumed version was interrupted, or that of version 0 has not run."""
        return self.is_due(version) and (not version if self._newest is None else self._newest < version)

    def state(self) -> dict[str, float | int]:
        best, newest = self.best_version, self._newest
        if best is None or newest is None:
            return {}
        return {"best": self.best, "best_version": best, "without_gain": self._without_gain, "newest": newest}

    def restore(self, state: Mapping[str, float | int]) -> None:
        if state:
            self.best, self.best_version = float(state["best"]), int(state["best_version"])
            self._without_gain = int(state["without_gain"])
            self._newest = int(state["newest"]) if "newest" in state else None  # older checkpoints do not say

    @property
    def is_over(self) -> bool:
        return bool(self.config.patience) and self._without_gain >= self.config.patience


def pass_at_k(attempts: int, solved: int, k: int) -> float:
    """The probability that k of the attempts hold a solved one: 1 - C(n - c, k) / C(n, k)."""
    return 1.0 - math.comb(attempts - solved, k) / math.comb(attempts, k)


async def train(
    trainer: Trainer,
    rounds: Rounds,
    publish: Publisher,
    *,
    store: Store | None = None,
    evaluator: Evaluator | None = None,
    on_step: OnStep | None = None,
) -> list[StepReport]:
    """Runs the steps that are left, from the newest checkpoint in `store`, with the same result as without the break.
    Cancellation and a failing engine let a step in progress finish and write a checkpoint."""
    evaluator = evaluator or Evaluator()
    run = Run(trainer=trainer, rounds=rounds, publish=publish, store=store, evaluator=evaluator, on_step=on_step)
    run.resume()
    await publish.begin(trainer)
    if evaluator.is_missing(trainer.version):
        await evaluator(trainer.version)
    try:
        for number in range(trainer.version, trainer.config.steps):
            if evaluator.is_over:
                break
            await run.step(number)
    except (asyncio.CancelledError, KeyboardInterrupt, EngineError):
        if trainer.version > run.kept and trainer.ranks.world == 1:  # no other rank is needed to gather the weights
            if run.unreported is not None:
                run.report_step({})
            run.keep()
        raise
    finally:
        for task in run.running.values():
            task.cancel()
        await asyncio.gather(*run.running.values(), return_exceptions=True)
    if trainer.version > run.kept:
        run.keep()
    return run.reports


class Run(msgspec.Struct, kw_only=True):
    trainer: Trainer
    rounds: Rounds
    publish: Publisher
    store: Store | None
    evaluator: Evaluator
    on_step: OnStep | None
    running: dict[int, asyncio.Task[Groups]] = {}  # this rank's parts
    finished: dict[int, Groups] = {}  # whole rounds
    counts: dict[int, Mapping[str, float]] = {}
    reports: list[StepReport] = []
    unreported: tuple[StepReport, float, float] | None = None  # with its begin and the time that it waited
    idle: int = 0  # steps in a row without a row to train on
    kept: int = 0  # the version of the newest checkpoint
    kept_at: float = msgspec.field(default_factory=time.monotonic)

    def resume(self) -> None:
        path = None if self.store is None else checkpoint.latest(self.store.directory)
        if path is not None and self.store is not None:
            loaded = checkpoint.load(self.trainer, path, self.store)
            self.finished, self.counts = loaded.rounds, loaded.counts
            self.evaluator.restore(loaded.evaluation)
        self.kept = self.trainer.version

    async def step(self, number: int) -> None:
        trainer = self.trainer
        self.start_rounds(first=number)
        began = time.perf_counter()
        if number not in self.finished:
            await self.gather_round(number)
        groups = self.finished.pop(number)
        waited = time.perf_counter() - began
        self.publish.metrics, self.publish.seconds = {}, 0.0  # those of the step before
        stepping = asyncio.ensure_future(asyncio.to_thread(trainer.step, groups))
        try:
            report = await finish(stepping)
            for task in list(self.running.values()):  # rounds that older weights must sample
                await asyncio.wait([task])
            await trainer.ranks.meet()
            await self.publish(trainer)
        except BaseException:
            if stepping.done() and stepping.exception() is None:
                self.unreported = stepping.result(), began, waited
            raise
        self.unreported = report, began, waited
        report = self.report_step(await self.evaluator(trainer.version))
        self.require_progress(report)
        if self.is_due():
            for waiting in sorted(self.running):
                await self.gather_round(waiting)
            self.keep()

    def report_step(self, judged: Mapping[str, float]) -> StepReport:
        assert self.unreported is not None
        (report, began, waited), self.unreported = self.unreported, None
        whole = time.perf_counter() - began
        seconds = {**report.seconds, "wait": waited, "publish": self.publish.seconds, "step": whole}
        metrics = {**report.metrics, **self.counts.pop(report.step, {}), **self.publish.metrics, **judged}
        report = replace(report, metrics=metrics, speeds={**report.speeds, **step_speeds(report, seconds)})
        self.reports.append(report)
        if self.on_step is not None:
            self.on_step(report, seconds)
        return report

    def require_progress(self, report: StepReport) -> None:
        self.idle = 0 if report.metrics["rows_trained"] else self.idle + 1
        if self.idle > self.trainer.config.max_idle_steps:
            rows = int(report.metrics["rows"])
            raise TrainingError(
                f"step {report.step}: no row to train on ({rows} rows, all with advantage 0), {self.idle} step(s) in a "
                "row; groups need sessions with different rewards (train.max_idle_steps allows more such steps)"
            )

    def start_rounds(self, *, first: int) -> None:
        config = self.trainer.config
        for number in range(first, min(first + config.lag + 1, config.steps)):
            if number not in self.running and number not in self.finished:
                self.running[number] = asyncio.create_task(self.play(number))

    async def play(self, number: int) -> Groups:
        groups = await self.rounds.play(number)
        await self.publish.require_versions(f"after round {number}")
        return groups

    async def gather_round(self, number: int) -> None:
        async def take() -> Groups:
            mine = await self.running.pop(number)
            if self.publish.sinks:
                require_fresh(mine, number, lag=self.trainer.config.lag)
            return mine

        ranks = self.trainer.ranks
        mine = await ranks.together(take(), f"play its part of round {number}")
        counts = self.rounds.counts(number) if isinstance(self.rounds, CountingRounds) else {}
        parts = ranks.all_gather_object((mine, dict(counts)))
        self.finished[number] = [group for groups, _ in parts for group in groups]
        names = dict.fromkeys(name for _, counted in parts for name in counted)
        self.counts[number] = {name: sum(counted.get(name, 0) for _, counted in parts) for name in names}

    def is_due(self) -> bool:
        if self.store is None:
            return False
        config, version = self.trainer.config, self.trainer.version
        by_clock = bool(config.checkpoint_minutes) and time.monotonic() - self.kept_at > 60 * config.checkpoint_minutes
        by_step = bool(config.checkpoint_every) and version % config.checkpoint_every == 0
        is_best = self.evaluator.best_version == version
        return self.trainer.ranks.from_first(by_clock or by_step or is_best or version == config.steps)

    def keep(self) -> None:
        if self.store is None:
            return
        progress = checkpoint.Progress(rounds=self.finished, counts=self.counts, evaluation=self.evaluator.state())
        checkpoint.save(self.trainer, self.store, progress, best=self.evaluator.best_version)
        self.kept, self.kept_at = self.trainer.version, time.monotonic()
        if self.trainer.ranks.first:
            self.store.on_kept(self.kept)


async def finish(step: asyncio.Future[StepReport]) -> StepReport:
    """A thread cannot be stopped half-way, so a cancellation waits for it."""
    try:
        return await asyncio.shield(step)
    except asyncio.CancelledError:
        await asyncio.wait([step])
        raise


def require_fresh(groups: Groups, number: int, *, lag: int) -> None:
    oldest = max(0, number - lag)
    for sample in (sample for group in groups for sample in group):
        version = min((span.policy_version or 0 for span in sample.spans if span.kind == "sampled"), default=oldest)
        if version < oldest:
            raise TrainingError(
                f"round {number}: sample {sample.sample_id} has tokens of policy version {version}, and version "
                f"{oldest} was published before the round (train.lag = {lag}): an engine samples from older "
                "weights. Restart it and resume the run"
            )
