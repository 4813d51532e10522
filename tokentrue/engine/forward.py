"""Tensors in, logits out: one decoder step over the paged cache. The only engine file that does arithmetic."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokentrue.engine.adapters import AdapterBank
from tokentrue.engine.decoder import Attention, Decoder, Dense, LatentAttention, Layer, Norm, Product
from tokentrue.engine.images import Features, VisualRows
from tokentrue.engine.schedule import ScheduleLimits, StepInputs
from tokentrue.numerics import HeadNorm, Ops, Packed, PagedBatch, RowSlots
from tokentrue.numerics.delta import GatedDelta
from tokentrue.numerics.leaves import row_linear
from tokentrue.numerics.ops import DeltaStates
from tokentrue.records import record

Ropes = Mapping[str | None, tuple[Tensor | None, Tensor | None]]
Pair = tuple[Tensor, Tensor]
TABLE_STEP = 8  # block tables are as wide as a multiple of this
CPU_SHARE, GPU_SHARE = 0.25, 0.85
CPU_MOST_BYTES = 4 << 30
ROW_PARALLEL = ("out", "down")


@record
class StepTensors:
    batch: PagedBatch
    sequences: Packed  # of the step's new tokens
    ropes: Ropes
    adapted: RowSlots | None
    state_slots: Tensor | None


class Forward:
    """`trace(name, tensor)`, if set, receives what each attention and MLP adds, and the logits."""

    def __init__(self, decoder: Decoder, ops: Ops, *, num_blocks: int, num_states: int | None = None) -> None:
        self.decoder = decoder
        self.ops = ops
        self.device = decoder.device
        self.num_states = num_states or 0
        self.states = self.new_states()
        self.caches = [self.new_cache(layer.mixer, num_blocks) for layer in decoder.layers]
        for at, index in enumerate(self.linear_layers):
            self.caches[index] = self.states[0][at], self.states[1][at]
        self.bank = AdapterBank(decoder, ops)
        self.features = Features(decoder.tower)
        self.trace: Callable[[str, Tensor], None] | None = None
        self.plain = decoder.residual_scale is None and all(is_plain(layer) for layer in decoder.layers)
        self.refresh()

    def new_cache(self, mixer: Attention | LatentAttention | GatedDelta, num_blocks: int) -> Pair:
        """Pages of keys and values; empty for linear attention."""
        d = self.decoder
        blocks = 0 if isinstance(mixer, GatedDelta) else num_blocks
        keys, values = (self.ops.new_cache(blocks, *d.heads[1:], d.dtype, d.device) for _ in range(2))
        return keys, values

    @property
    def linear_layers(self) -> list[int]:
        return [i for i, layer in enumerate(self.decoder.layers) if isinstance(layer.mixer, GatedDelta)]

    def new_states(self) -> tuple[Tensor, ...]:
        """Convolution history and recurrent state of all layers by slot, if any; the last slot is for padding rows."""
        d, layers = self.decoder, self.linear_layers
        mixer, slots = d.layers[layers[0]].mixer if layers else None, self.num_states + 1
        if not isinstance(mixer, GatedDelta):
            return ()
        history = torch.zeros(len(layers), slots, mixer.taps - 1, mixer.channels, dtype=d.dtype, device=d.device)
        shape = (len(layers), slots, mixer.value_heads, mixer.key_size, mixer.value_size)
        return history, torch.zeros(shape, dtype=torch.float32, device=d.device)

    def refresh(self) -> None:
        """Call after a weight change: invalidates what the operators derived from the weights."""
        self.ops.pack(self.decoder.weights())
        self.features.forget()

    @torch.inference_mode()
    def step(self, inputs: StepInputs, rows: Sequence[int]) -> Tensor:
        """Logits [len(rows), V] of those token rows."""
        x, seen = self.embed(inputs), None
        if inputs.images and (seen := self.features.rows_of(inputs.starts, inputs.counts, inputs.images)) is not None:
            x = x.index_copy(0, seen.rows, seen.features)
        return self.logits_of_rows(self.compute(inputs, x, seen), rows)

    @torch.inference_mode()
    def embed(self, inputs: StepInputs) -> Tensor:
        return self.decoder.embed(torch.from_numpy(np.array(inputs.ids)).to(self.device))

    @torch.inference_mode()
    def compute(self, inputs: StepInputs, x: Tensor, seen: VisualRows | None = None) -> Tensor:
        """[T,K] after this decoder's layers, for the input of the first."""
        paged = paged_batch(inputs, self.ops.block_size, self.device)
        self.copy_states(inputs.state_copies)
        slots = torch.tensor(inputs.state_slots, device=self.device) if inputs.state_slots else None
        h, x = self.layers(x, paged, self.bank.rows_of(inputs.adapters, inputs.counts, self.device), slots, seen)
        return x + h

    @torch.inference_mode()
    def logits_of_rows(self, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        if not rows:
            return hidden.new_empty(0, self.decoder.vocabulary)
        if len(rows) < hidden.shape[0]:
            hidden = hidden.index_select(0, torch.tensor(rows, device=self.device))
        return self.logits(hidden)

    def logits_of_all(
        self, ids: Tensor, batch: PagedBatch, adapted: RowSlots | None = None, state_slots: Tensor | None = None
    ) -> Tensor:
        """Logits [T,V] of every token of the step."""
        d = self.decoder
        h, x = self.layers(d.embed(ids), batch, adapted, state_slots)
        if not self.plain or d.logit_softcap is not None or d.logit_divisor is not None:
            return self.logits(x + h)
        assert d.norm is not None and d.head is not None
        return self.ops.norm_linear(h, x, d.norm, *d.head)[0]

    @contextmanager
    def routes(self) -> Iterator[Callable[[int, int], tuple[np.ndarray, np.ndarray]]]:
        """Records experts inside the block; yields (first row, end) -> int16 [rows, layers, top_k], float32 weights."""
        chosen: list[Pair] = []
        self.ops.routes = chosen

        def read(first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
            experts, weights = (torch.stack([one[first:end] for one in kind], 1) for kind in zip(*chosen, strict=True))
            return experts.to(torch.int16).cpu().numpy(), weights.float().cpu().numpy()

        try:
            yield read
        finally:
            self.ops.routes = None

    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        """Executes the queued copies between state slots (from, to), in order."""
        for source, target in copies:
            for tensor in self.states:
                tensor[:, target].copy_(tensor[:, source])

    def layers(
        self, x: Tensor, batch: PagedBatch, adapted: RowSlots | None = None, state_slots: Tensor | None = None,
        seen: VisualRows | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """(h, x): what the last layer adds, and the residual [T,K]. The norm that reads a sum computes it."""
        ropes: Ropes = {None: (None, None), **self.angles(batch)}
        sequences = Packed(cu_seqlens=batch.cu_q, lengths=batch.q_lens)
        step = StepTensors(batch=batch, sequences=sequences, ropes=ropes, adapted=adapted, state_slots=state_slots)
        h: Tensor | None = None
        for index, layer in enumerate(self.decoder.layers):
            h, x = self.mix(index, layer, h, x, step)
            h, x = self.mlp(index, layer, self.scale(h), x, step)
            h = self.scale(h)
            if seen is not None and index < len(seen.added):
                x = x + h
                h, x = None, x.index_copy(0, seen.rows, x.index_select(0, seen.rows) + seen.added[index])
        assert h is not None
        return h, x

    def angles(self, batch: PagedBatch) -> dict[str, Pair]:
        """Cosine and sine of each token's position or, with images, of its place in time, height and width."""
        at, tables = batch.positions if batch.rope is None else batch.rope, self.decoder.ropes.items()
        if at.dim() == 1:
            return {key: (cos[at], sin[at]) for key, (cos, sin) in tables}
        places = at.t()[:, self.decoder.axes]
        return {key: (cos.gather(0, places), sin.gather(0, places)) for key, (cos, sin) in tables}

    def scale(self, h: Tensor) -> Tensor:
        return h if self.decoder.residual_scale is None else h * self.decoder.residual_scale

    def mix(self, index: int, layer: Layer, h: Tensor | None, x: Tensor, step: StepTensors) -> tuple[Tensor, Tensor]:
        """What the layer's attention adds, and the residual before it."""
        mixer = layer.mixer
        if isinstance(mixer, Attention):
            qkv, x = self.project(index, "qkv", layer.before_attention, h, x, mixer.qkv, step)
            attended = self.attend(index, mixer, qkv, step)
        elif isinstance(mixer, GatedDelta):
            assert mixer.merged is not None and step.state_slots is not None
            inputs, x = self.project(index, "inputs", layer.before_attention, h, x, Product(*mixer.merged), step)
            parts = inputs.split([part.out_features for part in mixer.projections], -1)
            (history, state), slots = self.caches[index], step.state_slots
            out = mixer.run(parts, step.sequences, DeltaStates(history=history, state=state, slots=slots))
            return self.norm(layer.after_attention, self.record(f"layers.{index}.attention", out)), x
        else:
            normed, x = self.enter(layer.before_attention, h, x)
            cos, sin = step.ropes[mixer.rope]
            assert cos is not None and sin is not None
            attended = mixer.attend(self.ops, normed, cos, sin, self.caches[index], step.batch)
        out = self.multiply(index, "out", attended, mixer.out, step)
        return self.norm(layer.after_attention, self.record(f"layers.{index}.attention", out)), x

    def attend(self, index: int, mixer: Attention, qkv: Tensor, step: StepTensors) -> Tensor:
        ops, cache = self.ops, self.caches[index]
        heads, _, size = self.decoder.heads
        if mixer.wide_norm is not None:
            qkv = norm_heads(ops, mixer.wide_norm, qkv)
        rope, gated = step.ropes[mixer.rope], mixer.gated
        q = ops.prepare_qkv(qkv, self.decoder.heads, mixer.head_norm, *rope, *cache, step.batch, gated=gated)
        attended = ops.paged_attention(q, *cache, step.batch, mixer.spec).flatten(1)
        if not gated:
            return attended
        # Query and gate of a head lie side by side.
        return ops.gate_heads(attended, qkv[:, : 2 * heads * size].view(-1, heads, 2, size)[:, :, 1])

    def mlp(self, index: int, layer: Layer, h: Tensor, x: Tensor, step: StepTensors) -> tuple[Tensor, Tensor]:
        """What the layer's MLP adds, and the residual before it."""
        mlp, norm = layer.mlp, layer.before_mlp
        if isinstance(mlp, Dense):
            inner, x = self.project(index, "gate_up", norm, h, x, mlp.gate_up, step, mlp.kind)
            out = self.multiply(index, "down", inner, mlp.down, step)
        else:
            normed, x = self.enter(norm, h, x)
            found = mlp(normed[None])
            out = (found[0] if isinstance(found, tuple) else found)[0]
        return self.norm(layer.after_mlp, self.record(f"layers.{index}.mlp", out)), x

    def project(
        self, index: int, name: str, norm: Norm | None, h: Tensor | None, x: Tensor, product: Product,
        step: StepTensors, kind: str | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """A merged product of norm(x + h) (gated if `kind` names an activation), and x + h."""
        changed = step.adapted is not None and (index, name) in self.bank.stacks
        if not changed and (kind is None or product.bias is None) and h is not None and norm is not None:
            return self.ops.norm_linear(h, x, norm, product.weight, product.bias, kind)
        normed, x = self.enter(norm, h, x)
        y = self.multiply(index, name, normed, product, step)
        if kind is not None:
            gate, up = y.chunk(2, -1)
            y = self.ops.act_mul(gate, up, kind)
        return y, x

    def enter(self, norm: Norm | None, h: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + h), x + h)."""
        if norm is None or h is None:
            x = x if h is None else x + h
            return self.norm(norm, x), x
        return self.ops.add_rms_norm(h, x, norm.weight, norm.eps, form=norm.form)

    def multiply(self, index: int, name: str, x: Tensor, product: Product, step: StepTensors) -> Tensor:
        """A merged product of x, with each row's adapter."""
        stack = self.bank.stacks.get((index, name)) if step.adapted is not None else None
        if step.adapted is not None and stack is not None:
            return self.ops.adapted_linear(x, *product, stack, step.adapted)
        return row_linear(self.ops, x, *product) if name in ROW_PARALLEL else self.ops.linear(x, *product)

    def norm(self, norm: Norm | None, x: Tensor) -> Tensor:
        return x if norm is None else self.ops.rms_norm(x, norm.weight, norm.eps, form=norm.form)

    def logits(self, hidden: Tensor) -> Tensor:
        d = self.decoder
        assert d.head is not None
        logits = self.record("logits", self.ops.linear(self.norm(d.norm, hidden), *d.head))
        if d.logit_divisor is not None:
            logits = logits / d.logit_divisor
        if d.logit_softcap is not None:
            logits = torch.tanh(logits / d.logit_softcap) * d.logit_softcap
        return logits

    def record(self, name: str, tensor: Tensor) -> Tensor:
        if self.trace is not None:
            self.trace(name, tensor)
        return tensor

    def clean(self) -> None:
        """Zeroes every page, after weights that were not finite."""
        for pair in (self.states, *self.caches):
            for tensor in pair:
                tensor.zero_()
        self.features.forget()


def is_plain(layer: Layer) -> bool:
    """norm, attention, sum, norm, product, sum: the form whose norms and products share launches."""
    before = layer.before_attention and layer.before_mlp
    mixer = layer.mixer
    attention = isinstance(mixer, Attention) and mixer.rope is not None and not mixer.gated and mixer.wide_norm is None
    return bool(before and attention and not layer.after_attention and not layer.after_mlp)


def norm_heads(ops: Ops, norm: HeadNorm, qkv: Tensor) -> Tensor:
    wide, narrow = norm.q_weight.shape[0], norm.k_weight.shape[0]
    q, k, v = qkv.split((wide, narrow, qkv.shape[1] - wide - narrow), -1)
    q = ops.rms_norm(q.contiguous(), norm.q_weight, norm.eps, form=norm.form)
    return torch.cat((q, ops.rms_norm(k.contiguous(), norm.k_weight, norm.eps, form=norm.form), v), -1)


def paged_batch(inputs: StepInputs, size: int, device: torch.device) -> PagedBatch:
    """Vectorised: a step may have tens of thousands of tokens."""
    counts, starts = np.array(inputs.counts), np.array(inputs.starts)
    ends = np.concatenate(([0], counts.cumsum()))
    positions = np.arange(ends[-1]) + np.repeat(starts - ends[:-1], counts)
    tables = table_of(inputs.blocks, len(counts), TABLE_STEP)
    blocks = tables[np.repeat(np.arange(len(counts)), counts), positions // size].astype(np.int64)
    contexts, rope = starts + counts, None
    if inputs.images:
        plain = torch.arange(int(contexts.max())).expand(3, -1)
        every = zip(inputs.images, inputs.starts, contexts.tolist(), strict=True)
        rope = torch.cat([plain[:, a:b] if own is None else own.positions_of(a, b) for own, a, b in every], 1).to(
            device
        )

    def tensor(values: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(values).to(device)

    return PagedBatch(
        positions=tensor(positions), slots=tensor(blocks * size + positions % size), cu_q=tensor(ends.astype(np.int32)),
        context_lens=tensor(contexts.astype(np.int32)), block_tables=tensor(tables), q_lens=tuple(counts.tolist()),
        contexts=tuple(contexts.tolist()), num_decodes=int((counts == 1).sum()), rope=rope,
    )  # fmt: skip


def table_of(blocks: Sequence[Sequence[int]], rows: int, step: int) -> np.ndarray:
    """int32 [rows, W], padded with the null block; W: longest row, rounded up to a multiple of `step`."""
    width = -(-max(map(len, blocks), default=1) // step) * step
    table = np.zeros((rows, width), dtype=np.int32)
    for row, own in zip(table, blocks, strict=False):
        row[: len(own)] = own
    return table


def blocks_for(decoder: Decoder, ops: Ops, *, limits: ScheduleLimits, kv_tokens: int | None, share: float = 1.0) -> int:
    """Enough for every request at full length if memory allows, else `share` of what fits; plus the null block."""
    heads, key_heads, size = decoder.heads
    attentions = sum(not isinstance(layer.mixer, GatedDelta) for layer in decoder.layers)
    token_bytes = 2 * attentions * key_heads * size * decoder.dtype.itemsize
    wanted = kv_tokens
    if wanted is None:
        if decoder.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(decoder.device)
            width = max(decoder.width, (heads + 2 * key_heads) * size)
            activations = limits.step_tokens * width * decoder.dtype.itemsize * 16
            logits = limits.max_requests * decoder.vocabulary * 40
            room = max(int(free * GPU_SHARE) - activations - logits, 0)
        else:
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            room = min(int(free * CPU_SHARE), CPU_MOST_BYTES)
        wanted = min(limits.max_requests * decoder.max_positions, int(share * room) // max(token_bytes, 1))
    return max(2, -(-wanted // ops.block_size)) + 1
