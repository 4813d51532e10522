"""Mixtures: (token, slot) pairs are grouped by expert in a stable order, one product per group, slots added in order.

A pair's row is an exact product with its expert's weights, so its bits do not depend on the other pairs. Planning stays
on the device with fixed sizes, so that a decode step can be captured.

Legend: T tokens, k slots a token, P = T·k pairs, E experts, I expert width, K model width.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokentrue.numerics.ops import ClampedSwiglu, ExpertWeights
from tokentrue.numerics.triton.elementwise import activation_grad, branch_of, gate_values
from tokentrue.numerics.triton.launch import (
    Tile,
    align_rows,
    cdiv,
    launch,
    let_next_start,
    power_of_two,
    precision_of,
    rows_of,
    wait_for_inputs,
)
from tokentrue.numerics.triton.matmul import describe, multiply_add, multiprocessors, zeros_of_tile


@triton.jit
def _route_kernel(z_ptr, weight_ptr, index_ptr, E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, NORMALISE: tl.constexpr,
                  GIVEN: tl.constexpr):  # fmt: skip
    """One program a token; ties take the lower expert."""
    wait_for_inputs()
    let_next_start()
    t = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, EP)
    z = tl.load(z_ptr + t * E + at, mask=at < E, other=float("-inf")).to(tl.float32)
    exps = tl.exp(z - tl.max(z, 0))
    probs = exps / tl.sum(exps, 0)
    left = tl.where(at < E, probs, -1.0)
    slots = tl.arange(0, 16)
    chosen = tl.zeros((16,), tl.float32)
    total = tl.zeros((), tl.float32)
    for s in tl.static_range(K):
        if GIVEN:
            expert = tl.load(index_ptr + t * K + s).to(tl.int32)
            best = tl.max(tl.where(at == expert, probs, -1.0), 0)
        else:
            best = tl.max(left, 0)
            expert = tl.min(tl.where(left == best, at, EP), 0)
            tl.store(index_ptr + t * K + s, expert.to(tl.int64))
        chosen = tl.where(slots == s, best, chosen)
        total = total + best
        left = tl.where(at == expert, -1.0, left)
    if NORMALISE:
        chosen = chosen / total
    tl.store(weight_ptr + t * K + slots, chosen.to(weight_ptr.dtype.element_ty), mask=slots < K)


def _choose(logits: Tensor, top_k: int, normalise: bool, given: Tensor | None) -> tuple[Tensor, Tensor]:
    tokens, experts = logits.shape
    weight = torch.empty((tokens, top_k), dtype=logits.dtype, device=logits.device)
    index = weight.new_empty(weight.shape, dtype=torch.int64) if given is None else given.contiguous()
    if tokens:
        launch(
            _route_kernel, (tokens,), logits, weight, index, E=experts, EP=power_of_two(experts), K=top_k, NORMALISE=normalise,
            GIVEN=given is not None, num_warps=1,
        )  # fmt: skip
    return weight, index


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, top_k: int, normalise: bool, given: Tensor | None) -> tuple[Tensor, Tensor]:
        weight, index = _choose(logits, top_k, normalise, given)
        ctx.save_for_backward(logits, index)
        ctx.normalise = normalise
        ctx.mark_non_differentiable(index)
        return weight, index

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, index = ctx.saved_tensors
        with torch.enable_grad():
            z = logits.detach().float().requires_grad_()
            weight = torch.softmax(z, -1).gather(-1, index)
            weight = weight / weight.sum(-1, keepdim=True) if ctx.normalise else weight
            (d_logits,) = torch.autograd.grad(weight, z, grads[0].float())
        return d_logits.to(logits.dtype), None, None, None


def fits_route(logits: Tensor, top_k: int) -> bool:
    return top_k <= 16 and logits.shape[-1] <= 1024


def route(logits: Tensor, top_k: int, normalise: bool, given: Tensor | None) -> tuple[Tensor, Tensor]:
    choose = _Route.apply if torch.is_grad_enabled() and logits.requires_grad else _choose
    return choose(rows_of(logits), top_k, normalise, given)


class Groups(NamedTuple):
    """Tiles of BM pairs of one expert each: `pairs` [tiles·BM] (P if empty), `experts` [tiles] (E if unused)."""

    pairs: Tensor
    experts: Tensor
    rows: int


@triton.jit(do_not_specialize=["P", "tiles"])
def _plan_kernel(index_ptr, pair_ptr, expert_ptr, P, tiles, E: tl.constexpr, EP: tl.constexpr, ROWS: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    """Program e writes the tiles of expert e; its pairs keep their order. Integers alone: timing changes nothing."""
    wait_for_inputs()
    let_next_start()
    e = tl.program_id(0)
    every = tl.arange(0, EP)
    counts = tl.zeros((EP,), tl.int32)
    for start in range(0, P, BLOCK):
        at = start + tl.arange(0, BLOCK)
        chosen = tl.load(index_ptr + at, mask=at < P, other=E).to(tl.int32)
        counts += tl.histogram(tl.minimum(chosen, EP - 1), EP)
    own_tiles = tl.where(every < E, (counts + ROWS - 1) // ROWS, 0)
    first = tl.sum(tl.where(every < e, own_tiles, 0), 0)
    mine = tl.sum(tl.where(every == e, own_tiles, 0), 0)
    total = tl.sum(own_tiles, 0)
    done = tl.zeros((), tl.int32)
    for start in range(0, P, BLOCK):
        at = start + tl.arange(0, BLOCK)
        own = (tl.load(index_ptr + at, mask=at < P, other=E).to(tl.int32) == e).to(tl.int32)
        place = first * ROWS + done + tl.cumsum(own, 0) - 1
        tl.store(pair_ptr + place, at.to(tl.int64), mask=own != 0)
        done += tl.sum(own, 0)
    rest = tl.arange(0, ROWS)
    padding = first * ROWS + done + rest
    tl.store(pair_ptr + padding, (P + rest * 0).to(tl.int64), mask=padding < (first + mine) * ROWS)
    for start in range(0, mine, ROWS):
        tl.store(expert_ptr + first + start + rest, (e + rest * 0).to(tl.int64), mask=start + rest < mine)
    for start in range(total + e * ROWS, tiles, E * ROWS):
        tl.store(expert_ptr + start + rest, (E + rest * 0).to(tl.int64), mask=start + rest < tiles)


def group(index: Tensor, experts: int, rows: int) -> Groups:
    """Pads each group to whole tiles of `rows`."""
    num, device = index.numel(), index.device
    tiles = cdiv(num, rows) + min(experts, num)
    pairs = torch.empty(tiles * rows, dtype=torch.int64, device=device)
    of_tile = torch.empty(tiles, dtype=torch.int64, device=device)
    block = min(max(power_of_two(num), 128), 8192)
    launch(
        _plan_kernel, (experts,), index.contiguous(), pairs, of_tile, num, tiles, E=experts, EP=power_of_two(experts + 1), ROWS=rows,
        BLOCK=block, num_warps=4 if block <= 1024 else 8,
    )  # fmt: skip
    return Groups(pairs=pairs, experts=of_tile, rows=rows)


@triton.jit
def _add_bias(y, at, ok):
    return (y.to(tl.float32) + tl.load(at, mask=ok, other=0.0).to(tl.float32)[None, :]).to(y.dtype)


@triton.jit(do_not_specialize=["P"])
def _group_kernel(x_ptr, w_ptr, b_ptr, y_ptr, pair_ptr, expert_ptr, P, N, K, E, stride_x, stride_e, stride_n, stride_k, SLOTS: tl.constexpr,
                  BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
                  INTERLEAVED: tl.constexpr, BIAS: tl.constexpr, BESIDE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Grid (tiles, N tiles). GATED: w [E, 2N, K] and x rows are tokens; else w [E, N, K] and x rows are pairs.
    INTERLEAVED: the rows of gate and up in turn. Strides of w: expert, output, input. BESIDE: runs beside the kernel ahead,
    which writes nothing that is read here."""
    wait_for_inputs(BESIDE)
    e = tl.load(expert_ptr + tl.program_id(0))
    if e >= E:
        wait_for_inputs(not BESIDE)
        return
    pair = tl.load(pair_ptr + tl.program_id(0) * BM + tl.arange(0, BM))
    ok = pair < P
    source = pair // SLOTS if GATED else pair
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    ks = tl.arange(0, BK)
    kind = y_ptr.dtype.element_ty
    x_tile = x_ptr + source[:, None] * stride_x + ks[None, :]
    height = 2 * N if GATED else N
    if INTERLEAVED and GATED:
        first = 2 * cols
        second = first + 1
    else:
        first = cols
        second = cols + N
    w_expert = w_ptr + e * stride_e + ks[:, None].to(tl.int64) * stride_k
    w_tile = w_expert + first[None, :].to(tl.int64) * stride_n
    up_tile = w_expert + second[None, :].to(tl.int64) * stride_n
    step = BK * stride_k
    CACHE: tl.constexpr = ".cg" if BESIDE else ""
    acc = tl.zeros((BM, BN), tl.float32)
    up = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        in_w = (cols < N)[None, :] & (ks < K - k)[:, None]
        # BESIDE: past the first cache, which may hold what was there before the kernel ahead began.
        x = tl.load(x_tile, mask=ok[:, None] & (ks < K - k)[None, :], other=0.0, cache_modifier=CACHE).to(kind)
        acc = tl.dot(x, tl.load(w_tile, mask=in_w, other=0.0), acc, input_precision=PRECISION)
        if GATED:
            up = tl.dot(x, tl.load(up_tile, mask=in_w, other=0.0), up, input_precision=PRECISION)
        x_tile += BK
        w_tile += step
        up_tile += step
    wait_for_inputs(not BESIDE)
    let_next_start()
    y = acc.to(kind)
    u = up.to(kind)
    if BIAS:
        y = _add_bias(y, b_ptr + e * height + first, cols < N)
        u = _add_bias(u, b_ptr + e * height + second, cols < N) if GATED else u
    if GATED:
        y = clamped_swiglu(y, u, ALPHA, LIMIT, kind) if ACT == 4 else gate_values(y, u, ACT)
    tl.store(y_ptr + pair[:, None] * N + cols[None, :], y, mask=ok[:, None] & (cols < N)[None, :])


