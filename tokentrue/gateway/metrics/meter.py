"""Wraps the engine: times it, and stamps the policy version where the engine reports none.

The time that a turn spends here is the engine's; the rest of the turn is what the gateway adds.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Protocol

from tokentrue.protocols import Adapting, EngineControl
from tokentrue.types import UNVERSIONED, Chunk, Completion, Ids, Sampling, VersionSpan


class Clock(Protocol):
    """Seconds that one turn spent in the engine."""

    engine_s: float


CLOCK: ContextVar[Clock | None] = ContextVar("tokentrue_engine_clock", default=None)


class Metered:
    """`version` is what /admin/version noted; an engine that reports its own is believed."""

    def __init__(self, inner: EngineControl, *, version: int = UNVERSIONED) -> None:
        self.inner = inner
        self.version = version

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def truthful_filters(self) -> frozenset[str]:
        return self.inner.truthful_filters

    @property
    def adapters(self) -> Sequence[str]:
        return self.inner.adapters if isinstance(self.inner, Adapting) else ()

    async def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None) -> Completion:
        clock, started = CLOCK.get(), time.perf_counter()
        try:
            completion = await self.inner.generate(prompt_ids, sampling, session=session)
        finally:
            if clock is not None:
                clock.engine_s += time.perf_counter() - started
        return self._stamp(completion, [])

    async def stream(self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None) -> AsyncIterator[Chunk]:
        clock, started = CLOCK.get(), time.perf_counter()
        seen: list[tuple[int, int]] = []  # (tokens, version noted when they came)
        stream: Any = self.inner.stream(prompt_ids, sampling, session=session)
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                if clock is not None:
                    clock.engine_s += time.perf_counter() - started
                if chunk.token_ids:
                    seen.append((len(chunk.token_ids), self.version))
                    if chunk.policy_version == UNVERSIONED:
                        chunk = replace(chunk, policy_version=self.version)
                yield chunk if chunk.final is None else replace(chunk, final=self._stamp(chunk.final, seen))
                started = time.perf_counter()

    def _stamp(self, completion: Completion, seen: list[tuple[int, int]]) -> Completion:
        if self.version == UNVERSIONED or any(span.version != UNVERSIONED for span in completion.versions):
            return completion
        total = len(completion.token_ids)
        if sum(count for count, _ in seen) != total:
            seen = [(total, self.version)]
        spans: list[VersionSpan] = []
        for count, version in seen:
            if spans and spans[-1].version == version:
                spans[-1] = replace(spans[-1], end=spans[-1].end + count)
            else:
                start = spans[-1].end if spans else 0
                spans.append(VersionSpan(start=start, end=start + count, version=version))
        return replace(completion, versions=tuple(spans))

    async def health(self) -> Mapping[str, Any]:
        return await self.inner.health()

    async def close(self) -> None:
        await self.inner.close()
