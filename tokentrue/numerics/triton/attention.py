"""Attention whose rows do not depend on what else is computed: one kernel for prefill, decode and training.

A row's result is a left fold, in ascending order, over key blocks of fixed size that start at position 0 of its
sequence. Each block is summed under its own maximum and then folded in, so blocks may be computed separately and folded
later with the same bits. A tile packs the query heads of one key head; with at least 16 rows a warp, the sums of a row
stay inside one warp, so the tile's height does not affect bits. Whole blocks in a row's future are exact no-ops. A sink
is folded in last, as a block of one key without a value. The backward pass has no atomics: dQ and dK/dV are two
kernels, each a fixed fold. In a tree the keys of a row are looked up one by one; all queries that see a segment's keys
follow it.

Legend: T tokens, H query heads, J key heads, G = H/J, D head size, S sequences, BM query rows, BN keys of a block.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokentrue.errors import ExactnessError
from tokentrue.numerics.ops import AttentionSpec, Packed, PagedBatch
from tokentrue.numerics.triton.launch import (
    align_rows,
    cdiv,
    launch,
    let_next_start,
    power_of_two,
    precision_of,
    wait_for_inputs,
)

LOG2E = 1.4426950408889634
# Values of a program that decodes; those of a wider head have several.
MOST_VALUES = 128


class QueryTile(NamedTuple):
    """Does not affect bits while a warp has at least 16 rows (16-bit dtypes)."""

    rows: int
    warps: int
    stages: int


def key_block(dtype: torch.dtype) -> int:
    """Keys per block; affects bits."""
    return 32 if dtype == torch.float32 else 64


def tile_of(dtype: torch.dtype, values: int, *, decodes: bool = False) -> QueryTile:
    """For programs that sum as many values. Measured on an H200."""
    if dtype == torch.float32:  # plain multiply-adds spread a row over threads by the tile's shape
        return QueryTile(rows=16, warps=4, stages=2)
    if values <= MOST_VALUES:
        return QueryTile(rows=64, warps=4, stages=3)
    return QueryTile(rows=64, warps=4, stages=2) if decodes else QueryTile(rows=128, warps=8, stages=2)


class Tiles(NamedTuple):
    """Program i computes queries from `query[i]` on in sequence `sequence[i]` (int32)."""

    sequence: Tensor
    query: Tensor


@triton.jit
def tanh(x):
    return 1.0 - 2.0 / (1.0 + tl.exp2(2.8853900817779268 * x))


@triton.jit
def scores(q, k, row_pos, key, scale, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """In units of log 2; -inf where the key is not allowed."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if SOFTCAP > 0.0:
        s = SOFTCAP * tanh(s / SOFTCAP) * 1.4426950408889634
    allowed = key[None, :] <= row_pos[:, None]
    if WINDOW > 0:
        allowed = allowed & (key[None, :] > row_pos[:, None] - WINDOW)
    return tl.where(allowed, s, float("-inf"))


@triton.jit
def last_key(position, length, CAUSAL: tl.constexpr):
    """That a query at `position` sees."""
    if not CAUSAL:
        position = tl.maximum(position, length - 1)
    return position


