"""Weights from the trainer to the engines: do they have them, and is the policy that they sample from better?

With several ranks weights are gathered one tensor at a time: no rank holds the whole model twice. A sink that fails
half-way must not leave the others waiting in a collective, so its rank walks on through the rest.

`Probe`: after every publication each engine samples a few tokens, and the trainer scores them. The prompt is always the
same and longer than a block of an engine's prefix cache: stale weights and a stale cache both show. At the start
deliberately changed weights are published, and each engine must be nearer to them than to the trainer's own.

`UpdateGate`: the engines score the step's rows with the new weights, and a bad update is undone (MIPU, arXiv
2606.29526). Nothing is sampled between the publication of an update and its acceptance.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from tokentrue.errors import (
    ConfigError,
    EngineContractError,
    EngineError,
    EngineRejected,
    EngineTimeout,
    EngineUnreachable,
    TrainingError,
)
from tokentrue.mismatch import UpdateCheck, check_update
from tokentrue.protocols import AdapterSink, Provider, Scoring, Versioned, WeightSink
from tokentrue.train.config import AcceptanceConfig
from tokentrue.train.exactness import PROBED_TOKENS
from tokentrue.train.ranks import Ranks, adapter_weights, find_adapter
from tokentrue.train.reporting import StepReport
from tokentrue.train.rows import Groups, Row
from tokentrue.train.trainer import Trainer
from tokentrue.train.update import Snapshot, per_token
from tokentrue.types import Completion, Sampling

PROMPT_TOKENS = 320
FLOOR = 1e-3  # mean |δ| that is never called stale: float32 engines have 2e-5
FACTOR = 5.0  # times the start's mean |δ|
CHANGE = 1.05  # factor on every trained matrix that proves the path
ADAPTER = "policy"  # its name at the engines
IN_FLIGHT = 32  # rows that an engine is asked to score at once


class Probe:
    """`engines` returns those in use. Every rank calls it."""

    def __init__(self, engines: Callable[[], Sequence[Provider]], *, vocabulary: int) -> None:
        rng = random.Random(0)
        self._engines = engines
        self._prompt = [rng.randrange(vocabulary) for _ in range(PROMPT_TOKENS)]
        self.limit: float | None = None

    async def __call__(self, trainer: Trainer) -> dict[str, float]:
        """Metrics. Raises TrainingError where an engine's log-probabilities are not those of the trainer's weights."""
        found = await self._sample(trainer)
        worst = max(self._delta(trainer, completion) for completion in found)
        if self.limit is None:
            self.limit = max(FLOOR, FACTOR * worst)
        elif worst > self.limit:
            raise TrainingError(
                f"policy version {trainer.version}: an engine's log-probabilities are {worst:.3g} away from the "
                f"trainer's in the mean (limit {self.limit:.3g}): it samples from other weights than those that were "
                "published. Restart it and resume the run"
            )
        return {"probe/delta": worst, "probe/engines": len(found)}

    async def require_versions(self, version: int, when: str) -> None:
        """Raises EngineContractError where an engine says that it has the weights of another version."""
        for engine in self._engines():
            if isinstance(engine, Versioned):
                found = version
                with suppress(EngineUnreachable, EngineTimeout):
                    found = await engine.weight_version()
                if found != version:
                    raise EngineContractError(
                        f"{engine.name} at {engine.url} has weight version {found} {when}, and version {version} was "
                        "published: it was restarted, or given other weights. Nothing of it is trained on; run again "
                        "to resume"
                    )

    async def prove(self, trainer: Trainer, publish: Callable[[Trainer], Awaitable[None]]) -> None:
        """Raises TrainingError unless every engine follows changed weights; the trainer's own are put back."""
        trained = [each for each in trainer.model.parameters() if each.requires_grad and each.dim() >= 2]
        own = [parameter.detach().clone() for parameter in trained]
        with torch.no_grad():
            for parameter in trained:
                parameter.mul_(CHANGE)
                if not bool(parameter.any()):  # the B of a new adapter
                    parameter.fill_(CHANGE - 1)
        try:
            await publish(trainer)
            found = await self._sample(trainer)
            changed = [self._delta(trainer, completion) for completion in found]
        finally:
            with torch.no_grad():
                for parameter, value in zip(trained, own, strict=True):
                    parameter.copy_(value)
        for near, completion in zip(changed, found, strict=True):
            far = self._delta(trainer, completion)
            if near > far / 2:
                raise TrainingError(
                    f"an engine does not take published weights: changed on purpose, they are {near:.3g} away from "
                    f"its log-probabilities, the unchanged ones {far:.3g}. See docs/engines.md for the server's options"
                )

    async def _sample(self, trainer: Trainer) -> list[Completion]:
        """What each of the first rank's engines sampled, on every rank."""
        mine: list[Completion] = []
        asked = Sampling(temperature=trainer.config.temperature, max_tokens=PROBED_TOKENS, seed=trainer.version)
        for engine in self._engines() if trainer.ranks.first else ():
            with suppress(EngineUnreachable, EngineTimeout):
                mine.append(await engine.generate(self._prompt, asked))
        await trainer.ranks.meet()
        found = trainer.ranks.from_first(mine)
        if not found:
            raise EngineError("no engine answered the probe")
        return found

    def _delta(self, trainer: Trainer, completion: Completion) -> float:
        mine = trainer.score([*self._prompt, *completion.token_ids])[PROMPT_TOKENS:].double().cpu()
        return float((mine - torch.tensor(list(completion.logprobs), dtype=torch.float64)).abs().mean())


