"""The optimiser's state in a checkpoint: moments, step counts and master weights by parameter name.

Below a size rank 0 writes one file of whole tensors. Above it each rank writes its own shards through
torch.distributed.checkpoint, which also gives them back to another number of ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tokentrue.train.ranks import whole

if TYPE_CHECKING:
    from tokentrue.train.trainer import Trainer

MASTER = "master"
FILE, SHARDS = "optimizer.safetensors", "optimizer"


def held_tensors(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    """`NAME|KEY` and value, as this rank holds it."""
    for name, master in trainer.masters.named():
        for key, value in trainer.optimizer.state.get(master, {}).items():
            yield f"{name}|{key}", value.detach()
    for name, master in trainer.masters.copies():
        yield f"{name}|{MASTER}", master.detach()


def write_whole(trainer: Trainer, directory: Path) -> None:
    """Every rank takes part in gathering; rank 0 writes."""
    tensors: dict[str, Tensor] = {}
    for key, value in held_tensors(trainer):
        gathered = whole(value)
        if trainer.ranks.first:
            tensors[key] = gathered.cpu().contiguous()
    if trainer.ranks.first:
        save_file(tensors, directory / FILE)


def write_shards(trainer: Trainer, directory: Path) -> None:
    """Every rank writes what it holds."""
    from torch.distributed.checkpoint.state_dict_saver import save

    with alone_is_meant(trainer):
        save(dict(held_tensors(trainer)), checkpoint_id=directory / SHARDS, no_dist=trainer.ranks.world == 1)


def read_optimizer(trainer: Trainer, directory: Path) -> None:
    """Puts state and master weights in place, bit for bit; every rank calls it."""
    restore_optimizer(
        trainer, read_shards(trainer, directory) if (directory / SHARDS).is_dir() else load_file(directory / FILE)
    )


def restore_optimizer(trainer: Trainer, found: Mapping[str, Tensor]) -> None:
    by_name: dict[str, dict[str, Tensor]] = {}
    for key, value in found.items():
        name, _, kind = key.rpartition("|")
        by_name.setdefault(name, {})[kind] = value
    for name, master in trainer.masters.named():
        mine = by_name.get(name, {})
        if (copy := mine.pop(MASTER, None)) is not None:
            with torch.no_grad():
                place(master, copy)
        if mine:
            placed = {k: v.clone() if v.dim() == 0 else place(torch.zeros_like(master), v) for k, v in mine.items()}
            trainer.optimizer.state[master] = placed


def read_shards(trainer: Trainer, directory: Path) -> Mapping[str, Tensor]:
    """What the shards hold, sharded as this rank's parameters are."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    known = FileSystemReader(directory / SHARDS).read_metadata().state_dict_metadata
    masters = dict(trainer.masters.named())
    wanted: dict[str, Any] = {}
    for key, facts in known.items():
        name = key.rpartition("|")[0]
        if name in masters and isinstance(facts, TensorStorageMetadata):
            scalar = len(facts.size) == 0
            wanted[key] = (
                torch.zeros((), dtype=facts.properties.dtype) if scalar else torch.zeros_like(masters[name].detach())
            )
    with alone_is_meant(trainer):
        load(wanted, checkpoint_id=directory / SHARDS, no_dist=trainer.ranks.world == 1)
    return wanted


@contextmanager
def alone_is_meant(trainer: Trainer) -> Iterator[None]:
    """torch warns that one process writes alone; with one rank that is as it should be."""
    with warnings.catch_warnings():
        if trainer.ranks.world == 1:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def place(target: Tensor, value: Tensor) -> Tensor:
    """Copies a whole tensor, or a shard like the target's own, into a parameter that may be sharded."""
    mesh = getattr(target, "device_mesh", None)
    if mesh is None or hasattr(value, "device_mesh"):
        return target.copy_(value)
    from torch.distributed.tensor import distribute_tensor

    return target.copy_(distribute_tensor(value.to(target.device), mesh, target.placements))  # type: ignore[attr-defined]
