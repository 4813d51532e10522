"""Head norm, rotary embedding and the write into the pages, in one launch; for inference.

The trainer does the same with the modules apart; both round after every elementwise step, so the bits agree.
Legend: T tokens, H query heads, J key heads, D head size. A cache is [blocks, J, page, D].
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from tokentrue.numerics.ops import HeadNorm
from tokentrue.numerics.triton.kernels.norm import scale_row, warps_for
from tokentrue.numerics.triton.launch import align_rows, launch, let_next_start, power_of_two, wait_for_inputs


@triton.jit
def _prepare_kernel(qkv_ptr, cos_ptr, sin_ptr, qw_ptr, kw_ptr, q_ptr, k_ptr, v_ptr, slot_ptr, stride_qkv, eps, H: tl.constexpr,
                    J: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, PAGE: tl.constexpr, NORM: tl.constexpr,
                    FORM: tl.constexpr, HEADS: tl.constexpr):  # fmt: skip
    """Grid (tokens, heads / HEADS). The heads of a program are all queries, all keys or all values, a warp each: so
    that a head's sum has the order of `norm.py`, whatever HEADS is."""
    wait_for_inputs()
    let_next_start()
    t = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * HEADS
    head = first + tl.arange(0, HEADS)[:, None]
    at = tl.arange(0, BD)[None, :]
    inside = (at < D) & (head >= 0)
    kind = q_ptr.dtype.element_ty
    row = qkv_ptr + t * stride_qkv + head * D
    x = tl.load(row + at, mask=inside, other=0.0)
    if first < H + J:
        partner = tl.where(at < D // 2, at + D // 2, at - D // 2)
        xp = tl.load(row + partner, mask=inside, other=0.0)
        if NORM:
            w_ptr = qw_ptr
            if first >= H:
                w_ptr = kw_ptr
            z = x.to(tl.float32)
            rstd = tl.rsqrt(tl.sum(z * z, 1) / D + eps)[:, None]
            x = scale_row(z, rstd, tl.load(w_ptr + at, mask=at < D, other=0.0), FORM, kind)
            xp = scale_row(xp.to(tl.float32), rstd, tl.load(w_ptr + partner, mask=at < D, other=0.0), FORM, kind)
        cos = tl.load(cos_ptr + t * D + at, mask=at < D, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + t * D + at, mask=at < D, other=0.0).to(tl.float32)
        turned = tl.where(at < D // 2, -xp.to(tl.float32), xp.to(tl.float32))
        x = ((x.to(tl.float32) * cos).to(kind).to(tl.float32) + (turned * sin).to(kind).to(tl.float32)).to(kind)
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
    qkv: torch.Tensor,
    heads: tuple[int, int, int],
    norm: HeadNorm | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Queries [T, H, D] of qkv [T, (H+2J)·D]; keys and values go to `slots` of the pages."""
    h, j, d = heads
    qkv, tokens = align_rows(qkv), qkv.shape[0]
    q = torch.empty((tokens, h, d), dtype=qkv.dtype, device=qkv.device)
    if tokens:
        together = math.gcd(h, j, 8)
        launch(
            _prepare_kernel, (tokens, (h + 2 * j) // together), qkv, align_rows(cos), align_rows(sin), norm.q_weight if norm else qkv,
            norm.k_weight if norm else qkv, q, k_cache, v_cache, slots, qkv.stride(0), norm.eps if norm else 0.0, H=h, J=j, D=d,
            BD=power_of_two(d), PAGE=k_cache.shape[2], NORM=norm is not None, FORM=int(norm.form) if norm else 0,
            HEADS=together, num_warps=together * warps_for(d),
        )  # fmt: skip
    return q


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


def store_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    tokens, heads, size = k.shape
    if tokens:
        launch(
            _store_kernel, (tokens, heads), k, v, k_cache, v_cache, slots, k.stride(0), k.stride(1), v.stride(0), v.stride(1), J=heads,
            D=size, BD=power_of_two(size), PAGE=k_cache.shape[2], num_warps=1,
        )  # fmt: skip