class UpdateGate:
    """The first rank's engines score the rows; every rank calls it."""

    def __init__(self, config: AcceptanceConfig, engines: Callable[[], Sequence[Provider]]) -> None:
        self.config = config
        self._engines = engines
        self.refused = 0  # updates in a row

    def engines(self) -> list[Scoring]:
        """Raises ConfigError where one of them cannot judge."""
        found: list[Scoring] = []
        for engine in self._engines():
            if not isinstance(engine, Scoring):
                raise ConfigError(
                    f"train.acceptance: engine {engine.name!r} does not score given tokens; use exact or vllm, or turn "
                    "it off"
                )
            found.append(engine)
        return found

    async def __call__(
        self,
        rows: Sequence[Row],
        advantages: Sequence[float],
        ranks: Ranks,
        *,
        require: Callable[[Sequence[Tensor]], Awaitable[None]] | None = None,
    ) -> UpdateCheck:
        """Judges the weights that the engines have. `require` raises where the scores are of other weights."""
        mine = await ranks.together(self._score(rows if ranks.first else ()), "judge the update")
        updated: list[Tensor] = ranks.from_first(mine)
        if require is not None:
            await require(updated)
        cpu = torch.device("cpu")
        scored = [(row, value, slice(len(found))) for row, value, found in zip(rows, advantages, updated, strict=True)]
        found = check_update(
            updated,
            [row.rollout[part] for row, _, part in scored],
            [per_token(row, value, cpu)[part] for row, value, part in scored],
            [row.mask[part] for row, _, part in scored],
            min_gain=self.config.min_gain,
            max_divergence=self.config.max_divergence or None,
        )
        self.refused = 0 if found.accepted else self.refused + 1
        return found

    async def _score(self, rows: Sequence[Row]) -> list[Tensor]:
        """Rows are dealt to the engines in turn; those of an engine that cannot be reached go to the next one."""
        if not rows:
            return []  # also on every rank but the first
        engines = deque(self.engines())
        gate = asyncio.Semaphore(IN_FLIGHT * len(engines))

        async def score(row: Row) -> Tensor:
            if row.kept is not None or bool((row.temperatures[row.mask] != 1.0).any()):
                raise ConfigError(
                    f"train.acceptance: sample {row.sample.sample_id} was sampled at another temperature than 1, or "
                    "under filters; engines score given tokens without them"
                )
            engines.rotate()
            order = list(engines)  # now: rows that wait at the gate have their turn already
            ids = row.ids.tolist()
            async with gate:
                try:
                    values = await score_with_first(order, ids)
                except EngineRejected:
                    del ids[-1]
                    values = await score_with_first(order, ids)
            if len(values) != len(ids) - 1:
                raise EngineContractError(
                    f"an engine gave {len(values)} log-probabilities of {len(ids)} tokens, not {len(ids) - 1}"
                )
            return torch.tensor([0.0, *values], dtype=torch.float64).float()

        return list(await asyncio.gather(*(score(row) for row in rows)))


