"""What every kernel launch shares: aligned inputs, no fused multiply-add that the source did not write, few
microseconds on the host, and on newer chips a start before the kernel ahead of it has ended.

The compiler picks a layout, and with it the order of a sum, from the alignment of its pointers; so rows are contiguous
and start at 16-byte boundaries, always. It may also contract `a * b + c`; contraction is off, and a kernel that wants a
fused multiply-add says `tl.fma`. Table widths and other numbers that change from step to step are not specialised on,
and the self-test runs every tile: nothing is compiled while requests wait.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ALIGNMENT_BYTES = 16
FOLLOWS = tl.constexpr(torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9)
"""Whether a kernel may be started before the one ahead of it has ended: on Hopper and newer."""

_compiled: dict[tuple[Any, ...], Any] = {}
"""Kernel, device, constants and the forms of the arguments -> its compiled form."""


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int, num_stages: int = 3, **constants: Any
) -> None:
    """`kernel[grid](*args, **constants)`; `constants` are the kernel's last parameters, in their order.

    A compiled form that was met before is launched without Triton's own search for it, which costs more than the rest
    of an operator.
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
    """First of all in every kernel: from here on, what the kernels ahead of it wrote is there, and what they read may
    be written."""
    if FOLLOWS:
        gdc_wait()


@triton.jit
def let_next_start():
    """The next kernel's programs may take what is free of the chip, and wait there. Too early, and they are in the way
    of this one's."""
    if FOLLOWS:
        gdc_launch_dependents()


def _form(value: Any) -> Any:
    """All that the compiler may specialise on: type and alignment of a tensor or descriptor, width and divisibility of
    a number."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % ALIGNMENT_BYTES == 0
    if isinstance(value, int):
        return value == 1, value % ALIGNMENT_BYTES == 0, -(1 << 31) <= value < 1 << 31
    if isinstance(value, float):
        return float
    return value.base.dtype, *value.block_shape  # a tensor descriptor


def align_rows(x: torch.Tensor) -> torch.Tensor:
    """`x` itself when its last dimension is dense and every row starts at a 16-byte boundary, else a copy for which
    that is so."""
    size = x.element_size()
    dense = x.is_contiguous() or (x.stride(-1) == 1 and all(s * size % ALIGNMENT_BYTES == 0 for s in x.stride()[:-1]))
    if dense and x.data_ptr() % ALIGNMENT_BYTES == 0:
        return x
    return x.contiguous() if not x.is_contiguous() else x.clone()


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """`x` as an aligned, contiguous [rows, last] matrix."""
    return align_rows(x.reshape(-1, x.shape[-1]).contiguous())


def cdiv(a: int, b: int) -> int:
    """Triton's own takes four times as long on the host."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
