"""Wraps the engine: measures its time, and sets the policy version if the engine reports none.

Time spent here is the engine's; the rest of a turn is the gateway's overhead.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from tokentrue.json_types import JsonMapping
from tokentrue.protocols import Adapting, EngineControl, Streaming
from tokentrue.types import UNVERSIONED, Chunk, Completion, Ids, Sampling, spans_from_runs


class EngineClock:
    """Wall seconds with at least one engine call of the turn running: the calls of n choices overlap."""

    def __init__(self) -> None:
        self.engine_s = 0.0
        self._running = 0
        self._since = 0.0

    def start(self) -> None:
        if not self._running:
            self._since = time.perf_counter()
        self._running += 1

    def stop(self) -> None:
        self._running -= 1
        if not self._running:
            self.engine_s += time.perf_counter() - self._since


CLOCK: ContextVar[EngineClock | None] = ContextVar("tokentrue_engine_clock", default=None)


class MeteredProvider(Streaming):
    """`version` was set by /admin/version; a version that the engine reports takes precedence."""

    def __init__(self, inner: EngineControl, *, version: int = UNVERSIONED) -> None:
        self.inner = inner
        self.version = version
        self._adapting = inner if isinstance(inner, Adapting) else None

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def truthful_filters(self) -> frozenset[str] | None:
        return self.inner.truthful_filters

    @property
    def adapters(self) -> Sequence[str]:
        return () if self._adapting is None else self._adapting.adapters

    async def stream(
        self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None, whole: bool = False
    ) -> AsyncIterator[Chunk]:
        clock = CLOCK.get() or EngineClock()
        seen: list[tuple[int, int]] = []  # (tokens, version noted when they came)
        stream: Any = self.inner.stream(prompt_ids, sampling, session=session, whole=whole)
        async with aclosing(stream) as chunks:
            while True:
                clock.start()
                try:
                    chunk: Chunk | None = await anext(chunks, None)
                finally:
                    clock.stop()
                if chunk is None:
                    return
                if chunk.token_ids:
                    seen.append((len(chunk.token_ids), self.version))
                    if chunk.policy_version == UNVERSIONED:
                        chunk = replace(chunk, policy_version=self.version)
                yield chunk if chunk.final is None else replace(chunk, final=self._stamp(chunk.final, seen))

    def _stamp(self, completion: Completion, seen: list[tuple[int, int]]) -> Completion:
        if self.version == UNVERSIONED or any(span.version != UNVERSIONED for span in completion.versions):
            return completion
        total = len(completion.token_ids)
        if sum(count for count, _ in seen) != total:
            seen = [(total, self.version)]
        return replace(completion, versions=spans_from_runs(seen))

    async def health(self) -> JsonMapping:
        clock = CLOCK.get() or EngineClock()
        clock.start()
        try:
            return await self.inner.health()
        finally:
            clock.stop()

    async def close(self) -> None:
        await self.inner.close()
