"""What every kernel launch shares: aligned inputs, and no fused multiply-add that the source did not write.

The compiler picks a layout, and with it the order of a sum, from the alignment of its pointers; so rows are contiguous and start at 16-byte
boundaries, always. It may also contract `a * b + c`; contraction is off, and a kernel that wants a fused multiply-add says `tl.fma`.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ALIGNMENT_BYTES = 16


@triton.jit
def after_previous(PDL: tl.constexpr):
    """Start of every kernel: with programmatic launch it may start before its predecessor ends, and waits here for its results.

    Its own successor may start at once: that one waits for this kernel's end, and through it for all before.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def prefetch(pointers):
    """Ask for the cache lines at `pointers` without waiting for them; used on weights, which no kernel writes, before `after_previous`."""
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


@lru_cache(maxsize=1)
def strict() -> dict[str, Any]:
    """Options of every launch: no contraction, and programmatic launch where the chip has it (Hopper and newer)."""
    early = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0) and not os.environ.get("TOKENTRUE_NO_PDL")
    return {"enable_fp_fusion": False, "PDL": early, **({"launch_pdl": True} if early else {})}


def aligned(x: torch.Tensor) -> torch.Tensor:
    """`x` itself when its last dimension is dense and every row starts at a 16-byte boundary, else a copy for which that is so."""
    size = x.element_size()
    dense = x.is_contiguous() or (x.stride(-1) == 1 and all(s * size % ALIGNMENT_BYTES == 0 for s in x.stride()[:-1]))
    if dense and x.data_ptr() % ALIGNMENT_BYTES == 0:
        return x
    return x.contiguous() if not x.is_contiguous() else x.clone()


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """`x` as an aligned, contiguous [rows, last] matrix."""
    return aligned(x.reshape(-1, x.shape[-1]).contiguous())


def power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
