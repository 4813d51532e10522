"""Which operators belong to which device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from tokentrue.errors import ExactnessError
from tokentrue.numerics.cpu import CpuOps
from tokentrue.numerics.ops import Ops


def on_device(device: torch.device | str) -> AbstractContextManager[object]:
    """Makes a GPU this thread's current one inside the block: kernels are launched there. CUDA keeps that setting per
    thread."""
    where = torch.device(device)
    return torch.cuda.device(where) if where.type == "cuda" else nullcontext()


def ops_for(device: torch.device | str) -> Ops:
    """The operators of a device; a fresh object, because fall-backs belong to one model on one machine."""
    kind = torch.device(device).type
    if kind == "cpu":
        return CpuOps()
    if kind == "cuda":
        from tokentrue.numerics.triton import TritonOps  # where there is no GPU there may be no triton

        return TritonOps()
    raise ExactnessError(f"no exact operators for device {kind!r}; use cpu or cuda")
