"""What the engine is to answer, and what it was asked and answered."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from tokentrue.conformance.standin.vision import ImagePlace
from tokentrue.conformance.standin.writer import Output


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """`reason` is stop or length; `matched` is the token or the string that stopped it."""

    reason: str
    matched: int | str | None = None


@dataclass(slots=True, kw_only=True)
class Generation:
    """One request to the engine, and what it answered. `delivered` counts the tokens of whole events that were written
    to the socket."""

    number: int
    session: str
    prompt: tuple[int, ...]
    streamed: bool
    plan: Plan
    body: dict[str, Any]
    temperature: float
    images: Sequence[ImagePlace] = ()
    sampled: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    finish: Finished = field(default_factory=lambda: Finished(reason="length"))
    kept: list[list[int]] = field(default_factory=list[list[int]])  # by token, where the request had a filter
    raw: list[float] = field(default_factory=list[float])  # log-probabilities before the filter
    delivered: int = 0
    ended: str = "running"
    seed: int | None = None
    stops: tuple[str, ...] = ()
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
