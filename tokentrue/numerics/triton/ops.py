"""Exact operators of a CUDA device (Ampere and newer), in Triton.

Tiles are free to vary while they agree on this machine: `self_test` compares them for the model's shapes, and pins one
if they do not.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

import tokentrue.numerics.triton.attention as attention
import tokentrue.numerics.triton.elementwise as elementwise
import tokentrue.numerics.triton.experts as expert_kernels
import tokentrue.numerics.triton.low_rank as low_rank
import tokentrue.numerics.triton.matmul as matmul
import tokentrue.numerics.triton.sampling as sampling
import tokentrue.numerics.triton.selftest as selftest
from tokentrue.numerics.ops import (
    AttentionSpec,
    HeadNorm,
    Heads,
    Linears,
    LowRankStack,
    Norm,
    NormForm,
    Packed,
    PagedBatch,
    RowSlots,
)
from tokentrue.numerics.triton.delta import scan

# Most sequences × key heads of a decode step whose key blocks are shared out to several programs.
MOST_SHARED = 64

# Rows up to which gate, up and activation share a launch; beyond, two accumulators leave no room for a tall tile.
FEW_ROWS = 256


def splits_for(programs: int) -> int:
    """Two programs per multiprocessor of an H200; measured there."""
    return min(32, 264 // programs) if programs <= MOST_SHARED else 1


class TritonOps(selftest.Fallbacks):
    """For one model on one device."""

    name = "triton"
    block_size = 64
    reads_16bit = True

    def __init__(self) -> None:
        self.pinned: dict[tuple[int, int], matmul.Tile] = {}  # (K, N) whose tiles disagree here -> its one tile
        self.split_decode = True
        self.fused = True
        self.tile: attention.QueryTile | None = None
        self._arrived: Tensor | None = None
        self._packed: tuple[Packed, int, int, attention.Tiles, attention.Tiles] | None = None
        self._batch: tuple[PagedBatch, int, int, attention.Tiles] | None = None

    rms_norm = staticmethod(elementwise.rms_norm)
    act_mul = staticmethod(elementwise.act_mul)
    store_kv = staticmethod(elementwise.store_kv)
    log_softmax = staticmethod(sampling.log_softmax)
    token_logprobs = staticmethod(sampling.token_logprobs)
    experts = staticmethod(expert_kernels.experts)
    pack_low_ranks = staticmethod(low_rank.pack)
    delta_scan = staticmethod(scan)

    # ---- rows x features
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return matmul.linear(x, weight, bias, tile=self.pinned.get((weight.shape[1], weight.shape[0])))

    def activation(self, x: Tensor, kind: str) -> Tensor:
        if kind in {"sigmoid", "softplus"}:  # torch's own kernels compute every element alone, in float32
            return (torch.sigmoid(x.float()) if kind == "sigmoid" else F.softplus(x.float())).to(x.dtype)
        return elementwise.activation(x, kind)

    def gated_linear(self, x: Tensor, gate_up: Tensor, kind: str) -> Tensor:
        if self.pinned or not self.fused or x.shape[0] > FEW_ROWS:
            gate, up = self.linear(x, gate_up).chunk(2, dim=-1)
            return self.act_mul(gate, up, kind)
        return matmul.gated_product(x, gate_up, act=kind)

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        def turned(x: Tensor) -> Tensor:
            if cos.shape[-1] < x.shape[-1]:  # partial: the rest stays as it is
                return torch.cat((turned(x[..., : cos.shape[-1]]), x[..., cos.shape[-1] :]), -1)
            left, right = x.chunk(2, dim=-1)
            return (x * cos[:, None] + torch.cat((-right, left), dim=-1) * sin[:, None]).to(x.dtype)

        return turned(q), turned(k)

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
        heads, key_heads = q.shape[1], k.shape[1]
        if self._packed is None or self._packed[0] is not packed or self._packed[1:3] != (heads, key_heads):
            tiles = attention.tiles_of(packed.lengths, heads=heads, key_heads=key_heads, dtype=q.dtype, device=q.device)
            backward = attention.gradient_tiles(packed.lengths, q.dtype, q.device)
            self._packed = (packed, heads, key_heads, tiles, backward)
        return attention.attention(q, k, v, packed, spec, *self._packed[3:])

    def paged_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, spec: AttentionSpec
    ) -> Tensor:
        q = attention.dense_heads(q)
        (_, heads, size), key_heads = q.shape, k_cache.shape[1]
        keys = attention.Keys(
            k=k_cache, v=v_cache, starts=batch.cu_q, table=batch.block_tables, context=batch.context_lens
        )
        # A captured step has rows that no tile computes.
        out = torch.empty_like(q) if batch.plan is None else torch.zeros_like(q)
        if batch.num_decodes:
            splits = splits_for(batch.num_decodes * key_heads) if self.split_decode else 0
            parts = None
            if splits > 1:
                room = batch.block_tables.shape[1] * k_cache.shape[2]
                shape, arrived = (heads, key_heads, size), self.arrived(q.device)
                parts = attention.parts_for(arrived, batch.num_decodes, room, splits, shape=shape, dtype=q.dtype)
            attention.attend(q, keys, out, spec, tiles=None, sequences=batch.num_decodes, parts=parts, tile=self.tile)
        if batch.num_decodes < len(batch.q_lens):
            attention.attend(
                q, keys, out, spec, tiles=batch.plan or self.tiles_of(batch, q, key_heads), sequences=len(batch.q_lens)
            )
        return out

    def tiles_of(self, batch: PagedBatch, q: Tensor, key_heads: int) -> attention.Tiles:
        """Cached by the first layer of a step."""
        heads = q.shape[1]
        if self._batch is None or self._batch[0] is not batch or self._batch[1:3] != (heads, key_heads):
            skip = batch.num_decodes
            tiles = attention.tiles_of(
                batch.q_lens, skip=skip, heads=heads, key_heads=key_heads, dtype=q.dtype, device=q.device
            )
            self._batch = (batch, heads, key_heads, tiles)
        return self._batch[3]

    def arrived(self, device: torch.device) -> Tensor:
        if self._arrived is None:
            self._arrived = torch.zeros(MOST_SHARED, dtype=torch.int32, device=device)
        return self._arrived

    # ---- compositions
    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, form: NormForm = NormForm.PLAIN
    ) -> tuple[Tensor, Tensor]:
        if not self.fused or (
            torch.is_grad_enabled() and (x.requires_grad or residual.requires_grad or weight.requires_grad)
        ):
            return super().add_rms_norm(x, residual, weight, eps, form=form)
        return elementwise.add_rms_norm(x, residual, weight, eps, form=form)

    def norm_linear(
        self,
        h: Tensor,
        residual: Tensor,
        norm: Norm,
        weight: Tensor,
        bias: Tensor | None = None,
        kind: str | None = None,
    ) -> tuple[Tensor, Tensor]:
        if self.fused and not self.pinned and matmul.fits_norm_product(h, weight, gated=kind is not None):
            return matmul.norm_product(h, residual, norm.weight, norm.eps, weight, bias, form=norm.form, act=kind)
        return super().norm_linear(h, residual, norm, weight, bias, kind)

    def add_low_ranks(self, y: Tensor, x: Tensor, stack: LowRankStack, rows: RowSlots) -> None:
        if stack.packed is None:
            super().add_low_ranks(y, x, stack, rows)
        else:
            low_rank.add_low_ranks(y, x, stack, rows)

    def prepare_qkv(
        self,
        qkv: Tensor,
        heads: tuple[int, int, int],
        norm: HeadNorm | None,
        cos: Tensor | None,
        sin: Tensor | None,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: PagedBatch,
    ) -> Tensor:
        if not self.fused or cos is None or sin is None or cos.shape[-1] != heads[2] or cos.dtype != qkv.dtype:
            return super().prepare_qkv(qkv, heads, norm, cos, sin, k_cache, v_cache, batch)
        return elementwise.prepare_qkv(qkv, heads, norm, cos, sin, k_cache, v_cache, batch.slots)

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
            "activation": "triton, float32, rounded once",
            "rotary": "elementwise, rounded after every step",
            "log_softmax": f"triton, float32, chunks of {sampling.CHUNK} folded by one program",
            "delta_scan": "triton, recurrent, one program a sequence, head and block of values",
            "route": "triton, one program a token, ties by ascending expert",
            "experts": "triton, stable groups by expert, slots added in order",
            "fused": "residual+norm, head norm+rotary+store, gate-up+activation" if self.fused else "nothing",
        }

    def self_test(self, *, linears: Linears, heads: Heads, dtype: torch.dtype) -> list[str]:
        return selftest.run(self, linears=linears, heads=heads, dtype=dtype)
