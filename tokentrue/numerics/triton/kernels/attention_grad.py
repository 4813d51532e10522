"""Training attention: `attend` over dense sequences, with a backward pass that has no atomics.

dQ and dK/dV are two kernels, each a fixed fold; so gradients are the same bits in every run. Legend as in
`attention.py`.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from tokentrue.numerics.ops import AttentionSpec, Packed
from tokentrue.numerics.triton.kernels.attention import (
    LOG2E,
    Tiles,
    attend,
    copy_tiles,
    dense_heads,
    dense_keys,
    scores,
    tiles_of,
)
from tokentrue.numerics.triton.kernels.matmul import precision_of
from tokentrue.numerics.triton.launch import align_rows, launch, let_next_start, power_of_two, wait_for_inputs


@triton.jit
def _score_grad(s, lse, dp, delta, SOFTCAP: tl.constexpr):
    """Probabilities, and the gradient of the raw scaled scores, from scores `s` in units of log 2."""
    p = tl.exp2(s - lse)
    ds = p * (dp - delta)
    if SOFTCAP > 0.0:
        t = tl.where(p == 0.0, 0.0, s / (SOFTCAP * 1.4426950408889634))
        ds = ds * (1.0 - t * t)
    return p, ds


@triton.jit
def _dq_kernel(q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, starts_ptr, tile_seq_ptr, tile_query_ptr, scale, grad_scale,
               stride_qt, stride_kt, stride_kj, H: tl.constexpr, J: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
               BN: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Grid (tiles of BM queries, H)."""
    wait_for_inputs()
    let_next_start()
    h = tl.program_id(1)
    s_id = tl.load(tile_seq_ptr + tl.program_id(0)).to(tl.int64)
    start = tl.load(starts_ptr + s_id)
    count = tl.load(starts_ptr + s_id + 1) - start
    first = tl.load(tile_query_ptr + tl.program_id(0))
    row = first + tl.arange(0, BM)
    d = tl.arange(0, BD)
    ok = (row < count)[:, None] & (d < D)[None, :]
    token = (start + row).to(tl.int64)
    q = tl.load(q_ptr + token[:, None] * stride_qt + h * D + d[None, :], mask=ok, other=0.0)
    do = tl.load(do_ptr + (token * H + h)[:, None] * D + d[None, :], mask=ok, other=0.0)
    lse = tl.load(lse_ptr + token * H + h, mask=row < count, other=0.0)
    delta = tl.load(delta_ptr + token * H + h, mask=row < count, other=0.0)
    dq = tl.zeros((BM, BD), tl.float32)
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(first - WINDOW + 1, 0) // BN
    for block in range(lowest, tl.cdiv(tl.minimum(first + BM, count), BN)):
        key = block * BN + tl.arange(0, BN)
        key_ok = (key < count)[:, None] & (d < D)[None, :]
        at = (start + key).to(tl.int64)[:, None] * stride_kt + (h // (H // J)) * stride_kj + d[None, :]
        k = tl.load(k_ptr + at, mask=key_ok, other=0.0)
        v = tl.load(v_ptr + at, mask=key_ok, other=0.0)
        s = scores(q, k, row, key, scale, WINDOW, SOFTCAP, PRECISION)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        _, ds = _score_grad(s, lse[:, None], dp, delta[:, None], SOFTCAP)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    tl.store(dq_ptr + (token * H + h)[:, None] * D + d[None, :], (dq * grad_scale).to(dq_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _dkv_kernel(q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, starts_ptr, tile_seq_ptr, tile_key_ptr, scale, grad_scale,
                stride_qt, stride_kt, stride_kj, H: tl.constexpr, J: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
                BN: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Grid (tiles of BN keys, J); folds over the heads of the group, then over query tiles from the diagonal on."""
    wait_for_inputs()
    let_next_start()
    j = tl.program_id(1)
    G: tl.constexpr = H // J
    s_id = tl.load(tile_seq_ptr + tl.program_id(0)).to(tl.int64)
    start = tl.load(starts_ptr + s_id)
    count = tl.load(starts_ptr + s_id + 1) - start
    first = tl.load(tile_key_ptr + tl.program_id(0))
    key = first + tl.arange(0, BN)
    d = tl.arange(0, BD)
    key_ok = (key < count)[:, None] & (d < D)[None, :]
    at = (start + key).to(tl.int64)[:, None] * stride_kt + j * stride_kj + d[None, :]
    k = tl.load(k_ptr + at, mask=key_ok, other=0.0)
    v = tl.load(v_ptr + at, mask=key_ok, other=0.0)
    dk = tl.zeros((BN, BD), tl.float32)
    dv = tl.zeros((BN, BD), tl.float32)
    end = count
    if WINDOW > 0:
        end = tl.minimum(count, first + BN + WINDOW)
    for g in range(G):
        h = j * G + g
        for block in range(first // BM, tl.cdiv(end, BM)):
            row = block * BM + tl.arange(0, BM)
            ok = (row < count)[:, None] & (d < D)[None, :]
            token = (start + row).to(tl.int64)
            q = tl.load(q_ptr + token[:, None] * stride_qt + h * D + d[None, :], mask=ok, other=0.0)
            do = tl.load(do_ptr + (token * H + h)[:, None] * D + d[None, :], mask=ok, other=0.0)
            lse = tl.load(lse_ptr + token * H + h, mask=row < count, other=float("inf"))
            delta = tl.load(delta_ptr + token * H + h, mask=row < count, other=0.0)
            s = scores(q, k, row, key, scale, WINDOW, SOFTCAP, PRECISION)
            dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
            p, ds = _score_grad(s, lse[:, None], dp, delta[:, None], SOFTCAP)
            dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
            dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
    to = ((start + key).to(tl.int64) * J + j)[:, None] * D + d[None, :]
    tl.store(dk_ptr + to, (dk * grad_scale).to(dk_ptr.dtype.element_ty), mask=key_ok)
    tl.store(dv_ptr + to, dv.to(dv_ptr.dtype.element_ty), mask=key_ok)


@triton.jit
def _delta_kernel(do_ptr, out_ptr, delta_ptr, D: tl.constexpr, BD: tl.constexpr):
    """Grid (tokens × heads): the sum over a head of dO · O in float32."""
    wait_for_inputs()
    let_next_start()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BD)
    do = tl.load(do_ptr + row * D + at, mask=at < D, other=0.0).to(tl.float32)
    out = tl.load(out_ptr + row * D + at, mask=at < D, other=0.0).to(tl.float32)
    tl.store(delta_ptr + row, tl.sum(do * out, 0))


def side_of(dtype: torch.dtype) -> int:
    """Queries, and keys, of a tile of the backward pass."""
    return 64 if dtype != torch.float32 else 16


def gradient_tiles(lengths: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tiles:
    """Tiles of the backward pass over whole sequences. Made once for all layers: a copy to the device per layer would
    wait for it."""
    pairs = [(s, at) for s, n in enumerate(lengths) for at in range(0, n, side_of(dtype))]
    return copy_tiles(pairs, device)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, packed: Packed, spec: AttentionSpec,
        tiles: Tiles, backward_tiles: Tiles,
    ) -> torch.Tensor:  # fmt: skip
        keys = dense_keys(k, v, packed.cu_seqlens)
        q = align_rows(q.contiguous())
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        out = torch.empty_like(q)
        attend(q, keys, out, spec, tiles=tiles, sequences=len(packed.lengths), lse=lse)
        ctx.save_for_backward(q, keys.k, keys.v, sinks, out, lse)
        ctx.packed, ctx.spec, ctx.tiles = packed, spec, backward_tiles
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        packed, spec, tiles = ctx.packed, ctx.spec, ctx.tiles
        do = align_rows(grads[0].contiguous())
        delta = torch.empty_like(lse)
        heads, key_heads, size = q.shape[1], k.shape[1], q.shape[2]
        side = side_of(q.dtype)
        dq = torch.empty_like(q)
        dk, dv = (torch.empty((k.shape[0], key_heads, size), dtype=k.dtype, device=k.device) for _ in range(2))
        scale = spec.scale if spec.softcap else spec.scale * LOG2E
        shape = {"H": heads, "J": key_heads, "D": size, "BD": power_of_two(size), "BM": side, "BN": side, "WINDOW": spec.window or 0,
                 "SOFTCAP": float(spec.softcap or 0.0), "PRECISION": precision_of(q.dtype),
                 "num_warps": 4, "num_stages": 2}  # fmt: skip
        args = (
            packed.cu_seqlens,
            tiles.sequence,
            tiles.query,
            scale,
            spec.scale,
            q.stride(0),
            k.stride(0),
            k.stride(1),
        )
        if count := len(tiles.query):
            launch(_delta_kernel, (delta.numel(),), do, out, delta, D=size, BD=power_of_two(size), num_warps=1)
            launch(_dq_kernel, (count, heads), q, k, v, do, lse, delta, dq, *args, **shape)
            launch(_dkv_kernel, (count, key_heads), q, k, v, do, lse, delta, dk, dv, *args, **shape)
        d_sinks = None if sinks is None else -(torch.exp2(sinks.float() * LOG2E - lse) * delta).sum(0).to(sinks.dtype)
        return dq, dk, dv, d_sinks, None, None, None, None


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: Packed, spec: AttentionSpec, tiles: Tiles | None = None,
    backward_tiles: Tiles | None = None,
) -> torch.Tensor:  # fmt: skip
    """Causal attention inside each packed sequence, q [T, H, D], k and v [T, J, D]; differentiable."""
    if tiles is None:
        tiles = tiles_of(packed.lengths, heads=q.shape[1], key_heads=k.shape[1], dtype=q.dtype, device=q.device)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        backward_tiles = backward_tiles or gradient_tiles(packed.lengths, q.dtype, q.device)
        return _Attention.apply(q, k, v, spec.sinks, packed, spec, tiles, backward_tiles)  # type: ignore[return-value]
    q, out = dense_heads(q), torch.empty(q.shape, dtype=q.dtype, device=q.device)
    attend(q, dense_keys(k, v, packed.cu_seqlens), out, spec, tiles=tiles, sequences=len(packed.lengths))
    return out
