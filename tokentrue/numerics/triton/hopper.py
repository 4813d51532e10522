"""Products through tensor descriptors (Hopper and newer): whole tiles are copied in bulk.

The sums, and so the bits, are those of `matmul.py`; the self-test compares them. Many rows run on as many programs as
there are multiprocessors, each starting its next tile while it stores the last. Up to 256 rows a program has one tile,
and prefetches as much of the weights as shared memory holds.

Legend: M rows, N outputs, K inputs; E experts, P pairs of a token and an expert.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tokentrue.numerics.ops import ExpertWeights
from tokentrue.numerics.triton.elementwise import activate, branch_of
from tokentrue.numerics.triton.launch import (
    ALIGNMENT_BYTES,
    NARROW,
    VOCABULARY,
    Tile,
    cdiv,
    launch,
    let_next_start,
    tile_at,
    wait_for_inputs,
)

LARGE = Tile(m=128, n=256, k=64, warps=8, stages=3)
MIDDLE = Tile(m=128, n=128, k=64, warps=4, stages=4)
SMALL = Tile(m=64, n=64, k=64, warps=4, stages=6)
FEW_ROWS = 256
# For few rows: every program has a multiprocessor, and nearly all of its shared memory, to itself. Smallest first.
ALONE = (
    Tile(m=64, n=64, k=128, warps=4, stages=6),
    Tile(m=64, n=128, k=64, warps=4, stages=8),
    Tile(m=128, n=128, k=64, warps=4, stages=6),
)


@triton.jit
def _product_kernel(x_desc, w_desc, y_desc, b_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr,
                    GROUP: tl.constexpr):  # fmt: skip
    wait_for_inputs()
    tiles = tl.cdiv(M, BM) * tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        m, n = tile_at(tile, M, N, BM, BN, GROUP)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            acc = tl.dot(x_desc.load([m * BM, k]), w_desc.load([n * BN, k]).T, acc)
        if BIAS:
            cols = n * BN + tl.arange(0, BN)
            acc += tl.load(b_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
        y_desc.store([m * BM, n * BN], acc.to(y_desc.dtype))
    let_next_start()


@triton.jit
def _multiply_add(x, w, acc, TURNED: tl.constexpr):
    """acc + x @ w.T. A matrix instruction has 64 rows: where x has fewer, the weights take that side."""
    return tl.dot(w, x.T, acc) if TURNED else tl.dot(x, w.T, acc)


@triton.jit
def _zeros(BM: tl.constexpr, BN: tl.constexpr, TURNED: tl.constexpr):
    return tl.zeros((BN, BM), tl.float32) if TURNED else tl.zeros((BM, BN), tl.float32)


@triton.jit
def _few_rows_kernel(x_desc, w_desc, y_desc, b_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr,
                     GROUP: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr):  # fmt: skip
    """GATED: w holds N gate rows, then N up rows; one program computes the same columns of both."""
    wait_for_inputs()
    m, n = tile_at(tl.program_id(0), M, N, BM, BN, GROUP)
    kind: tl.constexpr = y_desc.dtype
    TURNED: tl.constexpr = BM < 64
    acc = _zeros(BM, BN, TURNED)
    up = _zeros(BM, BN, TURNED)
    for k in range(0, K, BK):
        x = x_desc.load([m * BM, k])
        acc = _multiply_add(x, w_desc.load([n * BN, k]), acc, TURNED)
        if GATED:
            up = _multiply_add(x, w_desc.load([N + n * BN, k]), up, TURNED)
    let_next_start()
    if TURNED:
        acc = acc.T
        up = up.T
    if BIAS:
        cols = n * BN + tl.arange(0, BN)
        acc += tl.load(b_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    y = acc.to(kind)
    if GATED:
        y = (activate(y, ACT).to(tl.float32) * up.to(kind).to(tl.float32)).to(kind)
    y_desc.store([m * BM, n * BN], y)


@triton.jit(do_not_specialize=["P"])
def _grouped_kernel(x_ptr, w_desc, y_ptr, pair_ptr, expert_ptr, P, N, K, E, SLOTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                    BK: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr):  # fmt: skip
    """Grid (N tiles, tiles of pairs). w [E · 2N, K] where GATED and x rows are tokens, else [E · N, K] and pairs."""
    wait_for_inputs()
    tile = tl.program_id(1)
    e = tl.load(expert_ptr + tile).to(tl.int32)
    if e >= E:
        return
    pair = tl.load(pair_ptr + tile * BM + tl.arange(0, BM))
    ok = pair < P
    ks = tl.arange(0, BK)
    x_tile = x_ptr + (pair // SLOTS if GATED else pair)[:, None] * K + ks[None, :]
    at = tl.program_id(0) * BN
    row = e * (2 * N if GATED else N) + at
    kind = y_ptr.dtype.element_ty
    TURNED: tl.constexpr = BM < 64
    acc = _zeros(BM, BN, TURNED)
    up = _zeros(BM, BN, TURNED)
    for k in range(0, K, BK):
        x = tl.load(x_tile, mask=ok[:, None] & (ks < K - k)[None, :], other=0.0)
        acc = _multiply_add(x, w_desc.load([row, k]), acc, TURNED)
        if GATED:
            up = _multiply_add(x, w_desc.load([row + N, k]), up, TURNED)
        x_tile += BK
    let_next_start()
    y = acc.to(kind)
    if GATED:
        y = (activate(y, ACT).to(tl.float32) * up.to(kind).to(tl.float32)).to(kind)
    if TURNED:
        y = y.T
    cols = at + tl.arange(0, BN)
    tl.store(y_ptr + pair[:, None] * N + cols[None, :], y, mask=ok[:, None] & (cols < N)[None, :])


@lru_cache(maxsize=16)
def _multiprocessors(device: torch.device) -> int:
    """0 if there are no descriptors."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count if properties.major >= 9 else 0


