"""Activations and the rotary turn on the CPU: a value's bits depend neither on its place in a vector nor on the values
beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tokentrue.numerics.bits import same_bits

LANES = 16  # float32 values in the widest vector register
APART_VALUES = (
    1024  # computed at a time: few enough that torch does not divide them between threads in the middle of a vector
)


def compute(name: str, x: Tensor) -> Tensor:
    """`torch.cos`, `sin` or `erf`. Where this machine's vector library chooses one formula for all values of a vector
    by the largest of them (Sleef on ARM does), each value gets a vector of its own."""
    function = getattr(torch, name)
    return compute_apart(function, x) if mixes_neighbours(name) else function(x)


def compute_apart(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function` of each value in a vector of its own, in float32."""
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
    """Both signs, magnitudes from 2^-12 to 2^16, mixed."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(count, generator=generator).sign() * torch.exp2(torch.rand(count, generator=generator) * 28 - 12)


class Silu(torch.autograd.Function):
    """x/(1+exp(-x)): torch's own silu treats the tail of a vector differently from its body."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x / x.neg().exp_().add_(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return torch.ops.aten.silu_backward(grads[0], ctx.saved_tensors[0])


def silu(x: Tensor) -> Tensor:
    if torch.is_grad_enabled() and x.requires_grad:
        return Silu.apply(x)  # pyright: ignore[reportReturnType]
    return x / x.neg().exp_().add_(1)


class Sigmoid(torch.autograd.Function):
    """1/(1+exp(-x)), for the same reason."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.neg().exp_().add_(1).reciprocal_()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return torch.ops.aten.sigmoid_backward(grads[0], ctx.saved_tensors[0])


class Softplus(torch.autograd.Function):
    """max(x, 0) + log1p(exp(-|x|)), for the same reason."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0).add_(x.abs().neg_().exp_().log1p_())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * torch.sigmoid(ctx.saved_tensors[0])


def gelu_tanh(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.tanh((x + x * x * x * 0.044715) * 0.7978845608028654))


class Erf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return compute("erf", x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * (2 / math.sqrt(math.pi)) * torch.exp(-ctx.saved_tensors[0].square())


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + Erf.apply(x * 0.7071067811865476))  # pyright: ignore


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "swish": silu,
    "gelu_pytorch_tanh": gelu_tanh,
    "gelu_new": gelu_tanh,
    "gelu": gelu,
    "relu": torch.relu,
    "sigmoid": Sigmoid.apply,  # pyright: ignore
    "softplus": Softplus.apply,  # pyright: ignore
}


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return apply_rotation(x, *rotation_of(cos, sin))


def rotation_of(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """cos and signed sin, each with room for the heads. (-x2)*sin and x2*(-sin) are the same bits; here the sign has
    the smaller tensor."""
    half = sin.shape[-1] // 2
    return cos.unsqueeze(1), torch.cat((-sin[..., :half], sin[..., half:]), -1).unsqueeze(1)


def apply_rotation(x: Tensor, cos: Tensor, signed: Tensor) -> Tensor:
    """Values past the width of `cos` (partial rotary embedding) stay as they are; a wider `cos` is the dtype of the
    arithmetic."""
    if cos.dtype != x.dtype:
        return apply_rotation(x.to(cos.dtype), cos, signed).to(x.dtype)
    if cos.shape[-1] < x.shape[-1]:
        return torch.cat((apply_rotation(x[..., : cos.shape[-1]], cos, signed), x[..., cos.shape[-1] :]), -1)
    half = cos.shape[-1] // 2
    return (x * cos).add_(torch.cat((x[..., half:], x[..., :half]), -1).mul_(signed))