async def score_with_first(engines: Sequence[Scoring], token_ids: Sequence[int]) -> Sequence[float]:
    """The answer of the first engine that can be reached."""
    for engine in engines[:-1]:
        with suppress(EngineUnreachable, EngineTimeout):
            return await engine.score(token_ids)
    return await engines[-1].score(token_ids)


class Publisher:
    """`sinks` are this rank's. Every rank calls it."""

    def __init__(self, *sinks: WeightSink, probe: Probe | None = None, gate: UpdateGate | None = None) -> None:
        self.sinks = sinks
        self.probe = probe
        self.gate = gate
        self.version: int | None = None  # of the last publication
        self.is_adapter: bool | None = None  # whether it was an adapter alone; None without one
        self.seconds = 0.0
        self.metrics: dict[str, float] = {}

    async def __call__(self, trainer: Trainer) -> None:
        began = time.perf_counter()
        await self.hand_over(trainer)
        self.version = trainer.version
        if self.probe is not None:
            self.metrics = await self.probe(trainer)
            trainer.delta_limit = self.probe.limit
        if self.is_adapter is not None:
            self.metrics |= {"publish/adapter": float(self.is_adapter)}
        self.seconds = time.perf_counter() - began

    async def begin(self, trainer: Trainer) -> None:
        """Before the first round: engines prove that they take weights, and get the trainer's."""
        if self.gate is not None and trainer.ranks.first:
            self.gate.engines()
        if self.probe is not None:
            await self.probe.prove(trainer, self.hand_over)
        if self.probe is not None or trainer.version:
            await self(trainer)

    async def publish_step(self, trainer: Trainer, report: StepReport, groups: Groups, before: Snapshot | None) -> None:
        """Publishes what a step made; an update that the gate refuses is undone, and the weights `before` it
        published."""
        began = time.perf_counter()
        await self(trainer)
        if self.gate is None or before is None:
            return
        rows = trainer.rows(groups)

        async def require_versions(when: str) -> None:
            await trainer.ranks.together(self.require_versions(when), "ask the engines for their version")

        async def require(scores: Sequence[Tensor]) -> None:
            await require_versions("after it scored the update")
            await asyncio.to_thread(trainer.require_scores, rows, report.advantages, scores)

        await require_versions("before it scored the update")
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
        if self.gate.refused > self.gate.config.max_refused:
            raise TrainingError(
                f"step {report.step}: {self.gate.refused} updates in a row were refused by update acceptance and "
                f"undone (the last: gain {found.gain:.3g}, divergence {found.divergence:.3g}); lower optim.lr, look at "
                "the mismatch of engine and trainer, or change train.acceptance"
            )

    async def hand_over(self, trainer: Trainer) -> None:
        """An adapter alone, where the engines serve adapters; otherwise all weights, with the adapter merged in."""
        weights = trainer.weights()  # gathered while somebody iterates
        adapter = find_adapter(trainer.model)
        trouble: Exception | None = None
        try:
            if adapter is not None and self.sinks and await self.hand_over_adapter(trainer, adapter):
                return
            # In one process these are the parameters themselves: nothing is copied.
            is_held = trainer.ranks.world == 1 or len(self.sinks) > 1
            given = await asyncio.to_thread(list, weights) if is_held else weights
            for sink in self.sinks:
                await sink.publish(given, version=trainer.version)
        except Exception as error:  # told to all ranks below
            trouble = error
        await asyncio.to_thread(deque, weights, 0)  # gathers the rest
        trainer.ranks.raise_together(trouble, f"publish version {trainer.version}")

    async def hand_over_adapter(self, trainer: Trainer, config: Any) -> bool:
        """False where the engines serve no adapters."""
        version, self.is_adapter = trainer.version, False
        for sink in self.sinks:
            if not isinstance(sink, AdapterSink):
                return False
            weights = adapter_weights(trainer.model)
            if not await sink.publish_adapter(weights, config, version=version, name=ADAPTER):
                return False
        self.is_adapter = True
        return True

    async def require_versions(self, when: str) -> None:
        """Raises where an engine of this rank has other weights than those published last."""
        if self.probe is not None and self.sinks and self.version is not None:
            await self.probe.require_versions(self.version, when)
