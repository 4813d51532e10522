"""The loop: play, train, publish, with a fixed lag between the policy that plays and the policy that learns.

Invariants: round j is played by the weights of version max(0, j - lag), all of it: weights are published only when every round that
an older version must play has ended. So staleness is a number that the configuration sets, and a run repeats bit for bit whatever
the timing. With lag 0 nothing overlaps; with lag 1 round j + 1 is played while step j trains.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokentrue.errors import TrainingError
from tokentrue.protocols import WeightSink
from tokentrue.train import checkpoint
from tokentrue.train.config import TrainConfig
from tokentrue.train.reporting import StepReport
from tokentrue.train.rounds import Groups, Rounds
from tokentrue.train.trainer import Trainer
from tokentrue.types import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """Where a run keeps its checkpoints. `to_json`/`from_json` turn a sample into plain JSON and back."""

    directory: Path
    run_hash: str
    model_dir: Path | None
    to_json: Callable[[Sample], Mapping[str, Any]]
    from_json: Callable[[Mapping[str, Any]], Sample]


class Publisher:
    """Hands whole weights to every sink and remembers how long that took."""

    def __init__(self, *sinks: WeightSink) -> None:
        self.sinks = sinks
        self.seconds = 0.0

    async def __call__(self, trainer: Trainer) -> None:
        weights = list(trainer.weights())  # every rank takes part in the gathering
        began = time.perf_counter()
        if trainer.ranks.first:
            for sink in self.sinks:
                await sink.publish(weights, version=trainer.version)
        self.seconds = time.perf_counter() - began


async def train(
    trainer: Trainer,
    rounds: Rounds,
    publish: Publisher,
    *,
    store: Store | None = None,
    on_step: Callable[[StepReport, Mapping[str, float]], None] | None = None,
) -> list[StepReport]:
    """Runs the steps that are left. Resumes from the newest checkpoint in `store`; the result is the same as without the break."""
    config = trainer.config
    playing: dict[int, asyncio.Task[Groups]] = {}
    reports: list[StepReport] = []
    idle = 0
    played = resume(trainer, store)
    if trainer.version:
        await publish(trainer)
    try:
        for number in range(trainer.version, config.steps):
            start(playing, played, rounds, trainer, first=number)
            began = time.perf_counter()
            groups = await taken(trainer, playing, played, number)
            waited = time.perf_counter() - began
            report = await asyncio.to_thread(trainer.step, groups)
            for task in list(playing.values()):  # rounds that older weights must play
                await asyncio.wait([task])
            await publish(trainer)
            reports.append(report)
            idle = require_progress(report, idle, config)
            seconds = {**report.seconds, "wait": waited, "publish": publish.seconds, "step": time.perf_counter() - began}
            if on_step is not None:
                on_step(report, seconds)
            if store is not None and is_due(trainer):
                await settle(playing, played)
                keep(trainer, store, played)
    finally:
        for task in playing.values():
            task.cancel()
        await asyncio.gather(*playing.values(), return_exceptions=True)
    return reports


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


def is_due(trainer: Trainer) -> bool:
    """Every so many steps, and always after the last one: a run leaves its weights behind."""
    every = trainer.config.checkpoint_every
    return trainer.version == trainer.config.steps or bool(every and trainer.version % every == 0)


def start(playing: dict[int, asyncio.Task[Groups]], played: Mapping[int, Groups], rounds: Rounds, trainer: Trainer, *, first: int) -> None:
    """Starts every round that the current weights may play and nobody has."""
    if not trainer.ranks.first:
        return
    for number in range(first, min(first + trainer.config.lag + 1, trainer.config.steps)):
        if number not in playing and number not in played:
            playing[number] = asyncio.create_task(rounds.play(number))


async def taken(trainer: Trainer, playing: dict[int, asyncio.Task[Groups]], played: dict[int, Groups], number: int) -> Groups:
    """Round `number`, on every rank."""
    groups: Groups | None = None
    if trainer.ranks.first:
        groups = played.pop(number) if number in played else await playing.pop(number)
    return trainer.ranks.from_first(groups)


async def settle(playing: dict[int, asyncio.Task[Groups]], played: dict[int, Groups]) -> None:
    for number in list(playing):
        played[number] = await playing.pop(number)


def keep(trainer: Trainer, store: Store, played: Mapping[int, Groups]) -> None:
    waiting = {number: [[store.to_json(sample) for sample in group] for group in groups] for number, groups in played.items()}
    checkpoint.save(
        trainer, store.directory, model_dir=store.model_dir, run_hash=store.run_hash, rounds=waiting, keep=trainer.config.keep_checkpoints
    )


def resume(trainer: Trainer, store: Store | None) -> dict[int, Groups]:
    path = None if store is None else checkpoint.latest(store.directory)
    if path is None or store is None:
        return {}
    loaded = checkpoint.load(trainer, path, run_hash=store.run_hash)
    return {number: [[store.from_json(s) for s in group] for group in groups] for number, groups in loaded.rounds.items()}
