"""Exact operators on the CPU, from plain torch. No form of a product is trusted: `self_test` first compares bits on
this machine for every shape of the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from tokentrue.errors import ExactnessError
from tokentrue.numerics.cpu.arithmetic import (
    ACTIVATIONS,
    PLAIN_ROWS,
    TILE,
    Linear,
    Product,
    apply_rotation,
    compute,
    onednn_product,
    plain_product,
    rotate,
    rotation_of,
    tiled_product,
    transposed_product,
)
from tokentrue.numerics.cpu.attention import (
    KEYS,
    TILES,
    DecodePlan,
    attention,
    chunks,
    decode_buckets,
    fold,
    head_major_one,
    hidden_decode,
    prefill_buckets,
    sink_rows,
    token_major,
    up_to,
)
from tokentrue.numerics.cpu.selftest import check
from tokentrue.numerics.delta import scan_sequences
from tokentrue.numerics.ops import (
    AttentionSpec,
    ExpertWeights,
    HeadNorm,
    Heads,
    Linears,
    NormForm,
    Ops,
    Packed,
    PagedBatch,
)

PAGE = 16


class CpuOps(Ops):
    name = "cpu"
    block_size = PAGE
    least_rows = 2
    delta_scan = staticmethod(scan_sequences)

    def __init__(self) -> None:
        # K for which oneDNN's float32 rows depend on the batch, whatever N: merged weights must agree.
        self.structural: set[int] = set()
        # K for which ordinary products have oneDNN's bits.
        self.plain: set[int] = set()
        self.has_onednn = hasattr(torch.ops.mkldnn, "_linear_pointwise") and torch.backends.mkldnn.is_available()
        self.rows = 8  # least rows of an attention product; `self_test` finds it
        self._packed: dict[tuple[int, int], tuple[Product, Tensor]] = {}
        self._head_weights: dict[int, Tensor] = {}
        self._rotation: tuple[Tensor, Tensor, Tensor] | None = None
        self._buffers: dict[str, Tensor] = {}
        self._plan: tuple[PagedBatch, dict[int | None, list[DecodePlan]]] | None = None

    # ---- rows x features
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        packed = (
            self._packed.get((weight.data_ptr(), weight.shape[0]))
            if self._packed and not torch.is_grad_enabled()
            else None
        )
        if packed is not None and x.dim() == 2 and x.is_contiguous():  # an engine step: the fast path
            return packed[0](x, packed[1], bias)
        flat = x.reshape(-1, x.shape[-1])
        if not flat.is_contiguous():
            flat = flat.contiguous()
        if flat.shape[0] == 0:
            out = flat.new_empty(0, weight.shape[0])
        elif torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
            out = Linear.apply(flat, weight, bias, self.product(weight, flat.shape[0]))
        else:
            product, form = packed or (self.product(weight, flat.shape[0]), weight)
            out = product(flat, form, bias)
        return out.view(*x.shape[:-1], weight.shape[0])  # pyright: ignore

    def product(self, weight: Tensor, rows: int) -> Product:
        n, k = weight.shape
        if n == 1 or weight.dtype != torch.float32 or not self.has_onednn or k in self.structural:
            return tiled_product
        return plain_product if k in self.plain and rows >= PLAIN_ROWS else onednn_product

    def pack(self, weights: Iterable[Tensor]) -> None:
        self._packed.clear()
        self._head_weights.clear()
        for weight in weights:
            n, k = weight.shape
            if n == 1 or weight.dtype != torch.float32 or not self.has_onednn or k in self.structural:
                continue
            if k in self.plain:
                form: tuple[Product, Tensor] = (transposed_product, weight.t().contiguous())
            else:
                form = (onednn_product, torch.ops.mkldnn._reorder_linear_weight(weight, None))
            self._packed[weight.data_ptr(), n] = form

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, form: NormForm = NormForm.PLAIN) -> Tensor:
        if x.dtype == torch.float32 and weight.dtype == torch.float32 and form is not NormForm.UNIT_OFFSET:
            return F.rms_norm(x, (x.shape[-1],), weight, eps)
        normed = F.rms_norm(x.float(), (x.shape[-1],), None, eps)
        if form is not NormForm.PLAIN:
            return (normed * (1.0 + weight.float() if form is NormForm.UNIT_OFFSET else weight.float())).to(x.dtype)
        return weight * normed.to(x.dtype)

    def activation(self, x: Tensor, kind: str) -> Tensor:
        if kind not in ACTIVATIONS:
            raise ExactnessError(f"activation {kind!r} has no exact form; known: {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[kind](x.float()).to(x.dtype)

    def function(self, x: Tensor, name: str) -> Tensor:
        return compute(name, x)

    def act_mul(self, gate: Tensor, up: Tensor, kind: str) -> Tensor:
        if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
            return self.activation(gate, kind) * up
        return self.activation(gate, kind).mul_(up)

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(q, cos, sin), rotate(k, cos, sin)

    def log_softmax(self, logits: Tensor) -> Tensor:
        return F.log_softmax(logits, -1)

    def experts(self, x: Tensor, index: Tensor, weight: Tensor, experts: ExpertWeights) -> Tensor:
        """Copies transposed weights: the start-up checks cover only contiguous rows."""
        tokens, slots = index.shape
        flat = index.reshape(-1)
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=experts.gate_up.shape[0]).tolist()
        rows = x.index_select(0, order // slots)
        outs, start = [], 0
        for expert, count in enumerate(counts):
            if count:
                both = self.linear(rows[start : start + count], experts.gate_up_of(expert).contiguous())
                both = both if experts.gate_up_bias is None else both + experts.gate_up_bias[expert]
                inner = self.gate_values(*experts.split(both), experts.act)
                out = self.linear(inner, experts.down_of(expert).contiguous())
                outs.append(out if experts.down_bias is None else out + experts.down_bias[expert])
                start += count
        scaled = torch.cat(outs).index_select(0, torch.argsort(order)).view(tokens, slots, -1) * weight.unsqueeze(
            -1
        ).to(x.dtype)
        total = scaled[:, 0]
        for slot in range(1, slots):
            total = total + scaled[:, slot]
        return total

    # ---- attention
    def attention(self, q: Tensor, k: Tensor, v: Tensor, packed: Packed, spec: AttentionSpec) -> Tensor:
        return attention(q, k, v, packed.lengths, spec)

    def new_cache(self, num_blocks: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        # Head-major underneath, so that gathered pages of a head lie as one run of keys.
        return torch.zeros(heads, num_blocks, self.block_size, head_dim, dtype=dtype, device=device).transpose(0, 1)

    def store_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        for new, cache in ((k, k_cache), (v, v_cache)):
            pages = cache.transpose(0, 1)
            pages.view(pages.shape[0], -1, pages.shape[-1]).index_copy_(1, slots, new.transpose(0, 1))

    def prepare_qkv(
        self, qkv: Tensor, heads: tuple[int, int, int], norm: HeadNorm | None, cos: Tensor | None, sin: Tensor | None,
        k_cache: Tensor, v_cache: Tensor, batch: PagedBatch,
    ) -> Tensor:  # fmt: skip
        """Norms and rotates queries and keys together: half the calls."""
        h, j, d = heads
        split = qkv.view(-1, h + 2 * j, d)
        qk, v = split[:, : h + j], split[:, h + j :]
        if norm is not None:
            if norm.form is NormForm.UNIT_OFFSET or qkv.dtype != torch.float32:
                q = self.rms_norm(qk[:, :h], norm.q_weight, norm.eps, form=norm.form)
                qk = torch.cat((q, self.rms_norm(qk[:, h:], norm.k_weight, norm.eps, form=norm.form)), 1)
            else:
                qk = F.rms_norm(qk, (d,), None, norm.eps).mul_(self.head_weights(norm, h, j, d))
        if cos is not None and sin is not None:
            qk = apply_rotation(qk, *self.rotation(cos, sin))
        self.store_kv(qk[:, h:], v, k_cache, v_cache, batch.slots)
        return qk[:, :h]

    def head_weights(self, norm: HeadNorm, h: int, j: int, d: int) -> Tensor:
        key = norm.q_weight.data_ptr()
        if key not in self._head_weights:
            self._head_weights[key] = torch.cat((norm.q_weight.expand(h, d), norm.k_weight.expand(j, d)))
        return self._head_weights[key]

    def rotation(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Cached: the same for every layer of a step."""
        if self._rotation is None or self._rotation[0] is not cos:
            self._rotation = (cos, *rotation_of(cos, sin))
        return self._rotation[1:]

    def paged_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, spec: AttentionSpec
    ) -> Tensor:
        decodes = batch.num_decodes
        plans = self.decode_plans(batch, spec.window, k_cache.shape[1])
        if len(plans) == 1 and decodes == len(batch.q_lens):
            return self.decode(q, k_cache, v_cache, plans[0], spec)
        out = q.new_empty(q.shape)
        for plan in plans:
            out[plan.rows] = self.decode(q[plan.rows], k_cache, v_cache, plan, spec)
        starts = list(itertools.accumulate(batch.q_lens, initial=0))
        for members in prefill_buckets(batch):
            rows = [slice(starts[i], starts[i + 1]) for i in members]
            alike = torch.stack([q[r] for r in rows])
            found = self.prefill(alike, k_cache, v_cache, batch.block_tables[members], batch.contexts[members[0]], spec)
            for r, result in zip(rows, found, strict=True):
                out[r] = result
        return out

    def decode_plans(self, batch: PagedBatch, window: int | None, heads: int) -> list[DecodePlan]:
        """Cached: the same for every layer of a step."""
        if self._plan is None or self._plan[0] is not batch:
            self._plan = (batch, {})
        plans = self._plan[1]
        if window not in plans:
            plans[window] = [
                self.decode_plan(batch, members, window, heads)
                for members in decode_buckets(batch.contexts[: batch.num_decodes])
            ]
        return plans[window]

    def decode_plan(self, batch: PagedBatch, members: list[int], window: int | None, heads: int) -> DecodePlan:
        contexts = [batch.contexts[i] for i in members]
        rows = slice(0, batch.num_decodes) if len(members) == batch.num_decodes else torch.tensor(members)
        keys = up_to(max(contexts), KEYS)
        hidden = hidden_decode(contexts, keys, window)
        if hidden is not None and len(members) > 1:
            hidden = hidden.repeat(heads, 1, 1)
        tables = batch.block_tables if len(members) == batch.block_tables.shape[0] else batch.block_tables[rows]
        return DecodePlan(rows, self.pages_of(tables, keys), keys, hidden)

    def pages_of(self, tables: Tensor, keys: int) -> Tensor:
        pages = keys // self.block_size
        return (tables[:, :pages] if tables.shape[1] >= pages else F.pad(tables, (0, pages - tables.shape[1]))).reshape(
            -1
        )

    def decode(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: DecodePlan, spec: AttentionSpec) -> Tensor:
        s, h, d = q.shape
        j = k_cache.shape[1]
        g = h // j
        k, v = self.gather(k_cache, plan.pages, plan.keys, "k"), self.gather(v_cache, plan.pages, plan.keys, "v")
        q_JSGD = q.view(s, j, g, d).transpose(0, 1)
        rows = max(g, self.rows)
        if rows == g:
            padded = q_JSGD.float() * spec.scale
        else:
            padded = q.new_zeros(j, s, rows, d, dtype=torch.float32)
            padded[:, :, :g].copy_(q_JSGD).mul_(spec.scale)
        sink = sink_rows(spec.sinks, j, s, 1, rows)
        out = fold(padded.reshape(j * s, rows, d), k, v, plan.hidden, spec.softcap, sink)[0]
        return out.view(j, s, rows, d)[:, :, :g].transpose(0, 1).reshape(s, h, d).to(q.dtype)

    def prefill(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, context: int, spec: AttentionSpec
    ) -> Tensor:
        """q [S,T,H,D]: runs of queries, the last at position `context - 1`."""
        s, t, h, d = q.shape
        j = k_cache.shape[1]
        g = h // j
        keys = up_to(context, KEYS)
        pages = self.pages_of(tables, keys)
        k, v = self.gather(k_cache, pages, keys, "k"), self.gather(v_cache, pages, keys, "v")
        first = context - t
        q_XTGD = head_major_one(q, j) * spec.scale
        out = q_XTGD.new_empty(q_XTGD.shape)
        for chunk in chunks(first, context, spec.window, g):
            at = chunk.first - first
            rows = q_XTGD[:, at : at + chunk.tile].reshape(j * s, -1, d)
            least = max(chunk.tile * g, self.rows)
            rows = F.pad(rows, (0, 0, 0, least - rows.shape[1]))
            hidden = (
                F.pad(chunk.hidden, (0, 0, 0, least - chunk.hidden.shape[0]))
                if least > chunk.hidden.shape[0]
                else chunk.hidden
            )
            stop = min(chunk.tile, t - at)
            sink = sink_rows(spec.sinks, j, s, stop, least)
            result = fold(rows, k[:, : chunk.keys], v[:, : chunk.keys], hidden, spec.softcap, sink)[0]
            out[:, at : at + stop] = result[:, : stop * g].view(j * s, stop, g, d)
        return token_major(out, q.shape).to(q.dtype)

    def gather(self, cache: Tensor, pages: Tensor, keys: int, name: str) -> Tensor:
        """float32 [J*S, keys, D], in a buffer that the next call with this name reuses."""
        source = cache.transpose(0, 1)
        j, _, b, d = source.shape
        size = j * pages.shape[0] * b * d
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size or buffer.dtype != cache.dtype:
            buffer = self._buffers[name] = torch.empty(size, dtype=cache.dtype)
        out = buffer[:size].view(j, pages.shape[0], b, d)
        torch.index_select(source, 1, pages, out=out)
        return out.view(-1, keys, d).float()

    # ---- self-knowledge
    def contract(self) -> Mapping[str, str]:
        tiles = "/".join(map(str, TILES))
        linear = (
            "oneDNN linear, rows >= 2, or a product equal to it in bits, float32"
            if self.has_onednn
            else f"{TILE}-row tiles"
        )
        return {
            "linear.float32": linear
            + (f"; {TILE}-row tiles for K in {sorted(self.structural)}" if self.structural else ""),
            "linear.16-bit": f"{TILE}-row tiles",
            "attention": f"float32 fold over {KEYS}-key blocks, query tiles {tiles}, rows >= {self.rows}, sink last",
            "rms_norm": "float32, torch rms_norm per row",
            "activation": "float32; silu as x/(1+exp(-x)), sigmoid as 1/(1+exp(-x)), softplus as max(x,0)+log1p(exp(-|x|))",
            "rotary": "elementwise, rounded after each product",
            "experts": "per-expert linear, then bias; slots added in order",
            "log_softmax": "float32, torch log_softmax per row",
        }

    def self_test(self, *, linears: Linears, heads: Heads, dtype: torch.dtype) -> list[str]:
        found = check(linears=linears, heads=heads, dtype=dtype, has_onednn=self.has_onednn)
        self.structural |= found.structural
        self.plain = (self.plain | found.plain) - self.structural if dtype == torch.float32 else self.plain
        if heads:
            self.rows = found.rows
        return list(found.notes)
