"""Publishing through a shared directory: write a version, pause the server, have it load the version, resume it.

    ROOT/version-000007/model.safetensors      every name, no index; tied heads written out

There is no index because an engine would load the shards of the first checkpoint that it names. A tied head is
written as a separate tensor: an engine that holds it apart from the embedding would keep the old one. If a server
refuses a version, the previous one is loaded again before the error is raised. Without a previous version it stays
paused: it may hold half of the new weights.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tokentrue.errors import ConfigError, EngineError, EngineRejected, TrainingError

HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenWeights:
    directory: Path
    version: int


class LoadsFromDisk(Protocol):
    @property
    def name(self) -> str: ...

    async def pause_for_weights(self) -> None: ...

    async def load_from_disk(self, written: WrittenWeights) -> None: ...

    async def resume_with_weights(self) -> None: ...


class DiskPublisher:
    """Publishes weights to one engine below `root`; `place` names this engine's files there."""

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
        """Loads the last written weights into a server that missed their publication."""
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


def write_weights(
    weights: Iterable[tuple[str, Any]], root: Path, *, version: int, keep: Iterable[Path] = ()
) -> WrittenWeights:
    """Writes a version completely, then removes all others but those in `keep`. Blocks: call it in a thread."""
    from safetensors import torch as safetensors_torch

    save_file: Any = vars(safetensors_torch)["save_file"]

    target = (root / f"version-{version:06d}").absolute()
    partial = root / f".{target.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(check_weights(weights, version=version), partial / "model.safetensors", metadata={"format": "pt"})
    shutil.rmtree(target, ignore_errors=True)
    os.replace(partial, target)
    spared = {target, *keep}
    for old in root.glob("version-*"):
        if old.absolute() not in spared:
            shutil.rmtree(old, ignore_errors=True)
    return WrittenWeights(directory=target, version=version)


def check_weights(weights: Iterable[tuple[str, Any]], *, version: int) -> dict[str, Any]:
    """Weights by name, each with separate memory; refuses values that are not finite."""
    kept = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights}
    for name, tensor in kept.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise TrainingError(f"weights of version {version}: {name} is not finite; they are not published")
    embedding = next((tensor for name, tensor in kept.items() if name.endswith(EMBEDDING)), None)
    if HEAD not in kept and embedding is not None:
        kept[HEAD] = embedding.clone()
    return kept
