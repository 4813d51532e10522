"""Gated delta rule (Qwen3-Next, Qwen3.5): linear attention with a state updated token by token.

Per token and value head, in float32, K the key size:

    S = S * exp(g);  S = S + k ⊗ ((v - Sᵀk) * beta);  out = Sᵀq / sqrt(K)

A token's sums run over the key size of its own state, so neither the batch nor a cut changes a bit. Engine and trainer
compute this recurrent form; gradients come from transformers' chunked form, on inputs that are computed again.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from tokentrue.errors import ExactnessError
from tokentrue.numerics.ops import DeltaInputs, DeltaStates, Ops, Packed


def groups(lengths: Sequence[int], device: torch.device) -> Iterator[tuple[list[int], Tensor]]:
    """Sequences of equal length, and their rows [S, length]."""
    starts, members = list(accumulate(lengths, initial=0)), dict[int, list[int]]()
    for index, length in enumerate(lengths):
        members.setdefault(length, []).append(index)
    for length, own in members.items():
        if length:
            first = torch.tensor([starts[i] for i in own], device=device)
            yield own, first[:, None] + torch.arange(length, device=device)


def scan_sequences(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, lengths: Sequence[int], state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The recurrence over sequences back to back: q, k [T,H,K], v [T,H,V], decay, beta [T,H], float32 -> out [T,H,V] and
    the states [S,H,K,V] after each; `state` None: zeros."""
    last = q.new_zeros(len(lengths), q.shape[1], q.shape[2], v.shape[2]) if state is None else state.clone()
    out, factor, scaled = torch.empty_like(v), torch.exp(decay), q * q.shape[-1] ** -0.5
    for members, rows in groups(lengths, q.device):
        own = last[members]
        queries, keys, values, factors, betas = (x[rows] for x in (scaled, k, v, factor, beta))
        found = torch.empty_like(values)
        for t in range(rows.shape[1]):
            key = keys[:, t].unsqueeze(-1)
            own = own * factors[:, t, :, None, None]
            delta = (values[:, t] - (own * key).sum(-2)) * betas[:, t].unsqueeze(-1)
            own = own + key * delta.unsqueeze(-2)
            found[:, t] = (own * queries[:, t].unsqueeze(-1)).sum(-2)
        out[rows], last[members] = found, own
    return out, last


