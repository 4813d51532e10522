"""Products on the CPU whose rows do not depend on their number.

float32 products come in three forms with the same bits, and a fourth that stands apart:
  oneDNN's linear kernel, whose rows do not depend on their number from two rows up (its weights may be packed
  beforehand); for small K (where libraries sum in one run of fused multiply-adds) the ordinary product of `PLAIN_ROWS`
  rows and more, and that of two rows and more with the transposed weight, which are far quicker to call;
  fixed row tiles (every product has exactly TILE rows, the last one padded), for 16-bit types, for one column and
  wherever the others fail.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 32
"""Rows of every product on the structural path."""
PLAIN_ROWS = 16

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def two_rows(x_MK: Tensor) -> Tensor:
    """One row alone would take the matrix-vector kernel, which sums in another order: it is given a companion."""
    return x_MK.expand(2, -1).contiguous() if x_MK.shape[0] == 1 else x_MK


def onednn_product(x_MK: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`weight` as it is, or packed."""
    return torch.ops.mkldnn._linear_pointwise(two_rows(x_MK), weight, bias, "none", [], "")[: x_MK.shape[0]]


def plain_product(x_MK: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """For PLAIN_ROWS rows and more; the bias is added after the sum, as oneDNN does."""
    out = torch.mm(x_MK, weight.t())
    return out if bias is None else out.add_(bias)


def transposed_product(x_MK: Tensor, weight_KN: Tensor, bias: Tensor | None) -> Tensor:
    out = torch.mm(two_rows(x_MK), weight_KN)[: x_MK.shape[0]]
    return out if bias is None else out.add_(bias)


LEAST_COLUMNS = 16
"""Of a float32 tile: with one column every library takes a matrix-vector kernel, whose order follows the rows, and some
do with few."""


@cache
def has_products(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies this 16-bit type on this processor. Where it does not, torch's own product takes up to
    a hundred times as long as one of float32 copies. On ARM, torch does not use oneDNN for float16, whatever it
    says."""
    if not torch.backends.mkldnn.is_available():
        return True
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.ops.mkldnn._is_mkldnn_fp16_supported() and platform.machine() not in ("aarch64", "arm64")


def widens(x: Tensor) -> bool:
    """Whether products with `x` are computed from float32 copies; the product of two 16-bit values is exact in
    float32."""
    return x.dtype in (torch.bfloat16, torch.float16) and x.device.type == "cpu" and not has_products(x.dtype)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b`, rounded once."""
    return (a.float() @ b.float()).to(a.dtype) if widens(a) else a @ b


def tiled_product(x_MK: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Every product has exactly TILE rows, and in float32 at least LEAST_COLUMNS columns."""
    if widens(x_MK):
        return tiled_product(x_MK.float(), weight.float(), None if bias is None else bias.float()).to(x_MK.dtype)
    rows, columns = x_MK.shape[0], weight.shape[0]
    if weight.dtype == torch.float32 and columns < LEAST_COLUMNS:
        missing = LEAST_COLUMNS - columns
        wide = tiled_product(
            x_MK, F.pad(weight, (0, 0, 0, missing)), None if bias is None else F.pad(bias, (0, missing))
        )
        return wide[:, :columns].contiguous()
    out = x_MK.new_empty(rows, weight.shape[0])
    for start in range(0, rows, TILE):
        tile = x_MK[start : start + TILE]
        short = TILE - tile.shape[0]
        if short:
            tile = torch.cat((tile, tile.new_zeros(short, tile.shape[1])))
        result = F.linear(tile, weight, bias)
        out[start : start + TILE] = result[: TILE - short] if short else result
    return out


class Linear(torch.autograd.Function):
    """Forward by a row-invariant product; backward by ordinary ones (fixed from run to run, which is all that gradients
    need)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: Product) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grads[0]
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        return (
            multiply(grad, weight) if need_x else None,
            multiply(grad.T, x) if need_weight else None,
            grad.sum(0) if ctx.has_bias and need_bias else None,
            None,
        )
