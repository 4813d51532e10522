"""What every probe is given: the engine, the reference, the prompts, and the spread that counts as rounding."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokentrue.doctor.fit import Spread
from tokentrue.doctor.observations import Observation
from tokentrue.doctor.reference import Reference
from tokentrue.doctor.routes import EngineRoutes
from tokentrue.protocols import Provider
from tokentrue.renderers import Renderer
from tokentrue.types import Completion, Sampling

QUESTIONS = (
    "What is 12 + 7?",
    "Name three rivers and say where they flow.",
    "Write one sentence about the sea in winter.",
    "Is 91 a prime number? Explain in a few words.",
)
STORY = (
    "The lamp on the pier had burned all night, and when the boats came in at six the harbour was still grey. Anna counted the crates, "
    "wrote 14 into the book, then 9, then 31, and asked twice whether the ice would last until noon. "
)


@dataclass(slots=True, kw_only=True)
class Examination:
    """Mutable: probes add their observations, which later ones use."""

    provider: Provider
    routes: EngineRoutes
    renderer: Renderer
    reference: Reference
    dtype: str  # what the engine is expected to compute in
    spread: Spread  # of that dtype against float32
    previous: str | Path | None = None
    max_tokens: int = 32
    seed: int = 7
    observations: list[Observation] = field(default_factory=list[Observation])
    uncertain: list[tuple[int, ...]] = field(
        default_factory=list[tuple[int, ...]]
    )  # prompts whose next token is least certain

    def prompts(self) -> list[tuple[int, ...]]:
        """Chat prompts of the model's own template."""
        return [tuple(self.renderer.render([{"role": "user", "content": text}]).token_ids) for text in QUESTIONS]

    def open_prompts(self) -> list[tuple[int, ...]]:
        """Prompts after which several tokens are likely; where none is known, the plain ones."""
        return self.uncertain or self.prompts()

    def long_prompt(self, tokens: int = 400) -> tuple[int, ...]:
        """A prompt of about `tokens` ids that no probe has sent before, well inside the context."""
        tokens = min(tokens, self.reference.max_positions // 2)

        def render(words: Sequence[str]) -> tuple[int, ...]:
            return tuple(self.renderer.render([{"role": "user", "content": " ".join(words)}]).token_ids)

        words = STORY.split()
        while len(render(words)) < tokens:
            words += STORY.split()
        low, high = 1, len(words)
        while low < high:  # the longest text whose prompt still fits
            middle = (low + high + 1) // 2
            low, high = (middle, high) if len(render(words[:middle])) <= tokens else (low, middle - 1)
        return render(words[:low])

    async def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        """All at once, as an engine batches them. Where one fails the others end before its error is raised."""
        found = await asyncio.gather(
            *(self.provider.generate(prompt, sampling) for prompt in prompts), return_exceptions=True
        )
        for one in found:
            if isinstance(one, BaseException):
                raise one
        return [one for one in found if isinstance(one, Completion)]
