"""What every probe is given: the engine, the reference, the prompts, and the spread that counts as rounding."""

from __future__ import annotations

import asyncio
import functools
import random
import re
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ParamSpec

from tokentrue.doctor.findings import Finding, cannot_tell
from tokentrue.doctor.naming import Evidence, Spread
from tokentrue.doctor.reference import Observation, Reference
from tokentrue.doctor.routes import EngineRoutes
from tokentrue.errors import ConfigError, EngineError, InputError, TokenContractError
from tokentrue.protocols import Provider
from tokentrue.renderers import Renderer
from tokentrue.types import Completion, Sampling

P = ParamSpec("P")
MARKER = re.compile(r"<[^<>\s]+>|\[[A-Z]+\]")
QUESTIONS = (
    "What is 12 + 7?",
    "Name three rivers and say where they flow.",
    "Write one sentence about the sea in winter.",
    "Is 91 a prime number? Explain in a few words.",
)
STORY = (
    "The lamp on the pier had burned all night, and when the boats came in at six the harbour was still grey. Anna "
    "counted the crates, wrote 14 into the book, then 9, then 31, and asked twice whether the ice would last until "
    "noon. "
)


@dataclass(slots=True, kw_only=True)
class Examination:
    """Mutable: the first probes add what they observe, which later ones use."""

    provider: Provider
    routes: EngineRoutes
    renderer: Renderer
    reference: Reference
    dtype: str  # what the engine is expected to compute in
    spread: Spread = field(default_factory=Spread)  # of that dtype against float32
    previous: str | Path | None = None
    max_tokens: int = 40
    seed: int = 7
    observations: list[Observation] = field(default_factory=list[Observation])
    uncertain: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])  # prompts with an uncertain next id
    evidence: Evidence | None = None  # of `observations`
    prompt_evidence: Evidence | None = None
    tops: list[Mapping[int, float]] = field(default_factory=list[Mapping[int, float]])  # at `open_prompts`, T = 1

    @property
    def visible(self) -> float:
        """A difference above this is seen through the wire and the dtype."""
        return max(self.spread.limit, 1e-3)

    def special_ids(self) -> list[int]:
        """Ids that an engine may put before a prompt: those of the configuration, and tokens that look like markers."""
        config, size = self.reference.config, self.reference.vocab_size
        named = [getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "pad", "decoder_start")]
        flat = [one for name in named for one in (name if isinstance(name, list) else [name]) if isinstance(one, int)]
        edges = [*range(min(64, size)), *range(max(64, size - 256), size)]
        markers = [one for one in edges if MARKER.fullmatch(self.renderer.decode([one]))]
        return list(dict.fromkeys([*flat, *self.renderer.stop_token_ids, 0, 1, 2, *markers]))[:24]

    def render(self, text: str) -> tuple[int, ...]:
        return tuple(self.renderer.render([{"role": "user", "content": text}]).token_ids)

    def prompts(self) -> list[tuple[int, ...]]:
        """Chat prompts of the model's own template."""
        return [self.render(text) for text in QUESTIONS]

    def open_prompts(self) -> list[tuple[int, ...]]:
        """Prompts after which several tokens are likely; where none is known, the plain ones."""
        return self.uncertain or self.prompts()

    def long_prompt(self, tokens: int = 400) -> tuple[int, ...]:
        """A prompt of about `tokens` ids that no probe has sent before, well inside the context."""
        tokens = min(tokens, self.reference.max_positions // 2)
        words = STORY.split() * (1 + tokens // len(STORY.split()))
        too_many = bisect_right(range(len(words)), tokens, key=lambda count: len(self.render(" ".join(words[:count]))))
        return self.render(" ".join(words[: max(1, too_many - 1)]))

    def fresh_prompt(self, tokens: int, seed: int) -> list[int]:
        """Ids that no probe has sent, so that no cache knows them; without the end of the message, after which a model
        may have little to say."""
        start, *middle = self.long_prompt(tokens)[:-8]
        random.Random(self.seed + seed).shuffle(middle)
        return [start, *middle]

    async def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        """All at once; where one fails the others end before its error is raised."""
        found = await asyncio.gather(
            *(self.provider.generate(prompt, sampling) for prompt in prompts), return_exceptions=True
        )
        for one in found:
            if isinstance(one, BaseException):
                raise one
        return [one for one in found if isinstance(one, Completion)]


def probe(name: str) -> Callable[[Callable[P, Awaitable[Finding]]], Callable[P, Awaitable[Finding]]]:
    """A probe of this name. Where the engine refuses what it asks, the probe cannot tell."""

    def wrap(ask: Callable[P, Awaitable[Finding]]) -> Callable[P, Awaitable[Finding]]:
        @functools.wraps(ask)
        async def run(*args: P.args, **kwargs: P.kwargs) -> Finding:
            try:
                found = await ask(*args, **kwargs)
            except ConfigError:  # the user's own, such as weights that cannot be loaded: not the engine's refusal
                raise
            except (EngineError, InputError, TokenContractError) as error:
                found = cannot_tell(str(error))
            return replace(found, probe=name)

        return run

    return wrap
