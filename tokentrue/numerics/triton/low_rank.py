"""LoRA beside a base product: y += (x A^T) B^T * scale, with an adapter per row.

Rows are grouped by adapter as pairs are by expert, so a row has the bits of `Ops.add_low_rank`. Planning stays on the
device and sizes are fixed, so that a step can be captured; new weights of the same shape are written in place.

Legend: T rows, K inputs, N outputs, S slots, P projections of the merged product, R rank (padded with zeros, which
change no sum).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokentrue.numerics.ops import LowRank, LowRankStack, RowSlots
from tokentrue.numerics.triton.experts import Groups, group, multiply_groups
from tokentrue.numerics.triton.launch import Tile, launch, let_next_start, power_of_two, precision_of, wait_for_inputs

LEAST_RANK = 16
MOST_PARTS = 3
# Widths of an expanding tile, the widest first; a tile lies within one projection.
COLUMNS = (64, 32, 16)


@triton.jit(do_not_specialize=["T"])
def _expand_kernel(u_ptr, b_ptr, scale_ptr, rank_ptr, y_ptr, row_ptr, slot_ptr, T, N, S, first_end, second_end, stride_y,
                   PARTS: tl.constexpr, R: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                   PRECISION: tl.constexpr):  # fmt: skip
    """Grid (tiles, N tiles): y += (u B^T) * scale, rounded after the product, the factor and the sum."""
    wait_for_inputs()
    slot = tl.load(slot_ptr + tl.program_id(0))
    if slot >= S:
        return
    start = tl.program_id(1) * BN
    part = (start >= first_end).to(tl.int32) + (start >= second_end).to(tl.int32)
    if tl.load(rank_ptr + slot * PARTS + part) == 0:  # not adapted: adding zero would turn -0 into 0
        return
    scale = tl.load(scale_ptr + slot * PARTS + part)
    row = tl.load(row_ptr + tl.program_id(0) * BM + tl.arange(0, BM))
    ok = row < T
    cols = start + tl.arange(0, BN)
    ks = tl.arange(0, BK)
    u_tile = u_ptr + row[:, None] * (PARTS * R) + part * R + ks[None, :]
    b_tile = b_ptr + (slot * N + cols)[None, :] * R + ks[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    for k in tl.static_range(0, R, BK):
        u = tl.load(u_tile + k, mask=ok[:, None], other=0.0)
        acc = tl.dot(u, tl.load(b_tile + k), acc, input_precision=PRECISION)
    let_next_start()
    kind = u_ptr.dtype.element_ty
    delta = (acc.to(kind).to(tl.float32) * scale).to(kind)
    y_tile = y_ptr + row[:, None] * stride_y + cols[None, :]
    y = tl.load(y_tile, mask=ok[:, None], other=0.0)
    tl.store(y_tile, (y.to(tl.float32) + delta.to(tl.float32)).to(y_ptr.dtype.element_ty), mask=ok[:, None])


class PackedStack(NamedTuple):
    """`a` [S,P·R,K], `b` [S,N,R], `scales` and `ranks` [S,P] (0 if not adapted)."""

    a: Tensor
    b: Tensor
    scales: Tensor
    ranks: Tensor


def pack(stack: LowRankStack, count: int) -> None:
    """Fills `stack.packed`, in place if the parts fit; None if they have no packed form."""
    packed: PackedStack | None = stack.packed
    lows = [low for parts in stack.parts.values() for low in parts if low is not None]
    fits = packed is not None and all(
        low.a.shape[0] <= packed.b.shape[2] and low.a.dtype == packed.a.dtype for low in lows
    )
    if packed is None or not fits or packed.a.shape[0] != count:
        packed = stack.packed = new_packed(stack, lows, count)
    if packed is None:
        return
    rank = packed.b.shape[2]
    for tensor in (packed.a, packed.b, packed.ranks):
        tensor.zero_()
    for slot, parts in stack.parts.items():
        for part, (low, start, end) in enumerate(zip(parts, (0, *stack.ends), stack.ends, strict=False)):
            if low is not None:
                own = low.a.shape[0]
                packed.a[slot, part * rank : part * rank + own] = low.a
                packed.b[slot, start:end, :own] = low.b
                packed.scales[slot, part] = low.scale
                packed.ranks[slot, part] = own


def new_packed(stack: LowRankStack, lows: Sequence[LowRank], count: int) -> PackedStack | None:
    kinds = {tensor.dtype for low in lows for tensor in (low.a, low.b)}
    if len(kinds) != 1 or kinds == {torch.float64} or len(stack.ends) > MOST_PARTS or columns_of(stack.ends) is None:
        return None
    rank = power_of_two(max(LEAST_RANK, *(low.a.shape[0] for low in lows)))
    parts, a = len(stack.ends), lows[0].a
    return PackedStack(
        a=a.new_zeros(count, parts * rank, a.shape[1]), b=a.new_zeros(count, stack.ends[-1], rank),
        scales=a.new_zeros(count, parts, dtype=torch.float32), ranks=a.new_zeros(count, parts, dtype=torch.int32),
    )  # fmt: skip


def columns_of(ends: tuple[int, ...]) -> int | None:
    return next((width for width in COLUMNS if all(end % width == 0 for end in ends)), None)


def add_low_ranks(y: Tensor, x: Tensor, stack: LowRankStack, rows: RowSlots, *, beside: bool) -> None:
    """`beside`: the kernel ahead is the product y itself; the first factor does not wait for it."""
    packed: PackedStack = stack.packed
    count = x.shape[0]
    if rows.groups is None:  # by the first product of a step
        rows.groups = group(rows.slots[:, None], rows.count, 16 if count <= 512 else 64)
    groups: Groups = rows.groups
    (slots, height, _), (_, outputs, rank) = packed.a.shape, packed.b.shape
    columns = columns_of(stack.ends)
    assert columns is not None and y.stride(1) == 1
    # The ranks of all projections side by side, in the adapter's dtype.
    u = torch.empty((count, height), dtype=packed.a.dtype, device=x.device)
    tile = Tile(groups.rows, 32, 128, 4, 4) if groups.rows > 16 else Tile(16, 16, 512, 4, 3)  # measured on an H200
    tile = Tile(groups.rows, 32, 32, 4, 4) if packed.a.dtype == torch.float32 else tile
    multiply_groups(x, packed.a, None, u, groups, tile, beside=beside)
    ends = (*stack.ends[:-1], outputs, outputs)
    launch(
        _expand_kernel, (groups.experts.shape[0], outputs // columns), u, packed.b, packed.scales, packed.ranks, y, groups.pairs,
        groups.experts, count, outputs, slots, ends[0], ends[1], y.stride(0), PARTS=len(stack.ends), R=rank, BM=groups.rows, BN=columns,
        BK=min(rank, 64), PRECISION=precision_of(packed.a.dtype), num_warps=4, num_stages=2,
    )  # fmt: skip
