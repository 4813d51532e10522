"""One process or many: the few things that a training step must ask of the others. One process is the same code with a world of 1."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tokentrue.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def everyone(self, value: Any) -> list[Any]:
        """This value of every rank, in rank order."""
        if self.world == 1:
            return [value]
        found: list[Any] = [None] * self.world
        torch.distributed.all_gather_object(found, value)
        return found

    def from_first(self, value: Any) -> Any:
        """What rank 0 holds."""
        if self.world == 1:
            return value
        box = [value]
        torch.distributed.broadcast_object_list(box, src=0)
        return box[0]


def join(device: str = "cpu") -> Ranks:
    """Joins the group that torchrun describes in the environment; gloo for training on CPU, nccl on GPU."""
    import os

    if "RANK" not in os.environ:
        return Ranks()
    if not torch.distributed.is_available():
        raise ConfigError("this torch has no distributed support; run without torchrun")
    if not torch.distributed.is_initialized():
        on_gpu = device.startswith("cuda")
        if on_gpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
    return Ranks(rank=torch.distributed.get_rank(), world=torch.distributed.get_world_size())


def leave() -> None:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def shard(model: nn.Module, ranks: Ranks) -> nn.Module:
    """FSDP2: each decoder layer is a unit, and the rest (embeddings, tied or not, final norm, head) is one.

    Parameters are gathered whole before they are used, so that the operators see the same numbers as in one process.
    """
    if ranks.world == 1:
        return model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    kind = "cuda" if next(model.parameters()).is_cuda else "cpu"
    mesh = init_device_mesh(kind, (ranks.world,))
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def layers_of(model: nn.Module) -> Iterable[nn.Module]:
    """The longest list of modules: the decoder layers, whatever the family calls them."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ConfigError(f"{type(model).__name__} has no list of layers; FSDP2 would have one unit only")
    return max(lists, key=len)


def whole(value: Tensor) -> Tensor:
    """A parameter, gradient or norm as one tensor, on every rank."""
    full = getattr(value, "full_tensor", None)
    return value if full is None else full()


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters (tied ones once) and persistent buffers, such as a router's bias, as they are held."""
    yield from model.named_parameters()
    kept = model.state_dict(keep_vars=True).keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in kept)


def whole_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and value of everything in `named_weights`, gathered. Every rank must walk through all of them."""
    for name, value in named_weights(model):
        yield name, whole(value.detach())
