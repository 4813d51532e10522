"""Start-up self-test: do the operators hold their invariant for this model's shapes on this machine?

A product that changes with the number of rows is pinned to one tile; a decode that differs from prefill loses its
split; a fused launch that differs from its parts is taken apart. What has no fall-back raises ExactnessError.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokentrue.errors import ExactnessError
from tokentrue.numerics.ops import AttentionSpec, HeadNorm, NormForm, Ops, Packed, PagedBatch, same_bits
from tokentrue.numerics.triton.launch import Tile

DEVICE = "cuda"
ROWS = (1, 2, 5, 16, 17, 32, 33, 64, 100, 256, 300, 640)
ALL_ROWS = 1100  # past every change of tile
PINNED = Tile(m=64, n=64, k=64, warps=4, stages=3)
PINNED_FLOAT32 = Tile(m=16, n=32, k=32, warps=4, stages=2)


class Fallbacks(Ops):
    """What the self-test may change in the operators."""

    pinned: dict[tuple[int, int], Tile]
    split_decode: bool
    fused: bool


# What held without a fall-back: a fact about the machine, so it is tested once a process.
_held: set[tuple[object, ...]] = set()


def run(
    ops: Fallbacks, *, linears: set[tuple[int, int, bool]], heads: set[tuple[int, int, int]], dtype: torch.dtype
) -> list[str]:
    """One sentence for each fall-back."""
    key = (type(ops), torch.cuda.current_device(), dtype, frozenset(linears), frozenset(heads))
    if key in _held:
        return []
    notes = _run(ops, linears, heads, dtype)
    if not notes:
        _held.add(key)
    return notes


def _run(
    ops: Fallbacks, linears: set[tuple[int, int, bool]], heads: set[tuple[int, int, int]], dtype: torch.dtype
) -> list[str]:
    random = torch.Generator(device=DEVICE).manual_seed(1)
    notes: list[str] = []
    with torch.no_grad():
        for inputs, outputs, bias in sorted(linears):
            notes += _linear(ops, inputs, outputs, bias, dtype, random)
        for h, j, d in sorted(heads):
            notes += _attention(ops, h, j, d, dtype, random)
        notes += _check_fused(ops, sorted(linears), sorted(heads), dtype, random)
    return notes


@dataclass(frozen=True, slots=True, kw_only=True)
class RowNorm:
    weight: Tensor
    eps: float
    form: NormForm


def _randn(*shape: int, dtype: torch.dtype, random: torch.Generator) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.float32, generator=random).to(dtype)


def _linear(
    ops: Fallbacks, inputs: int, outputs: int, bias: bool, dtype: torch.dtype, random: torch.Generator
) -> list[str]:
    x = _randn(ALL_ROWS, inputs, dtype=dtype, random=random)
    w = _randn(outputs, inputs, dtype=dtype, random=random) * inputs**-0.5
    b = _randn(outputs, dtype=dtype, random=random) if bias else None

    def holds() -> list[int]:
        whole = ops.linear(x, w, b)
        return [m for m in ROWS if not same_bits(ops.linear(x[:m], w, b), whole[:m])]

    failed = holds()
    if not failed:
        return []
    ops.pinned[(inputs, outputs)] = PINNED_FLOAT32 if dtype == torch.float32 else PINNED
    if holds():
        raise ExactnessError(
            f"linear {inputs}x{outputs} in {dtype} changes with the number of rows even with one tile, on this device"
        )
    return [f"linear {inputs}x{outputs} differs at {failed} rows: pinned to one tile"]


def paged_copy(k: Tensor, v: Tensor, block: int, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Caches with the keys and values [T, J, D] of one sequence on shuffled pages, and its table [1, W]."""
    tokens, j, d = k.shape
    pages = -(-tokens // block)
    table = torch.randperm(pages, device=k.device, generator=random).to(torch.int32)[None] + 1
    caches = torch.zeros((2, pages + 1, j, block, d), dtype=k.dtype, device=k.device)
    for cache, rows in zip(caches, (k, v), strict=True):
        padded = torch.zeros((pages * block, j, d), dtype=k.dtype, device=k.device)
        padded[:tokens] = rows
        cache[table[0].long()] = padded.view(pages, block, j, d).transpose(1, 2)
    return caches[0], caches[1], table


def decode_batch(position: int, table: Tensor, copies: int = 1) -> PagedBatch:
    device = table.device
    return PagedBatch(
        positions=torch.full((copies,), position, dtype=torch.int64, device=device),
        slots=torch.zeros(copies, dtype=torch.int64, device=device),
        cu_q=torch.arange(copies + 1, dtype=torch.int32, device=device),
        context_lens=torch.full((copies,), position + 1, dtype=torch.int32, device=device),
        block_tables=table.expand(copies, -1).contiguous(),
        q_lens=(1,) * copies,
        contexts=(position + 1,) * copies,
        num_decodes=copies,
    )


def _attention(ops: Fallbacks, h: int, j: int, d: int, dtype: torch.dtype, random: torch.Generator) -> list[str]:
    tokens = 700
    q, k, v = (_randn(tokens, n, d, dtype=dtype, random=random) for n in (h, j, j))
    spec = AttentionSpec(scale=d**-0.5)
    whole = ops.attention(q, k, v, Packed.of((tokens,), DEVICE), spec)
    k_cache, v_cache, table = paged_copy(k, v, ops.block_size, random)

    def holds(copies: int) -> list[int]:
        failed = []
        for position in (0, 1, 15, 63, 64, 65, 300, 511, 512, tokens - 1):
            batch = decode_batch(position, table, copies)
            out = ops.paged_attention(q[position].expand(copies, -1, -1).contiguous(), k_cache, v_cache, batch, spec)
            if not all(same_bits(row, whole[position]) for row in out):
                failed.append(position)
        return failed

    if failed := holds(-(-300 // j)):  # enough sequences that the blocks are not shared out
        raise ExactnessError(
            f"attention {h}/{j} heads of {d} in {dtype}: decode differs from prefill at positions {failed} on this device"
        )
    if ops.split_decode and (failed := holds(1)):
        ops.split_decode = False
        return [
            f"attention {h}/{j} heads of {d}: split decode differs at positions {failed}: one program a sequence instead"
        ]
    return []


def _check_fused(
    ops: Fallbacks,
    linears: list[tuple[int, int, bool]],
    heads: list[tuple[int, int, int]],
    dtype: torch.dtype,
    random: torch.Generator,
) -> list[str]:
    widths = sorted({inputs for inputs, _, _ in linears})
    wrong = [f"residual+norm of {w}" for w in widths if not _add_norm_holds(ops, w, dtype, random)]
    wrong += [f"head norm+rotary of {shape}" for shape in heads if not _prepare_holds(ops, shape, dtype, random)]
    wrong += [
        f"norm+product {k}x{n}" for k, n, bias in linears if not _norm_product_holds(ops, k, n, bias, dtype, random)
    ]
    wrong += [
        f"gate-up+activation {k}x{n}"
        for k, n, bias in linears
        if not bias and n % 2 == 0 and not _gated_holds(ops, k, n, dtype, random)
    ]
    if not wrong:
        return []
    ops.fused = False
    return [f"fused launches differ from their parts ({', '.join(wrong)}): taken apart"]


def _add_norm_holds(ops: Fallbacks, width: int, dtype: torch.dtype, random: torch.Generator) -> bool:
    x, r = (_randn(64, width, dtype=dtype, random=random) for _ in range(2))
    w = _randn(width, dtype=dtype, random=random)
    y, total = ops.add_rms_norm(x, r, w, 1e-6)
    return same_bits(total, r + x) and same_bits(y, ops.rms_norm(r + x, w, 1e-6))


def _prepare_holds(ops: Fallbacks, shape: tuple[int, int, int], dtype: torch.dtype, random: torch.Generator) -> bool:
    h, j, d = shape
    tokens = 70
    qkv = _randn(tokens, (h + 2 * j) * d, dtype=dtype, random=random)
    cos, sin = (_randn(tokens, d, dtype=dtype, random=random) for _ in range(2))
    weights = HeadNorm(
        q_weight=_randn(d, dtype=dtype, random=random), k_weight=_randn(d, dtype=dtype, random=random), eps=1e-6
    )
    batch = decode_batch(0, torch.zeros((1, 1), dtype=torch.int32, device=DEVICE))
    slots = torch.randperm(3 * ops.block_size, device=DEVICE, generator=random)[:tokens]
    batch = PagedBatch(positions=slots, slots=slots, cu_q=batch.cu_q, context_lens=batch.context_lens, block_tables=batch.block_tables,
                       q_lens=(tokens,), contexts=(tokens,), num_decodes=0)  # fmt: skip
    results = []
    for fused in (True, False):
        caches = torch.zeros((2, 3, j, ops.block_size, d), dtype=dtype, device=DEVICE)
        was, ops.fused = ops.fused, fused
        q = ops.prepare_qkv(qkv, shape, weights, cos, sin, caches[0], caches[1], batch)
        ops.fused = was
        results.append((q, caches))
    return all(same_bits(a, b) for a, b in zip(*results, strict=True))


def _norm_product_holds(
    ops: Fallbacks, inputs: int, outputs: int, bias: bool, dtype: torch.dtype, random: torch.Generator
) -> bool:
    """One row, plain and (where the outputs halve) gated."""
    w = _randn(outputs, inputs, dtype=dtype, random=random) * inputs**-0.5
    b = _randn(outputs, dtype=dtype, random=random) if bias else None
    norm = RowNorm(weight=_randn(inputs, dtype=dtype, random=random), eps=1e-6, form=NormForm.PLAIN)
    for kind in (None, "silu") if not bias and outputs % 2 == 0 else (None,):
        h, r = (_randn(1, inputs, dtype=dtype, random=random) for _ in range(2))
        found, total = ops.norm_linear(h, r, norm, w, b, kind)
        normed = ops.rms_norm(r + h, norm.weight, 1e-6)
        plain = ops.linear(normed, w, b)
        apart = plain if kind is None else ops.act_mul(plain[:, : outputs // 2], plain[:, outputs // 2 :], kind)
        if not same_bits(found, apart) or not same_bits(total, r + h):
            return False
    return True


def _gated_holds(ops: Fallbacks, inputs: int, outputs: int, dtype: torch.dtype, random: torch.Generator) -> bool:
    x = _randn(300, inputs, dtype=dtype, random=random)
    w = _randn(outputs, inputs, dtype=dtype, random=random) * inputs**-0.5
    gate, up = ops.linear(x, w).chunk(2, dim=-1)
    apart = ops.act_mul(gate, up, "silu")
    return all(same_bits(ops.gated_linear(x[:m], w, "silu"), apart[:m]) for m in (1, 5, 16, 17, 32, 64, 100, 256, 300))
