"""Start-up checks on this machine: are rows independent of the batch, for exactly this model's shapes?

Results are cached per shape, dtype and thread count: they are properties of the machine, not of a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from tokentrue.errors import ExactnessError
from tokentrue.numerics.cpu.arithmetic import (
    PLAIN_ROWS,
    TILE,
    Product,
    compute,
    make_wide_values,
    onednn_product,
    plain_product,
    tiled_product,
    transposed_product,
)
from tokentrue.numerics.cpu.attention import KEYS, TILES, attention, chunks, fold, head_major, head_major_one
from tokentrue.numerics.ops import AttentionSpec, Heads, Linears, same_bits

ROWS = (1, 2, 3, 8, 17, 32, 33, 64, 129, 256)
ELEMENTWISE = ("exp", "log", "log1p", "tanh", "sqrt", "reciprocal", "cos", "sin", "erf")
POSITIVE = ("log", "log1p", "sqrt")
COMPUTED_APART = ("cos", "sin", "erf")
ROWWISE = ("softmax", "sum", "mean", "log_softmax")
WIDTHS = (4, 8, 60, 128, 2000)
LEAST_ROWS = (2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    structural: frozenset[int]  # K for which oneDNN's rows depend on their number
    plain: frozenset[int]  # K for which ordinary products have oneDNN's bits
    rows: int  # least rows of an attention product
    notes: tuple[str, ...]  # one sentence per fallback


def check(*, linears: Linears, heads: Heads, dtype: torch.dtype, has_onednn: bool) -> Findings:
    """Raises ExactnessError if no product is independent of the batch."""
    check_functions(dtype)
    structural, plain, notes = check_linears(linears, dtype, has_onednn)
    rows, more = check_heads(heads)
    return Findings(structural=structural, plain=plain, rows=rows, notes=(*notes, *more))


def check_functions(dtype: torch.dtype) -> None:
    """Functions of `modules.ARITHMETIC`, callable by a model's code, that are more than one rounded operation."""
    for name in ELEMENTWISE:
        for kind in {dtype, torch.float32}:
            if not elements_independent(name, kind):
                raise ExactnessError(
                    f"torch.{name} in {kind}: a value's bits depend on its place or its neighbours on this machine"
                )
    for name in ROWWISE:
        if not all(sums_independent(name, width, torch.get_num_threads()) for width in WIDTHS):
            raise ExactnessError(f"torch.{name} over a row: bits depend on the number of rows on this machine")


@cache
def elements_independent(name: str, dtype: torch.dtype) -> bool:
    x = make_wide_values(4099).to(dtype)
    x = x.abs() if name in POSITIVE else x
    function = partial(compute, name) if name in COMPUTED_APART else getattr(torch, name)
    whole = function(x)
    return all(
        same_bits(function(x[i : i + n].clone()), whole[i : i + n]) for i in range(0, 120, 7) for n in (1, 3, 8, 17, 33)
    )


@cache
def sums_independent(name: str, width: int, threads: int) -> bool:
    x = torch.randn(200, width, generator=torch.Generator().manual_seed(width))
    function = getattr(torch, name)
    whole = function(x, -1)
    return all(
        same_bits(function(x[i : i + n].clone(), -1), whole[i : i + n])
        for i in (0, 1, 7, 64)
        for n in (1, 2, 3, 17, 100)
    )


def check_linears(
    linears: Linears, dtype: torch.dtype, has_onednn: bool
) -> tuple[frozenset[int], frozenset[int], list[str]]:
    threads, notes, plain, structural = torch.get_num_threads(), [], {}, set()
    for k, n, bias in sorted(linears):
        if dtype == torch.float32 and has_onednn and n > 1:
            if rows_independent(onednn_product, k, n, bias, dtype, threads):
                plain[k] = plain.get(k, True) and plain_equals_onednn(k, n, bias, threads)
                continue
            structural.add(k)
            notes.append(f"linear {k}x{n} {dtype}: oneDNN's rows depend on the batch here; {TILE}-row tiles instead")
        if not rows_independent(tiled_product, k, n, bias, dtype, threads):
            raise ExactnessError(
                f"linear {k}x{n} {dtype}: even a fixed {TILE}-row tile gives a row different bits at different places"
            )
    equal = frozenset(k for k, holds in plain.items() if holds and k not in structural)
    return frozenset(structural), equal, notes


