"""Exact operators on the CPU, from plain torch.

float32 products run in oneDNN's linear kernel, whose rows do not depend on their number from two rows up; 16-bit products, and machines
where that does not hold, use fixed row tiles (every product has exactly TILE rows, the last one padded). Neither is taken on trust:
`self_test` compares bits on this machine for every shape of the model and falls back from the first to the second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tokentrue.errors import ExactnessError
from tokentrue.numerics import cpu_attention
from tokentrue.numerics.ops import AttentionSpec, Ops, Packed, PagedBatch

TILE = 32
"""Rows of every product on the structural path."""
PAGE = 16

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def onednn_product(x_MK: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """One row alone would take the matrix-vector kernel, which sums in another order: it is given a companion."""
    if x_MK.shape[0] == 1:
        return torch.ops.mkldnn._linear_pointwise(x_MK.expand(2, -1).contiguous(), weight, bias, "none", [], "")[:1]
    return torch.ops.mkldnn._linear_pointwise(x_MK, weight, bias, "none", [], "")


def tiled_product(x_MK: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Every product has exactly TILE rows."""
    rows = x_MK.shape[0]
    out = x_MK.new_empty(rows, weight.shape[0])
    for start in range(0, rows, TILE):
        tile = x_MK[start : start + TILE]
        short = TILE - tile.shape[0]
        if short:
            tile = torch.cat((tile, tile.new_zeros(short, tile.shape[1])))
        result = F.linear(tile, weight, bias)
        out[start : start + TILE] = result[: TILE - short] if short else result
    return out


class Linear(torch.autograd.Function):
    """Forward by a row-invariant product; backward by ordinary ones (fixed from run to run, which is all that gradients need)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: Product) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grads[0]
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        return (
            grad @ weight if need_x else None,
            grad.T @ x if need_weight else None,
            grad.sum(0) if ctx.has_bias and need_bias else None,
            None,
        )


class Silu(torch.autograd.Function):
    """x/(1+exp(-x)): torch's own silu treats the tail of a vector differently from its body."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        denominator = x.neg().exp_().add_(1)
        ctx.save_for_backward(x, denominator)
        return x / denominator

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        x, denominator = ctx.saved_tensors
        sigmoid = denominator.reciprocal()
        return grads[0] * sigmoid * (1 + x * (1 - sigmoid))


def silu(x: Tensor) -> Tensor:
    if torch.is_grad_enabled() and x.requires_grad:
        return Silu.apply(x)  # pyright: ignore[reportReturnType]
    return x / x.neg().exp_().add_(1)


def gelu_tanh(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.tanh((x + x * x * x * 0.044715) * 0.7978845608028654))


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x * 0.7071067811865476))


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "swish": silu,
    "gelu_pytorch_tanh": gelu_tanh,
    "gelu_new": gelu_tanh,
    "gelu": gelu,
    "relu": torch.relu,
}


