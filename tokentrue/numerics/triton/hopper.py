"""Products through tensor descriptors, for chips that have them (Hopper and newer): whole tiles are copied in bulk, not element by element.

The sums are those of `matmul.py`, one over K in ascending order, so the bits are too; the self-test compares them. Many rows run on as many
programs as there are multiprocessors, each of which goes on to its next tile while it stores the last one.
Legend: M rows, N outputs, K inputs.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tokentrue.numerics.triton.kernels.activation import activate, branch_of
from tokentrue.numerics.triton.launch import ALIGNMENT_BYTES, cdiv, launch, let_next_start, wait_for_inputs
from tokentrue.numerics.triton.tiles import NARROW, Tile, tile_at

LARGE = Tile(m=128, n=256, k=64, warps=8, stages=3)
MIDDLE = Tile(m=128, n=128, k=64, warps=4, stages=4)
SMALL = Tile(m=64, n=64, k=64, warps=4, stages=6)
GATED = Tile(m=128, n=64, k=64, warps=4, stages=4)


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
def _gated_kernel(x_desc, w_desc, y_desc, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
                  ACT: tl.constexpr):  # fmt: skip
    """w holds N gate rows, then N up rows; one program computes the same columns of both."""
    wait_for_inputs()
    m, n = tile_at(tl.program_id(0), M, N, BM, BN, GROUP)
    kind: tl.constexpr = y_desc.dtype
    gate = tl.zeros((BM, BN), tl.float32)
    up = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        x = x_desc.load([m * BM, k])
        gate = tl.dot(x, w_desc.load([n * BN, k]).T, gate)
        up = tl.dot(x, w_desc.load([N + n * BN, k]).T, up)
    let_next_start()
    y = activate(gate.to(kind), ACT).to(tl.float32) * up.to(kind).to(tl.float32)
    y_desc.store([m * BM, n * BN], y.to(kind))


@lru_cache(maxsize=16)
def _multiprocessors(device: torch.device) -> int:
    """0 where there are no descriptors."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count if properties.major >= 9 else 0


def _describable(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Descriptors want rows that start at 16-byte boundaries; the result's rows are as long as the weight is high."""
    dense = x.stride(-1) == 1 and x.stride(0) * x.element_size() % ALIGNMENT_BYTES == 0
    return x.dtype != torch.float32 and dense and weight.shape[0] % 16 == 0 and weight.shape[1] % 8 == 0


def tile_for(x: torch.Tensor, weight: torch.Tensor, *, gated: bool = False) -> Tile | None:
    """The tile where this file is the quicker one, else None; measured on an H200."""
    rows, outputs = x.shape[0], weight.shape[0]
    if rows <= 64 or not _describable(x, weight) or not _multiprocessors(x.device):
        return None
    if gated:
        return GATED
    if rows <= 256 and outputs <= NARROW:
        return None
    enough = _multiprocessors(x.device) * 7 // 8
    return next((tile for tile in (LARGE, MIDDLE) if _tiles(rows, outputs, tile) >= enough), SMALL)


def _tiles(rows: int, outputs: int, tile: Tile) -> int:
    return cdiv(rows, tile.m) * cdiv(outputs, tile.n)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: Tile, out: torch.Tensor) -> None:
    """out = x [M, K] @ weight[N, K].T + bias."""
    (rows, inputs), outputs = x.shape, weight.shape[0]
    programs = min(_tiles(rows, outputs, tile), _multiprocessors(x.device) * 8 // tile.warps)
    launch(
        _product_kernel, (programs,), _describe(x, tile.m, tile.k), _describe(weight, tile.n, tile.k), _describe(out, tile.m, tile.n),
        bias if bias is not None else x, rows, outputs, inputs, BM=tile.m, BN=tile.n, BK=tile.k, BIAS=bias is not None, GROUP=8,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def gated_product(x: torch.Tensor, weight: torch.Tensor, act: str, tile: Tile, out: torch.Tensor) -> None:
    """out = act(x @ gate.T) * (x @ up.T) for weight = [gate; up]."""
    (rows, inputs), outputs = x.shape, weight.shape[0] // 2
    launch(
        _gated_kernel, (_tiles(rows, outputs, tile),), _describe(x, tile.m, tile.k), _describe(weight, tile.n, tile.k),
        _describe(out, tile.m, tile.n), rows, outputs, inputs, BM=tile.m, BN=tile.n, BK=tile.k, GROUP=8, ACT=branch_of(act),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _describe(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])
