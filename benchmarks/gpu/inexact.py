"""The price of exactness: what the engine does with ordinary operators."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tokentrue.numerics.ops import AttentionSpec, Norm, Ops, PagedBatch
from tokentrue.numerics.triton import TritonOps, attention
from tokentrue.numerics.triton.attention import QueryTile


class InexactOps(TritonOps):
    """The same forward with exactness off: cuBLAS products and a quicker decode tile, whose bits depend on the batch."""

    reads_16bit = False

    def paged_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, spec: AttentionSpec
    ) -> Tensor:
        exact = attention.tile_of
        # A row's sums over four warps: faster, and not invariant.
        attention.tile_of = lambda *args, decodes=False: QueryTile(16, 4, 3) if decodes else exact(*args)
        try:
            return super().paged_attention(q, k_cache, v_cache, batch, spec)
        finally:
            attention.tile_of = exact

    def norm_linear(
        self,
        h: Tensor,
        residual: Tensor,
        norm: Norm,
        weight: Tensor,
        bias: Tensor | None = None,
        kind: str | None = None,
    ) -> tuple[Tensor, Tensor]:
        return Ops.norm_linear(self, h, residual, norm, weight, bias, kind)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias)

    def gated_linear(self, x: Tensor, gate_up: Tensor, kind: str) -> Tensor:
        gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
        return self.act_mul(gate, up, kind)

    def log_softmax(self, logits: Tensor) -> Tensor:
        return torch.log_softmax(logits, dim=-1)

    def token_logprobs(self, logits: Tensor, ids: Tensor) -> Tensor:
        return torch.log_softmax(logits, dim=-1).gather(-1, ids[..., None]).squeeze(-1)

    def self_test(
        self, *, linears: set[tuple[int, int, bool]], heads: set[tuple[int, int, int]], dtype: torch.dtype
    ) -> list[str]:
        return ["exactness is off"]