class CpuOps(Ops):
    name = "cpu"
    block_size = PAGE

    def __init__(self) -> None:
        self.structural: set[int] = set()
        """In-feature sizes K for which oneDNN's float32 kernel is not row-invariant here, whatever N: merged weights must agree."""
        self.has_onednn = hasattr(torch.ops.mkldnn, "_linear_pointwise") and torch.backends.mkldnn.is_available()
        self.rows = 8  # least rows of an attention product; `self_test` may raise it
        self._buffers: dict[str, Tensor] = {}

    # ---- rows x features ----------------------------------------------------------------------------------------------------------
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        product = self.product(weight)
        flat = x.reshape(-1, x.shape[-1])
        if not flat.is_contiguous():
            flat = flat.contiguous()
        if flat.shape[0] == 0:
            out = flat.new_empty(0, weight.shape[0])
        elif torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
            out = Linear.apply(flat, weight, bias, product)
        else:
            out = product(flat, weight, bias)
        return out.view(*x.shape[:-1], weight.shape[0])  # pyright: ignore

    def product(self, weight: Tensor) -> Product:
        fast = weight.dtype == torch.float32 and self.has_onednn and weight.shape[1] not in self.structural
        return onednn_product if fast else tiled_product

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False) -> Tensor:
        if x.dtype == torch.float32 and not unit_offset:
            return F.rms_norm(x, (x.shape[-1],), weight, eps)
        normed = F.rms_norm(x.float(), (x.shape[-1],), None, eps)
        if unit_offset:
            return (normed * (1.0 + weight.float())).to(x.dtype)
        return weight * normed.to(x.dtype)

    def activation(self, x: Tensor, kind: str) -> Tensor:
        if kind not in ACTIVATIONS:
            raise ExactnessError(f"activation {kind!r} has no exact form; known: {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[kind](x.float()).to(x.dtype)

    def act_mul(self, gate: Tensor, up: Tensor, kind: str) -> Tensor:
        if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
            return self.activation(gate, kind) * up
        return self.activation(gate, kind).mul_(up)

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, half = cos.unsqueeze(1), cos.shape[-1] // 2
        # (-x2)*sin and x2*(-sin) are the same bits; the sign moves to the smaller tensor.
        signed = torch.cat((-sin[..., :half], sin[..., half:]), -1).unsqueeze(1)
        return tuple((x * cos).add_(torch.cat((x[..., half:], x[..., :half]), -1).mul_(signed)) for x in (q, k))  # pyright: ignore

    def log_softmax(self, logits: Tensor) -> Tensor:
        return F.log_softmax(logits, -1)

    def experts(self, x: Tensor, index: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor, kind: str) -> Tensor:
        tokens, slots = index.shape
        flat = index.reshape(-1)
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=gate_up.shape[0]).tolist()
        rows = x.index_select(0, order // slots)
        outs, start = [], 0
        for expert, count in enumerate(counts):
            if count:
                gate, up = self.linear(rows[start : start + count], gate_up[expert]).chunk(2, -1)
                outs.append(self.linear(self.act_mul(gate, up, kind), down[expert]))
                start += count
        scaled = torch.cat(outs).index_select(0, torch.argsort(order)).view(tokens, slots, -1) * weight.unsqueeze(-1).to(x.dtype)
        total = scaled[:, 0]
        for slot in range(1, slots):
            total = total + scaled[:, slot]
        return total

    # ---- attention ----------------------------------------------------------------------------------------------------------------
    def attention(self, q: Tensor, k: Tensor, v: Tensor, packed: Packed, spec: AttentionSpec) -> Tensor:
        return cpu_attention.attention(q, k, v, packed.lengths, spec)

    def new_cache(self, num_blocks: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        # Head-major underneath, so that gathered pages of a head lie as one run of keys.
        return torch.zeros(heads, num_blocks, self.block_size, head_dim, dtype=dtype, device=device).transpose(0, 1)

    def store_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        for new, cache in ((k, k_cache), (v, v_cache)):
            pages = cache.transpose(0, 1)
            pages.view(pages.shape[0], -1, pages.shape[-1]).index_copy_(1, slots, new.transpose(0, 1))

    def paged_attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, spec: AttentionSpec) -> Tensor:
        out = torch.empty_like(q)
        decodes = batch.num_decodes
        for members in decode_buckets(batch.contexts[:decodes]):
            rows = slice(None, decodes) if len(members) == decodes else torch.tensor(members)
            out[rows] = self.decode(q[rows], k_cache, v_cache, batch.block_tables[rows], [batch.contexts[i] for i in members], spec)
        start = decodes
        for i in range(decodes, len(batch.q_lens)):
            stop = start + batch.q_lens[i]
            out[start:stop] = self.prefill(q[start:stop], k_cache, v_cache, batch.block_tables[i], batch.contexts[i], spec)
            start = stop
        return out

    def decode(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, contexts: list[int], spec: AttentionSpec) -> Tensor:
        """One query per sequence."""
        s, h, d = q.shape
        j = k_cache.shape[1]
        g = h // j
        keys = cpu_attention.up_to(max(contexts), cpu_attention.KEYS)
        k, v = self.gather(k_cache, tables, keys, "k"), self.gather(v_cache, tables, keys, "v")
        rows = max(g, self.rows)
        padded = q.new_zeros(j, s, rows, d, dtype=torch.float32)
        padded[:, :, :g] = q.view(s, j, g, d).transpose(0, 1)
        hidden = hidden_decode(contexts, keys, spec.window)
        out, _ = cpu_attention.fold(
            padded.view(j * s, rows, d).mul_(spec.scale), k, v, hidden.repeat(j, 1, 1) if hidden is not None else None, spec.softcap
        )
        return out.view(j, s, rows, d)[:, :, :g].transpose(0, 1).reshape(s, h, d).to(q.dtype)

    def prefill(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, context: int, spec: AttentionSpec) -> Tensor:
        """A run of queries of one sequence, the last at position `context - 1`."""
        t, h, d = q.shape
        j = k_cache.shape[1]
        g = h // j
        keys = cpu_attention.up_to(context, cpu_attention.KEYS)
        k, v = self.gather(k_cache, table[None], keys, "k"), self.gather(v_cache, table[None], keys, "v")
        first = context - t
        q_JTGD = q.float().view(t, j, g, d).transpose(0, 1) * spec.scale
        out = q_JTGD.new_empty(j, t, g, d)
        for chunk in cpu_attention.chunks(first, context, spec.window, g):
            at = chunk.first - first
            rows = q_JTGD[:, at : at + chunk.tile].reshape(j, -1, d)
            real = rows.shape[1]
            least = max(chunk.tile * g, self.rows)
            rows = F.pad(rows, (0, 0, 0, least - real))
            hidden = F.pad(chunk.hidden, (0, 0, 0, least - chunk.hidden.shape[0])) if least > chunk.hidden.shape[0] else chunk.hidden
            result, _ = cpu_attention.fold(rows, k[:, : chunk.keys], v[:, : chunk.keys], hidden, spec.softcap)
            stop = min(chunk.tile, t - at)
            out[:, at : at + stop] = result[:, : stop * g].view(j, stop, g, d)
        return out.transpose(0, 1).reshape(t, h, d).to(q.dtype)

    def gather(self, cache: Tensor, tables: Tensor, keys: int, name: str) -> Tensor:
        """The first `keys` keys of each sequence, [J*S, keys, D] float32; into a buffer that the next call of the same name reuses."""
        s, width = tables.shape
        pages = keys // self.block_size
        if width < pages:
            tables = F.pad(tables, (0, pages - width))
        source = cache.transpose(0, 1)
        j, _, b, d = source.shape
        size = j * s * pages * b * d
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size or buffer.dtype != cache.dtype:
            buffer = self._buffers[name] = torch.empty(size, dtype=cache.dtype)
        out = buffer[:size].view(j, s * pages, b, d)
        torch.index_select(source, 1, tables[:, :pages].reshape(-1), out=out)
        return out.view(j * s, keys, d).float()

    # ---- self-knowledge -----------------------------------------------------------------------------------------------------------
    def contract(self) -> Mapping[str, str]:
        tiles = "/".join(map(str, cpu_attention.TILES))
        linear = "oneDNN linear, rows >= 2, float32" if self.has_onednn else f"{TILE}-row tiles"
        return {
            "linear.float32": linear + (f"; {TILE}-row tiles for K in {sorted(self.structural)}" if self.structural else ""),
            "linear.bfloat16": f"{TILE}-row tiles",
            "attention": f"float32 fold over {cpu_attention.KEYS}-key blocks, query tiles {tiles}, rows >= {self.rows}",
            "rms_norm": "float32, torch rms_norm per row",
            "activation": "float32; silu as x/(1+exp(-x))",
            "rotary": "elementwise, rounded after each product",
            "experts": "per-expert linear; slots added in order",
            "log_softmax": "float32, torch log_softmax per row",
        }

    def self_test(self, *, linears: set[tuple[int, int, bool]], heads: set[tuple[int, int, int]], dtype: torch.dtype) -> list[str]:
        from tokentrue.numerics.selftest import check_cpu

        return check_cpu(self, linears=linears, heads=heads, dtype=dtype)


def decode_buckets(contexts: tuple[int, ...]) -> list[list[int]]:
    """Sequences whose padded lengths are within a factor of two share a product; the rest would pay for the longest."""
    buckets: dict[int, list[int]] = {}
    for i, context in enumerate(contexts):
        buckets.setdefault(((context - 1) // cpu_attention.KEYS).bit_length(), []).append(i)
    return list(buckets.values())


def hidden_decode(contexts: list[int], keys: int, window: int | None) -> Tensor | None:
    if window is None and all(context == keys for context in contexts):
        return None
    ends = torch.tensor(contexts).view(-1, 1, 1)
    at = torch.arange(keys).view(1, 1, -1)
    hidden = at >= ends
    if window is not None:
        hidden |= at < ends - window
    return hidden
