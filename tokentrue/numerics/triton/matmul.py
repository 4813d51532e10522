"""y = x @ w.T + b with bits that do not depend on the number of rows.

Every output element is one float32 sum over k in ascending order: no split of K. The number of rows selects the tile,
only for speed, and most products on a Hopper go through `hopper.py`; `selftest.py` checks on this machine that all
agree. Backward products are cuBLAS's (deterministic). Gated products round where the plain modules round.
`norm_product` shortens the chain of launches of a single decoding sequence: every program norms the row itself, with
the sum of `_norm_kernel` (same block, same warps, so same order).

Legend: M rows, N outputs, K inputs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

import tokentrue.numerics.triton.hopper as hopper
from tokentrue.numerics.ops import NormForm
from tokentrue.numerics.triton.elementwise import activate, branch_of, reciprocal_rms, scale_row, warps_for
from tokentrue.numerics.triton.launch import (
    VOCABULARY,
    Tile,
    align_rows,
    cdiv,
    launch,
    let_next_start,
    power_of_two,
    tile_at,
    tile_for_product,
    wait_for_inputs,
)


@triton.jit
def _products(x_ptr, w_ptr, rows, cols, M, N, K, stride_x, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr,
              EVEN_N: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    ks = tl.arange(0, BK)
    x_tile = x_ptr + rows.to(tl.int64)[:, None] * stride_x + ks[None, :]
    w_tile = w_ptr + cols.to(tl.int64)[None, :] * K + ks[:, None]
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        in_x = (rows < M)[:, None]
        if EVEN_K:
            x = tl.load(x_tile, mask=in_x, other=0.0)
            if EVEN_N:  # noqa: SIM108
                w = tl.load(w_tile)
            else:
                w = tl.load(w_tile, mask=(cols < N)[None, :], other=0.0)
        else:
            x = tl.load(x_tile, mask=in_x & (ks < K - k)[None, :], other=0.0)
            w = tl.load(w_tile, mask=(cols < N)[None, :] & (ks < K - k)[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
        x_tile += BK
        w_tile += BK
    return acc


@triton.jit
def _linear_kernel(x_ptr, w_ptr, b_ptr, y_ptr, M, N, K, stride_x, stride_y, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                   EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, BIAS: tl.constexpr, GROUP: tl.constexpr,
                   PRECISION: tl.constexpr):  # fmt: skip
    wait_for_inputs()
    m, n = tile_at(tl.program_id(0), M, N, BM, BN, GROUP)
    rows = m * BM + tl.arange(0, BM)
    cols = n * BN + tl.arange(0, BN)
    acc = _products(x_ptr, w_ptr, rows, cols, M, N, K, stride_x, BM, BN, BK, EVEN_K, EVEN_N, PRECISION)
    let_next_start()
    if BIAS:
        acc += tl.load(b_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    out = y_ptr + rows.to(tl.int64)[:, None] * stride_y + cols[None, :]
    tl.store(out, acc.to(y_ptr.dtype.element_ty), mask=(rows < M)[:, None] & (cols < N)[None, :])


@triton.jit
def _gated_kernel(x_ptr, w_ptr, y_ptr, M, N, K, stride_x, stride_y, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                  EVEN_K: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr, ACT: tl.constexpr):  # fmt: skip
    """w holds N gate rows, then N up rows; one program computes the same columns of both."""
    wait_for_inputs()
    m, n = tile_at(tl.program_id(0), M, N, BM, BN, GROUP)
    rows = m * BM + tl.arange(0, BM)
    cols = n * BN + tl.arange(0, BN)
    ks = tl.arange(0, BK)
    kind = y_ptr.dtype.element_ty
    x_tile = x_ptr + rows.to(tl.int64)[:, None] * stride_x + ks[None, :]
    gate_tile = w_ptr + cols.to(tl.int64)[None, :] * K + ks[:, None]
    up_tile = gate_tile + N.to(tl.int64) * K
    gate = tl.zeros((BM, BN), dtype=tl.float32)
    up = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        in_k = (ks < K - k) if not EVEN_K else (ks < BK)
        in_w = (cols < N)[None, :] & in_k[:, None]
        x = tl.load(x_tile, mask=(rows < M)[:, None] & in_k[None, :], other=0.0)
        gate = tl.dot(x, tl.load(gate_tile, mask=in_w, other=0.0), gate, input_precision=PRECISION)
        up = tl.dot(x, tl.load(up_tile, mask=in_w, other=0.0), up, input_precision=PRECISION)
        x_tile += BK
        gate_tile += BK
        up_tile += BK
    let_next_start()
    y = activate(gate.to(kind), ACT).to(tl.float32) * up.to(kind).to(tl.float32)
    out = y_ptr + rows.to(tl.int64)[:, None] * stride_y + cols[None, :]
    tl.store(out, y.to(kind), mask=(rows < M)[:, None] & (cols < N)[None, :])


def precision_of(dtype: torch.dtype) -> str:
    """TF32 would round the inputs."""
    return "ieee" if dtype == torch.float32 else "tf32"


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    tile: Tile | None = None,
    out: Tensor | None = None,
) -> Tensor:
    x, weight = align_rows(x), align_rows(weight)
    (rows, inputs), outputs = x.shape, weight.shape[0]
    y = torch.empty((rows, outputs), dtype=x.dtype, device=x.device) if out is None else out
    if rows == 0:
        return y
    if tile is None and (described := hopper.tile_for(x, weight)) is not None:
        hopper.product(x, weight, bias, described, y)
        return y
    t = tile or tile_for_product(rows, outputs, inputs, x.dtype)
    grid = (cdiv(rows, t.m) * cdiv(outputs, t.n),)
    launch(
        _linear_kernel, grid, x, weight, bias if bias is not None else x, y, rows, outputs, inputs, x.stride(0), y.stride(0),
        BM=t.m, BN=t.n, BK=t.k, EVEN_K=inputs % t.k == 0, EVEN_N=outputs % t.n == 0, BIAS=bias is not None, GROUP=8,
        PRECISION=precision_of(x.dtype), num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return y


def gated_product(x: Tensor, weight: Tensor, *, act: str = "silu", tile: Tile | None = None) -> Tensor:
    """act(x @ gate.T) * (x @ up.T) for weight = [gate; up], with the bits of the separate operators."""
    x, weight = align_rows(x), align_rows(weight)
    (rows, inputs), outputs = x.shape, weight.shape[0] // 2
    y = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if rows == 0:
        return y
    if tile is None and (described := hopper.tile_for(x, weight, gated=True)) is not None:
        hopper.product(x, weight, None, described, y, act)
        return y
    t = tile or tile_for_product(rows, outputs, inputs, x.dtype, gated=True)
    grid = (cdiv(rows, t.m) * cdiv(outputs, t.n),)
    launch(
        _gated_kernel, grid, x, weight, y, rows, outputs, inputs, x.stride(0), y.stride(0), BM=t.m, BN=t.n, BK=t.k,
        EVEN_K=inputs % t.k == 0, GROUP=8, PRECISION=precision_of(x.dtype), ACT=branch_of(act),
        num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return product(x, weight, bias, tile=tile)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy = grads[0]
        dx = dy @ weight if ctx.needs_input_grad[0] else None
        dw = dy.t() @ x if ctx.needs_input_grad[1] else None
        db = dy.float().sum(0).to(dy.dtype) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return dx, dw, db, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, tile: Tile | None = None) -> Tensor:
    """`tile` pins one tile for every number of rows."""
    flat = x.reshape(-1, x.shape[-1])
    needs = torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    y: Any = _Linear.apply(flat, weight, bias, tile) if needs else product(flat, weight, bias, tile=tile)
    return y.reshape(*x.shape[:-1], weight.shape[0])


WIDE, DEEP, STAGES = 32, 256, 4


@triton.jit
def _norm_product_kernel(h_ptr, res_ptr, norm_ptr, w_ptr, b_ptr, y_ptr, sum_ptr, N, eps, K: tl.constexpr, KP: tl.constexpr,
                         BN: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr,
                         FORM: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    wait_for_inputs()
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    w_cols = w_ptr + cols.to(tl.int64) * K
    up_cols = w_cols + N.to(tl.int64) * K
    kind = y_ptr.dtype.element_ty
    at = tl.arange(0, KP)
    if KP == K:
        h = tl.load(h_ptr + at)
        r = tl.load(res_ptr + at)
    else:
        h = tl.load(h_ptr + at, mask=at < K, other=0.0)
        r = tl.load(res_ptr + at, mask=at < K, other=0.0)
    total = (r.to(tl.float32) + h.to(tl.float32)).to(kind)
    if tl.program_id(0) == 0:
        tl.store(sum_ptr + at, total, mask=at < K)
    rstd = reciprocal_rms(total.to(tl.float32), K, eps)
    first = (tl.arange(0, 16) == 0)[:, None]
    ks = tl.arange(0, BK)
    acc = tl.zeros((16, BN), tl.float32)
    up = tl.zeros((16, BN), tl.float32)
    for k in range(0, K, BK):
        x = (tl.load(res_ptr + k + ks).to(tl.float32) + tl.load(h_ptr + k + ks).to(tl.float32)).to(kind)
        x = scale_row(x.to(tl.float32), rstd, tl.load(norm_ptr + k + ks), FORM, kind)
        row = tl.where(first, x[None, :], 0.0).to(kind)
        acc = tl.dot(row, tl.load(w_cols[None, :] + k + ks[:, None]), acc, input_precision=PRECISION)
        if GATED:
            up = tl.dot(row, tl.load(up_cols[None, :] + k + ks[:, None]), up, input_precision=PRECISION)
    let_next_start()
    if BIAS:
        acc += tl.load(b_ptr + cols).to(tl.float32)[None, :]
    y = acc.to(kind)
    if GATED:
        y = (activate(y, ACT).to(tl.float32) * up.to(kind).to(tl.float32)).to(kind)
    out = y_ptr + cols[None, :] + tl.zeros((16, 1), tl.int32)
    tl.store(out, y, mask=first & (cols >= 0)[None, :])


def fits_norm_product(h: Tensor, weight: Tensor, *, gated: bool) -> bool:
    outputs, inputs = weight.shape
    if h.shape[0] != 1 or h.dtype == torch.float32 or outputs > VOCABULARY:  # a large head would norm the row too often
        return False
    return inputs % DEEP == 0 and outputs % (2 * WIDE if gated else WIDE) == 0


def norm_product(
    h: Tensor, residual: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None,
    *, form: NormForm = NormForm.PLAIN, act: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    h, residual, weight, norm = align_rows(h), align_rows(residual), align_rows(weight), align_rows(norm)
    inputs = weight.shape[1]
    outputs = weight.shape[0] // (1 if act is None else 2)
    y = torch.empty((1, outputs), dtype=h.dtype, device=h.device)
    total = torch.empty_like(h)
    launch(
        _norm_product_kernel, (outputs // WIDE,), h, residual, norm, weight, bias if bias is not None else h, y, total, outputs, eps,
        K=inputs, KP=power_of_two(inputs), BN=WIDE, BK=DEEP, BIAS=bias is not None, GATED=act is not None,
        ACT=branch_of(act) if act is not None else 0, FORM=int(form), PRECISION=precision_of(h.dtype),
        num_warps=warps_for(inputs), num_stages=STAGES,
    )  # fmt: skip
    return y, total
