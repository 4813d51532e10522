"""Elementwise activations, computed in float32 and rounded once to the model's dtype, by one device function that every
kernel shares."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tokentrue.errors import ExactnessError
from tokentrue.numerics.triton.launch import align_rows, cdiv, launch, let_next_start, wait_for_inputs

# Name in a model's configuration -> branch of `activate`.
ACTIVATIONS = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1, "gelu_tanh": 1, "gelu": 2, "relu": 3}


def branch_of(kind: str) -> int:
    if kind not in ACTIVATIONS:
        raise ExactnessError(f"activation {kind!r} has no exact form on CUDA; known: {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[kind]


@triton.jit
def activate(x, ACT: tl.constexpr):
    """act(x) rounded to x's dtype; the arithmetic is float32."""
    z = x.to(tl.float32)
    if ACT == 0:
        y = z / (1.0 + tl.exp(-z))
    elif ACT == 1:
        inner = 0.7978845608028654 * (z + 0.044715 * (z * z * z))
        y = 0.5 * z * (1.0 + (1.0 - 2.0 / (1.0 + tl.exp(2.0 * inner))))
    elif ACT == 2:
        y = 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    else:
        y = tl.maximum(z, 0.0)
    return y.to(x.dtype)


@triton.jit
def slope(x, ACT: tl.constexpr):
    """act'(x) rounded to x's dtype; the arithmetic is float32."""
    z = x.to(tl.float32)
    if ACT == 0:
        s = 1.0 / (1.0 + tl.exp(-z))
        y = s * (1.0 + z * (1.0 - s))
    elif ACT == 1:
        t = 1.0 - 2.0 / (1.0 + tl.exp(1.5957691216057308 * (z + 0.044715 * (z * z * z))))
        y = 0.5 * (1.0 + t) + 0.5 * z * ((1.0 - t * t) * 0.7978845608028654 * (1.0 + 0.134145 * (z * z)))
    elif ACT == 2:
        y = 0.5 * (1.0 + tl.erf(z * 0.7071067811865476)) + z * tl.exp(-0.5 * (z * z)) * 0.3989422804014327
    else:
        y = tl.where(z > 0.0, 1.0, 0.0)
    return y.to(x.dtype)


@triton.jit(do_not_specialize=["n"])
def _act_grad_kernel(x_ptr, dy_ptr, act_ptr, dx_ptr, n, ACT: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    """dy · act'(x), or, without a gradient, act(x) and act'(x)."""
    wait_for_inputs()
    let_next_start()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    dx = slope(x, ACT)
    if GRADIENT:
        dx = (tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32) * dx.to(tl.float32)).to(x.dtype)
    else:
        tl.store(act_ptr + at, activate(x, ACT), mask=inside)
    tl.store(dx_ptr + at, dx, mask=inside)


@triton.jit(do_not_specialize=["n"])
def _act_kernel(x_ptr, y_ptr, n, ACT: tl.constexpr, BLOCK: tl.constexpr):
    wait_for_inputs()
    let_next_start()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(y_ptr + at, activate(tl.load(x_ptr + at, mask=inside, other=0.0), ACT), mask=inside)


@triton.jit
def _act_mul_kernel(gate_ptr, up_ptr, y_ptr, D, stride_gate, stride_up, ACT: tl.constexpr, BLOCK: tl.constexpr):
    wait_for_inputs()
    let_next_start()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < D
    gate = tl.load(gate_ptr + row * stride_gate + at, mask=inside, other=0.0)
    up = tl.load(up_ptr + row * stride_up + at, mask=inside, other=0.0)
    y = activate(gate, ACT).to(tl.float32) * up.to(tl.float32)
    tl.store(y_ptr + row * D + at, y.to(gate.dtype), mask=inside)


def activation_grad(x: torch.Tensor, kind: str, dy: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(act(x), act'(x)) in x's dtype, for backward passes; with `dy` the second is dy · act'(x), and the first is x."""
    x = align_rows(x.contiguous())
    dy, acted, dx = (
        x if dy is None else align_rows(dy.contiguous()),
        x if dy is not None else torch.empty_like(x),
        torch.empty_like(x),
    )
    if x.numel():
        launch(
            _act_grad_kernel, (cdiv(x.numel(), 1024),), x, dy, acted, dx, x.numel(), ACT=branch_of(kind), GRADIENT=acted is x,
            BLOCK=1024, num_warps=4,
        )  # fmt: skip
    return acted, dx


class _Act(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kind: str) -> torch.Tensor:
        x = align_rows(x.contiguous())
        ctx.save_for_backward(x)
        ctx.kind = kind
        y = torch.empty_like(x)
        if x.numel():
            launch(_act_kernel, (cdiv(x.numel(), 1024),), x, y, x.numel(), ACT=branch_of(kind), BLOCK=1024, num_warps=4)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return activation_grad(x, ctx.kind, grads[0])[1], None


def activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    """The activation `kind` of a model's configuration; differentiable."""
    return _Act.apply(x, kind)  # type: ignore[return-value]


def act_mul(gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
    """activation(gate) * up, rounded after each; one launch where no gradient is wanted."""
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        return activation(gate, kind) * up
    width = gate.shape[-1]
    flat_gate, flat_up = align_rows(gate.reshape(-1, width)), align_rows(up.reshape(-1, width))
    y = torch.empty(flat_gate.shape, dtype=gate.dtype, device=gate.device)
    if y.numel():
        launch(
            _act_mul_kernel, (y.shape[0], cdiv(width, 1024)), flat_gate, flat_up, y, width, flat_gate.stride(0), flat_up.stride(0),
            ACT=branch_of(kind), BLOCK=1024, num_warps=4,
        )  # fmt: skip
    return y.reshape(gate.shape)
