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
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in weights}, partial, metadata={"format": "pt"})
    os.replace(partial, target)
    return target
