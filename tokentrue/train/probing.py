"""Do the engines have the trainer's weights? After every publication each of them samples a few tokens, and the trainer scores them.

The prompt is always the same and longer than a block of an engine's prefix cache: stale weights and a stale cache both show. What an
engine's own arithmetic adds is measured once, at the start, when nothing has been published; a later mean |δ| far above that means that
the engine samples from other weights, and the run stops.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tokentrue.errors import EngineError, TrainingError
from tokentrue.protocols import Provider
from tokentrue.train.trainer import Trainer
from tokentrue.types import Completion, Sampling

PROMPT_TOKENS = 320
SAMPLED_TOKENS = 24
FLOOR = 1e-3  # mean |δ| that is never called stale: float32 engines have 2e-5
START_LIMIT = 0.3  # mean |δ| at the start above which an engine holds another model
FACTOR = 5.0  # times the start's mean |δ|


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
        found = trainer.ranks.from_first(await self._sample(trainer) if trainer.ranks.first else None)
        deltas = [self._delta(trainer, completion) for completion in found]
        if not deltas:
            raise EngineError("no engine answered the probe")
        worst = max(deltas)
        if self.limit is None:
            self._start(worst)
        elif worst > self.limit:
            raise TrainingError(
                f"policy version {trainer.version}: an engine's log-probabilities are {worst:.3g} away from the trainer's in the mean "
                f"(limit {self.limit:.3g}): it samples from other weights than those that were published. Restart it and resume the run"
            )
        return ProbeResult(delta=worst, engines=len(deltas))

    def _start(self, delta: float) -> None:
        if delta > START_LIMIT:
            raise TrainingError(
                f"the engine's log-probabilities are {delta:.3g} away from the trainer's in the mean before the first step: "
                "it serves another model; start it from the directory or id in model.path"
            )
        self.limit = max(FLOOR, FACTOR * delta)

    async def _sample(self, trainer: Trainer) -> list[Completion]:
        asked = Sampling(temperature=trainer.config.temperature, max_tokens=SAMPLED_TOKENS, seed=trainer.version)
        return [await engine.generate(self._prompt, asked) for engine in self._engines()]

    def _delta(self, trainer: Trainer, completion: Completion) -> float:
        ids = [*self._prompt, *completion.token_ids]
        mine = trainer.score(ids)[len(self._prompt) :].double().cpu()
        return float((mine - torch.tensor(list(completion.logprobs), dtype=torch.float64)).abs().mean())
