"""What the model samples (in ids that the tokenizer would not have chosen), how the engine is to answer, and what it
was asked and answered.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, ClassVar

from tokentrue.conformance.standin.vocabulary import ImagePlace, Vocabulary
from tokentrue.records import record


@record
class Output:
    """`expected`: what a client must be shown, (reasoning, text, calls as (name, arguments)); None where the parser
    decides."""

    ids: tuple[int, ...]
    text: str
    expected: tuple[str, str, tuple[tuple[str, str], ...]] | None = None


@dataclass(slots=True, kw_only=True)
class Plan:
    """One generation to come. `after` tokens go out before `fault`."""

    output: Output
    fault: str = ""
    after: int = 0
    version: str = ""
    next_version: str = ""  # of the tokens from `after` on: weights that changed in mid-turn
    per_event: int = 1
    cumulative: bool = True
    hold: asyncio.Event | None = None  # the tokens before `after` are out; the rest waits for this


@record
class Finished:
    """`reason` is stop or length; `matched` is the token or the string that stopped it."""

    reason: str
    matched: int | str | None = None


@record
class EngineRequest:
    """What every route asks for. `prompt` has one placeholder for each image."""

    body: dict[str, Any]
    prompt: tuple[int, ...]
    stream: bool
    temperature: float
    limit: int | None = None
    stops: tuple[str, ...] = ()
    seed: int | None = None
    is_filtered: bool = False  # top-p, top-k or min-p
    several: int = 1  # answers
    images: tuple[bytes, ...] = ()


@dataclass(slots=True, kw_only=True)
class Generation:
    """One request and its answer. `prompt` has all placeholders of images. `delivered` counts the tokens of whole
    events that were written to the socket."""

    number: int
    session: str
    asked: EngineRequest
    plan: Plan
    prompt: tuple[int, ...]
    images: Sequence[ImagePlace] = ()
    sampled: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    finish: Finished = field(default_factory=lambda: Finished(reason="length"))
    kept: list[list[int]] = field(default_factory=list[list[int]])  # by token, where the request had a filter
    delivered: int = 0
    ended: str = "running"
    doubtful: bool = False  # it is open whether what was delivered can be taken for tokens
    arrived: asyncio.Event = field(default_factory=asyncio.Event)  # the first tokens are out

    @property
    def full(self) -> tuple[int, ...]:
        return (*self.prompt, *self.sampled[: self.delivered])

    def version_at(self, count: int) -> str:
        """The version of the weights that sampled the token before `count`."""
        return self.plan.next_version if self.plan.next_version and count > self.plan.after else self.plan.version

    def version_spans(self) -> list[dict[str, Any]]:
        spans, at = list[dict[str, Any]](), 0
        for version, group in groupby(self.version_at(count) for count in range(1, len(self.sampled) + 1)):
            end = at + len(list(group))
            spans.append({"start": at, "end": end, "version": version})
            at = end
        return spans


class Writer:
    WORDS: ClassVar[Sequence[str]] = (
        "the", "shelf", "door", "café", "東京", "слово", "🧪", "x=1;", '"quoted"', "\\back", "[1, 2]", "tokenization",
        "ok",
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
        return replace(self.sampled(raw, split=split), expected=(reasoning, text, tuple(calls)))

    def sampled(self, raw: str, *, split: float | None = None) -> Output:
        ids = self._vocabulary.encode(raw)
        ids = self._vocabulary.split(ids, self._rng, self._rng.choice((0.0, 0.1, 0.5)) if split is None else split)
        return Output(ids=(*ids, self._vocabulary.stop), text=raw)
