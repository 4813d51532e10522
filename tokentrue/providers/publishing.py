"""Writes published weights to a directory that an engine's server sees.

    ROOT/version-000007/model.safetensors      every name, no index; tied heads written out

There is no index because an engine would load the shards of the first checkpoint that it names. A tied head is
written as a separate tensor: an engine that holds it apart from the embedding would keep the old one.

    ROOT/policy@7.3f9a1c/adapter_model.safetensors, adapter_config.json      a LoRA adapter, as peft saves it
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from tokentrue.errors import TrainingError
from tokentrue.protocols import NamedWeights, PretrainedAdapter
from tokentrue.records import record

if TYPE_CHECKING:
    from torch import Tensor

HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"


@record
class WrittenWeights:
    directory: Path
    version: int


def write_weights(weights: NamedWeights, root: Path, *, version: int, keep: Iterable[Path] = ()) -> WrittenWeights:
    """Writes a version completely, then removes all others but those in `keep`. Blocks: call it in a thread."""
    kept = copy_finite(weights, version)
    embedding = next((tensor for name, tensor in kept.items() if name.endswith(EMBEDDING)), None)
    if HEAD not in kept and embedding is not None:
        kept[HEAD] = embedding.clone()
    target = (root / f"version-{version:06d}").absolute()
    partial = root / f".{target.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    save_tensors(kept, partial / "model.safetensors")
    shutil.rmtree(target, ignore_errors=True)
    os.replace(partial, target)
    spared = {target, *keep}
    for old in root.glob("version-*"):
        if old.absolute() not in spared:
            shutil.rmtree(old, ignore_errors=True)
    return WrittenWeights(directory=target, version=version)


def write_adapter(weights: NamedWeights, config: PretrainedAdapter, directory: Path, *, version: int) -> None:
    """`config` is peft's. Blocks: call it in a thread."""
    save_tensors(copy_finite(weights, version), directory / "adapter_model.safetensors")
    config.save_pretrained(directory)


def copy_finite(weights: NamedWeights, version: int) -> dict[str, Tensor]:
    kept = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights}
    for name, tensor in kept.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise TrainingError(f"weights of version {version}: {name} is not finite; they are not published")
    return kept


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True)
    save_file(tensors, path, metadata={"format": "pt"})
