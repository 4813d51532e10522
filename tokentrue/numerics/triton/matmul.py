"""y = x @ w.T + b with bits that do not depend on the number of rows.

Every output element is one float32 sum over k in ascending order: no split of K. The number of rows selects kernel and
tile for speed alone; the self-test checks that all agree. From Hopper on most products use tensor descriptors, which
copy whole tiles in bulk. Backward products are cuBLAS's (deterministic). Gated products round where the plain modules
round.

Legend: M rows, N outputs, K inputs.
"""

from functools import lru_cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tokentrue.numerics.cpu.arithmetic import Linear
from tokentrue.numerics.ops import Norm
from tokentrue.numerics.triton.elementwise import branch_of, gate_values, reciprocal_rms, scale_row, warps_for
from tokentrue.numerics.triton.launch import (
    ALIGNMENT_BYTES,
    Tile,
    align_rows,
    cdiv,
    launch,
    let_beside_start,
    let_next_start,
    power_of_two,
    precision_of,
    wait_for_inputs,
)

# Outputs up to which a product has few programs, and from which it has enough whatever its tile.
NARROW, VOCABULARY = 2048, 16384


@triton.jit
def tile_at(pid, M, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """Programs walk GROUP row tiles together, so that the weight tiles they share stay in the cache."""
    num_m = tl.cdiv(M, BM)
    num_n = tl.cdiv(N, BN)
    group = pid // (GROUP * num_n)
    first = group * GROUP
    size = tl.minimum(num_m - first, GROUP)
    within = pid % (GROUP * num_n)
    return first + within % size, within // size


@triton.jit
def _linear_kernel(x_ptr, w_ptr, b_ptr, y_ptr, M, N, K, stride_x, stride_y, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                   EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, BIAS: tl.constexpr, GROUP: tl.constexpr, GATED: tl.constexpr,
                   ACT: tl.constexpr, EARLY: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """GATED: w holds N gate rows, then N up rows; one program computes the same columns of both."""
    wait_for_inputs()
    let_beside_start(EARLY)
    m, n = tile_at(tl.program_id(0), M, N, BM, BN, GROUP)
    rows = m * BM + tl.arange(0, BM)
    cols = n * BN + tl.arange(0, BN)
    ks = tl.arange(0, BK)
    kind = y_ptr.dtype.element_ty
    x_tile = x_ptr + rows.to(tl.int64)[:, None] * stride_x + ks[None, :]
    w_tile = w_ptr + cols.to(tl.int64)[None, :] * K + ks[:, None]
    up_tile = w_ptr + (cols.to(tl.int64) + N)[None, :] * K + ks[:, None]
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    up = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        in_x = (rows < M)[:, None]
        in_w = None if EVEN_N else (cols < N)[None, :]
        if not EVEN_K:
            in_x = in_x & (ks < K - k)[None, :]
            in_w = (cols < N)[None, :] & (ks < K - k)[:, None]
        zero = None if in_w is None else 0.0
        x = tl.load(x_tile, mask=in_x, other=0.0)
        acc = tl.dot(x, tl.load(w_tile, mask=in_w, other=zero), acc, input_precision=PRECISION)
        if GATED:
            up = tl.dot(x, tl.load(up_tile, mask=in_w, other=zero), up, input_precision=PRECISION)
        x_tile += BK
        w_tile += BK
        up_tile += BK
    let_next_start()
    if BIAS:
        acc += tl.load(b_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    y = acc.to(kind)
    if GATED:
        y = gate_values(y, up.to(kind), ACT)
    out = y_ptr + rows.to(tl.int64)[:, None] * stride_y + cols[None, :]
    tl.store(out, y, mask=(rows < M)[:, None] & (cols < N)[None, :])


@triton.jit
def _many_rows_kernel(x_desc, w_desc, y_desc, b_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr,
                      GROUP: tl.constexpr):  # fmt: skip
    """As many programs as multiprocessors, each starting its next tile while it stores the last."""
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
def multiply_add(x, w, acc, TURNED: tl.constexpr):
    """acc + x @ w.T. A matrix instruction has 64 rows: where x has fewer, the weights take that side."""
    return tl.dot(w, x.T, acc) if TURNED else tl.dot(x, w.T, acc)


@triton.jit
def zeros_of_tile(BM: tl.constexpr, BN: tl.constexpr, TURNED: tl.constexpr):
    return tl.zeros((BN, BM), tl.float32) if TURNED else tl.zeros((BM, BN), tl.float32)


@triton.jit
def _few_rows_kernel(x_desc, w_desc, y_desc, b_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr,
                     GROUP: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """One tile a program; prefetches as much of the weights as shared memory holds."""
    wait_for_inputs()
    let_beside_start(EARLY)
    m, n = tile_at(tl.program_id(0), M, N, BM, BN, GROUP)
    kind: tl.constexpr = y_desc.dtype
    TURNED: tl.constexpr = BM < 64
    acc = zeros_of_tile(BM, BN, TURNED)
    up = zeros_of_tile(BM, BN, TURNED)
    for k in range(0, K, BK):
        x = x_desc.load([m * BM, k])
        acc = multiply_add(x, w_desc.load([n * BN, k]), acc, TURNED)
        if GATED:
            up = multiply_add(x, w_desc.load([N + n * BN, k]), up, TURNED)
    let_next_start()
    if TURNED:
        acc = acc.T
        up = up.T
    if BIAS:
        cols = n * BN + tl.arange(0, BN)
        acc += tl.load(b_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    y = acc.to(kind)
    if GATED:
        y = gate_values(y, up.to(kind), ACT)
    y_desc.store([m * BM, n * BN], y)


@lru_cache(maxsize=16)
def multiprocessors(device: torch.device) -> int:
    """0 if there are no descriptors."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count if properties.major >= 9 else 0


def describe(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])


def num_tiles(rows: int, outputs: int, tile: Tile) -> int:
    return cdiv(rows, tile.m) * cdiv(outputs, tile.n)


LARGE = Tile(128, 256, 64, 8, 3)
MIDDLE = Tile(128, 128, 64, 4, 4)
SMALL = Tile(64, 64, 64, 4, 6)
# For few rows: every program has a multiprocessor, and nearly all of its shared memory, to itself. Smallest first.
ALONE = (Tile(64, 64, 128, 4, 6), Tile(64, 128, 64, 4, 8), Tile(128, 128, 64, 4, 6))


def plain_tile(rows: int, outputs: int, inputs: int, dtype: torch.dtype, *, gated: bool) -> Tile:
    """Measured on an H200, harmless elsewhere. `outputs`: of each half, if gated."""
    if dtype == torch.float32:
        return Tile(16, 32, 32, 4, 3) if rows <= 32 else Tile(64, 64, 32, 4, 3)
    if rows > 256:
        return Tile(128, 128, 64, 8, 3)
    if outputs > VOCABULARY:
        if rows > 64:
            return Tile(128, 128, 64, 4, 3)
        return Tile(next(m for m in (16, 32, 64) if rows <= m), 64, 128 if rows <= 16 else 64, 4, 4)
    if rows > 64 and gated:
        return Tile(128, 64, 64, 4, 4)
    if rows > 64:
        narrow = outputs <= NARROW
        return Tile(64, 32 if narrow else 64, 128, 4, 4 if narrow else 3)
    if outputs <= NARROW and not gated:  # a sum is a chain of dependent products: many narrow programs, few steps
        return Tile(16, 8, 512, 2, 4) if rows <= 16 else Tile(16, 16, 512, 2, 3)
    if rows > 16:
        return Tile(64, 32, 128, 4, 4)
    deep = gated or inputs >= 3072
    return Tile(16, 32, 256 if deep else 128, 4, 4 if deep else 5)


def described_tile(x: Tensor, weight: Tensor, *, gated: bool) -> Tile | None:
    """None if there are no descriptors, or `plain_tile` is faster. Measured on an H200."""
    rows, outputs, processors = x.shape[0], weight.shape[0], multiprocessors(x.device)
    # Rows must start at 16-byte boundaries; a row of the result has as many values as the weight has rows.
    dense = x.stride(-1) == 1 and x.stride(0) * x.element_size() % ALIGNMENT_BYTES == 0
    even = outputs % 16 == 0 and weight.shape[1] % 8 == 0
    if not processors or x.dtype == torch.float32 or not dense or not even:
        return None
    if gated:
        return _gated_tile(rows, outputs // 2, processors)
    if outputs > VOCABULARY:
        return _vocabulary_tile(rows)
    if rows > 256:
        return next((tile for tile in (LARGE, MIDDLE) if num_tiles(rows, outputs, tile) >= processors * 7 // 8), SMALL)
    if rows > 16 and outputs <= 256:  # a mixture's router: narrow tiles and a short loop
        return Tile(64, 16, 256, 4, 4)
    if rows <= 64 and outputs <= NARROW:
        return None
    if rows <= 32:
        return Tile(16, 64, 256, 4, 5) if rows <= 16 else Tile(32, 64, 256, 4, 4)
    return next((tile for tile in ALONE if num_tiles(rows, outputs, tile) <= processors), MIDDLE)


def _vocabulary_tile(rows: int) -> Tile | None:
    if rows <= 16:
        return None
    if rows <= 64:
        return Tile(32, 128, 128, 4, 5) if rows <= 32 else ALONE[1]
    return Tile(128, 128, 64, 4, 3) if rows <= 128 else LARGE


# Height -> depth and stages where one, two or three programs share a multiprocessor.
DEPTHS = {16: ((128, 6), (128, 3), (64, 3)), 32: ((128, 5), (64, 5), (64, 3)), 64: ((128, 4), (64, 4), (64, 3))}


def _gated_tile(rows: int, outputs: int, processors: int) -> Tile:
    m = next((m for m in (16, 32) if rows <= m), 64)
    programs = cdiv(cdiv(rows, m) * cdiv(outputs, 64), processors)
    if programs > 3:
        return Tile(128, 64, 64, 4, 6)
    k, stages = DEPTHS[m][programs - 1]
    return Tile(m, 64, k, 4, stages)


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, act: str | None = None, tile: Tile | None = None, early: bool = False
) -> Tensor:  # fmt: skip
    """x [M, K] @ weight[N, K].T + bias; with `act`, act(x @ gate.T) * (x @ up.T) for weight = [gate; up]. `early`: see
    `let_beside_start`."""
    x, weight = align_rows(x), align_rows(weight)
    gated = act is not None
    (rows, inputs), outputs = x.shape, weight.shape[0] // 2 if gated else weight.shape[0]
    y = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if rows == 0:
        return y
    described = described_tile(x, weight, gated=gated) if tile is None else None
    t = described or tile or plain_tile(rows, outputs, inputs, x.dtype, gated=gated)
    bias_or_x = bias if bias is not None else x
    options = {"num_warps": t.warps, "num_stages": t.stages}
    constants: dict[str, Any] = {"BM": t.m, "BN": t.n, "BK": t.k}
    gate = {"GATED": gated, "ACT": branch_of(act) if act is not None else 0, "EARLY": early}
    programs = num_tiles(rows, outputs, t)
    if described is None:
        even = {"EVEN_K": inputs % t.k == 0, "EVEN_N": outputs % t.n == 0, "BIAS": bias is not None, "GROUP": 8}
        launch(
            _linear_kernel, (programs,), x, weight, bias_or_x, y, rows, outputs, inputs, x.stride(0), y.stride(0),
            **constants, **even, **gate, PRECISION=precision_of(x.dtype), **options,
        )  # fmt: skip
        return y
    args = describe(x, t.m, t.k), describe(weight, t.n, t.k), describe(y, t.m, t.n), bias_or_x, rows, outputs, inputs
    constants |= {"BIAS": bias is not None, "GROUP": 8}
    if not gated and t in (LARGE, MIDDLE, SMALL):
        programs = min(programs, multiprocessors(x.device) * 8 // t.warps)
        launch(_many_rows_kernel, (programs,), *args, **constants, **options)
    else:
        launch(_few_rows_kernel, (programs,), *args, **constants, **gate, **options)
    return y


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, tile: Tile | None = None) -> Tensor:
    """`tile` pins one tile for every number of rows."""
    flat = x.reshape(-1, x.shape[-1])
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        y: Any = Linear.apply(flat, weight, bias, partial(product, tile=tile))
    else:
        y = product(flat, weight, bias, tile=tile)
    return y.reshape(*x.shape[:-1], weight.shape[0])


WIDE, DEEP, STAGES = 32, 256, 4


@triton.jit
def _norm_product_kernel(h_ptr, res_ptr, norm_ptr, w_ptr, b_ptr, y_ptr, sum_ptr, N, eps, K: tl.constexpr, KP: tl.constexpr,
                         BN: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr,
                         FORM: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """For a single decoding sequence: every program norms the row itself, with the sum of `_norm_kernel` (same block, same
    warps, so same order)."""
    wait_for_inputs()
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    w_cols = w_ptr + cols.to(tl.int64) * K
    up_cols = w_cols + N.to(tl.int64) * K
    kind = y_ptr.dtype.element_ty
    at = tl.arange(0, KP)
    inside = None if KP == K else at < K
    zero = None if KP == K else 0.0
    h = tl.load(h_ptr + at, mask=inside, other=zero)
    r = tl.load(res_ptr + at, mask=inside, other=zero)
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
        y = gate_values(y, up.to(kind), ACT)
    out = y_ptr + cols[None, :] + tl.zeros((16, 1), tl.int32)
    tl.store(out, y, mask=first & (cols >= 0)[None, :])


def fits_norm_product(h: Tensor, weight: Tensor, *, gated: bool) -> bool:
    outputs, inputs = weight.shape
    # A large head would norm the row too often.
    few = h.shape[0] == 1 and h.dtype != torch.float32 and outputs <= VOCABULARY
    return few and inputs % DEEP == 0 and outputs % (2 * WIDE if gated else WIDE) == 0


def norm_product(
    h: Tensor, residual: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None, act: str | None
) -> tuple[Tensor, Tensor]:
    h, residual, weight = align_rows(h), align_rows(residual), align_rows(weight)
    inputs = weight.shape[1]
    outputs = weight.shape[0] // (1 if act is None else 2)
    y = torch.empty((1, outputs), dtype=h.dtype, device=h.device)
    total = torch.empty_like(h)
    launch(
        _norm_product_kernel, (outputs // WIDE,), h, residual, align_rows(norm.weight), weight, bias if bias is not None else h, y, total,
        outputs, norm.eps, K=inputs, KP=power_of_two(inputs), BN=WIDE, BK=DEEP, BIAS=bias is not None, GATED=act is not None,
        ACT=branch_of(act) if act is not None else 0, FORM=int(norm.form), PRECISION=precision_of(h.dtype),
        num_warps=warps_for(inputs), num_stages=STAGES,
    )  # fmt: skip
    return y, total
