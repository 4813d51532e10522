"""Weights on disk for engines that load them from there: written beside, then moved into place, so that no reader sees half a file."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_weights(weights: Iterable[tuple[str, Any]], directory: Path) -> Path:
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    target = directory / "model.safetensors"
    partial = directory / ".model.safetensors.partial"
    save_file(_once(weights), partial, metadata={"format": "pt"})
    os.replace(partial, target)
    return target


def _once(weights: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Tied weights (an lm_head that is the embedding) are written once, as models are saved."""
    kept: dict[str, Any] = {}
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for name, tensor in weights:
        place = (tensor.data_ptr(), tuple(tensor.shape))
        if place not in seen:
            kept[name] = tensor.detach().cpu().contiguous()
        seen.add(place)
    return kept
