"""What a training step asks of the other ranks."""

import asyncio
import itertools
import os
from collections.abc import Awaitable, Iterator, Mapping
from dataclasses import field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tokentrue.errors import ConfigError, EngineError
from tokentrue.protocols import PretrainedAdapter
from tokentrue.records import record

POLL_S = 0.02
ADAPTER = "default"  # peft's name of a model's first adapter
K = TypeVar("K")
T = TypeVar("T")


@record
class Ranks:
    """This process among those of torchrun; a world of 1 without it. `store` carries words between ranks without a
    collective."""

    rank: int = 0
    world: int = 1
    device: str | None = None
    store: Any = None
    _meetings: Iterator[int] = field(default_factory=itertools.count, repr=False, compare=False)

    @property
    def first(self) -> bool:
        return self.rank == 0

    def all_gather_object(self, value: T) -> list[T]:
        if self.world == 1:
            return [value]
        found = [value] * self.world
        torch.distributed.all_gather_object(found, value)
        return found

    def merge(self, mine: Mapping[K, T]) -> dict[K, T]:
        return {key: value for found in self.all_gather_object(dict(mine)) for key, value in found.items()}

    def raise_together(self, trouble: Exception | None, doing: str) -> None:
        """A rank in trouble raises it, all others an error that names it."""
        said = self.all_gather_object("" if trouble is None else f"{type(trouble).__name__}: {trouble}")
        if trouble is not None:
            raise trouble
        for rank, words in enumerate(said):
            if words:
                raise EngineError(f"rank {rank} could not {doing}: {words}")

    async def together(self, work: Awaitable[T], doing: str) -> T:
        """This rank's result, when all ranks have ended their work; they also fail together."""
        trouble, found = None, list[T]()
        try:
            found.append(await work)
        except Exception as error:
            trouble = error
        await self.meet()
        self.raise_together(trouble, doing)
        return found[0]

    def from_first(self, value: T) -> T:
        if self.world == 1:
            return value
        box = [value]
        torch.distributed.broadcast_object_list(box, src=0)
        return box[0]

    async def meet(self) -> None:
        """Returns when every rank has called it, however long that takes: a collective would time out."""
        if self.world == 1 or self.store is None:
            return
        key = f"meeting-{next(self._meetings)}"
        arrived = self.store.add(key, 1)
        while arrived < self.world:
            await asyncio.sleep(POLL_S)
            arrived = self.store.add(key, 0)


def join(device: str = "cpu") -> Ranks:
    if "RANK" not in os.environ:
        return Ranks(device=device)
    if not torch.distributed.is_available():
        raise ConfigError("this torch has no distributed support; run without torchrun")
    distributed: Any = torch.distributed
    if device.startswith("cuda"):
        gpus, ranks = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if ranks > gpus and not distributed.is_initialized():
            raise ConfigError(f"{ranks} ranks and {gpus} GPUs on this machine: nccl needs one for each; start {gpus}")
        device = f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % gpus}"
        torch.cuda.set_device(device)
    if not distributed.is_initialized():
        distributed.init_process_group("cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo")
    rank, world = distributed.get_rank(), distributed.get_world_size()
    if world == 1:
        return Ranks(device=device)
    store = distributed.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False
    )
    # Keys of an earlier attempt of torchrun must not be seen.
    attempt = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return Ranks(rank=rank, world=world, device=device, store=distributed.PrefixStore(f"tokentrue/{attempt}", store))


def leave() -> None:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def shard(model: nn.Module, ranks: Ranks) -> nn.Module:
    """FSDP2: each decoder layer is a unit, and the rest, a vision tower included, is one. Parameters are gathered whole
    before use, so that the operators see the numbers of one process. Gradients of a rank whose rows show no
    image are 0 in the tower."""
    if ranks.world == 1:
        return model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cuda" if next(model.parameters()).is_cuda else "cpu", (ranks.world,))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for unit in (*find_layers(model), model):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
        if isinstance(unit, FSDPModule) and "nccl" not in torch.distributed.get_backend():
            unit.set_force_sum_reduction_for_comms(True)  # gloo has no mean
    if hasattr(getattr(model, "config", None), "vision_config"):
        if not hasattr(model, "set_reduce_scatter_unused_params"):
            raise ConfigError(
                f"several ranks train images with torch 2.13, here is {torch.__version__}; start one process"
            )
        model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
    return model


def find_layers(model: nn.Module) -> nn.ModuleList:
    """The decoder's: the longest list outside of a vision tower."""
    found = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    lists = [module for name, module in found if "vis" not in name]
    if not lists:
        raise ConfigError(f"{type(model).__name__} has no list of layers; FSDP2 would have one unit only")
    return max(lists, key=len)


def whole(value: Tensor) -> Tensor:
    full = getattr(value, "full_tensor", None)
    return value if full is None else full()


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters (tied ones once) and persistent buffers, as they are held; a LoRA adapter merged into them."""
    yield from model.named_parameters() if find_adapter(model) is None else merged_weights(model)
    kept = model.state_dict(keep_vars=True).keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in kept)


# ---- a LoRA adapter over frozen weights
def find_adapter(model: nn.Module) -> PretrainedAdapter | None:
    return getattr(model, "peft_config", {}).get(ADAPTER)


def adapter_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            yield name.replace(f".{ADAPTER}.", "."), parameter


def merged_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Under the names that the model has without its adapter."""
    for name, parameter in model.named_parameters():
        layer, _, kind = name.partition(".base_layer.")
        if kind == "weight":
            delta: Any = getattr(model.get_submodule(layer), "get_delta_weight")(ADAPTER)  # noqa: B009
            parameter = (parameter + delta).detach().to(parameter.dtype)
        if ".lora_" not in name:
            yield name.removeprefix("base_model.model.").replace(".base_layer.", "."), parameter
