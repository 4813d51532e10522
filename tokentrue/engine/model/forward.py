"""Tensors in, logits out: one step of the decoder over the paged cache. The only file of the engine that does
arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokentrue.engine.model.adapters import AdapterBank
from tokentrue.engine.model.decoder import Attention, Decoder, Dense, Layer
from tokentrue.engine.model.latent import LatentAttention, Norm
from tokentrue.engine.model.step import StepInputs
from tokentrue.numerics import HeadNorm, Ops, PagedBatch, RowSlots
from tokentrue.numerics.delta import GatedDelta

Ropes = Mapping[str | None, tuple[Tensor | None, Tensor | None]]
Trace = Callable[[str, Tensor], None]
TABLE_STEP = 8
"""Block tables are as wide as a multiple of this."""


class Forward:
    """A decoder, its operators and its cache. `trace(name, tensor)`, where given, receives every operator's result."""

    def __init__(self, decoder: Decoder, ops: Ops, *, num_blocks: int, num_states: int | None = None) -> None:
        """`num_states` counts the recurrent-state slots of a hybrid model."""
        self.decoder = decoder
        self.ops = ops
        self.device = device = decoder.device
        dtype = decoder.dtype
        _, heads, head_dim = decoder.heads
        self.caches = [
            (
                ops.new_cache(num_blocks, heads, head_dim, dtype, device),
                ops.new_cache(num_blocks, heads, head_dim, dtype, device),
            )
            if not isinstance(layer.mixer, GatedDelta)
            else None
            for layer in decoder.layers
        ]
        self.recurrent = [new_state(layer.mixer, num_states, dtype, device) for layer in decoder.layers]
        self.bank = AdapterBank(decoder, ops)
        self.trace: Trace | None = None
        self.plain = decoder.residual_scale is None and all(is_plain(layer) for layer in decoder.layers)
        self.refresh()

    def refresh(self) -> None:
        """The weights have changed: what the operators derived from them is stale."""
        self.ops.pack(weight for weight in linear_weights(self.decoder))

    @torch.inference_mode()
    def step(self, inputs: StepInputs, rows: Sequence[int]) -> Tensor:
        """Logits [len(rows), V] of those token rows of the step."""
        return self.logits_of_rows(self.compute(inputs, self.embed(inputs)), rows)

    @torch.inference_mode()
    def embed(self, inputs: StepInputs) -> Tensor:
        return self.decoder.embed(torch.from_numpy(np.array(inputs.ids)).to(self.device))

    @torch.inference_mode()
    def compute(self, inputs: StepInputs, x: Tensor) -> Tensor:
        """[T,K] after this decoder's layers, of what comes into the first of them."""
        paged = paged_batch(inputs, self.ops.block_size, self.device)
        slots = self.prepare_states(inputs)
        return self.layers(x, paged, self.bank.rows_of(inputs.adapters, inputs.counts, self.device), slots)

    @torch.inference_mode()
    def logits_of_rows(self, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        if not rows:
            return hidden.new_empty(0, self.decoder.vocabulary)
        if len(rows) < hidden.shape[0]:
            hidden = hidden.index_select(0, torch.tensor(rows, device=self.device))
        return self.logits(hidden)

    @contextmanager
    def routes(self) -> Iterator[Callable[[Sequence[int]], tuple[Tensor, Tensor]]]:
        """The experts chosen in a step inside the block: rows -> int16 [rows, layers, top_k] and their float32 weights,
        in host memory."""
        chosen: list[tuple[Tensor, Tensor]] = []
        self.ops.routes = chosen

        def read(rows: Sequence[int]) -> tuple[Tensor, Tensor]:
            at = list(rows)
            experts = torch.stack([index[at] for index, _ in chosen], 1).to(torch.int16).cpu()
            return experts, torch.stack([weight[at] for _, weight in chosen], 1).float().cpu()

        try:
            yield read
        finally:
            self.ops.routes = None

    def prepare_states(self, inputs: StepInputs) -> Tensor | None:
        """Do the copies between state slots that the scheduler queued; returns the slots of the step's requests."""
        if not inputs.state_slots:
            return None
        for source, target in inputs.state_copies:
            for pair in self.recurrent:
                for tensor in pair or ():
                    tensor[target].copy_(tensor[source])
        return torch.tensor(inputs.state_slots, device=self.device)

    def layers(
        self, x: Tensor, batch: PagedBatch, adapted: RowSlots | None = None, slots: Tensor | None = None
    ) -> Tensor:
        """[T,K] after the last layer, before the final norm."""
        if self.plain and self.trace is None:
            h, x = self.plain_layers(x, batch, adapted)
            return x + h
        ropes = self.ropes(batch)
        for index, layer in enumerate(self.decoder.layers):
            x = self.layer(index, layer, x, ropes, batch, adapted, slots)
        return x

    def logits_of_all(self, ids: Tensor, batch: PagedBatch, adapted: RowSlots | None = None) -> Tensor:
        """Logits [T,V] of every token of the step."""
        d = self.decoder
        if not self.plain or d.logit_softcap is not None or d.logit_divisor is not None:
            return self.logits(self.layers(d.embed(ids), batch, adapted))
        assert d.norm is not None and d.head is not None
        return self.ops.norm_linear(*self.plain_layers(d.embed(ids), batch, adapted), d.norm, d.head, d.head_bias)[0]

    def ropes(self, batch: PagedBatch) -> Ropes:
        """cos and sin of the step's positions; none for layers without a rotary embedding."""
        at = batch.positions
        return {None: (None, None), **{key: (cos[at], sin[at]) for key, (cos, sin) in self.decoder.ropes.items()}}

    def plain_layers(self, x: Tensor, batch: PagedBatch, adapted: RowSlots | None) -> tuple[Tensor, Tensor]:
        """(h, x): the last layer's result and the residual behind it. Every residual sum is left to the norm that reads
        it; a product that adapters change reads a norm of its own."""
        ops, d, ropes = self.ops, self.decoder, self.ropes(batch)
        stacks = {} if adapted is None else self.bank.stacks
        alone, copies = x.shape[0] < ops.least_rows and adapted is None, ops.least_rows
        x, h = x.repeat(copies, 1) if alone else x, None
        for index, (cache, layer) in enumerate(zip(self.caches, d.layers, strict=True)):
            n, m, mixer, mlp = layer.before_attention, layer.before_mlp, layer.mixer, layer.mlp
            assert n is not None and m is not None and cache is not None and isinstance(mixer, Attention)
            if h is not None and (index, "qkv") not in stacks:
                qkv, x = ops.norm_linear(h, x, n, mixer.qkv, mixer.qkv_bias)
            else:
                if h is None:
                    normed = ops.rms_norm(x, n.weight, n.eps, form=n.form)
                else:
                    normed, x = ops.add_rms_norm(h, x, n.weight, n.eps, form=n.form)
                qkv = self.adapt(adapted, index, "qkv", normed, ops.linear(normed, mixer.qkv, mixer.qkv_bias))
            qkv = qkv[:1] if alone else qkv
            q = ops.prepare_qkv(qkv, d.heads, mixer.head_norm, *ropes[mixer.rope], *cache, batch)
            attended = ops.paged_attention(q, *cache, batch, mixer.spec).flatten(1)
            h = ops.linear(attended.repeat(copies, 1) if alone else attended, mixer.out, mixer.out_bias)
            h = self.adapt(adapted, index, "out", attended, h)
            if isinstance(mlp, Dense) and mlp.gate_up_bias is None and (index, "gate_up") not in stacks:
                inner, x = ops.norm_linear(h, x, m, mlp.gate_up, kind=mlp.kind)
                h = self.adapt(adapted, index, "down", inner, ops.linear(inner, mlp.down, mlp.down_bias))
            else:
                h, x = ops.add_rms_norm(h, x, m.weight, m.eps, form=m.form)
                h = self.mlp("", mlp, h, adapted, index)
        assert h is not None
        return (h[:1], x[:1]) if alone else (h, x)

    def layer(
        self,
        index: int,
        layer: Layer,
        x: Tensor,
        ropes: Ropes,
        batch: PagedBatch,
        adapted: RowSlots | None,
        slots: Tensor | None,
    ) -> Tensor:
        ops, name, scale = self.ops, f"layers.{index}", self.decoder.residual_scale
        h = self.norm(f"{name}.before_attention", layer.before_attention, x)
        if isinstance(layer.mixer, Attention):
            h = self.attend(index, layer.mixer, h, ropes, batch, adapted)
        elif isinstance(layer.mixer, LatentAttention):
            h = self.attend_latent(index, layer.mixer, h, ropes, batch)
        else:
            h = self.record(f"{name}.out", self.scan(index, layer.mixer, h, batch, slots))
        h = self.norm(f"{name}.after_attention", layer.after_attention, h)
        h = h if scale is None else h * scale
        if layer.before_mlp is None:
            x = x + h
            h = x
        else:
            n = layer.before_mlp
            h, x = ops.add_rms_norm(h, x, n.weight, n.eps, form=n.form)
            self.record(f"{name}.before_mlp", h)
        h = self.norm(f"{name}.after_mlp", layer.after_mlp, self.mlp(name, layer.mlp, h, adapted, index))
        return x + (h if scale is None else h * scale)

    def attend(
        self, index: int, mixer: Attention, h: Tensor, ropes: Ropes, batch: PagedBatch, adapted: RowSlots | None
    ) -> Tensor:
        ops, name, cache = self.ops, f"layers.{index}", self.caches[index]
        heads, _, size = self.decoder.heads
        assert cache is not None
        qkv = self.adapt(adapted, index, "qkv", h, ops.linear(h, mixer.qkv, mixer.qkv_bias))
        self.record(f"{name}.qkv", qkv)
        gate = None
        if mixer.gated:  # q and gate of a head lie side by side
            wide = 2 * heads * size
            q, gate = qkv[:, :wide].view(-1, heads, 2, size).unbind(2)
            qkv = torch.cat((q.flatten(1), qkv[:, wide:]), -1)
        if mixer.wide_norm is not None:
            qkv = norm_heads(ops, mixer.wide_norm, qkv)
        prepare = ops.prepare_qkv if mixer.rope is not None else partial(Ops.prepare_qkv, ops)
        q = prepare(qkv, self.decoder.heads, mixer.head_norm, *ropes[mixer.rope], *cache, batch)
        attended = ops.paged_attention(q, *cache, batch, mixer.spec).flatten(1)
        if gate is not None:
            attended = attended * ops.activation(gate.flatten(1), "sigmoid")
        self.record(f"{name}.attention", attended)
        out = ops.linear(attended, mixer.out, mixer.out_bias)
        return self.record(f"{name}.out", self.adapt(adapted, index, "out", attended, out))

    def attend_latent(self, index: int, mixer: LatentAttention, h: Tensor, ropes: Ropes, batch: PagedBatch) -> Tensor:
        cache, (cos, sin) = self.caches[index], ropes[mixer.rope]
        assert cache is not None and cos is not None and sin is not None
        attended = self.record(f"layers.{index}.attention", mixer.attend(self.ops, h, cos, sin, cache, batch))
        return self.record(f"layers.{index}.out", self.ops.linear(attended, mixer.out, mixer.out_bias))

    def scan(self, index: int, mixer: GatedDelta, h: Tensor, batch: PagedBatch, slots: Tensor | None) -> Tensor:
        """Linear attention: the states of the step's requests go in and out of their slots."""
        kept = self.recurrent[index]
        assert kept is not None and slots is not None
        history, state = kept
        out, history[slots], state[slots] = mixer.run(h, batch.q_lens, history[slots], state[slots])
        return out

    def mlp(
        self,
        name: str,
        mlp: Dense | Callable[[Tensor], Any],
        h: Tensor,
        adapted: RowSlots | None,
        index: int,
    ) -> Tensor:
        if not isinstance(mlp, Dense):
            found = mlp(h[None])
            return self.record(f"{name}.mlp", (found[0] if isinstance(found, tuple) else found)[0])
        both = self.adapt(adapted, index, "gate_up", h, self.ops.linear(h, mlp.gate_up, mlp.gate_up_bias))
        gate, up = both.chunk(2, -1)
        inner = self.record(f"{name}.activation", self.ops.act_mul(gate, up, mlp.kind))
        out = self.adapt(adapted, index, "down", inner, self.ops.linear(inner, mlp.down, mlp.down_bias))
        return self.record(f"{name}.mlp", out)

    def adapt(self, adapted: RowSlots | None, index: int, product: str, x: Tensor, y: Tensor) -> Tensor:
        """Adds each row's adapter to y, the merged product of x, in place; returns y."""
        stack = self.bank.stacks.get((index, product)) if adapted is not None else None
        if adapted is not None and stack is not None:
            self.ops.add_low_ranks(y, x, stack, adapted)
        return y

    def norm(self, name: str, norm: Norm | None, x: Tensor) -> Tensor:
        if norm is None:
            return x
        return self.record(name, self.ops.rms_norm(x, norm.weight, norm.eps, form=norm.form))

    def logits(self, hidden: Tensor) -> Tensor:
        d = self.decoder
        assert d.head is not None
        logits = self.ops.linear(self.norm("norm", d.norm, hidden), d.head, d.head_bias)
        if d.logit_divisor is not None:
            logits = logits / d.logit_divisor
        if d.logit_softcap is not None:
            logits = torch.tanh(logits / d.logit_softcap) * d.logit_softcap
        return self.record("logits", logits)

    def record(self, name: str, tensor: Tensor) -> Tensor:
        if self.trace is not None:
            self.trace(name, tensor)
        return tensor

    def clean(self) -> None:
        """Zero every page: after weights that were not finite."""
        for pair in (*self.caches, *self.recurrent):
            for tensor in pair or ():
                tensor.zero_()


def is_plain(layer: Layer) -> bool:
    """norm, attention, sum, norm, product, sum: the form whose sums can be left to the norms."""
    before = layer.before_attention and layer.before_mlp
    mixer = layer.mixer
    attention = isinstance(mixer, Attention) and mixer.rope is not None and not mixer.gated and mixer.wide_norm is None
    return bool(before and attention and not layer.after_attention and not layer.after_mlp)


def new_state(
    mixer: Attention | LatentAttention | GatedDelta, num_states: int | None, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """Convolution history and recurrent state of one layer for every slot; None for attention."""
    if not isinstance(mixer, GatedDelta):
        return None
    assert num_states is not None
    history = torch.zeros(num_states, mixer.taps - 1, mixer.channels, dtype=dtype, device=device)
    shape = (num_states, mixer.value_heads, mixer.key_size, mixer.value_size)
    return history, torch.zeros(shape, dtype=torch.float32, device=device)


def norm_heads(ops: Ops, norm: HeadNorm, qkv: Tensor) -> Tensor:
    """Queries, and keys, normed over all their heads together."""
    wide, narrow = norm.q_weight.shape[0], norm.k_weight.shape[0]
    q, k, v = qkv.split((wide, narrow, qkv.shape[1] - wide - narrow), -1)
    q = ops.rms_norm(q.contiguous(), norm.q_weight, norm.eps, form=norm.form)
    return torch.cat((q, ops.rms_norm(k.contiguous(), norm.k_weight, norm.eps, form=norm.form), v), -1)


def linear_weights(decoder: Decoder) -> Iterator[Tensor]:
    for layer in decoder.layers:
        if isinstance(layer.mixer, Attention):
            yield from (layer.mixer.qkv, layer.mixer.out)
        elif isinstance(layer.mixer, LatentAttention):
            yield from layer.mixer.weights()
        if isinstance(layer.mlp, Dense):
            yield from (layer.mlp.gate_up, layer.mlp.down)
    if decoder.head is not None:
        yield decoder.head


def paged_batch(inputs: StepInputs, size: int, device: torch.device) -> PagedBatch:
    """Plain arithmetic on whole arrays: a step may hold tens of thousands of tokens."""
    counts, starts = np.array(inputs.counts), np.array(inputs.starts)
    ends = np.concatenate(([0], counts.cumsum()))
    positions = np.arange(ends[-1]) + np.repeat(starts - ends[:-1], counts)
    tables = table_of(inputs.blocks, len(counts), TABLE_STEP)
    slots = (
        tables[np.repeat(np.arange(len(counts)), counts), positions // size].astype(np.int64) * size + positions % size
    )
    contexts = starts + counts
    return PagedBatch(
        positions=torch.from_numpy(positions).to(device),
        slots=torch.from_numpy(slots).to(device),
        cu_q=torch.from_numpy(ends.astype(np.int32)).to(device),
        context_lens=torch.from_numpy(contexts.astype(np.int32)).to(device),
        block_tables=torch.from_numpy(tables).to(device),
        q_lens=tuple(counts.tolist()),
        contexts=tuple(contexts.tolist()),
        num_decodes=int((counts == 1).sum()),
    )


def table_of(blocks: Sequence[Sequence[int]], rows: int, step: int) -> np.ndarray:
    """int32 [rows, W], padded with the null block; W is the longest row's length, up to the next multiple of `step`."""
    width = -(-max(map(len, blocks), default=1) // step) * step
    table = np.zeros((rows, width), dtype=np.int32)
    for row, own in zip(table, blocks, strict=False):
        row[: len(own)] = own
    return table
