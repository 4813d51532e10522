"""LoRA beside a base product: y += (x A^T) B^T * scale, with an adapter per row.

Rows are grouped by adapter as pairs are by expert, so a row has the bits of `Ops.add_low_rank`, whatever else is in the
batch. Planning stays on the device and sizes are fixed, so that a step can be captured; new weights of the same shape
are written in place.

Legend: T rows, K inputs, N outputs, S slots, P projections of the merged product, R rank (padded with zeros, which
change no sum).
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokentrue.numerics.ops import LowRank, LowRankStack, RowSlots
from tokentrue.numerics.triton.experts import Groups, group, launch_groups
from tokentrue.numerics.triton.launch import Tile, align_rows, launch, let_next_start, power_of_two, wait_for_inputs
from tokentrue.numerics.triton.matmul import precision_of

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


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedStack:
    """`a` [S,P·R,K], `b` [S,N,R], `scales` and `ranks` [S,P] (0 if not adapted)."""

    a: Tensor
    b: Tensor
    scales: Tensor
    ranks: Tensor

    def holds(self, parts: tuple[LowRank | None, ...], count: int) -> bool:
        rank = self.b.shape[2]
        fits = all(low is None or (low.a.shape[0] <= rank and low.a.dtype == self.a.dtype) for low in parts)
        return fits and self.a.shape[0] == count

    def write(self, slot: int, parts: tuple[LowRank | None, ...], ends: tuple[int, ...]) -> None:
        rank, start = self.b.shape[2], 0
        self.a[slot].zero_()
        self.b[slot].zero_()
        self.ranks[slot].zero_()
        for part, (low, end) in enumerate(zip(parts, ends, strict=True)):
            if low is not None:
                own = low.a.shape[0]
                self.a[slot, part * rank : part * rank + own] = low.a
                self.b[slot, start:end, :own] = low.b
                self.scales[slot, part] = low.scale
                self.ranks[slot, part] = own
            start = end


def pack(stack: LowRankStack, count: int) -> None:
    """Fills `stack.packed`, in place if the parts fit; None if they have no packed form."""
    packed = stack.packed
    if packed is None or not all(packed.holds(parts, count) for parts in stack.parts.values()):
        packed = stack.packed = new_packed(stack, count)
    if packed is not None:
        nothing = (None,) * len(stack.ends)
        for slot in range(count):
            packed.write(slot, stack.parts.get(slot, nothing), stack.ends)


def new_packed(stack: LowRankStack, count: int) -> PackedStack | None:
    lows = [low for parts in stack.parts.values() for low in parts if low is not None]
    kinds = {low.a.dtype for low in lows} | {low.b.dtype for low in lows}
    if len(kinds) != 1 or kinds == {torch.float64} or len(stack.ends) > MOST_PARTS or columns_of(stack.ends) is None:
        return None
    rank = power_of_two(max(LEAST_RANK, *(low.a.shape[0] for low in lows)))
    parts, like = len(stack.ends), lows[0].a

    def zeros(*shape: int, dtype: torch.dtype = like.dtype) -> Tensor:
        return torch.zeros(count, *shape, dtype=dtype, device=like.device)

    return PackedStack(
        a=zeros(parts * rank, like.shape[1]), b=zeros(stack.ends[-1], rank), scales=zeros(parts, dtype=torch.float32),
        ranks=zeros(parts, dtype=torch.int32),
    )  # fmt: skip


def columns_of(ends: tuple[int, ...]) -> int | None:
    return next((width for width in COLUMNS if all(end % width == 0 for end in ends)), None)


def add_low_ranks(y: Tensor, x: Tensor, stack: LowRankStack, rows: RowSlots) -> None:
    packed: PackedStack = stack.packed
    x, count = align_rows(x), x.shape[0]
    groups = groups_of(rows, count)
    (slots, height, _), (_, outputs, rank) = packed.a.shape, packed.b.shape
    columns = columns_of(stack.ends)
    assert columns is not None and y.stride(1) == 1
    u = torch.empty((count, height), dtype=packed.a.dtype, device=x.device)
    # The ranks of all projections side by side, in the adapter's dtype.
    tile = Tile(m=groups.rows, n=32, k=32 if packed.a.dtype == torch.float32 else 128, warps=4, stages=4)
    launch_groups(x, packed.a, None, u, groups, tile)
    ends = (*stack.ends[:-1], outputs, outputs)
    launch(
        _expand_kernel, (groups.experts.shape[0], outputs // columns), u, packed.b, packed.scales, packed.ranks, y, groups.pairs,
        groups.experts, count, outputs, slots, ends[0], ends[1], y.stride(0), PARTS=len(stack.ends), R=rank, BM=groups.rows, BN=columns,
        BK=min(rank, 64), PRECISION=precision_of(packed.a.dtype), num_warps=4, num_stages=2,
    )  # fmt: skip


def groups_of(rows: RowSlots, count: int) -> Groups:
    """Cached by the first product of a step."""
    if rows.groups is None:
        rows.groups = group(rows.slots[:, None], rows.count, 16 if count <= 512 else 64)
    return rows.groups
