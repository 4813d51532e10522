"""Weights from the trainer to the engines, which are probed then, and with update acceptance judge the update.

With several ranks weights are gathered one tensor at a time: no rank holds the whole model twice. A sink that fails
half-way must not leave the others waiting in a collective, so its rank walks on through the rest.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from tokentrue.protocols import WeightSink
from tokentrue.train.data.rounds import Groups
from tokentrue.train.probing import Probe, UpdateGate
from tokentrue.train.reporting import StepReport
from tokentrue.train.trainer import Trainer
from tokentrue.train.update.masters import Snapshot


class Publisher:
    """`sinks` are this rank's. Every rank calls it."""

    def __init__(self, *sinks: WeightSink, probe: Probe | None = None, gate: UpdateGate | None = None) -> None:
        self.sinks = sinks
        self.probe = probe
        self.gate = gate
        self.version: int | None = None  # of the last publication
        self.seconds = 0.0
        self.metrics: dict[str, float] = {}

    async def __call__(self, trainer: Trainer) -> None:
        began = time.perf_counter()
        await self.hand_over(trainer)
        self.version = trainer.version
        await self.check(trainer)
        self.seconds = time.perf_counter() - began

    async def publish_step(self, trainer: Trainer, report: StepReport, groups: Groups, before: Snapshot | None) -> None:
        """Publishes what a step made; an update that the gate refuses is undone, and the weights `before` it
        published."""
        began = time.perf_counter()
        await self(trainer)
        if self.gate is None or before is None:
            return
        rows = trainer.rows(groups)

        async def require(scores: Sequence[Tensor]) -> None:
            await self.require_versions_on_all(trainer, "after it scored the update")
            await asyncio.to_thread(trainer.require_scores, rows, report.advantages, scores)

        await self.require_versions_on_all(trainer, "before it scored the update")
        found = await self.gate(rows, report.advantages, trainer.ranks, require=require)
        if not found.accepted:
            trainer.restore(before)
            await self(trainer)
        self.metrics |= {
            "acceptance/gain": found.gain,
            "acceptance/divergence": found.divergence,
            "update/refused": float(not found.accepted),
        }
        self.seconds = time.perf_counter() - began
        self.gate.require_progress(found, step=report.step)

    async def hand_over(self, trainer: Trainer) -> None:
        if trainer.ranks.world == 1:
            weights = list(trainer.weights())  # the parameters themselves: nothing is copied
            for sink in self.sinks:
                await sink.publish(weights, version=trainer.version)
            return
        await self.hand_over_gathered(trainer)

    async def hand_over_gathered(self, trainer: Trainer) -> None:
        passing = Passing(trainer.weights())
        trouble: Exception | None = None
        try:
            if len(self.sinks) > 1:
                kept = await asyncio.to_thread(list, passing)
                for sink in self.sinks:
                    await sink.publish(kept, version=trainer.version)
            for sink in self.sinks if len(self.sinks) == 1 else ():
                await sink.publish(passing, version=trainer.version)
        except Exception as error:  # told to all ranks below
            trouble = error
        await asyncio.to_thread(passing.finish)
        trainer.ranks.raise_together(trouble, f"publish version {trainer.version}")

    async def begin(self, trainer: Trainer) -> None:
        """Before the first round: engines prove that they take weights, and get the trainer's."""
        if self.gate is not None and trainer.ranks.first:
            self.gate.require_scoring()
        if self.probe is not None:
            await self.probe.prove(trainer, self.hand_over)
        if self.probe is not None or trainer.version:
            await self(trainer)

    async def check(self, trainer: Trainer) -> None:
        if self.probe is not None:
            self.metrics = await self.probe(trainer)
            trainer.delta_limit = self.probe.limit

    async def require_versions(self, when: str) -> None:
        """Raises where an engine of this rank has other weights than those published last."""
        if self.probe is not None and self.sinks and self.version is not None:
            await self.probe.require_versions(self.version, when)

    async def require_versions_on_all(self, trainer: Trainer, when: str) -> None:
        await trainer.ranks.together(self.require_versions(when), "ask the engines for their version")


class Passing(Iterable[tuple[str, Any]]):
    """Weights that are gathered while somebody iterates; `finish` gathers the rest."""

    def __init__(self, weights: Iterator[tuple[str, Any]]) -> None:
        self._weights = weights

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return self._weights

    def finish(self) -> None:
        deque(self._weights, maxlen=0)
