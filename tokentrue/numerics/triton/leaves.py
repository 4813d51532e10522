"""x @ w.T over leaves of K, each one float32 sum in ascending order, joined by a binary tree in float32.

A program sums a whole subtree; if several share a tile, a second kernel continues the same tree. Legend: M rows, N
outputs, K inputs, WIDTH inputs of a leaf.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokentrue.numerics.triton.launch import Tile, align_rows, cdiv, launch, let_next_start, wait_for_inputs
from tokentrue.numerics.triton.matmul import describe, multiply_add, multiprocessors, num_tiles, tile_at, zeros_of_tile

LEAST = 16  # inputs of a leaf
BLOCK = 1024


@triton.jit
def carry(total, one, two, four, leaf, LEAVES: tl.constexpr):
    """Joins a leaf with the subtrees that it completes; those of one, two or four leaves that wait are in the rest."""
    ends = leaf % 2 == 1
    whole = tl.where(ends, one + total, total)
    one = tl.where(ends, one, total)
    if LEAVES > 2:
        pair = tl.where(leaf % 4 == 3, two + whole, whole)
        two = tl.where(leaf % 4 == 1, whole, two)
        whole = pair
    if LEAVES > 4:
        pair = tl.where(leaf % 8 == 7, four + whole, whole)
        four = tl.where(leaf % 8 == 3, whole, four)
        whole = pair
    return whole, one, two, four


@triton.jit
def _leaf_kernel(x_desc, w_desc, b_ptr, y_ptr, M, N, WIDTH: tl.constexpr, LEAVES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                      BK: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """Grid (tiles, subtrees)."""
    wait_for_inputs()
    m, n = tile_at(tl.program_id(0), M, N, BM, BN, 8)
    TURNED: tl.constexpr = BM < 64
    first = tl.program_id(1) * LEAVES * WIDTH
    total = zeros_of_tile(BM, BN, TURNED)
    one = total
    two = total
    four = total
    for leaf in tl.range(0, LEAVES, flatten=True):  # loads of the next leaf start early
        part = zeros_of_tile(BM, BN, TURNED)
        for k in range(0, WIDTH, BK):
            at = first + leaf * WIDTH + k
            part = multiply_add(x_desc.load([m * BM, at]), w_desc.load([n * BN, at]), part, TURNED)
        total, one, two, four = carry(part, one, two, four, leaf, LEAVES)
    let_next_start()
    if TURNED:
        total = total.T
    rows = m * BM + tl.arange(0, BM)
    cols = n * BN + tl.arange(0, BN)
    if BIAS:
        total += tl.load(b_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    out = y_ptr + (tl.program_id(1) * M + rows).to(tl.int64)[:, None] * N + cols[None, :]
    tl.store(out, total.to(y_ptr.dtype.element_ty), mask=(rows < M)[:, None] & (cols < N)[None, :])


@triton.jit
def _join_kernel(part_ptr, b_ptr, y_ptr, SIZE, N, PARTS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    wait_for_inputs()
    let_next_start()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    one = total
    two = total
    four = total
    for part in tl.static_range(PARTS):
        total = tl.load(part_ptr + at, mask=at < SIZE, other=0.0)
        total, one, two, four = carry(total, one, two, four, part, PARTS)
        part_ptr += SIZE
    if BIAS:
        total += tl.load(b_ptr + at % N, mask=at < SIZE, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=at < SIZE)


def tile_for(rows: int, width: int) -> Tile:
    """Few rows: a program has a multiprocessor to itself. Many: narrow, because totals that wait stay in registers."""
    deep = next(k for k in (128, 64, 32, 16) if width % k == 0)
    if rows > 64:
        return Tile(128, 128 if rows <= 128 else 64, min(deep, 64), 8, 6)
    m = next(m for m in (16, 32, 64) if rows <= m)
    return Tile(m, 64, deep, 4, 6 if m == 64 else 8)


def fits(x: Tensor, leaves: int) -> bool:
    return bool(multiprocessors(x.device)) and x.dtype != torch.float32 and x.shape[1] % (LEAST * leaves) == 0


def leaf_product(x: Tensor, weight: Tensor, bias: Tensor | None, leaves: int, dtype: torch.dtype) -> Tensor:
    """[M, N] in `dtype`, rounded once."""
    x, weight = align_rows(x), align_rows(weight)
    rows, outputs, width = x.shape[0], weight.shape[0], x.shape[1] // leaves
    y = torch.empty((rows, outputs), dtype=dtype, device=x.device)
    if rows == 0:
        return y
    t = tile_for(rows, width)
    tiles, parts = num_tiles(rows, outputs, t), 1
    while parts < leaves and 2 * tiles * parts <= multiprocessors(x.device):
        parts *= 2
    out = y if parts == 1 else torch.empty((parts, rows, outputs), dtype=torch.float32, device=x.device)
    bias_or_x, has_bias = x if bias is None else bias, bias is not None
    launch(
        _leaf_kernel, (tiles, parts), describe(x, t.m, t.k), describe(weight, t.n, t.k), bias_or_x, out, rows, outputs, WIDTH=width,
        LEAVES=leaves // parts, BM=t.m, BN=t.n, BK=t.k, BIAS=has_bias and parts == 1, num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    if parts > 1:
        size = rows * outputs
        launch(
            _join_kernel, (cdiv(size, BLOCK),), out, bias_or_x, y, size, outputs, PARTS=parts, BIAS=has_bias, BLOCK=BLOCK, num_warps=4
        )  # fmt: skip
    return y
