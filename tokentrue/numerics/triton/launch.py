"""Shared by all kernel launches.

The compiler picks a layout, and with it the order of a sum, from the alignment of its pointers: rows are always
contiguous and start at 16-byte boundaries. It may contract `a * b + c`: that is off, and a kernel that wants it calls
`tl.fma`. Numbers that change from step to step are not specialised on: nothing is compiled while requests wait.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ALIGNMENT_BYTES = 16
# Whether a kernel may start before the one ahead of it has ended: on Hopper and newer.
FOLLOWS = tl.constexpr(torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9)

# By kernel, device, constants and the forms of the arguments.
_compiled: dict[tuple[object, ...], Any] = {}


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int, num_stages: int = 3, **constants: Any
) -> None:
    """`kernel[grid](*args, **constants)`; `constants` are the kernel's last parameters, in their order. Caches compiled
    forms: Triton's own lookup costs more than the rest of an operator."""
    key = (id(kernel), torch.cuda.current_device(), num_warps, num_stages, *constants.values(), *map(_form, args))
    compiled = _compiled.get(key)
    if compiled is None:
        assert tuple(constants) == tuple(kernel.arg_names[len(args) :]), (
            f"{tuple(constants)} are not the last of {kernel.arg_names}"
        )
        options = {"num_warps": num_warps, "num_stages": num_stages, "launch_pdl": FOLLOWS.value}
        _compiled[key] = kernel[grid](*args, **constants, **options, enable_fp_fusion=False)
        return
    compiled[(*grid, 1, 1)[:3]](*args, *constants.values())


@triton.jit
def wait_for_inputs(LATER: tl.constexpr = False):
    """First in every kernel: what the kernels ahead wrote is there, and what they read may be written. LATER: the kernel
    reads nothing of the one ahead, and waits only before it writes."""
    if FOLLOWS and not LATER:
        gdc_wait()


@triton.jit
def let_next_start():
    """The next kernel's programs may take what is free of the chip. Too early, they are in the way."""
    if FOLLOWS:
        gdc_launch_dependents()


@triton.jit
def let_beside_start(EARLY: tl.constexpr):
    """The next kernel waits only before it writes, and runs beside this one."""
    if FOLLOWS and EARLY:
        gdc_launch_dependents()


def _form(value: Any) -> object:
    """Everything that the compiler may specialise on."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % ALIGNMENT_BYTES == 0
    if isinstance(value, int):
        return value == 1, value % ALIGNMENT_BYTES == 0, -(1 << 31) <= value < 1 << 31
    if isinstance(value, float):
        return float
    return value.base.dtype, *value.block_shape  # a tensor descriptor


def align_rows(x: Tensor) -> Tensor:
    """`x`, or a copy with a dense last dimension and rows that start at 16-byte boundaries."""
    size = x.element_size()
    dense = x.is_contiguous() or (x.stride(-1) == 1 and all(s * size % ALIGNMENT_BYTES == 0 for s in x.stride()[:-1]))
    if dense and x.data_ptr() % ALIGNMENT_BYTES == 0:
        return x
    return x.contiguous() if not x.is_contiguous() else x.clone()


def rows_of(x: Tensor) -> Tensor:
    """As an aligned, contiguous [rows, last] matrix."""
    return align_rows(x.reshape(-1, x.shape[-1]).contiguous())


def cdiv(a: int, b: int) -> int:
    """Triton's own takes four times as long on the host."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


class Tile(NamedTuple):
    """Of a product [m, k] x [k, n]."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


def precision_of(dtype: torch.dtype) -> str:
    """TF32 would round the inputs."""
    return "ieee" if dtype == torch.float32 else "tf32"
