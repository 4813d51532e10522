"""Activations, RMS norms, and head norm + rotary embedding + write into the pages in one launch.

Arithmetic is float32, rounded where the Hugging Face modules round, so fused and separate launches have equal bits. One
row of a norm is one program, whose block and warps, and with them the order of the sum, depend only on its width.

Legend: T tokens, H query heads, J key heads, D head size. A cache is [blocks, J, page, D].
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokentrue.errors import ExactnessError
from tokentrue.numerics.ops import HeadNorm, NormForm
from tokentrue.numerics.triton.launch import (
    align_rows,
    cdiv,
    launch,
    let_next_start,
    power_of_two,
    rows_of,
    wait_for_inputs,
)

# Name in a model's configuration -> branch of `activate`.
ACTIVATIONS = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1, "gelu_tanh": 1, "gelu": 2, "relu": 3, "sigmoid": 5}


def branch_of(kind: str) -> int:
    if kind not in ACTIVATIONS:
        raise ExactnessError(f"activation {kind!r} has no exact form on CUDA; known: {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[kind]


@triton.jit
def activate(x, ACT: tl.constexpr):
    """Rounded to x's dtype."""
    z = x.to(tl.float32)
    if ACT == 0:
        y = z / (1.0 + tl.exp(-z))
    elif ACT == 1:
        inner = 0.7978845608028654 * (z + 0.044715 * (z * z * z))
        y = 0.5 * z * (1.0 + (1.0 - 2.0 / (1.0 + tl.exp(2.0 * inner))))
    elif ACT == 2:
        y = 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    elif ACT == 5:
        y = 1.0 / (1.0 + tl.exp(-z))
    else:
        y = tl.maximum(z, 0.0)
    return y.to(x.dtype)