class DeltaRule(torch.autograd.Function):
    """Forward by the exact rule from zero states, backward by transformers' chunked form."""

    @staticmethod
    def forward(ctx: Any, ops: Ops, sequences: Packed, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.ops, ctx.lengths = ops, sequences.lengths
        return ops.delta_rule(DeltaInputs(**dict(zip(FIELDS, tensors, strict=True))), sequences, None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

        wanted = ctx.needs_input_grad[2:]
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_(need) for x, need in zip(ctx.saved_tensors, wanted, strict=True)]
            inputs = DeltaInputs(**dict(zip(FIELDS, leaves, strict=True)))
            scanned, _ = scan_inputs(ctx.ops, inputs, ctx.lengths, None)
            pieces, places = list[Tensor](), list[Tensor]()
            for _, rows in groups(ctx.lengths, grads[0].device):
                q, k, v, decay, beta = (x[rows] for x in scanned)
                out, _ = torch_chunk_gated_delta_rule(q, k, v, g=decay, beta=beta)
                pieces.append(out.flatten(0, 1))
                places.append(rows.flatten())
            found = torch.autograd.grad(
                torch.cat(pieces), [x for x in leaves if x.requires_grad], grads[0][torch.cat(places)].float()
            )
        each = iter(found)
        return None, None, *(next(each) if need else None for need in wanted)


FIELDS = ("q", "k", "v", "b", "a", "convolution", "a_log", "dt_bias")


def plain_rule(ops: Ops, inputs: DeltaInputs, lengths: Sequence[int], states: DeltaStates | None) -> Tensor:
    """`Ops.delta_rule` in plain torch."""
    history, state = (None, None) if states is None else (states.history[states.slots], states.state[states.slots])
    (q, k, v, decay, beta), history = scan_inputs(ops, inputs, lengths, history)
    out, state = scan_sequences(q, k, v, decay, beta, lengths, state)
    if states is not None:
        states.history[states.slots], states.state[states.slots] = history, state
    return out.to(inputs.v.dtype)


def scan_inputs(
    ops: Ops, inputs: DeltaInputs, lengths: Sequence[int], history: Tensor | None
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    """q, k [T,H,K], v [T,H,V], decay and beta [T,H] in float32, and the next history. (grad)"""
    (_, key_heads, size), group = inputs.q.shape, inputs.b.shape[2]
    mixed = torch.cat([part.flatten(1) for part in (inputs.q, inputs.k, inputs.v)], -1)
    mixed, history = convolve(ops, mixed, inputs.convolution, lengths, history)
    keys = key_heads * size
    q, k, v = mixed.split((keys, keys, mixed.shape[1] - 2 * keys), -1)
    q, k = (unit(part.view(-1, key_heads, size)).repeat_interleave(group, 1) for part in (q, k))
    v = v.reshape(-1, inputs.value_heads, inputs.value_size).float()
    beta = ops.activation(inputs.b.flatten(1), "sigmoid").float()
    decay = -torch.exp(inputs.a_log.float()) * ops.activation(inputs.a.flatten(1).float() + inputs.dt_bias, "softplus")
    return (q, k, v, decay, beta), history


def unit(x: Tensor) -> Tensor:
    """Normalised to length 1 in float32."""
    x = x.float()
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def convolve(
    ops: Ops, mixed: Tensor, weight: Tensor, lengths: Sequence[int], history: Tensor | None
) -> tuple[Tensor, Tensor]:
    """SiLU of the causal depthwise convolution: taps added in order in float32, one rounding."""
    weight, taps = weight.float(), weight.shape[1]
    if history is None:
        history = mixed.new_zeros(len(lengths), taps - 1, mixed.shape[1])
    kept = torch.empty_like(history)
    pieces: list[tuple[Tensor, Tensor]] = []
    for members, rows in groups(lengths, mixed.device):
        length = lengths[members[0]]
        long = torch.cat((history[members], mixed[rows]), 1)
        wide = long.float()
        total = wide[:, :length] * weight[:, 0]
        for tap in range(1, taps):
            total = total + wide[:, tap : tap + length] * weight[:, tap]
        pieces.append((rows.flatten(), total.to(mixed.dtype).flatten(0, 1)))
        kept[members] = long[:, length:].detach()
    order = torch.cat([rows for rows, _ in pieces])
    out = torch.cat([values for _, values in pieces]).index_select(0, order.argsort())
    return ops.activation(out, "silu"), kept


class GatedDelta:
    """One layer; reads parameters from the model's module at call time."""

    def __init__(self, name: str, module: Any, ops: Ops) -> None:
        self.module = module
        self.ops = ops
        self.key_heads, self.value_heads = module.num_k_heads, module.num_v_heads
        self.key_size, self.value_size = module.head_k_dim, module.head_v_dim
        self.taps = module.conv_kernel_size
        self.channels = 2 * self.key_heads * self.key_size + self.value_heads * self.value_size
        self.joined = hasattr(module, "in_proj_qkvz")  # Qwen3-Next; Qwen3.5 has one projection for each
        inputs = ("qkvz", "ba") if self.joined else ("qkv", "z", "b", "a")
        self.projections = tuple(getattr(module, f"in_proj_{part}") for part in inputs)
        self.merged: tuple[Tensor, Tensor | None] | None = None  # weight of all projections, in the engine
        known = {"conv1d", "norm", "out_proj", *(f"in_proj_{part}" for part in inputs)}
        parts = {child for child, _ in module.named_children()}
        if parts != known or module.conv1d.bias is not None or module.activation != "silu":
            raise ExactnessError(f"{name} ({type(module).__name__}) has no exact form: its parts are {sorted(parts)}")

    def run(self, projected: Sequence[Tensor], sequences: Packed, states: DeltaStates | None) -> Tensor:
        """[T,K] from the results of `projections`; without states the sequences start here."""
        ops, m = self.ops, self.module
        q, k, v, z, b, a = self.split(projected)
        tensors = (q, k, v, b, a, m.conv1d.weight.squeeze(1), m.A_log, m.dt_bias)
        if states is None and torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            out: Any = DeltaRule.apply(ops, sequences, *tensors)
        else:
            out = ops.delta_rule(DeltaInputs(**dict(zip(FIELDS, tensors, strict=True))), sequences, states)
        gated = ops.gated_norm(out, z, m.norm.weight, m.norm.variance_epsilon)
        return ops.linear(gated.flatten(1), m.out_proj.weight)

    def split(self, projected: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """q, k [T,J,K], v, z [T,J,G*V], b, a [T,J,G]: views, by key head."""
        tokens, heads = projected[0].shape[0], self.key_heads
        group = self.value_heads // heads
        wide, keys = group * self.value_size, heads * self.key_size
        if self.joined:
            qkvz, ba = (part.view(tokens, heads, -1) for part in projected)
            return (*qkvz.split((self.key_size, self.key_size, wide, wide), -1), *ba.split((group, group), -1))
        qkv, z, b, a = projected
        q, k, v = qkv.split((keys, keys, heads * wide), -1)
        return tuple(part.view(tokens, heads, -1) for part in (q, k, v, z, b, a))


def delta_forward(name: str, module: nn.Module, ops: Ops) -> Callable[..., Tensor]:
    """Exact forward of a model's own module: whole sequences, packed or padded."""
    delta = GatedDelta(name, module, ops)

    def whole(x: Tensor, sequences: Packed) -> Tensor:
        return delta.run([ops.linear(x, part.weight) for part in delta.projections], sequences, None)

    def forward(
        hidden_states: Tensor, cache_params: object = None, attention_mask: Tensor | None = None, packed: Packed | None = None,
        **kwargs: object,
    ) -> Tensor:  # fmt: skip
        if cache_params is not None:
            raise ExactnessError(
                "exact(model) scores whole sequences; for generation with a cache use ExactEngine (here: use_cache=False)"
            )
        if packed is not None and packed.branches is not None:
            raise ExactnessError(f"{name}: the gated delta rule has no exact form over a tree")
        b, t, size = hidden_states.shape
        flat = hidden_states.reshape(b * t, size)
        if attention_mask is not None and not bool(attention_mask.bool().all()):
            rows = attention_mask.reshape(-1).nonzero().squeeze(-1)
            out = whole(flat[rows], Packed.of(tuple(attention_mask.sum(-1).tolist()), flat.device))
            return torch.zeros_like(flat).index_copy(0, rows, out).view(b, t, size)
        return whole(flat, packed or Packed.of((t,) * b, flat.device)).view(b, t, size)

    return forward


def is_gated_delta(module: nn.Module) -> bool:
    return all(hasattr(module, part) for part in ("A_log", "dt_bias", "conv1d", "num_k_heads", "head_v_dim"))
