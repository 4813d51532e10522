"""y = x @ w.T + b with bits that do not depend on the number of rows.

Every output element is one float32 sum over k in ascending order: no split of K, whatever the tile. The tile is chosen
by the number of rows for speed alone, and most products on a Hopper go through `hopper.py`; `selftest.py` checks on the
machine at hand that all agree. Backward products are cuBLAS's (deterministic).
Legend: M rows, N outputs, K inputs. `gated` computes act(gate) * up of two stacked weights, rounding where the plain
modules round.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

import tokentrue.numerics.triton.hopper as hopper
from tokentrue.numerics.triton.kernels.activation import activate, branch_of
from tokentrue.numerics.triton.launch import align_rows, cdiv, launch, let_next_start, wait_for_inputs
from tokentrue.numerics.triton.tiles import Tile, tile_at, tile_for


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
    """float32 products are IEEE products: TF32 would round the inputs."""
    return "ieee" if dtype == torch.float32 else "tf32"


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tile: Tile | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [M, K] @ weight[N, K].T + bias, without autograd."""
    x, weight = align_rows(x), align_rows(weight)
    (rows, inputs), outputs = x.shape, weight.shape[0]
    y = torch.empty((rows, outputs), dtype=x.dtype, device=x.device) if out is None else out
    if rows == 0:
        return y
    if tile is None and (described := hopper.tile_for(x, weight)) is not None:
        hopper.product(x, weight, bias, described, y)
        return y
    t = tile or tile_for(rows, outputs, inputs, x.dtype)
    grid = (cdiv(rows, t.m) * cdiv(outputs, t.n),)
    launch(
        _linear_kernel, grid, x, weight, bias if bias is not None else x, y, rows, outputs, inputs, x.stride(0), y.stride(0),
        BM=t.m, BN=t.n, BK=t.k, EVEN_K=inputs % t.k == 0, EVEN_N=outputs % t.n == 0, BIAS=bias is not None, GROUP=8,
        PRECISION=precision_of(x.dtype), num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return y


def gated_product(
    x: torch.Tensor, weight: torch.Tensor, *, act: str = "silu", tile: Tile | None = None
) -> torch.Tensor:
    """act(x @ gate.T) * (x @ up.T) for weight = [gate; up]; the bits of the two products and the two elementwise
    operators apart."""
    x, weight = align_rows(x), align_rows(weight)
    (rows, inputs), outputs = x.shape, weight.shape[0] // 2
    y = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if rows == 0:
        return y
    if tile is None and (described := hopper.tile_for(x, weight, gated=True)) is not None:
        hopper.gated_product(x, weight, act, described, y)
        return y
    t = tile or tile_for(rows, outputs, inputs, x.dtype, gated=True)
    grid = (cdiv(rows, t.m) * cdiv(outputs, t.n),)
    launch(
        _gated_kernel, grid, x, weight, y, rows, outputs, inputs, x.stride(0), y.stride(0), BM=t.m, BN=t.n, BK=t.k,
        EVEN_K=inputs % t.k == 0, GROUP=8, PRECISION=precision_of(x.dtype), ACT=branch_of(act),
        num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: Tile | None
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return product(x, weight, bias, tile=tile)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy = grads[0]
        dx = dy @ weight if ctx.needs_input_grad[0] else None
        dw = dy.t() @ x if ctx.needs_input_grad[1] else None
        db = dy.float().sum(0).to(dy.dtype) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return dx, dw, db, None


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, tile: Tile | None = None
) -> torch.Tensor:
    """F.linear with bits independent of the number of rows; differentiable. `tile` pins one tile for every number of
    rows."""
    flat = x.reshape(-1, x.shape[-1])
    needs = torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    y: Any = _Linear.apply(flat, weight, bias, tile) if needs else product(flat, weight, bias, tile=tile)
    return y.reshape(*x.shape[:-1], weight.shape[0])