@triton.jit
def gate_values(gate, up, ACT: tl.constexpr):
    """activate(gate) * up, rounded after each."""
    return (activate(gate, ACT).to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def slope(x, ACT: tl.constexpr):
    """act'(x), rounded to x's dtype."""
    z = x.to(tl.float32)
    if ACT == 0:
        s = 1.0 / (1.0 + tl.exp(-z))
        y = s * (1.0 + z * (1.0 - s))
    elif ACT == 1:
        t = 1.0 - 2.0 / (1.0 + tl.exp(1.5957691216057308 * (z + 0.044715 * (z * z * z))))
        y = 0.5 * (1.0 + t) + 0.5 * z * ((1.0 - t * t) * 0.7978845608028654 * (1.0 + 0.134145 * (z * z)))
    elif ACT == 2:
        y = 0.5 * (1.0 + tl.erf(z * 0.7071067811865476)) + z * tl.exp(-0.5 * (z * z)) * 0.3989422804014327
    elif ACT == 5:
        s = 1.0 / (1.0 + tl.exp(-z))
        y = s * (1.0 - s)
    else:
        y = tl.where(z > 0.0, 1.0, 0.0)
    return y.to(x.dtype)


@triton.jit(do_not_specialize=["n"])
def _act_kernel(x_ptr, dy_ptr, y_ptr, dx_ptr, n, ACT: tl.constexpr, VALUE: tl.constexpr, SLOPE: tl.constexpr, GRADIENT: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    """VALUE: act(x). SLOPE: act'(x), times dy with GRADIENT."""
    wait_for_inputs()
    let_next_start()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    if SLOPE:
        dx = slope(x, ACT)
        if GRADIENT:
            dx = (tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32) * dx.to(tl.float32)).to(x.dtype)
        tl.store(dx_ptr + at, dx, mask=inside)
    if VALUE:
        tl.store(y_ptr + at, activate(x, ACT), mask=inside)


@triton.jit
def _act_mul_kernel(gate_ptr, up_ptr, y_ptr, D, stride_gate, stride_up, ACT: tl.constexpr, BLOCK: tl.constexpr):
    wait_for_inputs()
    let_next_start()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < D
    gate = tl.load(gate_ptr + row * stride_gate + at, mask=inside, other=0.0)
    up = tl.load(up_ptr + row * stride_up + at, mask=inside, other=0.0)
    tl.store(y_ptr + row * D + at, gate_values(gate, up, ACT), mask=inside)


def _activate(x: Tensor, kind: str, dy: Tensor | None = None, *, value: bool, slope: bool) -> tuple[Tensor, Tensor]:
    """act(x) and act'(x), times `dy` if given; `x` itself for what is not asked for."""
    x = align_rows(x.contiguous())
    y, dx = torch.empty_like(x) if value else x, torch.empty_like(x) if slope else x
    if x.numel():
        launch(
            _act_kernel, (cdiv(x.numel(), 1024),), x, x if dy is None else align_rows(dy.contiguous()), y, dx, x.numel(),
            ACT=branch_of(kind), VALUE=value, SLOPE=slope, GRADIENT=dy is not None, BLOCK=1024, num_warps=4,
        )  # fmt: skip
    return y, dx


def activation_grad(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """(act(x), act'(x))."""
    return _activate(x, kind, value=True, slope=True)


class _Act(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kind = kind
        return _activate(x, kind, value=True, slope=False)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _activate(*ctx.saved_tensors, ctx.kind, grads[0], value=False, slope=True)[1], None


def activation(x: Tensor, kind: str) -> Tensor:
    return _Act.apply(x, kind)


def act_mul(gate: Tensor, up: Tensor, kind: str) -> Tensor:
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


@triton.jit
def reciprocal_rms(x, D: tl.constexpr, eps):
    """Positions past D hold zeros."""
    return tl.rsqrt(tl.sum(x * x, 0) / D + eps)


@triton.jit
def scale_row(x, rstd, w, FORM: tl.constexpr, kind: tl.constexpr):
    """x is float32, w the weight as stored."""
    if FORM == 1:
        return (x * rstd * (1.0 + w.to(tl.float32))).to(kind)
    if FORM == 2:
        return (x * rstd * w.to(tl.float32)).to(kind)
    return ((x * rstd).to(kind).to(tl.float32) * w.to(tl.float32)).to(kind)


@triton.jit
def _norm_kernel(x_ptr, res_ptr, w_ptr, y_ptr, sum_ptr, rstd_ptr, eps, D: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr,
                 FORM: tl.constexpr, SAVE: tl.constexpr):  # fmt: skip
    wait_for_inputs()
    let_next_start()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    kind = y_ptr.dtype.element_ty
    inside = None if BLOCK == D else at < D
    zero = None if BLOCK == D else 0.0
    x = tl.load(x_ptr + row * D + at, mask=inside, other=zero)
    w = tl.load(w_ptr + at, mask=inside, other=zero)
    if RESIDUAL:
        r = tl.load(res_ptr + row * D + at, mask=inside, other=zero)
        x = (r.to(tl.float32) + x.to(tl.float32)).to(kind)
        tl.store(sum_ptr + row * D + at, x, mask=at < D)
    x = x.to(tl.float32)
    rstd = reciprocal_rms(x, D, eps)
    if SAVE:
        tl.store(rstd_ptr + row, rstd)
    tl.store(y_ptr + row * D + at, scale_row(x, rstd, w, FORM, kind), mask=at < D)


def warps_for(width: int) -> int:
    """Eight elements per thread for 16-bit rows: one warp up to 256 elements, at most eight."""
    return min(max(power_of_two(width) // 256, 1), 8)


def _norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, form: NormForm, *, save: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of x [rows, width] + residual, that sum, and (if saved) the reciprocal RMS of each row."""
    rows, width = x.shape
    y = torch.empty_like(x)
    total = torch.empty_like(x) if residual is not None else x
    rstd = torch.empty(rows if save else 1, dtype=torch.float32, device=x.device)
    if rows:
        launch(
            _norm_kernel, (rows,), x, residual if residual is not None else x, align_rows(weight), y, total, rstd, eps,
            D=width, BLOCK=power_of_two(width), RESIDUAL=residual is not None, FORM=int(form), SAVE=save,
            num_warps=warps_for(width),
        )  # fmt: skip
    return y, total, rstd


@triton.jit(do_not_specialize=["rows", "per"])
def _norm_grad_kernel(
    x_ptr, w_ptr, rstd_ptr, dy_ptr, dx_ptr, dw_ptr, rows, per, D: tl.constexpr, BLOCK: tl.constexpr, FORM: tl.constexpr
):
    """Program p computes dx of rows [p·per, (p+1)·per) and, row after row, their share of dw."""
    wait_for_inputs()
    p = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    w = tl.load(w_ptr + at, mask=at < D, other=0.0).to(tl.float32)
    if FORM == 1:
        w += 1.0
    share = tl.zeros((BLOCK,), tl.float32)
    for row in range(p * per, tl.minimum((p + 1) * per, rows)):
        rstd = tl.load(rstd_ptr + row)
        z = tl.load(x_ptr + row * D + at, mask=at < D, other=0.0).to(tl.float32) * rstd
        dy = tl.load(dy_ptr + row * D + at, mask=at < D, other=0.0).to(tl.float32)
        dz = dy * w
        dx = (dz - z * (tl.sum(dz * z, 0) / D)) * rstd
        tl.store(dx_ptr + row * D + at, dx.to(dx_ptr.dtype.element_ty), mask=at < D)
        share += dy * z
    let_next_start()
    tl.store(dw_ptr + p * D + at, share, mask=at < D)


# Sixteen a multiprocessor of an H200. Fixed, so that the order of dw's sum depends on the rows alone.
PROGRAMS = 2112


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, form: NormForm) -> Tensor:
        y, _, rstd = _norm(x, None, weight, eps, form, save=True)
        ctx.save_for_backward(x, weight, rstd)
        ctx.form = form
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        rows, width = x.shape
        if rows == 0:
            return torch.zeros_like(x), torch.zeros_like(weight), None, None
        dx, per = torch.empty_like(x), cdiv(rows, PROGRAMS)
        programs = cdiv(rows, per)
        dw = torch.empty((programs, width), dtype=torch.float32, device=x.device)
        launch(
            _norm_grad_kernel, (programs,), x, align_rows(weight), rstd, rows_of(grads[0]), dx, dw, rows, per, D=width,
            BLOCK=power_of_two(width), FORM=int(ctx.form), num_warps=warps_for(width),
        )  # fmt: skip
        return dx, dw.sum(0).to(weight.dtype), None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, form: NormForm = NormForm.PLAIN) -> Tensor:
    flat = rows_of(x)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _RMSNorm.apply(flat, weight, eps, form).reshape(x.shape)
    return _norm(flat, None, weight, eps, form)[0].reshape(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, form: NormForm) -> tuple[Tensor, Tensor]:
    y, total, _ = _norm(rows_of(x), rows_of(residual), weight, eps, form)
    return y.reshape(x.shape), total.reshape(x.shape)


@triton.jit
def _prepare_kernel(qkv_ptr, cos_ptr, sin_ptr, qw_ptr, kw_ptr, q_ptr, k_ptr, v_ptr, slot_ptr, stride_qkv, eps, H: tl.constexpr,
                    J: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, R: tl.constexpr, STEP: tl.constexpr, PAGE: tl.constexpr,
                    NORM: tl.constexpr, FORM: tl.constexpr, HEADS: tl.constexpr):  # fmt: skip
    """Grid (tokens, heads / HEADS). A program's heads are all queries, all keys or all values, a warp each, so that a
    head's sum has the order of `_norm_kernel`, whatever HEADS is. R: values of a head that are rotated. STEP: from one
    query head to the next."""
    wait_for_inputs()
    let_next_start()
    t = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * HEADS
    head = first + tl.arange(0, HEADS)[:, None]
    at = tl.arange(0, BD)[None, :]
    inside = (at < D) & (head >= 0)
    kind = q_ptr.dtype.element_ty
    row = qkv_ptr + t * stride_qkv + head * D
    if first < H:
        row += head * (STEP - D)
    else:
        row += H * (STEP - D)
    x = tl.load(row + at, mask=inside, other=0.0)
    if first < H + J:
        partner = tl.where(at < R // 2, at + R // 2, tl.where(at < R, at - R // 2, at))
        xp = tl.load(row + partner, mask=inside, other=0.0)
        if NORM:
            w_ptr = qw_ptr
            if first >= H:
                w_ptr = kw_ptr
            z = x.to(tl.float32)
            rstd = tl.rsqrt(tl.sum(z * z, 1) / D + eps)[:, None]
            x = scale_row(z, rstd, tl.load(w_ptr + at, mask=at < D, other=0.0), FORM, kind)
            xp = scale_row(xp.to(tl.float32), rstd, tl.load(w_ptr + partner, mask=at < D, other=0.0), FORM, kind)
        cos = tl.load(cos_ptr + t * R + at, mask=at < R, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + t * R + at, mask=at < R, other=0.0).to(tl.float32)
        turned = tl.where(at < R // 2, -xp.to(tl.float32), xp.to(tl.float32))
        rotated = ((x.to(tl.float32) * cos).to(kind).to(tl.float32) + (turned * sin).to(kind).to(tl.float32)).to(kind)
        x = tl.where(at < R, rotated, x)
    if first < H:
        tl.store(q_ptr + (t * H + head) * D + at, x, mask=inside)
    else:
        slot = tl.load(slot_ptr + t)
        to = (slot // PAGE * J * PAGE + slot % PAGE) * D + at
        if first < H + J:
            tl.store(k_ptr + to + (head - H) * PAGE * D, x, mask=inside)
        else:
            tl.store(v_ptr + to + (head - H - J) * PAGE * D, x, mask=inside)


def prepare_qkv(
    qkv: Tensor, heads: tuple[int, int, int], norm: HeadNorm | None, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor,
    slots: Tensor, *, gated: bool = False,
) -> Tensor:  # fmt: skip
    """Queries [T, H, D] of qkv [T, (H+2J)·D]; writes keys and values to `slots` of the pages."""
    h, j, d = heads
    qkv, tokens = align_rows(qkv), qkv.shape[0]
    q = torch.empty((tokens, h, d), dtype=qkv.dtype, device=qkv.device)
    if tokens:
        together = math.gcd(h, j, 8)
        launch(
            _prepare_kernel, (tokens, (h + 2 * j) // together), qkv, align_rows(cos), align_rows(sin), norm.q_weight if norm else qkv,
            norm.k_weight if norm else qkv, q, k_cache, v_cache, slots, qkv.stride(0), norm.eps if norm else 0.0, H=h, J=j, D=d,
            BD=power_of_two(d), R=cos.shape[-1], STEP=2 * d if gated else d, PAGE=k_cache.shape[2], NORM=norm is not None,
            FORM=int(norm.form) if norm else 0, HEADS=together, num_warps=together * warps_for(d),
        )  # fmt: skip
    return q


@triton.jit(do_not_specialize=["stride_t", "step"])
def _gate_kernel(x_ptr, gate_ptr, y_ptr, stride_t, step, N: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """y = x * sigmoid(gate): x [T, N], heads of D gate values `step` apart."""
    wait_for_inputs()
    let_next_start()
    t = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + t * N + at, mask=at < N, other=0.0)
    gate = tl.load(gate_ptr + t * stride_t + at // D * step + at % D, mask=at < N, other=0.0)
    y = (x.to(tl.float32) * activate(gate, 5).to(tl.float32)).to(x.dtype)
    tl.store(y_ptr + t * N + at, y, mask=at < N)


def gate_heads(x: Tensor, gate: Tensor) -> Tensor:
    x, (tokens, heads, size) = rows_of(x), gate.shape
    y = torch.empty_like(x)
    if tokens:
        launch(
            _gate_kernel, (tokens, cdiv(heads * size, 1024)), x, gate, y, *gate.stride()[:2], N=heads * size, D=size, BLOCK=1024,
            num_warps=4,
        )  # fmt: skip
    return y


@triton.jit
def _store_kernel(k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slot_ptr, stride_kt, stride_kj, stride_vt, stride_vj, J: tl.constexpr,
                  D: tl.constexpr, BD: tl.constexpr, PAGE: tl.constexpr):  # fmt: skip
    wait_for_inputs()
    let_next_start()
    t = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1)
    at = tl.arange(0, BD)
    slot = tl.load(slot_ptr + t)
    to = ((slot // PAGE * J + j) * PAGE + slot % PAGE) * D + at
    tl.store(k_cache_ptr + to, tl.load(k_ptr + t * stride_kt + j * stride_kj + at, mask=at < D), mask=at < D)
    tl.store(v_cache_ptr + to, tl.load(v_ptr + t * stride_vt + j * stride_vj + at, mask=at < D), mask=at < D)


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    tokens, heads, size = k.shape
    if tokens:
        launch(
            _store_kernel, (tokens, heads), k, v, k_cache, v_cache, slots, k.stride(0), k.stride(1), v.stride(0), v.stride(1), J=heads,
            D=size, BD=power_of_two(size), PAGE=k_cache.shape[2], num_warps=1,
        )  # fmt: skip
