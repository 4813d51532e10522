"""Do the engines have the trainer's weights? After every publication each of them samples a few tokens, and the trainer
scores them.

The prompt is always the same and longer than a block of an engine's prefix cache: stale weights and a stale cache both
show. At the start the path is proven: deliberately changed weights are published, and each engine must be nearer to
them than to the trainer's own. Then the own ones are published, and what an engine's arithmetic adds is measured; a
later mean |δ| far above that means that the engine samples from other weights, and the run stops.

Between two publications an engine may be restarted with the weights of its start. `require_versions` asks every engine
which weights it has; behind a router that hides a restart the |δ| of each row decides (`exactness.require_near`).
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import torch

from tokentrue.errors import EngineContractError, EngineError, EngineTimeout, EngineUnreachable, TrainingError
from tokentrue.protocols import Provider, Versioned
from tokentrue.train.checks.exactness import PROBED_TOKENS
from tokentrue.train.trainer import Trainer
from tokentrue.types import Completion, Sampling

PROMPT_TOKENS = 320
FLOOR = 1e-3  # mean |δ| that is never called stale: float32 engines have 2e-5
FACTOR = 5.0  # times the start's mean |δ|
CHANGE = 1.05  # factor on every matrix that proves the path


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """`delta` is the largest mean |δ| over the engines, `engines` how many answered."""

    delta: float
    engines: int


class Probe:
    """`engines` gives the engines that are in use. Every rank calls it."""

    def __init__(self, engines: Callable[[], Sequence[Provider]], *, vocabulary: int) -> None:
        rng = random.Random(0)
        self._engines = engines
        self._prompt = [rng.randrange(vocabulary) for _ in range(PROMPT_TOKENS)]
        self.limit: float | None = None

    async def __call__(self, trainer: Trainer) -> ProbeResult:
        """Raises TrainingError where an engine's log-probabilities are not those of the trainer's weights."""
        found = await self._sampled(trainer)
        worst = max(self._delta(trainer, completion) for completion in found)
        if self.limit is None:
            self.limit = max(FLOOR, FACTOR * worst)
        elif worst > self.limit:
            raise TrainingError(
                f"policy version {trainer.version}: an engine's log-probabilities are {worst:.3g} away from the trainer's in the mean "
                f"(limit {self.limit:.3g}): it samples from other weights than those that were published. Restart it and resume the run"
            )
        return ProbeResult(delta=worst, engines=len(found))

    async def require_versions(self, version: int, when: str) -> None:
        """Raises EngineContractError where an engine in use says that it has the weights of another version.

        An engine that is gone gets the weights again before it is used.
        """
        for engine in self._engines():
            if isinstance(engine, Versioned):
                found = version
                with contextlib.suppress(EngineUnreachable, EngineTimeout):
                    found = await engine.weight_version()
                if found != version:
                    raise EngineContractError(
                        f"{engine.name} at {engine.url} has weight version {found} {when}, and version {version} was published: it was "
                        "restarted, or given other weights. Nothing of it is trained on; run again to resume"
                    )

    async def prove(self, trainer: Trainer, publish: Callable[[Trainer], Awaitable[None]]) -> None:
        """Raises TrainingError unless every engine follows changed weights. The trainer's own are put back, bit for
        bit."""
        own = [parameter.detach().clone() for parameter in trainer.model.parameters()]
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.mul_(CHANGE if parameter.dim() >= 2 else 1.0)
        try:
            await publish(trainer)
            found = await self._sampled(trainer)
            changed = [self._delta(trainer, completion) for completion in found]
        finally:
            with torch.no_grad():
                for parameter, value in zip(trainer.model.parameters(), own, strict=True):
                    parameter.copy_(value)
        for near, completion in zip(changed, found, strict=True):
            far = self._delta(trainer, completion)
            if near > far / 2:
                raise TrainingError(
                    f"an engine does not take published weights: changed on purpose, they are {near:.3g} away from its log-probabilities, "
                    f"the unchanged ones {far:.3g}. See docs/engines.md for the server's options"
                )

    async def _sampled(self, trainer: Trainer) -> list[Completion]:
        """What each engine sampled, on every rank."""
        mine = await self._sample(trainer) if trainer.ranks.first else None
        await trainer.ranks.meet()
        found = trainer.ranks.from_first(mine)
        if not found:
            raise EngineError("no engine answered the probe")
        return found

    async def _sample(self, trainer: Trainer) -> list[Completion]:
        """An engine that dies here is not probed: it gets the weights again before it is used, as one that missed the
        publication."""
        asked = Sampling(temperature=trainer.config.temperature, max_tokens=PROBED_TOKENS, seed=trainer.version)
        found: list[Completion] = []
        for engine in self._engines():
            with contextlib.suppress(EngineUnreachable, EngineTimeout):
                found.append(await engine.generate(self._prompt, asked))
        return found

    def _delta(self, trainer: Trainer, completion: Completion) -> float:
        ids = [*self._prompt, *completion.token_ids]
        mine = trainer.score(ids)[len(self._prompt) :].double().cpu()
        return float((mine - torch.tensor(list(completion.logprobs), dtype=torch.float64)).abs().mean())