@triton.jit
def _block(q, k, v, row_pos, key, scale, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """Maximum, sum and weighted values of one key block."""
    s = scores(q, k, row_pos, key, scale, WINDOW, SOFTCAP, PRECISION)
    m = tl.max(s, 1)
    p = tl.exp2(s - tl.where(m == float("-inf"), 0.0, m)[:, None])
    return m, tl.sum(p, 1), tl.dot(p.to(v.dtype), v, input_precision=PRECISION)


@triton.jit
def _fold(top, total, out, m, length, o):
    """A block without allowed keys changes nothing."""
    new = tl.maximum(top, m)
    safe = tl.where(new == float("-inf"), 0.0, new)
    a = tl.exp2(top - safe)
    b = tl.exp2(m - safe)
    return new, tl.fma(total, a, length * b), tl.fma(out, a[:, None], o * b[:, None])


@triton.jit
def _fold_sink(top, total, out, sink_ptr, heads, ok):
    sink = tl.load(sink_ptr + heads, mask=ok, other=0.0).to(tl.float32) * 1.4426950408889634
    return _fold(top, total, out, sink, 1.0, out * 0.0)


@triton.jit
def divide_rows(out, total, kind: tl.constexpr):
    """Zero for a padding row, which has seen no key."""
    return (out / tl.where(total == 0.0, 1.0, total)[:, None]).to(kind)


@triton.jit
def _fold_parts(part_ptr, part_m_ptr, part_l_ptr, sink_ptr, o_ptr, s, j, lowest, num_blocks, max_blocks, H: tl.constexpr, J: tl.constexpr,
                D: tl.constexpr, BD: tl.constexpr, GP: tl.constexpr, SINK: tl.constexpr):  # fmt: skip
    """The blocks of one decode query; read past the first cache, where another program's writes may not show."""
    G: tl.constexpr = H // J
    g = tl.arange(0, GP)
    d = tl.arange(0, BD)
    top = tl.full((GP,), float("-inf"), tl.float32)
    total = tl.zeros((GP,), tl.float32)
    out = tl.zeros((GP, BD), tl.float32)
    for block in range(lowest, num_blocks):
        slot = ((s * J + j) * max_blocks + block) * GP
        m = tl.load(part_m_ptr + slot + g, mask=g < G, other=float("-inf"), cache_modifier=".cg")
        partial = tl.load(part_l_ptr + slot + g, mask=g < G, other=0.0, cache_modifier=".cg")
        o = tl.load(
            part_ptr + (slot + g)[:, None] * BD + d[None, :], mask=(g < G)[:, None], other=0.0, cache_modifier=".cg"
        )
        top, total, out = _fold(top, total, out, m, partial, o)
    if SINK:
        top, total, out = _fold_sink(top, total, out, sink_ptr, j * G + g, g < G)
    at_out = s * H + j * G + g
    tl.store(
        o_ptr + at_out[:, None] * D + d[None, :],
        divide_rows(out, total, o_ptr.dtype.element_ty),
        mask=(g < G)[:, None] & (d < D)[None, :],
    )


@triton.jit
def _row(path_ptr, branch_ptr, s, count, TREE: tl.constexpr):
    """The keys that the last query of sequence `s` sees, and where a tree's row lies in the path."""
    length = count
    if TREE:
        length = tl.load(branch_ptr + s * 3 + 1)
        path_ptr += tl.load(branch_ptr + s * 3)
    return length, path_ptr


@triton.jit
def _token(start, path_ptr, key, length, TREE: tl.constexpr):
    token = (start + key).to(tl.int64)
    if TREE:
        token = tl.load(path_ptr + key, mask=key < length, other=0).to(tl.int64)
    return token


@triton.jit(do_not_specialize=[
    "starts_ptr", "context_ptr", "tile_seq_ptr", "tile_query_ptr", "table_ptr", "branch_ptr", "stride_table", "max_blocks",
])  # fmt: skip
def _forward_kernel(q_ptr, k_ptr, v_ptr, sink_ptr, o_ptr, lse_ptr, starts_ptr, context_ptr, tile_seq_ptr, tile_query_ptr, table_ptr,
                    branch_ptr, scale, stride_qt, stride_head, stride_key, stride_table, part_ptr, part_m_ptr, part_l_ptr, arrived_ptr, max_blocks,
                    H: tl.constexpr, J: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, GP: tl.constexpr,
                    BM: tl.constexpr, BN: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
                    LSE: tl.constexpr, SPLIT: tl.constexpr, DECODE: tl.constexpr, SINK: tl.constexpr, CAUSAL: tl.constexpr,
                    TREE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Grid (tiles, J, splits, or parts of the values). With SPLIT (one query a sequence) the last program to arrive folds
    the blocks of all, in the order of a program that has them alone."""
    wait_for_inputs()
    let_next_start()
    tile = tl.program_id(0)
    j = tl.program_id(1)
    G: tl.constexpr = H // J
    if DECODE:
        s = tile.to(tl.int64)
        query0 = 0
        start = s
        count = 1
    else:
        s = tl.load(tile_seq_ptr + tile).to(tl.int64)
        query0 = tl.load(tile_query_ptr + tile)
        start = tl.load(starts_ptr + s).to(tl.int64)
        count = tl.load(starts_ptr + s + 1) - start.to(tl.int32)
    if PAGE > 0:
        length = tl.load(context_ptr + s)
    else:
        length, path_ptr = _row(table_ptr, branch_ptr, s, count, TREE)
    first = length - count
    r = tl.arange(0, BM)
    query = query0 + r // GP
    g = r % GP
    row_ok = (query < count) & (g < G)
    row_pos = last_key(first + tl.minimum(query, count - 1), length, CAUSAL)
    d = tl.arange(0, BD)
    token = start + query
    q = tl.load(
        q_ptr + token[:, None] * stride_qt + ((j * G + g) * D)[:, None] + d[None, :],
        mask=row_ok[:, None] & (d < D)[None, :],
        other=0.0,
    )
    last = last_key(first + tl.minimum(query0 + BM // GP, count) - 1, length, CAUSAL)
    num_blocks = tl.cdiv(last + 1, BN)
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(first + query0 - WINDOW + 1, 0) // BN
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    out = tl.zeros((BM, BV), tl.float32)
    c = (0 if SPLIT else tl.program_id(2)) * BV + tl.arange(0, BV)
    step = 1
    if SPLIT:
        sharing = tl.minimum(tl.num_programs(2), num_blocks - lowest)
        if tl.program_id(2) >= sharing:
            return
        lowest += tl.program_id(2)
        step = sharing
    n = tl.arange(0, BN)
    row_of_table = table_ptr + s * stride_table
    if PAGE > 0:
        page = tl.load(row_of_table + lowest * BN // PAGE)
    for block in range(lowest, num_blocks, step):
        key = block * BN + n
        if PAGE > 0:
            at = ((page.to(tl.int64) * J + j) * PAGE + block * BN % PAGE + n) * D
            # Asked for a turn early, so that the next block's keys can be on their way before this one's are used.
            page = tl.load(row_of_table + tl.minimum(block + step, num_blocks - 1) * BN // PAGE)
        else:
            at = _token(start, path_ptr, key, length, TREE) * stride_key + j * stride_head
        inside = (key < length)[:, None]
        k = tl.load(k_ptr + at[:, None] + d[None, :], mask=inside & (d < D)[None, :], other=0.0)
        v = tl.load(v_ptr + at[:, None] + c[None, :], mask=inside & (c < D)[None, :], other=0.0)
        m, partial, o = _block(q, k, v, row_pos, key, scale, WINDOW, SOFTCAP, PRECISION)
        if SPLIT:
            slot = ((s * J + j) * max_blocks + block) * GP
            keep = row_ok & (r < GP)
            tl.store(part_m_ptr + slot + r, m, mask=keep)
            tl.store(part_l_ptr + slot + r, partial, mask=keep)
            tl.store(part_ptr + (slot + r)[:, None] * BD + d[None, :], o, mask=keep[:, None])
        else:
            top, total, out = _fold(top, total, out, m, partial, o)
    if SPLIT:
        tl.debug_barrier()
        arrived = tl.atomic_add(arrived_ptr + s * J + j, 1, sem="acq_rel", scope="gpu")
        if arrived == sharing - 1:
            first_block = lowest - tl.program_id(2)
            _fold_parts(part_ptr, part_m_ptr, part_l_ptr, sink_ptr, o_ptr, s, j, first_block, num_blocks, max_blocks, H, J, D,
                        BD, GP, SINK)  # fmt: skip
            tl.store(arrived_ptr + s * J + j, 0)
    else:
        if SINK:
            top, total, out = _fold_sink(top, total, out, sink_ptr, j * G + g, row_ok)
        at_out = token * H + j * G + g
        tl.store(
            o_ptr + at_out[:, None] * D + c[None, :],
            divide_rows(out, total, o_ptr.dtype.element_ty),
            mask=row_ok[:, None] & (c < D)[None, :],
        )
        if LSE:
            tl.store(lse_ptr + at_out, top + tl.log2(total), mask=row_ok)


def copy_tiles(pairs: list[tuple[int, int]], device: torch.device) -> Tiles:
    flat = torch.tensor(pairs, dtype=torch.int32).reshape(-1, 2).t().contiguous()
    if device.type == "cuda":
        flat = flat.pin_memory().to(device, non_blocking=True)
    return Tiles(sequence=flat[0], query=flat[1])


def tile_starts(
    counts: Sequence[int], *, skip: int = 0, heads: int, key_heads: int, size: int, dtype: torch.dtype
) -> list[tuple[int, int]]:
    group, rows = power_of_two(heads // key_heads), tile_of(dtype, size).rows
    if group > rows:
        raise ExactnessError(f"{group} query heads for one key head have no exact form in {dtype}; the most is {rows}")
    return [(s, first) for s in range(skip, len(counts)) for first in range(0, counts[s], rows // group)]


def gradient_tiles(lengths: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tiles:
    """Made once for all layers: a copy per layer would synchronise with the device."""
    return copy_tiles([(s, at) for s, n in enumerate(lengths) for at in range(0, n, side_of(dtype))], device)


def dense_heads(q: Tensor) -> Tensor:
    return align_rows(q if q.stride(-1) == 1 and q.stride(1) == q.shape[2] else q.contiguous())


def attend(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, spec: AttentionSpec, source: Packed | PagedBatch, tiles: Tiles | None, *,
    lse: Tensor | None = None, splits: int = 1, arrived: Tensor | None = None,
) -> None:  # fmt: skip
    """Attention of q [T, H, D] into `out`: the queries of `tiles`, or (None) the decodes of a `PagedBatch`.

    Keys and values lie dense [T, J, D] beside the queries (`Packed`), or in contiguous pages [blocks, J, page, D].
    `splits` programs share a decode's blocks; `arrived` int32 [S·J] is zero between launches.
    """
    _, heads, size = q.shape
    key_heads, group, width = k.shape[1], power_of_two(heads // k.shape[1]), power_of_two(size)
    programs = tiles.sequence.shape[0] if tiles is not None else source.num_decodes
    if programs == 0:
        return
    split, block = splits > 1, key_block(q.dtype)
    values = min(width, MOST_VALUES) if tiles is None and not split else width
    tile = tile_of(q.dtype, values, decodes=tiles is None)
    tree = source.branches if isinstance(source, Packed) else None
    if isinstance(source, Packed):
        starts = context = source.cu_seqlens
        table = starts if tree is None else tree.path
        page, strides = 0, (k.stride(1), k.stride(0), 0)
    else:
        starts, table, context = source.cu_q, source.block_tables, source.context_lens
        page, strides = k.shape[2], (0, 0, table.stride(0))
    blocks, parts = 0, (out, out, out)  # unfolded blocks: values, maximum, sum
    if split:
        blocks = cdiv(table.shape[1] * page, block)
        rows = programs * key_heads * blocks * group
        shape = {"dtype": torch.float32, "device": q.device}
        parts = (torch.empty((rows, width), **shape), *torch.empty((2, rows), **shape))
    launch(
        _forward_kernel, (programs, key_heads, splits * (width // values)),
        q, k, v, spec.sinks if spec.sinks is not None else q, out, lse if lse is not None else out, starts, context,
        tiles.sequence if tiles else table, tiles.query if tiles else table, table, starts if tree is None else tree.table,
        spec.scale if spec.softcap else spec.scale * LOG2E, q.stride(0), *strides, *parts, arrived if split else starts, blocks,
        H=heads, J=key_heads, D=size, BD=width, BV=values, GP=group, BM=tile.rows, BN=block,
        PAGE=page, WINDOW=spec.window or 0, SOFTCAP=float(spec.softcap or 0.0), LSE=lse is not None,
        SPLIT=split, DECODE=tiles is None, SINK=spec.sinks is not None, CAUSAL=spec.causal, TREE=tree is not None,
        PRECISION=precision_of(q.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@triton.jit
def _score_grad(s, lse, dp, delta, SOFTCAP: tl.constexpr):
    """Probabilities, and the gradient of the raw scaled scores."""
    p = tl.exp2(s - lse)
    ds = p * (dp - delta)
    if SOFTCAP > 0.0:
        t = tl.where(p == 0.0, 0.0, s / (SOFTCAP * 1.4426950408889634))
        ds = ds * (1.0 - t * t)
    return p, ds


@triton.jit
def _dq_kernel(q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, starts_ptr, path_ptr, branch_ptr, position_ptr, tile_seq_ptr,
               tile_query_ptr, scale, grad_scale, stride_qt, stride_kt, stride_kj, H: tl.constexpr, J: tl.constexpr, D: tl.constexpr,
               BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, CAUSAL: tl.constexpr,
               TREE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
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
    length, path_ptr = _row(path_ptr, branch_ptr, s_id, count, TREE)
    before = length - count  # keys ahead of the segment
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(before + first - WINDOW + 1, 0) // BN
    last = last_key(before + tl.minimum(first + BM, count) - 1, length, CAUSAL)
    position = last_key(before + row, length, CAUSAL)
    for block in range(lowest, tl.cdiv(last + 1, BN)):
        key = block * BN + tl.arange(0, BN)
        key_ok = (key < length)[:, None] & (d < D)[None, :]
        at = _token(start, path_ptr, key, length, TREE)[:, None] * stride_kt + (h // (H // J)) * stride_kj + d[None, :]
        k = tl.load(k_ptr + at, mask=key_ok, other=0.0)
        v = tl.load(v_ptr + at, mask=key_ok, other=0.0)
        s = scores(q, k, position, key, scale, WINDOW, SOFTCAP, PRECISION)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        _, ds = _score_grad(s, lse[:, None], dp, delta[:, None], SOFTCAP)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    tl.store(dq_ptr + (token * H + h)[:, None] * D + d[None, :], (dq * grad_scale).to(dq_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _dkv_kernel(q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, starts_ptr, path_ptr, branch_ptr, position_ptr, tile_seq_ptr,
                tile_key_ptr, scale, grad_scale, stride_qt, stride_kt, stride_kj, H: tl.constexpr, J: tl.constexpr, D: tl.constexpr,
                BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, CAUSAL: tl.constexpr,
                TREE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Grid (tiles of BN keys, J); folds over the heads of the group, then over query tiles, if causal from the diagonal on."""
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
    length, path_ptr = _row(path_ptr, branch_ptr, s_id, count, TREE)
    before = length - count  # keys ahead of the segment
    last = count  # of the queries behind the segment's start, all that see it
    if TREE:
        last = tl.load(branch_ptr + s_id * 3 + 2) - start
    end = last
    lowest = 0
    if CAUSAL:
        lowest = first // BM
    if WINDOW > 0 and not TREE:
        end = tl.minimum(count, first + BN + WINDOW)
    for g in range(G):
        h = j * G + g
        for block in range(lowest, tl.cdiv(end, BM)):
            row = block * BM + tl.arange(0, BM)
            ok = (row < last)[:, None] & (d < D)[None, :]
            token = (start + row).to(tl.int64)
            position = last_key(row, count, CAUSAL)
            if TREE:
                position = tl.load(position_ptr + token, mask=row < last, other=0)
            q = tl.load(q_ptr + token[:, None] * stride_qt + h * D + d[None, :], mask=ok, other=0.0)
            do = tl.load(do_ptr + (token * H + h)[:, None] * D + d[None, :], mask=ok, other=0.0)
            lse = tl.load(lse_ptr + token * H + h, mask=row < last, other=float("inf"))
            delta = tl.load(delta_ptr + token * H + h, mask=row < last, other=0.0)
            s = scores(q, k, position, before + key, scale, WINDOW, SOFTCAP, PRECISION)
            dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
            p, ds = _score_grad(s, lse[:, None], dp, delta[:, None], SOFTCAP)
            dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
            dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
    to = ((start + key).to(tl.int64) * J + j)[:, None] * D + d[None, :]
    tl.store(dk_ptr + to, (dk * grad_scale).to(dk_ptr.dtype.element_ty), mask=key_ok)
    tl.store(dv_ptr + to, dv.to(dv_ptr.dtype.element_ty), mask=key_ok)


@triton.jit
def _delta_kernel(do_ptr, out_ptr, delta_ptr, D: tl.constexpr, BD: tl.constexpr):
    """Grid (tokens × heads): the sum over a head of dO · O."""
    wait_for_inputs()
    let_next_start()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BD)
    do = tl.load(do_ptr + row * D + at, mask=at < D, other=0.0).to(tl.float32)
    out = tl.load(out_ptr + row * D + at, mask=at < D, other=0.0).to(tl.float32)
    tl.store(delta_ptr + row, tl.sum(do * out, 0))


def side_of(dtype: torch.dtype) -> int:
    return 64 if dtype != torch.float32 else 16


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, packed: Packed, spec: AttentionSpec,
        tiles: Tiles, backward_tiles: Tiles,
    ) -> Tensor:  # fmt: skip
        q, lse = align_rows(q.contiguous()), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        k, v = dense_keys(k, v)
        out = torch.empty_like(q)
        attend(q, k, v, out, spec, packed, tiles, lse=lse)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.packed, ctx.spec, ctx.tiles = packed, spec, backward_tiles
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        packed, spec, tiles = ctx.packed, ctx.spec, ctx.tiles
        do = align_rows(grads[0].contiguous())
        delta, dq = torch.empty_like(lse), torch.empty_like(q)
        (_, heads, size), key_heads, side = q.shape, k.shape[1], side_of(q.dtype)
        dk, dv = (torch.empty(k.shape, dtype=k.dtype, device=k.device) for _ in range(2))
        scale = spec.scale if spec.softcap else spec.scale * LOG2E
        width = {"D": size, "BD": power_of_two(size)}
        shape = {"H": heads, "J": key_heads, **width, "BM": side, "BN": side, "WINDOW": spec.window or 0,
                 "SOFTCAP": float(spec.softcap or 0.0), "CAUSAL": spec.causal, "TREE": packed.branches is not None,
                 "PRECISION": precision_of(q.dtype), "num_warps": 4, "num_stages": 2}  # fmt: skip
        strides = q.stride(0), k.stride(0), k.stride(1)
        starts, tree = packed.cu_seqlens, packed.branches
        branches = (starts,) * 3 if tree is None else (tree.path, tree.table, tree.positions)
        args = (starts, *branches, tiles.sequence, tiles.query, scale, spec.scale, *strides)
        if count := len(tiles.query):
            launch(_delta_kernel, (delta.numel(),), do, out, delta, **width, num_warps=1)
            launch(_dq_kernel, (count, heads), q, k, v, do, lse, delta, dq, *args, **shape)
            launch(_dkv_kernel, (count, key_heads), q, k, v, do, lse, delta, dk, dv, *args, **shape)
        d_sinks = None if sinks is None else -(torch.exp2(sinks.float() * LOG2E - lse) * delta).sum(0).to(sinks.dtype)
        return dq, dk, dv, d_sinks, None, None, None, None


def dense_keys(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Both with aligned rows and the same strides."""
    k, v = align_rows(k), align_rows(v)
    return (k, v) if v.stride() == k.stride() else (align_rows(k.contiguous()), align_rows(v.contiguous()))


def attention(
    q: Tensor, k: Tensor, v: Tensor, packed: Packed, spec: AttentionSpec, tiles: Tiles, backward_tiles: Tiles
) -> Tensor:
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _Attention.apply(q, k, v, spec.sinks, packed, spec, tiles, backward_tiles)
    q, out = dense_heads(q), torch.empty(q.shape, dtype=q.dtype, device=q.device)
    attend(q, *dense_keys(k, v), out, spec, packed, tiles)
    return out