def check_heads(heads: Heads) -> tuple[int, list[str]]:
    threads, notes, least = torch.get_num_threads(), [], 1
    for h, j, d in sorted(heads):
        for rows in (least, *LEAST_ROWS):
            if rows >= least and attention_independent(max(rows, h // j), h, j, d, threads):
                least = max(rows, h // j)
                break
        else:
            raise ExactnessError(
                f"attention with {h}/{j} heads of {d}: no row count up to {LEAST_ROWS[-1]} is independent of the batch"
            )
        if least > 8:
            notes.append(f"attention {h}/{j}x{d}: at least {least} rows per product")
    return least, notes


@cache
def plain_equals_onednn(k: int, n: int, bias: bool, threads: int) -> bool:
    """True if ordinary and transposed products have oneDNN's bits for every row count that uses them."""
    x, w, b = example(k, n, bias, torch.float32)
    transposed = w.t().contiguous()
    with torch.no_grad():
        wanted = onednn_product(x, w, b)
        for m in (*ROWS, *range(4, 16), 24, 48, 100, 128, 200):
            rows = x[:m].contiguous()
            if not same_bits(transposed_product(rows, transposed, b), wanted[:m]):
                return False
            if m >= PLAIN_ROWS and not same_bits(plain_product(rows, w, b), wanted[:m]):
                return False
    return True


def example(k: int, n: int, bias: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(k * 1000003 + n)
    x = torch.randn(ROWS[-1], k, generator=generator).to(dtype)
    w = (torch.randn(n, k, generator=generator) / k**0.5).to(dtype)
    return x, w, torch.randn(n, generator=generator).to(dtype) if bias else None


@cache
def rows_independent(product: Product, k: int, n: int, bias: bool, dtype: torch.dtype, threads: int) -> bool:
    """Compares rows of a large product with the same rows in smaller ones, at other positions, and with another N."""
    x, w, b = example(k, n, bias, dtype)
    most = x.shape[0]
    with torch.no_grad():
        whole = product(x, w, b)
        for m in ROWS:
            if not same_bits(product(x[:m].contiguous(), w, b), whole[:m]):
                return False
            if not same_bits(product(x[most - m :].contiguous(), w, b), whole[most - m :]):
                return False
        if n == 1:
            return True
        more = product(x[:5].contiguous(), torch.cat((w, w)), torch.cat((b, b)) if b is not None else None)
    return same_bits(more, torch.cat((whole[:5], whole[:5]), -1))


@cache
def attention_independent(rows: int, h: int, j: int, d: int, threads: int) -> bool:
    """Compares whole sequences with decodes, chunks and batches of the same queries."""
    generator = torch.Generator().manual_seed(h * 1009 + d)
    g, keys, spec = h // j, 3 * KEYS, AttentionSpec(scale=d**-0.5)
    q = torch.randn(keys, h, d, generator=generator)
    k, v = (torch.randn(keys, j, d, generator=generator) for _ in range(2))
    with torch.no_grad():
        whole = attention(q, k, v, (keys,), spec)
        twice = [torch.cat((x, x[:200])) for x in (q, k, v)]
        double = attention(twice[0], twice[1], twice[2], (keys, 200), spec)
        if not same_bits(double, torch.cat((whole, whole[:200]))):
            return False
        q_XTGD, k_XND, v_XND = head_major(q[None], k[None], v[None], spec.scale)
        wanted = head_major_one(whole[None], j)
        for tile in TILES:
            for first in (0, 1, 100, 127, 128, 255, 256, keys - tile):
                if first % KEYS + tile > KEYS:
                    continue
                (chunk,) = chunks(first, first + tile, None, g)
                m = max(tile * g, rows)
                x = q_XTGD.new_zeros(j, m, d)
                x[:, : tile * g] = q_XTGD[:, first : first + tile].reshape(j, tile * g, d)
                hidden = torch.zeros(m, chunk.hidden.shape[-1], dtype=torch.bool)
                hidden[: tile * g] = chunk.hidden
                for copies in (1, 3):
                    stacked = [t.repeat(copies, 1, 1) for t in (x, k_XND[:, : chunk.keys], v_XND[:, : chunk.keys])]
                    out = fold(stacked[0], stacked[1], stacked[2], hidden, None)[0]
                    found = out[: j * copies, : tile * g].view(copies, j, tile, g, d)
                    if not same_bits(found, wanted[:, first : first + tile].expand(copies, j, tile, g, d)):
                        return False
    return True
