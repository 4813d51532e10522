"""Arithmetic on the CPU whose bits do not depend on the number of rows, nor on a value's position or neighbours.

float32 products have three forms with the same bits: oneDNN's linear kernel (rows are independent from two rows up);
for small K, with far less call overhead, the ordinary product of at least PLAIN_ROWS rows, and the product with the
transposed weight. Fixed row tiles serve all other cases.
"""

import math
import platform
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tokentrue.numerics.ops import same_bits

# Rows of every tiled product.
TILE = 32
PLAIN_ROWS = 16

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def two_rows(x_MK: Tensor) -> Tensor:
    """Pads one row to two: a single row would take the matrix-vector kernel, which sums in another order."""
    return x_MK.expand(2, -1).contiguous() if x_MK.shape[0] == 1 else x_MK


def onednn_product(x_MK: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(two_rows(x_MK), weight, bias, "none", [], "")[: x_MK.shape[0]]


def plain_product(x_MK: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Adds the bias after the sum, as oneDNN does."""
    out = torch.mm(x_MK, weight.t())
    return out if bias is None else out.add_(bias)


def transposed_product(x_MK: Tensor, weight_KN: Tensor, bias: Tensor | None) -> Tensor:
    out = torch.mm(two_rows(x_MK), weight_KN)[: x_MK.shape[0]]
    return out if bias is None else out.add_(bias)


# With one column (in some libraries: few), float32 takes a matrix-vector kernel whose order depends on the rows.
LEAST_COLUMNS = 16


@cache
def has_products(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies this 16-bit type here; torch's product is otherwise up to a hundred times slower than
    one of float32 copies. On ARM, torch never uses oneDNN for float16, whatever it reports."""
    if not torch.backends.mkldnn.is_available():
        return True
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.ops.mkldnn._is_mkldnn_fp16_supported() and platform.machine() not in ("aarch64", "arm64")


def widens(x: Tensor) -> bool:
    """Whether float32 copies are multiplied: the product of two 16-bit values is exact in float32."""
    return x.dtype in (torch.bfloat16, torch.float16) and x.device.type == "cpu" and not has_products(x.dtype)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    return (a.float() @ b.float()).to(a.dtype) if widens(a) else a @ b


def tiled_product(x_MK: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if widens(x_MK):
        return tiled_product(x_MK.float(), weight.float(), None if bias is None else bias.float()).to(x_MK.dtype)
    rows, columns = x_MK.shape[0], weight.shape[0]
    if weight.dtype == torch.float32 and columns < LEAST_COLUMNS:
        missing = LEAST_COLUMNS - columns
        wide_bias = None if bias is None else F.pad(bias, (0, missing))
        return tiled_product(x_MK, F.pad(weight, (0, 0, 0, missing)), wide_bias)[:, :columns].contiguous()
    out = x_MK.new_empty(rows, columns)
    for start in range(0, rows, TILE):
        tile = x_MK[start : start + TILE]
        short = TILE - tile.shape[0]
        if short:
            tile = torch.cat((tile, tile.new_zeros(short, tile.shape[1])))
        out[start : start + TILE] = F.linear(tile, weight, bias)[: TILE - short]
    return out


class Linear(torch.autograd.Function):
    """On any device: forward by a row-invariant product; backward by ordinary ones (deterministic, which suffices)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: Product) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grads[0]
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        d_bias = None
        if need_bias:
            d_bias = grad.sum(0) if grad.device.type == "cpu" else grad.float().sum(0).to(grad.dtype)
        return multiply(grad, weight) if need_x else None, multiply(grad.T, x) if need_weight else None, d_bias, None


LANES = 16  # float32 values in the widest vector register
APART_VALUES = 1024  # computed at a time: few enough that torch does not split them between threads within a vector


def compute(name: str, x: Tensor) -> Tensor:
    """`torch.cos`, `sin` or `erf`. Some vector libraries (Sleef on ARM) choose the formula of a vector by its largest
    value: there each value gets its own vector."""
    function = getattr(torch, name)
    return compute_apart(function, x) if mixes_neighbours(name) else function(x)


def compute_apart(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    flat = x.reshape(-1).float()
    out = torch.empty_like(flat)
    for start in range(0, flat.numel(), APART_VALUES):
        part = flat[start : start + APART_VALUES, None]
        out[start : start + APART_VALUES] = function(part.expand(-1, LANES).contiguous())[:, 0]
    return out.view(x.shape).to(x.dtype)


@cache
def mixes_neighbours(name: str) -> bool:
    x, function = make_wide_values(1 << 14), getattr(torch, name)
    return not same_bits(function(x), compute_apart(function, x))


def make_wide_values(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(count, generator=generator).sign() * torch.exp2(torch.rand(count, generator=generator) * 28 - 12)


def gelu_tanh(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.tanh((x + x * x * x * 0.044715) * 0.7978845608028654))


def sigmoid(x: Tensor) -> Tensor:
    return x.neg().exp_().add_(1).reciprocal_()


# Value and gradient. torch's own silu, sigmoid and softplus treat the tail of a vector differently from its body.
FORMULAS: Mapping[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "silu": (lambda x: x / x.neg().exp_().add_(1), torch.ops.aten.silu_backward),
    "sigmoid": (sigmoid, lambda grad, x: torch.ops.aten.sigmoid_backward(grad, sigmoid(x))),
    "softplus": (
        lambda x: x.clamp(min=0).add_(x.abs().neg_().exp_().log1p_()),
        lambda grad, x: grad * torch.sigmoid(x),
    ),
    "erf": (partial(compute, "erf"), lambda grad, x: grad * (2 / math.sqrt(math.pi)) * torch.exp(-x.square())),
}


class Formula(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.name = name
        return FORMULAS[name][0](x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return FORMULAS[ctx.name][1](grads[0], *ctx.saved_tensors), None


def apply_formula(name: str, x: Tensor) -> Tensor:
    if torch.is_grad_enabled() and x.requires_grad:
        return Formula.apply(x, name)  # pyright: ignore[reportReturnType]
    return FORMULAS[name][0](x)


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": partial(apply_formula, "silu"),
    "swish": partial(apply_formula, "silu"),
    "gelu_pytorch_tanh": gelu_tanh,
    "gelu_new": gelu_tanh,
    "gelu": lambda x: x * 0.5 * (1 + apply_formula("erf", x * 0.7071067811865476)),
    "relu": torch.relu,
    "sigmoid": partial(apply_formula, "sigmoid"),
    "softplus": partial(apply_formula, "softplus"),
}
