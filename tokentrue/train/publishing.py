"""Weights from the trainer to the engines, gathered one tensor at a time, and whether they have them.

`Probe`: after every publication each engine samples a few tokens, and the trainer scores them. The prompt is longer
than a block of a prefix cache: stale weights and a stale cache both show.
"""

import asyncio
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import torch

from tokentrue.errors import EngineContractError, EngineError, EngineTimeout, EngineUnreachable, TrainingError
from tokentrue.protocols import AdapterSink, PretrainedAdapter, Provider, Versioned, WeightSink
from tokentrue.train.exactness import PROBED_TOKENS
from tokentrue.train.ranks import adapter_weights, find_adapter
from tokentrue.train.trainer import Trainer
from tokentrue.types import Completion, Sampling

PROMPT_TOKENS = 320
FLOOR = 1e-3  # mean |δ| that is never called stale: float32 engines have 2e-5
FACTOR = 5.0  # times the start's mean |δ|
CHANGE = 1.05  # factor on every trained matrix that proves the path
ADAPTER = "policy"  # its name at the engines


class Probe:
    """`engines` returns those in use. Every rank calls it."""

    def __init__(self, engines: Callable[[], Sequence[Provider]], *, vocabulary: int) -> None:
        rng = random.Random(0)
        self._engines = engines
        self._prompt = [rng.randrange(vocabulary) for _ in range(PROMPT_TOKENS)]
        self.limit: float | None = None

    async def __call__(self, trainer: Trainer) -> dict[str, float]:
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


class Publisher:
    """`sinks` are this rank's. Every rank calls it."""

    def __init__(self, *sinks: WeightSink, probe: Probe | None = None) -> None:
        self.sinks = sinks
        self.probe = probe
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
        if self.probe is not None:
            await self.probe.prove(trainer, self.hand_over)
        if self.probe is not None or trainer.version:
            await self(trainer)

    async def hand_over(self, trainer: Trainer) -> None:
        """An adapter alone, where the engines serve adapters; otherwise all weights, with it merged in."""
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

    async def hand_over_adapter(self, trainer: Trainer, config: PretrainedAdapter) -> bool:
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
        if self.probe is not None and self.sinks and self.version is not None:
            await self.probe.require_versions(self.version, when)
