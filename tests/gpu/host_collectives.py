"""A process group for ranks that share a GPU: every collective over gloo, on copies in host memory.

nccl before 2.30 refuses two ranks on one GPU, and FSDP2 over gloo's own collectives of CUDA tensors ends in a
segmentation fault (torch 2.11).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Backend, ProcessGroup, ProcessGroupGloo

BACKEND = "staged"
COLLECTIVES = {
    name: name
    for name in (
        "_allgather_base", "_reduce_scatter_base", "allgather", "allreduce", "alltoall", "alltoall_base", "broadcast",
        "gather", "recv", "reduce", "reduce_scatter", "scatter", "send",
    )
} | {"all_gather_single": "_allgather_base", "reduce_scatter_single": "_reduce_scatter_base"}  # fmt: skip
"""A group's collectives → gloo's; each writes to its first argument."""
COALESCED = {
    "allgather_into_tensor_coalesced": "_allgather_base",
    "reduce_scatter_tensor_coalesced": "_reduce_scatter_base",
}
"""Those on lists of tensors, one after the other."""


class HostStagedGroup(ProcessGroup):
    """Tensors on `devices` pass through host memory."""

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, *, devices: Sequence[str] = ("cuda",)
    ) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue]: the stub knows another overload
        self.gloo: Any = ProcessGroupGloo(store, rank, size, timeout)
        self.devices = frozenset(devices)
        for device in ("cpu", *devices):  # the group's name is kept there
            self._register_backend(torch.device(device), ProcessGroup.BackendType.GLOO, self.gloo)

    def barrier(self, opts: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.gloo.barrier(opts) if opts is not None else self.gloo.barrier()

    def getBackendName(self) -> str:
        return BACKEND

    def shutdown(self) -> None:
        self.gloo.shutdown()


def make_collective(name: str) -> Callable[..., Any]:
    def collective(group: HostStagedGroup, *arguments: Any) -> Any:
        call = getattr(group.gloo, name)
        if not any(tensor.device.type in group.devices for argument in arguments for tensor in tensors_of(argument)):
            return call(*arguments)
        copies = [copy_to_host(argument) for argument in arguments]
        work = call(*copies)
        work.wait()
        for target, source in zip(tensors_of(arguments[0]), tensors_of(copies[0]), strict=True):
            target.copy_(source)
        return work

    return collective


def make_coalesced(name: str) -> Callable[..., Any]:
    def collective(group: HostStagedGroup, outputs: list[Tensor], inputs: list[Tensor], *options: Any) -> Any:
        works = [getattr(group, name)(output, given, *options) for output, given in zip(outputs, inputs, strict=True)]
        for work in works[:-1]:
            work.wait()
        return works[-1]

    return collective


for _name, _of_gloo in COLLECTIVES.items():
    setattr(HostStagedGroup, _name, make_collective(_of_gloo))
for _name, _single in COALESCED.items():
    setattr(HostStagedGroup, _name, make_coalesced(_single))


def tensors_of(argument: Any) -> list[Tensor]:
    if isinstance(argument, Tensor):
        return [argument]
    return [tensor for part in argument for tensor in tensors_of(part)] if isinstance(argument, list | tuple) else []


def copy_to_host(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return argument.detach().to("cpu", copy=True)
    return [copy_to_host(part) for part in argument] if isinstance(argument, list | tuple) else argument


def register() -> None:
    if not hasattr(Backend, BACKEND.upper()):
        Backend.register_backend(BACKEND, HostStagedGroup, devices=["cpu", "cuda"])
