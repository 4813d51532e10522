"""Latent attention (DeepSeek-V3): queries and keys through low-rank products, one rotary key for all heads.

Keys and values are expanded when they are computed, and cached expanded, because the trainer expands them too:
multiplying queries by the expansion instead (as engines do to cache the latent alone) changes the order of the sums,
and the bits. The cache holds as much as that of plain attention with as many key heads as query heads; values are
padded to the size of keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokentrue.errors import ExactnessError
from tokentrue.numerics import AttentionSpec, NormForm, Ops, PagedBatch
from tokentrue.numerics.patching.replacements import norm_kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    weight: Tensor
    eps: float
    form: NormForm


def data_of(parameter: nn.Parameter | None) -> Tensor | None:
    return None if parameter is None else parameter.data


def read_norm(name: str, module: nn.Module) -> Norm:
    eps, form = norm_kind(name, module)
    return Norm(weight=module.weight.data, eps=eps, form=form)  # pyright: ignore


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """q = up(norm(down(x))) (or one product); latent and rotary key = kv_down(x); keys and values =
    kv_up(norm(latent))."""

    q_down: Projection | None
    q_norm: Norm | None
    q_up: Projection
    kv_down: Projection
    kv_norm: Norm
    kv_up: Projection
    out: Tensor
    out_bias: Tensor | None
    spec: AttentionSpec
    rope: str
    plain_size: int  # values of a key without, and behind them `rotary_size` values with, a rotary embedding
    rotary_size: int
    value_size: int
    pairs: bool  # rotary pairs lie side by side, not in halves

    def weights(self) -> Iterator[Tensor]:
        yield from (part.weight for part in (self.q_down, self.q_up, self.kv_down, self.kv_up) if part is not None)
        yield self.out

    def attend(
        self, ops: Ops, h: Tensor, cos: Tensor, sin: Tensor, cache: tuple[Tensor, Tensor], batch: PagedBatch
    ) -> Tensor:
        """[T, H*V] of hidden states [T,K]; keys and values of the step go into the cache."""
        size = self.plain_size + self.rotary_size
        q = h if self.q_down is None else ops.linear(h, self.q_down.weight, self.q_down.bias)
        q = q if self.q_norm is None else ops.rms_norm(q, self.q_norm.weight, self.q_norm.eps, form=self.q_norm.form)
        q = ops.linear(q, self.q_up.weight, self.q_up.bias).view(h.shape[0], -1, size)
        down = ops.linear(h, self.kv_down.weight, self.kv_down.bias)
        latent, turning = down[:, : -self.rotary_size].contiguous(), down[:, None, -self.rotary_size :]
        latent = ops.rms_norm(latent, self.kv_norm.weight, self.kv_norm.eps, form=self.kv_norm.form)
        expanded = ops.linear(latent, self.kv_up.weight, self.kv_up.bias).view(
            h.shape[0], -1, self.plain_size + self.value_size
        )
        key, value = expanded.split((self.plain_size, self.value_size), -1)
        q_turned, turned = ops.rotary(self.halves(q[..., self.plain_size :]), self.halves(turning), cos, sin)
        q = torch.cat((q[..., : self.plain_size], q_turned), -1)
        key = torch.cat((key, turned.expand(-1, key.shape[1], -1)), -1)
        ops.store_kv(key, F.pad(value, (0, size - self.value_size)), *cache, batch.slots)
        return ops.paged_attention(q, *cache, batch, self.spec)[..., : self.value_size].flatten(1)

    def halves(self, x: Tensor) -> Tensor:
        """Rotary pairs as two halves, the form that `Ops.rotary` turns."""
        return torch.cat((x[..., ::2], x[..., 1::2]), -1) if self.pairs else x


def read_latent(name: str, attention: Any) -> LatentAttention:
    known = {
        "q_proj",
        "q_a_proj",
        "q_a_layernorm",
        "q_b_proj",
        "kv_a_proj_with_mqa",
        "kv_a_layernorm",
        "kv_b_proj",
        "o_proj",
    }
    strange = {child for child, _ in attention.named_children()} - known
    if strange or attention.v_head_dim > attention.qk_head_dim:
        what = (
            f"parts {sorted(strange)}"
            if strange
            else f"values of {attention.v_head_dim} for keys of {attention.qk_head_dim}"
        )
        raise ExactnessError(f"{name} ({type(attention).__name__}) has no exact form: {what}")

    def projection(module: nn.Linear) -> Projection:
        return Projection(weight=module.weight.data, bias=data_of(module.bias))

    low = attention.q_lora_rank is not None
    return LatentAttention(
        q_down=projection(attention.q_a_proj) if low else None, q_up=projection(attention.q_b_proj if low else attention.q_proj),
        q_norm=read_norm(f"{name}.q_a_layernorm", attention.q_a_layernorm) if low else None,
        kv_down=projection(attention.kv_a_proj_with_mqa), kv_norm=read_norm(f"{name}.kv_a_layernorm", attention.kv_a_layernorm),
        kv_up=projection(attention.kv_b_proj), out=attention.o_proj.weight.data, out_bias=data_of(attention.o_proj.bias),
        spec=AttentionSpec(scale=attention.scaling), rope="", plain_size=attention.qk_nope_head_dim, rotary_size=attention.qk_rope_head_dim,
        value_size=attention.v_head_dim, pairs=bool(getattr(attention.config, "rope_interleave", True)),
    )  # fmt: skip
