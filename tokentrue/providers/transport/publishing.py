"""Publishing through a directory that a server sees: write a version, pause the server, have it load the version,
resume it.

A server that refuses a version gets the version before again and goes on with it; only then does the refusal reach the
caller. One that
has no version before stays paused: it may hold half of the new weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from tokentrue.errors import ConfigError, EngineError, EngineRejected
from tokentrue.providers.transport.weights import WrittenWeights, write_weights


class LoadsFromDisk(Protocol):
    """An engine's own calls."""

    @property
    def name(self) -> str: ...

    async def pause_for_weights(self) -> None: ...

    async def load_from_disk(self, written: WrittenWeights) -> None:
        """Loads the weights, drops what was cached with other ones, and stamps the version; raises EngineError where
        any of it fails."""
        ...

    async def resume_with_weights(self) -> None: ...


class DiskPublisher:
    """The weights of one engine, below `root`. `place` names this engine's files there."""

    def __init__(self, engine: LoadsFromDisk, root: str | Path | None, *, place: str) -> None:
        self._engine = engine
        self._root = None if root is None else Path(root) / place
        self._loading = asyncio.Lock()
        self._written: WrittenWeights | None = None
        self._published: WrittenWeights | None = None

    async def publish(self, weights: Iterable[tuple[str, Any]], *, version: int) -> None:
        if self._root is None:
            raise ConfigError(f"publishing to {self._engine.name} needs weights_dir=, a directory that the server sees")
        keep = () if self._published is None else (self._published.directory,)
        async with self._loading:
            self._written = await asyncio.to_thread(write_weights, weights, self._root, version=version, keep=keep)
            await self._load(self._written)

    async def rejoin(self) -> None:
        """Loads the weights that were written last: for a server that was away when they were published."""
        async with self._loading:
            if self._written is not None:
                await self._load(self._written)

    async def _load(self, written: WrittenWeights) -> None:
        before, name = self._published, self._engine.name
        await self._engine.pause_for_weights()
        try:
            await self._engine.load_from_disk(written)
        except EngineError as error:
            if before is None:
                raise EngineRejected(
                    f"{name} did not take version {written.version} and is left paused; restart it: {error}"
                ) from error
            await self._engine.load_from_disk(before)
            await self._engine.resume_with_weights()
            raise EngineRejected(
                f"{name} did not take version {written.version} and keeps version {before.version}: {error}"
            ) from error
        await self._engine.resume_with_weights()
        self._published = written
