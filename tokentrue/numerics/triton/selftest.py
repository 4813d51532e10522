"""Start-up self-test: do the operators satisfy their invariant for this model's shapes on this machine?

A product that changes with the number of rows is pinned to one tile; a decode that differs from prefill is not split; a
fused launch that differs from its parts is replaced by them. Without a fallback, raises ExactnessError.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokentrue.errors import ExactnessError
from tokentrue.numerics.ops import AttentionSpec, HeadNorm, Heads, Linears, NormForm, Ops, Packed, PagedBatch, same_bits
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


def run(ops: Fallbacks, *, linears: Linears, heads: Heads, dtype: torch.dtype) -> list[str]:
    """Returns one sentence per fallback."""
    key = (type(ops), torch.cuda.current_device(), dtype, frozenset(linears), frozenset(heads))
    if key in _held:
        return []
    check = SelfTest(ops, dtype)
    with torch.no_grad():
        for shape in sorted(linears):
            check.linear(*shape)
        for shape in sorted(heads):
            check.attention(*shape)
        check.fused(sorted(linears), sorted(heads))
    if not check.notes:
        _held.add(key)
    return check.notes


@dataclass(frozen=True, slots=True, kw_only=True)
class RowNorm:
    weight: Tensor
    eps: float
    form: NormForm


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


class SelfTest:
    def __init__(self, ops: Fallbacks, dtype: torch.dtype) -> None:
        self.ops = ops
        self.dtype = dtype
        self.random = torch.Generator(device=DEVICE).manual_seed(1)
        self.notes: list[str] = []

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE, dtype=torch.float32, generator=self.random).to(self.dtype)

    def weights(self, inputs: int, outputs: int, bias: bool = False) -> tuple[Tensor, Tensor | None]:
        return self.randn(outputs, inputs) * inputs**-0.5, self.randn(outputs) if bias else None

    def linear(self, inputs: int, outputs: int, bias: bool) -> None:
        x, (w, b) = self.randn(ALL_ROWS, inputs), self.weights(inputs, outputs, bias)

        def failing_rows() -> list[int]:
            whole = self.ops.linear(x, w, b)
            return [m for m in ROWS if not same_bits(self.ops.linear(x[:m], w, b), whole[:m])]

        if failed := failing_rows():
            what = f"linear {inputs}x{outputs}"
            self.ops.pinned[(inputs, outputs)] = PINNED_FLOAT32 if self.dtype == torch.float32 else PINNED
            if failing_rows():
                text = f"{what} in {self.dtype} changes with the number of rows even with one tile, on this device"
                raise ExactnessError(text)
            self.notes.append(f"{what} differs at {failed} rows: pinned to one tile")

    def attention(self, h: int, j: int, d: int) -> None:
        ops, tokens, what = self.ops, 700, f"attention {h}/{j} heads of {d}"
        q, k, v = (self.randn(tokens, n, d) for n in (h, j, j))
        spec = AttentionSpec(scale=d**-0.5)
        whole = ops.attention(q, k, v, Packed.of((tokens,), DEVICE), spec)
        k_cache, v_cache, table = paged_copy(k, v, ops.block_size, self.random)

        def failing_positions(copies: int) -> list[int]:
            failed = []
            for position in (0, 1, 15, 63, 64, 65, 300, 511, 512, tokens - 1):
                queries = q[position].expand(copies, -1, -1).contiguous()
                out = ops.paged_attention(queries, k_cache, v_cache, decode_batch(position, table, copies), spec)
                if not all(same_bits(row, whole[position]) for row in out):
                    failed.append(position)
            return failed

        if failed := failing_positions(-(-300 // j)):  # enough sequences that the blocks are not shared out
            text = f"{what} in {self.dtype}: decode differs from prefill at positions {failed} on this device"
            raise ExactnessError(text)
        if ops.split_decode and (failed := failing_positions(1)):
            ops.split_decode = False
            self.notes.append(f"{what}: split decode differs at positions {failed}: one program a sequence instead")

    def fused(self, linears: list[tuple[int, int, bool]], heads: list[tuple[int, int, int]]) -> None:
        wrong = [f"residual+norm of {w}" for w in sorted({k for k, _, _ in linears}) if not self.add_norm_holds(w)]
        wrong += [f"head norm+rotary of {shape}" for shape in heads if not self.prepare_holds(shape)]
        wrong += [f"norm+product {k}x{n}" for k, n, bias in linears if not self.norm_product_holds(k, n, bias)]
        halves = [(k, n) for k, n, bias in linears if not bias and n % 2 == 0]
        wrong += [f"gate-up+activation {k}x{n}" for k, n in halves if not self.gated_holds(k, n)]
        if wrong:
            self.ops.fused = False
            self.notes.append(f"fused launches differ from their parts ({', '.join(wrong)}): taken apart")

    def add_norm_holds(self, width: int) -> bool:
        x, r, w = self.randn(64, width), self.randn(64, width), self.randn(width)
        y, total = self.ops.add_rms_norm(x, r, w, 1e-6)
        return same_bits(total, r + x) and same_bits(y, self.ops.rms_norm(r + x, w, 1e-6))

    def prepare_holds(self, shape: tuple[int, int, int]) -> bool:
        (h, j, d), tokens, ops = shape, 70, self.ops
        qkv, cos, sin = self.randn(tokens, (h + 2 * j) * d), self.randn(tokens, d), self.randn(tokens, d)
        weights = HeadNorm(q_weight=self.randn(d), k_weight=self.randn(d), eps=1e-6)
        slots = torch.randperm(3 * ops.block_size, device=DEVICE, generator=self.random)[:tokens]
        batch = decode_batch(0, torch.zeros((1, 1), dtype=torch.int32, device=DEVICE))
        batch = replace(batch, positions=slots, slots=slots, q_lens=(tokens,), contexts=(tokens,), num_decodes=0)
        results = []
        for fused in (True, False):
            caches = torch.zeros((2, 3, j, ops.block_size, d), dtype=self.dtype, device=DEVICE)
            was, ops.fused = ops.fused, fused
            q = ops.prepare_qkv(qkv, shape, weights, cos, sin, caches[0], caches[1], batch)
            ops.fused = was
            results.append((q, caches))
        return all(same_bits(a, b) for a, b in zip(*results, strict=True))

    def norm_product_holds(self, inputs: int, outputs: int, bias: bool) -> bool:
        """One row, plain and (if the outputs halve) gated."""
        ops, (w, b) = self.ops, self.weights(inputs, outputs, bias)
        norm = RowNorm(weight=self.randn(inputs), eps=1e-6, form=NormForm.PLAIN)
        for kind in (None, "silu") if not bias and outputs % 2 == 0 else (None,):
            h, r = self.randn(1, inputs), self.randn(1, inputs)
            found, total = ops.norm_linear(h, r, norm, w, b, kind)
            apart = ops.linear(ops.rms_norm(r + h, norm.weight, 1e-6), w, b)
            if kind is not None:
                apart = ops.act_mul(apart[:, : outputs // 2], apart[:, outputs // 2 :], kind)
            if not same_bits(found, apart) or not same_bits(total, r + h):
                return False
        return True

    def gated_holds(self, inputs: int, outputs: int) -> bool:
        ops, x, (w, _) = self.ops, self.randn(300, inputs), self.weights(inputs, outputs)
        gate, up = ops.linear(x, w).chunk(2, dim=-1)
        apart = ops.act_mul(gate, up, "silu")
        rows = (1, 5, 16, 17, 32, 64, 100, 256, 300)
        return all(same_bits(ops.gated_linear(x[:m], w, "silu"), apart[:m]) for m in rows)
