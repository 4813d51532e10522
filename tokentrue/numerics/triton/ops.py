"""Exact operators of a CUDA device (Ampere and newer), in Triton.

Tiles are free to vary while `self_test` finds that they agree for the model's shapes. A product that changes with the
number of rows is pinned to one tile; a decode that differs from prefill is not split; a fused launch that differs from
its parts is replaced by them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

import tokentrue.numerics.triton.attention as attention
import tokentrue.numerics.triton.delta as delta
import tokentrue.numerics.triton.elementwise as elementwise
import tokentrue.numerics.triton.experts as expert_kernels
import tokentrue.numerics.triton.leaves as leaf_kernels
import tokentrue.numerics.triton.low_rank as low_rank
import tokentrue.numerics.triton.matmul as matmul
import tokentrue.numerics.triton.sampling as sampling
from tokentrue.errors import ExactnessError
from tokentrue.numerics.ops import (
    AttentionSpec,
    DeltaInputs,
    DeltaStates,
    HeadNorm,
    Heads,
    Linears,
    LowRankStack,
    Norm,
    NormForm,
    Ops,
    Packed,
    PagedBatch,
    RowSlots,
    same_bits,
)
from tokentrue.numerics.selftest import differing_cuts, differing_runs, fill_pages, paged_batch
from tokentrue.numerics.triton.launch import Tile, align_rows

# Most sequences × key heads of a decode step whose key blocks are shared out to several programs.
MOST_SHARED = 64

# Rows up to which gate, up and activation share a launch; beyond, two accumulators leave no room for a tall tile.
FEW_ROWS = 256


def splits_for(programs: int) -> int:
    """Two programs per multiprocessor of an H200."""
    return min(32, 264 // programs) if programs <= MOST_SHARED else 1


class TritonOps(Ops):
    """For one model on one device."""

    block_size = 64
    reads_16bit = True

    def __init__(self) -> None:
        self.pinned: dict[tuple[int, int], Tile] = {}  # (K, N) whose tiles disagree here -> its one tile
        self.split_decode = True
        self.fused = True
        self._arrived: Tensor | None = None
        self._tiles: (
            tuple[Packed | PagedBatch, Mapping[str, object], attention.Tiles, attention.Tiles | None] | None
        ) = None

    rms_norm = staticmethod(elementwise.rms_norm)
    act_mul = staticmethod(elementwise.act_mul)
    store_kv = staticmethod(elementwise.store_kv)
    log_softmax = staticmethod(sampling.log_softmax)
    token_logprobs = staticmethod(sampling.token_logprobs)
    experts = staticmethod(expert_kernels.experts)
    expert_rows = staticmethod(expert_kernels.expert_rows)
    add_slots = staticmethod(expert_kernels.add_slots)
    pack_low_ranks = staticmethod(low_rank.pack)

    # ---- rows x features
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return matmul.linear(x, weight, bias, tile=self.pinned.get((weight.shape[1], weight.shape[0])))

    def leaf_product(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, leaves: int, *, rounded: bool = True
    ) -> Tensor:
        if not leaf_kernels.fits(x, leaves):
            return super().leaf_product(x, weight, bias, leaves, rounded=rounded)
        return leaf_kernels.leaf_product(x, weight, bias, leaves, x.dtype if rounded else torch.float32)

    def activation(self, x: Tensor, kind: str) -> Tensor:
        if kind == "softplus":  # torch's own kernel computes every element alone, in float32
            return F.softplus(x.float()).to(x.dtype)
        return elementwise.activation(x, kind)

    def gated_linear(self, x: Tensor, gate_up: Tensor, kind: str) -> Tensor:
        if self.pinned or not self.fused or x.shape[0] > FEW_ROWS:
            return super().gated_linear(x, gate_up, kind)
        return matmul.product(x, gate_up, act=kind)

    def logits_gradient(self, logits: Tensor, ids: Tensor, grads: Tensor, *, entropy: bool) -> Tensor:
        if entropy:
            return super().logits_gradient(logits, ids, grads, entropy=True)
        return sampling.logits_gradient(logits, ids, grads)

    def route(self, logits: Tensor, top_k: int, normalise: bool, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if not expert_kernels.fits_route(logits, top_k):
            return super().route(logits, top_k, normalise, given)
        return expert_kernels.route(logits, top_k, normalise, given)

    # ---- attention
    def attention(self, q: Tensor, k: Tensor, v: Tensor, packed: Packed, spec: AttentionSpec) -> Tensor:
        return attention.attention(q, k, v, packed, spec, *self.tiles_of(packed, q, k.shape[1]))

    def paged_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, spec: AttentionSpec
    ) -> Tensor:
        q, pages, decodes, key_heads = attention.dense_heads(q), (k_cache, v_cache), batch.num_decodes, k_cache.shape[1]
        # A captured step has rows that no tile computes.
        out = torch.empty_like(q) if batch.plan is None else torch.zeros_like(q)
        if decodes:
            splits = splits_for(decodes * key_heads) if self.split_decode else 1
            if splits > 1 and self._arrived is None:
                self._arrived = torch.zeros(MOST_SHARED, dtype=torch.int32, device=q.device)
            attention.attend(q, *pages, out, spec, batch, None, splits=splits, arrived=self._arrived)
        if decodes < len(batch.q_lens):
            attention.attend(q, *pages, out, spec, batch, batch.plan or self.tiles_of(batch, q, key_heads)[0])
        return out

    def tiles_of(
        self, source: Packed | PagedBatch, q: Tensor, key_heads: int
    ) -> tuple[attention.Tiles, attention.Tiles | None]:
        """Forward and backward; cached: the same for every layer of a pass or step."""
        shape = {"heads": q.shape[1], "key_heads": key_heads, "size": q.shape[2], "dtype": q.dtype}
        if self._tiles is None or self._tiles[0] is not source or self._tiles[1] != shape:
            packed = isinstance(source, Packed)
            lengths, skip = (source.lengths, 0) if packed else (source.q_lens, source.num_decodes)
            forward = attention.copy_tiles(attention.tile_starts(lengths, skip=skip, **shape), q.device)
            backward = attention.gradient_tiles(lengths, q.dtype, q.device) if packed else None
            self._tiles = (source, shape, forward, backward)
        return self._tiles[2:]

    # ---- compositions
    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, form: NormForm = NormForm.PLAIN
    ) -> tuple[Tensor, Tensor]:
        if not self.fused:
            return super().add_rms_norm(x, residual, weight, eps, form=form)
        return elementwise.add_rms_norm(x, residual, weight, eps, form)

    def norm_linear(
        self, h: Tensor, residual: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None, kind: str | None = None
    ) -> tuple[Tensor, Tensor]:
        if self.fused and not self.pinned and matmul.fits_norm_product(h, weight, gated=kind is not None):
            return matmul.norm_product(h, residual, norm, weight, bias, kind)
        return super().norm_linear(h, residual, norm, weight, bias, kind)

    def adapted_linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, stack: LowRankStack, rows: RowSlots
    ) -> Tensor:
        if stack.packed is None:
            return super().adapted_linear(x, weight, bias, stack, rows)
        x, grouped = align_rows(x), rows.groups is not None
        y = matmul.product(x, weight, bias, tile=self.pinned.get((weight.shape[1], weight.shape[0])), early=grouped)
        low_rank.add_low_ranks(y, x, stack, rows, beside=grouped)
        return y

    def prepare_qkv(
        self, qkv: Tensor, heads: tuple[int, int, int], norm: HeadNorm | None, cos: Tensor | None, sin: Tensor | None,
        k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, *, gated: bool = False,
    ) -> Tensor:  # fmt: skip
        if not self.fused or cos is None or sin is None or cos.dtype != qkv.dtype:
            return super().prepare_qkv(qkv, heads, norm, cos, sin, k_cache, v_cache, batch, gated=gated)
        return elementwise.prepare_qkv(qkv, heads, norm, cos, sin, k_cache, v_cache, batch.slots, gated=gated)

    def gate_heads(self, x: Tensor, gate: Tensor) -> Tensor:
        return elementwise.gate_heads(x, gate) if self.fused else super().gate_heads(x, gate)

    # ---- linear attention
    def delta_rule(self, inputs: DeltaInputs, sequences: Packed, states: DeltaStates | None) -> Tensor:
        # Replayed with other lengths, a captured step has rows of no sequence.
        return delta.delta_rule(inputs, sequences, states, padded=not sum(sequences.lengths))

    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not self.fused or (torch.is_grad_enabled() and any(t.requires_grad for t in (x, gate, weight))):
            return super().gated_norm(x, gate, weight, eps)
        return delta.gated_norm(x, gate, weight, eps)

    # ---- self-knowledge
    def contract(self) -> Mapping[str, str]:
        blocks = {str(d).removeprefix("torch."): attention.key_block(d) for d in (torch.bfloat16, torch.float32)}
        return {
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
            "triton": triton.__version__,
            "linear": "triton, one float32 sum over K in ascending order, no split-K, tile by rows, descriptors from Hopper on"
            + "".join(f"; {k}x{n} pinned to {t.m}x{t.n}x{t.k}" for (k, n), t in sorted(self.pinned.items())),
            "attention": f"triton, key blocks of {blocks}, each under its own maximum, folded in order, a sink last; dense and paged",
            "decode": "key blocks over programs, folded in order"
            if self.split_decode
            else "one program a sequence and key head",
            "rms_norm": "triton, one program a row, float32",
            "activation": "triton, float32, rounded once; sigmoid 1/(1+exp(-x))",
            "rotary": "elementwise, rounded after every step",
            "log_softmax": f"triton, float32, chunks of {sampling.CHUNK} folded by one program",
            "delta_rule": f"triton, convolution and recurrence by one warp a sequence, head and {delta.BLOCK} values",
            "route": "triton, one program a token, ties by ascending expert",
            "experts": "triton, stable groups by expert, slots added in order",
            "fused": "residual+norm, head norm+rotary+store, gate-up+activation" if self.fused else "nothing",
        }

    def self_test(self, *, linears: Linears, heads: Heads, dtype: torch.dtype) -> list[str]:
        key = (type(self), torch.cuda.current_device(), dtype, frozenset(linears), frozenset(heads))
        if key in _held:
            return []
        check = SelfTest(self, dtype)
        with torch.no_grad():
            for shape in sorted(linears):
                check.linear(*shape)
            for shape in sorted(heads):
                check.attention(*shape)
            check.fused(sorted(linears), sorted(heads))
        if not check.notes:
            _held.add(key)
        return check.notes


DEVICE = "cuda"
ROWS = (1, 2, 5, 16, 17, 32, 33, 64, 100, 256, 300, 640)
ALL_ROWS = 1100  # past every change of tile
GATED_ROWS = (1, 5, 16, 17, 32, 64, 100, 256, 300)
PINNED = Tile(64, 64, 64, 4, 3)
PINNED_FLOAT32 = Tile(16, 32, 32, 4, 2)

# What held without a fall-back: a fact about the machine, so it is tested once a process.
_held: set[tuple[object, ...]] = set()


class SelfTest:
    def __init__(self, ops: TritonOps, dtype: torch.dtype) -> None:
        self.ops = ops
        self.dtype = dtype
        self.random = torch.Generator(device=DEVICE).manual_seed(1)
        self.notes: list[str] = []

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE, dtype=torch.float32, generator=self.random).to(self.dtype)

    def linear(self, inputs: int, outputs: int, bias: bool) -> None:
        x, w = self.randn(ALL_ROWS, inputs), self.randn(outputs, inputs) * inputs**-0.5
        b, what = self.randn(outputs) if bias else None, f"linear {inputs}x{outputs}"

        def failing_rows() -> list[int]:
            cuts = differing_cuts(lambda rows: self.ops.linear(rows, w, b), x, ((0, m) for m in ROWS))
            return [m for _, m in cuts]

        if failed := failing_rows():
            self.ops.pinned[(inputs, outputs)] = PINNED_FLOAT32 if self.dtype == torch.float32 else PINNED
            if failing_rows():
                raise ExactnessError(
                    f"{what} in {self.dtype} changes with the number of rows even with one tile, on this device"
                )
            self.notes.append(f"{what} differs at {failed} rows: pinned to one tile")

    def attention(self, h: int, j: int, d: int) -> None:
        ops, tokens, what = self.ops, 700, f"attention {h}/{j} heads of {d}"
        q, k, v = (self.randn(tokens, n, d) for n in (h, j, j))
        spec = AttentionSpec(scale=d**-0.5)
        whole = ops.attention(q, k, v, Packed.of((tokens,), DEVICE), spec)
        pages = fill_pages(ops, k, v, self.random)

        def failing_positions(copies: int) -> list[int]:
            decodes = [(position, 1) for position in (0, 1, 15, 63, 64, 65, 300, 511, 512, tokens - 1)]
            return differing_runs(ops, q, whole, pages, spec, decodes, copies)

        if failed := failing_positions(-(-300 // j)):  # enough sequences that the blocks are not shared out
            raise ExactnessError(
                f"{what} in {self.dtype}: decode differs from prefill at positions {failed} on this device"
            )
        if ops.split_decode and (failed := failing_positions(1)):
            ops.split_decode = False
            self.notes.append(f"{what}: split decode differs at positions {failed}: one program a sequence instead")

    def fused(self, linears: list[tuple[int, int, bool]], heads: list[tuple[int, int, int]]) -> None:
        ops, randn, was, wrong = self.ops, self.randn, self.ops.fused, list[str]()

        def compare(what: str, method: Callable[..., Any], *args: Any) -> None:
            results = []
            for fused in (False, True):
                ops.fused = fused
                found = method(*args)
                results.append(found if isinstance(found, tuple) else (found,))
            if what not in wrong and not all(same_bits(apart, one) for apart, one in zip(*results, strict=True)):
                wrong.append(what)

        for k in sorted({k for k, _, _ in linears}):
            compare(f"residual+norm of {k}", ops.add_rms_norm, randn(64, k), randn(64, k), randn(k), 1e-6)
        for h, j, d in heads:
            qkv, cos, sin = randn(70, (h + 2 * j) * d), randn(70, d), randn(70, d)
            norm = HeadNorm(q_weight=randn(d), k_weight=randn(d), eps=1e-6)
            compare(f"head norm+rotary of {(h, j, d)}", self.prepare_qkv, qkv, (h, j, d), norm, cos, sin)
            wide, part = randn(70, (2 * h + 2 * j) * d), d // 4 * 2
            turns = (cos[:, :part].contiguous(), sin[:, :part].contiguous())
            gated = partial(self.prepare_qkv, gated=True)
            compare(f"gated head norm+rotary of {(h, j, d)}", gated, wide, (h, j, d), norm, *turns)
            gate = wide[:, : 2 * h * d].view(-1, h, 2, d)[:, :, 1]
            compare(f"gate of {h} heads of {d}", ops.gate_heads, randn(70, h * d), gate)
            compare(f"gated norm of {d}", ops.gated_norm, randn(70, h, d), randn(70, h, d), randn(d), 1e-6)
        for k, n, bias in linears:
            x, w, b = randn(300, k), randn(n, k) * k**-0.5, randn(n) if bias else None
            norm = Norm(weight=randn(k), eps=1e-6, form=NormForm.PLAIN)
            compare(f"norm+product {k}x{n}", ops.norm_linear, x[:1], x[1:2], norm, w, b)
            if not bias and n % 2 == 0:
                compare(f"norm+product {k}x{n}", ops.norm_linear, x[2:3], x[3:4], norm, w, b, "silu")
                for m in GATED_ROWS:
                    compare(f"gate-up+activation {k}x{n}", ops.gated_linear, x[:m], w, "silu")
        ops.fused = was and not wrong
        if wrong:
            self.notes.append(f"fused launches differ from their parts ({', '.join(wrong)}): taken apart")

    def prepare_qkv(
        self, qkv: Tensor, heads: tuple[int, int, int], *args: Any, gated: bool = False
    ) -> tuple[Tensor, ...]:
        """The queries, and the pages that the keys and values went to."""
        _, j, d = heads
        slots = torch.arange(qkv.shape[0], device=DEVICE) * 2 + 1
        batch = replace(paged_batch(0, len(slots), slots.new_zeros(1, 1, dtype=torch.int32)), slots=slots)
        k_cache, v_cache = torch.zeros((2, 3, j, self.ops.block_size, d), dtype=self.dtype, device=DEVICE)
        return self.ops.prepare_qkv(qkv, heads, *args, k_cache, v_cache, batch, gated=gated), k_cache, v_cache
