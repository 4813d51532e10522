"""Weights on disk for engines that load them from there: a fresh directory for every version.

    ROOT/version-000007/model.safetensors      every name, no index; tied heads written out

An index would name the shards of the first checkpoint, and an engine that finds one loads those. A tied head is written
as a tensor of its
own: an engine that holds it apart from the embedding would keep the old one. The version before stays, for repair.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokentrue.errors import TrainingError

HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenWeights:
    """Weights that an engine can load."""

    directory: Path
    version: int


def write_weights(
    weights: Iterable[tuple[str, Any]], root: Path, *, version: int, keep: Iterable[Path] = ()
) -> WrittenWeights:
    """Writes a version whole, then removes all others but those in `keep`. Blocks: call it in a thread."""
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
    """By name, each with memory of its own; weights that are not finite are refused before any engine sees them."""
    kept = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights}
    for name, tensor in kept.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise TrainingError(f"weights of version {version}: {name} is not finite; they are not published")
    embedding = next((tensor for name, tensor in kept.items() if name.endswith(EMBEDDING)), None)
    if HEAD not in kept and embedding is not None:
        kept[HEAD] = embedding.clone()
    return kept
