"""What the model samples: reasoning, text and calls, in ids that the tokenizer would not have chosen."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from tokentrue.conformance.standin.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """`expected` is what a client must be shown: (reasoning, text, calls as (name, arguments)); None where that is the
    parser's to say."""

    ids: tuple[int, ...]
    text: str
    expected: tuple[str, str, tuple[tuple[str, str], ...]] | None = None


class Writer:
    """Random outputs for one case."""

    WORDS: ClassVar[Sequence[str]] = (
        "the", "shelf", "door", "café", "東京", "слово", "🧪", "x=1;", '"quoted"', "\\back", "[1, 2]", "tokenization", "ok",
    )  # fmt: skip

    def __init__(self, vocabulary: Vocabulary, rng: random.Random) -> None:
        self._vocabulary, self._rng = vocabulary, rng

    def words(self, most: int = 8) -> str:
        return " ".join(self._rng.choice(self.WORDS) for _ in range(self._rng.randint(1, most)))

    def structured(
        self, reasoning: str, text: str, calls: Sequence[tuple[str, str]], *, split: float | None = None
    ) -> Output:
        """`split`: the share of tokens that are cut in two; None is a random one."""
        raw = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
        raw += text
        for index, (name, arguments) in enumerate(calls):
            raw += "\n" if text or index else ""
            raw += f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        made = self.sampled(raw, split=split)
        return replace(made, expected=(reasoning, text, tuple(calls)))

    def sampled(self, raw: str, *, stop: bool = True, split: float | None = None) -> Output:
        ids = self._vocabulary.encode(raw)
        ids = self._vocabulary.split(ids, self._rng, self._rng.choice((0.0, 0.1, 0.5)) if split is None else split)
        return Output(ids=(*ids, *([self._vocabulary.stop] if stop else [])), text=raw)