def _describable(x: Tensor, weight: Tensor) -> bool:
    """Rows must start at 16-byte boundaries; a row of the result has as many values as the weight has rows."""
    dense = x.stride(-1) == 1 and x.stride(0) * x.element_size() % ALIGNMENT_BYTES == 0
    return x.dtype != torch.float32 and dense and weight.shape[0] % 16 == 0 and weight.shape[1] % 8 == 0


def tile_for(x: Tensor, weight: Tensor, *, gated: bool = False) -> Tile | None:
    """None if `matmul.py` is faster; measured on an H200."""
    rows, outputs, processors = x.shape[0], weight.shape[0], _multiprocessors(x.device)
    if not processors or not _describable(x, weight):
        return None
    if gated:
        return _tile_of_gated(rows, outputs // 2, processors)
    if outputs > VOCABULARY:
        return _tile_of_a_vocabulary(rows)
    if rows <= FEW_ROWS:
        return _tile_of_few_rows(rows, outputs, processors)
    return next((tile for tile in (LARGE, MIDDLE) if _tiles(rows, outputs, tile) >= processors * 7 // 8), SMALL)


def _tile_of_few_rows(rows: int, outputs: int, processors: int) -> Tile | None:
    if rows > 16 and outputs <= 256:  # a mixture's router: narrow tiles and a short loop
        return Tile(m=64, n=16, k=256, warps=4, stages=4)
    if rows <= 64 and outputs <= NARROW:
        return None
    if rows <= 32:
        return Tile(m=16, n=64, k=256, warps=4, stages=5) if rows <= 16 else Tile(m=32, n=64, k=256, warps=4, stages=4)
    return next((tile for tile in ALONE if _tiles(rows, outputs, tile) <= processors), MIDDLE)


def _tile_of_a_vocabulary(rows: int) -> Tile | None:
    if rows <= 16:
        return None
    if rows <= 64:
        return Tile(m=32, n=128, k=128, warps=4, stages=5) if rows <= 32 else ALONE[1]
    return MIDDLE if rows <= 128 else LARGE


def _tile_of_gated(rows: int, outputs: int, processors: int) -> Tile:
    """As deep as one, two or three programs per multiprocessor allow."""
    m = next(m for m in (16, 32, 64) if rows <= m or m == 64)
    programs = cdiv(cdiv(rows, m) * cdiv(outputs, 64), processors)
    if programs > 3:
        return Tile(m=128, n=64, k=64, warps=4, stages=6)
    k, stages = {16: ((128, 6), (128, 3), (64, 3)), 32: ((128, 5), (64, 5), (64, 3)), 64: ((128, 4), (64, 4), (64, 3))}[
        m
    ][programs - 1]
    return Tile(m=m, n=64, k=k, warps=4, stages=stages)


def tile_of_a_group(rows: int, pairs: int, *, gated: bool) -> Tile:
    if rows > 64:
        return Tile(m=rows, n=128, k=64, warps=8, stages=4) if gated else Tile(m=rows, n=256, k=64, warps=8, stages=3)
    if rows > 16:
        return Tile(m=rows, n=64 if gated else 128, k=64, warps=4, stages=3)
    return Tile(m=rows, n=64, k=256 if gated and pairs <= 64 else 128, warps=4, stages=3)


def _tiles(rows: int, outputs: int, tile: Tile) -> int:
    return cdiv(rows, tile.m) * cdiv(outputs, tile.n)


def product(x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile, out: Tensor, act: str | None = None) -> None:
    """out = x [M, K] @ weight[N, K].T + bias, or act(x @ gate.T) * (x @ up.T) for weight = [gate; up]."""
    (rows, inputs), outputs = x.shape, out.shape[1]
    args = (
        _describe(x, tile.m, tile.k), _describe(weight, tile.n, tile.k), _describe(out, tile.m, tile.n),
        bias if bias is not None else x, rows, outputs, inputs,
    )  # fmt: skip
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    constants = {"BM": tile.m, "BN": tile.n, "BK": tile.k, "BIAS": bias is not None, "GROUP": 8}
    if act is None and tile in (LARGE, MIDDLE, SMALL):
        programs = min(_tiles(rows, outputs, tile), _multiprocessors(x.device) * 8 // tile.warps)
        launch(_product_kernel, (programs,), *args, **constants, **options)
        return
    gate = {"GATED": act is not None, "ACT": branch_of(act) if act is not None else 0}
    launch(_few_rows_kernel, (_tiles(rows, outputs, tile),), *args, **constants, **gate, **options)


def fits_experts(x: Tensor, experts: ExpertWeights) -> bool:
    plain = (
        not experts.interleaved
        and experts.gate_up_bias is None
        and experts.down_bias is None
        and isinstance(experts.act, str)
    )
    even = all(
        w.is_contiguous() and w.shape[1] % 16 == 0 and w.shape[2] % 8 == 0 for w in (experts.gate_up, experts.down)
    )
    return plain and even and x.dtype != torch.float32 and _multiprocessors(x.device) > 0


def grouped_product(
    x: Tensor,
    weight: Tensor,
    pairs: Tensor,
    experts: Tensor,
    tile: Tile,
    out: Tensor,
    *,
    slots: int,
    act: str | None,
) -> None:
    """out[p] = x's row of pair p @ weight[its expert].T, weight [E, N, K]; gated if `act` is given."""
    (number, height, inputs), (num_pairs, outputs) = weight.shape, out.shape
    launch(
        _grouped_kernel, (cdiv(outputs, tile.n), experts.shape[0]), x, _describe(weight.view(number * height, inputs), tile.n, tile.k), out,
        pairs, experts, num_pairs, outputs, inputs, number, SLOTS=slots, BM=tile.m, BN=tile.n, BK=tile.k, GATED=act is not None,
        ACT=branch_of(act) if act is not None else 0, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _describe(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])