@triton.jit
def clamped_swiglu(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr, kind: tl.constexpr):
    """Rounded after each operation."""
    g = tl.minimum(gate.to(tl.float32), LIMIT)
    u = tl.minimum(tl.maximum(up.to(tl.float32), -LIMIT), LIMIT)
    inner = (g * ALPHA).to(kind).to(tl.float32)
    share = (1.0 / (1.0 + tl.exp(-inner))).to(kind).to(tl.float32)
    return ((u + 1.0).to(kind).to(tl.float32) * (g * share).to(kind).to(tl.float32)).to(kind)


@triton.jit(do_not_specialize=["P"])
def _described_group_kernel(x_ptr, w_desc, b_ptr, y_ptr, pair_ptr, expert_ptr, P, N, K, E, SLOTS: tl.constexpr, BM: tl.constexpr,
                            BN: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr, ALPHA: tl.constexpr,
                            LIMIT: tl.constexpr, INTERLEAVED: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """Grid (N tiles, tiles of pairs). w [E · 2N, K] where GATED and x rows are tokens, else [E · N, K] and pairs.
    INTERLEAVED (and GATED): one product has the rows of gate and up in turn."""
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
    ONE: tl.constexpr = GATED and INTERLEAVED
    row = e * (2 * N if GATED else N) + (2 * at if ONE else at)
    kind = y_ptr.dtype.element_ty
    TURNED: tl.constexpr = BM < 64
    acc = zeros_of_tile(BM, 2 * BN if ONE else BN, TURNED)
    up = zeros_of_tile(BM, BN, TURNED)
    for k in range(0, K, BK):
        x = tl.load(x_tile, mask=ok[:, None] & (ks < K - k)[None, :], other=0.0)
        acc = multiply_add(x, w_desc.load([row, k]), acc, TURNED)
        if GATED and not INTERLEAVED:
            up = multiply_add(x, w_desc.load([row + N, k]), up, TURNED)
        x_tile += BK
    let_next_start()
    y = acc.to(kind)
    u = up.to(kind)
    if TURNED:
        y = y.T
        u = u.T
    if ONE:
        y, u = tl.split(tl.reshape(y, (BM, BN, 2)))
    cols = at + tl.arange(0, BN)
    if BIAS:
        first = 2 * cols if ONE else cols
        height = 2 * N if GATED else N
        y = _add_bias(y, b_ptr + e * height + first, cols < N)
        if GATED:
            u = _add_bias(u, b_ptr + e * height + (first + 1 if ONE else first + N), cols < N)
    if GATED:
        y = clamped_swiglu(y, u, ALPHA, LIMIT, kind) if ACT == 4 else gate_values(y, u, ACT)
    tl.store(y_ptr + pair[:, None] * N + cols[None, :], y, mask=ok[:, None] & (cols < N)[None, :])


@triton.jit
def _add_slots_kernel(x_ptr, weight_ptr, y_ptr, K, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    """y[t] = Σ_s x[t·k+s] · weight[t, s], rounded after each product and each sum, slots in order."""
    wait_for_inputs()
    let_next_start()
    t = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kind = y_ptr.dtype.element_ty
    for s in tl.static_range(SLOTS):
        w = tl.load(weight_ptr + t * SLOTS + s).to(tl.float32)
        x = tl.load(x_ptr + (t * SLOTS + s) * K + at, mask=at < K, other=0.0).to(tl.float32)
        part = (x * w).to(kind)
        if s == 0:  # noqa: SIM108
            total = part
        else:
            total = (total.to(tl.float32) + part.to(tl.float32)).to(kind)
    tl.store(y_ptr + t * K + at, total, mask=at < K)


def fits_descriptors(x: Tensor, experts: ExpertWeights) -> bool:
    """An engine lays interleaved weights out by output; a trainer has them by input, where rows are not dense."""
    if x.dtype == torch.float32 or not multiprocessors(x.device):
        return False
    weights = (by_output(experts.gate_up, experts), by_output(experts.down, experts))
    return all(w.is_contiguous() and w.shape[1] % 16 == 0 and w.shape[2] % 8 == 0 for w in weights)


def by_output(weight: Tensor, experts: ExpertWeights) -> Tensor:
    """[E, outputs, K], whatever its memory."""
    return weight.transpose(1, 2) if experts.interleaved else weight


def gate_constants(act: str | ClampedSwiglu | None) -> dict[str, Any]:
    """Of a kernel that gates its products if `act` is given."""
    clamped = isinstance(act, ClampedSwiglu)
    branch = 4 if clamped else branch_of(act) if act is not None else 0
    alpha, limit = (float(act.alpha), float(act.limit)) if clamped else (0.0, 0.0)
    return {"GATED": act is not None, "ACT": branch, "ALPHA": alpha, "LIMIT": limit}


def tile_for_group(rows: int, pairs: int, dtype: torch.dtype, *, gated: bool, described: bool) -> Tile:
    """Measured on an H200; does not affect bits."""
    if dtype == torch.float32:
        return Tile(rows, 32, 32, 4, 3)
    if rows > 64:  # with descriptors alone
        return Tile(rows, 128 if gated else 256, 64, 8, 4 if gated else 3)
    if rows > 16:
        return Tile(rows, 128 if described and not gated else 64, 64, 4, 3)
    if gated and pairs <= 64:  # few programs: few steps of the loop
        return Tile(rows, 64 if described else 32, 256, 4, 3)
    return Tile(rows, 64, 128, 4, 4 if gated and not described else 3)


def multiply_groups(
    x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, groups: Groups, tile: Tile, *,
    act: str | ClampedSwiglu | None = None, slots: int = 1, interleaved: bool = False, beside: bool = False,
) -> None:  # fmt: skip
    """y[p] = x's row of pair p times its group's weight [E, outputs, K] (any strides); gated if `act` is given."""
    (number, _, inputs), (num_pairs, outputs) = weight.shape, y.shape
    launch(
        _group_kernel, (groups.experts.shape[0], cdiv(outputs, tile.n)),
        x, weight, bias if bias is not None else x, y, groups.pairs, groups.experts, num_pairs, outputs, inputs, number,
        x.stride(0), *weight.stride(), SLOTS=slots, BM=groups.rows, BN=tile.n, BK=tile.k, **gate_constants(act),
        INTERLEAVED=interleaved, BIAS=bias is not None, BESIDE=beside,
        PRECISION=precision_of(y.dtype), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def expert_rows(x: Tensor, index: Tensor, experts: ExpertWeights) -> Tensor:
    x, (tokens, slots) = align_rows(x.contiguous()), index.shape
    if tokens == 0:
        return x
    pairs, number, described = tokens * slots, experts.gate_up.shape[0], fits_descriptors(x, experts)
    height = 16
    if pairs // number >= 32 and x.dtype != torch.float32:
        height = 128 if pairs // number >= 128 and described else 64
    groups = group(index, number, height)

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, act: str | ClampedSwiglu | None) -> Tensor:
        weight = by_output(weight, experts)
        _, outputs, inputs = weight.shape
        columns = outputs if act is None else outputs // 2
        out = torch.empty((pairs, columns), dtype=x.dtype, device=x.device)
        t = tile_for_group(height, pairs, x.dtype, gated=act is not None, described=described)
        if not described:
            multiply_groups(x, weight, bias, out, groups, t, act=act, slots=slots, interleaved=experts.interleaved)
            return out
        rows = describe(weight.view(-1, inputs), 2 * t.n if experts.interleaved and act is not None else t.n, t.k)
        launch(
            _described_group_kernel, (cdiv(columns, t.n), groups.experts.shape[0]), x, rows, bias if bias is not None else x, out,
            groups.pairs, groups.experts, pairs, columns, inputs, number, SLOTS=slots, BM=t.m, BN=t.n, BK=t.k, **gate_constants(act),
            INTERLEAVED=experts.interleaved, BIAS=bias is not None, num_warps=t.warps, num_stages=t.stages,
        )  # fmt: skip
        return out

    hidden = multiply(x, experts.gate_up, experts.gate_up_bias, experts.act)
    return multiply(hidden, experts.down, experts.down_bias, None)


def add_slots(rows: Tensor, weight: Tensor) -> Tensor:
    (tokens, slots), width = weight.shape, rows.shape[1]
    y = torch.empty((tokens, width), dtype=rows.dtype, device=rows.device)
    if tokens:
        grid = (tokens, cdiv(width, 1024))
        launch(_add_slots_kernel, grid, rows, weight.contiguous(), y, width, SLOTS=slots, BLOCK=1024, num_warps=4)
    return y


TENSORS = ("gate_up", "down", "gate_up_bias", "down_bias")


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, weight: Tensor, experts: ExpertWeights, *tensors: Tensor) -> Tensor:
        """`tensors`: those of `experts`, for autograd."""
        ctx.save_for_backward(x, index, weight, *tensors)
        ctx.form = {"act": experts.act, "interleaved": experts.interleaved}
        return add_slots(expert_rows(x, index, experts), weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Expert by expert over the sorted pairs, put back by a permutation: every order of addition is fixed."""
        x, index, weight, *tensors = ctx.saved_tensors
        experts = ExpertWeights(**dict(zip(TENSORS, tensors, strict=True)), **ctx.form)
        totals = [None if tensor is None else torch.zeros_like(tensor) for tensor in tensors]
        tokens, slots = index.shape
        expert, order = torch.sort(index.reshape(-1).long(), stable=True)
        counts = torch.bincount(expert, minlength=experts.gate_up.shape[0]).tolist()
        token = order // slots
        dy, xs, ws = grads[0][token], x[token], weight.reshape(-1)[order]
        dx, dw = torch.empty_like(xs), torch.zeros_like(ws, dtype=torch.float32)
        at = 0
        for e, count in enumerate(counts):
            if count:
                part = slice(at, at + count)
                at += count
                dx[part], dw[part] = add_gradients(experts, totals, e, xs[part], ws[part], dy[part])
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0], device=order.device)
        d_x = dx[back].reshape(tokens, slots, -1).float().sum(1).to(x.dtype)
        return d_x, None, dw[back].reshape(tokens, slots).to(weight.dtype), None, *totals


def add_gradients(
    experts: ExpertWeights, totals: list[Tensor | None], e: int, x: Tensor, w: Tensor, dy: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of rows x [P, K] and slot weights w [P] of expert `e`, from those of its output rows; its own go to
    `totals`.
    """
    gate_up, down = experts.matrices(e)
    both = x @ gate_up.t()
    both = both if experts.gate_up_bias is None else both + experts.gate_up_bias[e]
    hidden, of_gate, of_up = gate_gradients(*experts.split(both), experts.act)
    out = hidden @ down.t()
    out = out if experts.down_bias is None else out + experts.down_bias[e]
    d_out = dy * w[:, None].to(dy.dtype)
    d_hidden = d_out @ down
    halves = (d_hidden * of_gate, d_hidden * of_up)
    d_both = torch.stack(halves, -1).flatten(-2) if experts.interleaved else torch.cat(halves, -1)
    for total, first, second in zip(totals[:2], (d_both, d_out), (x, hidden), strict=True):
        total[e] = second.t() @ first if experts.interleaved else first.t() @ second
    for bias, rows in zip(totals[2:], (d_both, d_out), strict=True):
        if bias is not None:
            bias[e] = rows.float().sum(0).to(bias.dtype)
    return d_both @ gate_up, (dy.float() * out.float()).sum(-1)


def gate_gradients(gate: Tensor, up: Tensor, act: str | ClampedSwiglu) -> tuple[Tensor, ...]:
    """`Ops.gate_values`, and its slopes with respect to gate and up."""
    if isinstance(act, str):
        acted, slope = activation_grad(gate, act)
        return acted * up, up * slope, acted
    g, u = gate.float().clamp(max=act.limit), up.float().clamp(min=-act.limit, max=act.limit)
    share = torch.sigmoid(g * act.alpha)
    slope = share * (1 + act.alpha * g * (1 - share)) * (gate <= act.limit)
    inside = (up >= -act.limit) & (up <= act.limit)
    return tuple(t.to(gate.dtype) for t in ((u + 1) * g * share, (u + 1) * slope, g * share * inside))


def experts(x: Tensor, index: Tensor, weight: Tensor, experts: ExpertWeights) -> Tensor:
    tensors = [getattr(experts, name) for name in TENSORS]
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, *tensors)):
        return _Experts.apply(x, index, weight, experts, *tensors)
    return add_slots(expert_rows(x, index, experts), weight)
