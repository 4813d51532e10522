"""What every kernel launch shares: aligned inputs, and no fused multiply-add that the source did not write.

The compiler picks a layout, and with it the order of a sum, from the alignment of its pointers; so rows are contiguous and start at 16-byte
boundaries, always. It may also contract `a * b + c`; contraction is off, and a kernel that wants a fused multiply-add says `tl.fma`.
Table widths and other numbers that change from step to step are not specialised on, and the self-test runs every tile: nothing is compiled
while requests wait.
"""

from __future__ import annotations

from typing import Any

import torch

ALIGNMENT_BYTES = 16
STRICT: dict[str, Any] = {"enable_fp_fusion": False}


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
