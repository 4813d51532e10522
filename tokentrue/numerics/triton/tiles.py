"""How a product is cut into tiles, and in which order programs take them: free for bits, decisive for speed."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One way to cut a product."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


NARROW, VOCABULARY = 2048, 16384
"""Outputs up to which a product has few programs, and from which it has enough whatever its tile."""


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


def tile_for(rows: int, outputs: int, inputs: int, dtype: torch.dtype, *, gated: bool = False) -> Tile:
    """The tile for a product (of each half, where gated); measured on an H200, harmless elsewhere."""
    if dtype == torch.float32:
        return Tile(m=16, n=32, k=32, warps=4, stages=3) if rows <= 32 else Tile(m=64, n=64, k=32, warps=4, stages=3)
    if rows > 256:
        return Tile(m=128, n=128, k=64, warps=8, stages=3)
    if outputs > VOCABULARY:
        return _tile_of_a_vocabulary(rows)
    if rows > 64:
        if gated:
            return Tile(m=128, n=64, k=64, warps=4, stages=4)
        return (
            Tile(m=64, n=32, k=128, warps=4, stages=4)
            if outputs <= NARROW
            else Tile(m=64, n=64, k=128, warps=4, stages=3)
        )
    if (
        outputs <= NARROW and not gated
    ):  # a sum is a chain of dependent products: many narrow programs, few steps of the loop
        return Tile(m=16, n=8, k=512, warps=2, stages=4) if rows <= 16 else Tile(m=16, n=16, k=512, warps=2, stages=3)
    if rows > 16:
        return Tile(m=64, n=32, k=128, warps=4, stages=4)
    if gated or inputs >= 3072:
        return Tile(m=16, n=32, k=256, warps=4, stages=4)
    return Tile(m=16, n=32, k=128, warps=4, stages=5)


def _tile_of_a_vocabulary(rows: int) -> Tile:
    if rows <= 16:
        return Tile(m=16, n=64, k=128, warps=4, stages=4)
    if rows <= 64:
        return Tile(m=32 if rows <= 32 else 64, n=64, k=64, warps=4, stages=4)
    return Tile(m=128, n=128, k=64, warps=4, stages=3)
