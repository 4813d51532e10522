"""Shared by all kernel launches, and how products are cut into tiles (no effect on bits, decisive for speed).

The compiler picks a layout, and with it the order of a sum, from the alignment of its pointers: rows are always
contiguous and start at 16-byte boundaries. It may contract `a * b + c`: that is off, and a kernel that wants a fused
multiply-add calls `tl.fma`. Numbers that change from step to step are not specialised on, and the self-test runs every
tile: nothing is compiled while requests wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ALIGNMENT_BYTES = 16
# Whether a kernel may start before the one ahead of it has ended: on Hopper and newer.
FOLLOWS = tl.constexpr(torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9)

# By kernel, device, constants and the forms of the arguments.
_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int, num_stages: int = 3, **constants: Any
) -> None:
    """`kernel[grid](*args, **constants)`; `constants` are the kernel's last parameters, in their order.

    Caches compiled forms: Triton's own lookup costs more than the rest of an operator.
    """
    key = (id(kernel), torch.cuda.current_device(), num_warps, num_stages, *constants.values(), *map(_form, args))
    compiled = _compiled.get(key)
    if compiled is None:
        assert tuple(constants) == tuple(kernel.arg_names[len(args) :]), (
            f"{tuple(constants)} are not the last of {kernel.arg_names}"
        )
        _compiled[key] = kernel[grid](
            *args,
            **constants,
            num_warps=num_warps,
            num_stages=num_stages,
            enable_fp_fusion=False,
            launch_pdl=FOLLOWS.value,
        )
        return
    compiled[(*grid, 1, 1)[:3]](*args, *constants.values())


@triton.jit
def wait_for_inputs():
    """First in every kernel: from here on, what the kernels ahead wrote is there, and what they read may be written."""
    if FOLLOWS:
        gdc_wait()


@triton.jit
def let_next_start():
    """The next kernel's programs may take what is free of the chip, and wait there. Too early, they are in the way."""
    if FOLLOWS:
        gdc_launch_dependents()


def _form(value: Any) -> Any:
    """Everything that the compiler may specialise on."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % ALIGNMENT_BYTES == 0
    if isinstance(value, int):
        return value == 1, value % ALIGNMENT_BYTES == 0, -(1 << 31) <= value < 1 << 31
    if isinstance(value, float):
        return float
    return value.base.dtype, *value.block_shape  # a tensor descriptor


def align_rows(x: Tensor) -> Tensor:
    """`x`, or a copy whose last dimension is dense and whose rows start at 16-byte boundaries."""
    size = x.element_size()
    dense = x.is_contiguous() or (x.stride(-1) == 1 and all(s * size % ALIGNMENT_BYTES == 0 for s in x.stride()[:-1]))
    if dense and x.data_ptr() % ALIGNMENT_BYTES == 0:
        return x
    return x.contiguous() if not x.is_contiguous() else x.clone()


def rows_of(x: Tensor) -> Tensor:
    """`x` as an aligned, contiguous [rows, last] matrix."""
    return align_rows(x.reshape(-1, x.shape[-1]).contiguous())


def cdiv(a: int, b: int) -> int:
    """Triton's own takes four times as long on the host."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    m: int
    n: int
    k: int
    warps: int
    stages: int


# Outputs up to which a product has few programs, and from which it has enough whatever its tile.
NARROW, VOCABULARY = 2048, 16384


@triton.jit
def tile_at(pid, M, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """Programs walk GROUP row tiles together, so that the weight tiles they share stay in the cache."""
    num_m = tl.cdiv(M, BM)
    num_n = tl.cdiv(N, BN)
    group = pid // (GROUP * num_n)
    first = group * GROUP
    size = tl.minimum(num_m - first, GROUP)
    within = pid % (GROUP * num_n)
    return first + within % size, within // size


def tile_for_product(rows: int, outputs: int, inputs: int, dtype: torch.dtype, *, gated: bool = False) -> Tile:
    """Measured on an H200, harmless elsewhere. `outputs`: of each half, if gated."""
    if dtype == torch.float32:
        return Tile(m=16, n=32, k=32, warps=4, stages=3) if rows <= 32 else Tile(m=64, n=64, k=32, warps=4, stages=3)
    if rows > 256:
        return Tile(m=128, n=128, k=64, warps=8, stages=3)
    if outputs > VOCABULARY:
        return _tile_of_a_vocabulary(rows)
    if rows > 64:
        if gated:
            return Tile(m=128, n=64, k=64, warps=4, stages=4)
        return (
            Tile(m=64, n=32, k=128, warps=4, stages=4)
            if outputs <= NARROW
            else Tile(m=64, n=64, k=128, warps=4, stages=3)
        )
    if (
        outputs <= NARROW and not gated
    ):  # a sum is a chain of dependent products: many narrow programs, few steps of the loop
        return Tile(m=16, n=8, k=512, warps=2, stages=4) if rows <= 16 else Tile(m=16, n=16, k=512, warps=2, stages=3)
    if rows > 16:
        return Tile(m=64, n=32, k=128, warps=4, stages=4)
    if gated or inputs >= 3072:
        return Tile(m=16, n=32, k=256, warps=4, stages=4)
    return Tile(m=16, n=32, k=128, warps=4, stages=5)


def _tile_of_a_vocabulary(rows: int) -> Tile:
    if rows <= 16:
        return Tile(m=16, n=64, k=128, warps=4, stages=4)
    if rows <= 64:
        return Tile(m=32 if rows <= 32 else 64, n=64, k=64, warps=4, stages=4)
    return Tile(m=128, n=128, k=64, warps=4, stages=3)
