"""Start-up checks on this machine: are rows independent of the batch, for exactly the shapes that this model uses?

Answers are remembered per shape, dtype and thread count, because they are facts about the machine, not about a model.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tokentrue.errors import ExactnessError
from tokentrue.numerics import cpu_attention
from tokentrue.numerics.ops import AttentionSpec, Packed

if TYPE_CHECKING:
    from tokentrue.numerics.cpu import CpuOps, Product

ROWS = (1, 2, 3, 8, 17, 32, 33, 64, 129, 256)
LEAST_ROWS = (8, 16, 32)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal as integers: no tolerance, and -0 is not 0."""
    kinds = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float64: torch.int64}
    return a.shape == b.shape and torch.equal(a.contiguous().view(kinds[a.dtype]), b.contiguous().view(kinds[b.dtype]))


def check_cpu(ops: CpuOps, *, linears: set[tuple[int, int, bool]], heads: set[tuple[int, int, int]], dtype: torch.dtype) -> list[str]:
    from tokentrue.numerics.cpu import TILE, onednn_product, tiled_product

    threads, notes = torch.get_num_threads(), []
    for k, n, bias in sorted(linears):
        if dtype == torch.float32 and ops.has_onednn:
            if rows_independent(onednn_product, k, n, bias, dtype, threads):
                continue
            ops.structural.add(k)
            notes.append(f"linear {k}x{n} {dtype}: oneDNN's rows depend on the batch here; {TILE}-row tiles instead")
        if not rows_independent(tiled_product, k, n, bias, dtype, threads):
            raise ExactnessError(f"linear {k}x{n} {dtype}: even a fixed {TILE}-row tile gives a row different bits at different places")
    for h, j, d in sorted(heads):
        for rows in LEAST_ROWS:
            ops.rows = max(ops.rows, rows)
            if attention_independent(ops.rows, h, j, d, threads):
                break
        else:
            raise ExactnessError(f"attention with {h}/{j} heads of {d}: no row count up to {LEAST_ROWS[-1]} is independent of the batch")
        if ops.rows > LEAST_ROWS[0]:
            notes.append(f"attention {h}/{j}x{d}: at least {ops.rows} rows per product")
    return notes


@cache
def rows_independent(product: Product, k: int, n: int, bias: bool, dtype: torch.dtype, threads: int) -> bool:
    """Rows of a large product against the same rows in smaller ones, at another place and with another N."""
    generator = torch.Generator().manual_seed(k * 1000003 + n)
    most = ROWS[-1]
    x = torch.randn(most, k, generator=generator).to(dtype)
    w = (torch.randn(n, k, generator=generator) / k**0.5).to(dtype)
    b = torch.randn(n, generator=generator).to(dtype) if bias else None
    with torch.no_grad():
        whole = product(x, w, b)
        for m in ROWS:
            if not same_bits(product(x[:m].contiguous(), w, b), whole[:m]):
                return False
            if not same_bits(product(x[most - m :].contiguous(), w, b), whole[most - m :]):
                return False
        more = product(x[:5].contiguous(), torch.cat((w, w)), torch.cat((b, b)) if b is not None else None)
    return same_bits(more, torch.cat((whole[:5], whole[:5]), -1))


@cache
def attention_independent(rows: int, h: int, j: int, d: int, threads: int) -> bool:
    """Whole-sequence attention against decodes, chunks and batches of the same queries."""
    generator = torch.Generator().manual_seed(h * 1009 + d)
    g, keys, spec = h // j, 3 * cpu_attention.KEYS, AttentionSpec(scale=d**-0.5)
    q = torch.randn(keys, h, d, generator=generator)
    k, v = (torch.randn(keys, j, d, generator=generator) for _ in range(2))
    with torch.no_grad():
        whole = cpu_attention.attention(q, k, v, (keys,), spec)
        double = cpu_attention.attention(*(torch.cat((x, x[:200])) for x in (q, k, v)), (keys, 200), spec)
        if not same_bits(double, torch.cat((whole, whole[:200]))):
            return False
        q_XTGD, k_XND, v_XND = cpu_attention.head_major(q[None], k[None], v[None], spec.scale)
        wanted = cpu_attention.head_major_one(whole[None], j)
        for tile in cpu_attention.TILES:
            for first in (0, 1, 100, 127, 128, 255, 256, keys - tile):
                if first % cpu_attention.KEYS + tile > cpu_attention.KEYS:
                    continue
                (chunk,) = cpu_attention.chunks(first, first + tile, None, g)
                m = max(tile * g, rows)
                x = q_XTGD.new_zeros(j, m, d)
                x[:, : tile * g] = q_XTGD[:, first : first + tile].reshape(j, tile * g, d)
                hidden = torch.zeros(m, chunk.hidden.shape[-1], dtype=torch.bool)
                hidden[: tile * g] = chunk.hidden
                for copies in (1, 3):
                    stacked = (t.repeat(copies, 1, 1) for t in (x, k_XND[:, : chunk.keys], v_XND[:, : chunk.keys]))
                    out, _ = cpu_attention.fold(*stacked, hidden, None)
                    found = out[: j * copies, : tile * g].view(copies, j, tile, g, d)
                    if not same_bits(found, wanted[:, first : first + tile].expand(copies, j, tile, g, d)):
                        return False
    return True


def packed_lengths(*lengths: int) -> Packed:
    return Packed.of(lengths)
