"""Gated delta rule (Qwen3-Next, Qwen3.5): linear attention with a state updated token by token.

Per token and value head, in float32, K the key size:

    S = S * exp(g);  S = S + k ⊗ ((v - Sᵀk) * beta);  out = Sᵀq / sqrt(K)

A token's sums run over the key size of its own state, so neither the batch nor a cut changes a bit. Engine and trainer
compute this recurrent form; gradients come from transformers' chunked form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from tokentrue.errors import ExactnessError
from tokentrue.numerics.ops import NormForm, Ops, Packed


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
    """`Ops.delta_scan` in plain torch."""
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


Scan = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Sequence[int], Tensor | None], tuple[Tensor, Tensor]]


class DeltaScan(torch.autograd.Function):
    """Forward by an exact scan from zero states, backward by transformers' chunked form."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, lengths: Sequence[int], scan: Scan
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, v, decay, beta)
        ctx.lengths = lengths
        out, state = scan(q, k, v, decay, beta, lengths, None)
        ctx.mark_non_differentiable(state)
        return out, state

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

        inputs = ctx.saved_tensors  # read once: checkpointing unpacks it
        found = [torch.empty_like(x) for x in inputs]
        for _, rows in groups(ctx.lengths, grads[0].device):
            with torch.enable_grad():
                q, k, v, decay, beta = leaves = [x[rows].detach().requires_grad_() for x in inputs]
                out, _ = torch_chunk_gated_delta_rule(q, k, v, g=decay, beta=beta)
                parts = torch.autograd.grad(out, leaves, grads[0][rows])
            for whole, part in zip(found, parts, strict=True):
                whole[rows] = part
        return (*found, None, None)


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
        known = {"conv1d", "norm", "out_proj", *(f"in_proj_{part}" for part in inputs)}
        parts = {child for child, _ in module.named_children()}
        if parts != known or module.conv1d.bias is not None or module.activation != "silu":
            raise ExactnessError(f"{name} ({type(module).__name__}) has no exact form: its parts are {sorted(parts)}")

    def run(
        self, x_TK: Tensor, lengths: Sequence[int], history: Tensor | None, state: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Output [T,K], next history [S,taps-1,C], state [S,H,K,V]; sequences back to back. None: their start."""
        ops, m = self.ops, self.module
        mixed, z, b, a = self.project(x_TK)
        mixed, history = self.convolve(mixed, lengths, history)
        keys = self.key_heads * self.key_size
        q, k, v = mixed.split((keys, keys, self.value_heads * self.value_size), -1)
        q, k = (self.unit(part.view(-1, self.key_heads, self.key_size)) for part in (q, k))
        v = v.view(-1, self.value_heads, self.value_size).float()
        beta = ops.activation(b, "sigmoid").float()
        decay = -torch.exp(m.A_log.float()) * ops.activation(a.float() + m.dt_bias, "softplus")
        inputs = (q, k, v, decay, beta)
        if state is None and torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
            out, last = DeltaScan.apply(*inputs, tuple(lengths), ops.delta_scan)  # pyright: ignore
        else:
            out, last = ops.delta_scan(*inputs, lengths, state)
        normed = ops.rms_norm(out.to(x_TK.dtype), m.norm.weight, m.norm.variance_epsilon, form=NormForm.PLAIN)
        gated = (normed.float() * ops.activation(z.float(), "silu")).to(x_TK.dtype)
        return ops.linear(gated.flatten(1), m.out_proj.weight), history, last

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Inputs of the convolution [T,C], gate z [T,H,V], b and a [T,H]."""
        ops, m, tokens = self.ops, self.module, x.shape[0]
        if not self.joined:
            # Their order is that of the sum of x's gradient.
            parts = (m.in_proj_z, m.in_proj_qkv, m.in_proj_b, m.in_proj_a)
            z, mixed, b, a = (ops.linear(x, part.weight) for part in parts)
            return mixed, z.view(tokens, self.value_heads, self.value_size), b, a
        group = self.value_heads // self.key_heads
        wide = group * self.value_size
        qkvz = ops.linear(x, m.in_proj_qkvz.weight).view(tokens, self.key_heads, -1)
        q, k, v, z = qkvz.split((self.key_size, self.key_size, wide, wide), -1)
        b, a = ops.linear(x, m.in_proj_ba.weight).view(tokens, self.key_heads, -1).split((group, group), -1)
        mixed = torch.cat((q.flatten(1), k.flatten(1), v.flatten(1)), -1)
        return mixed, z.reshape(tokens, self.value_heads, self.value_size), b.flatten(1), a.flatten(1)

    def convolve(self, mixed: Tensor, lengths: Sequence[int], history: Tensor | None) -> tuple[Tensor, Tensor]:
        """SiLU of the causal depthwise convolution: taps added in order in float32, one rounding."""
        weight = self.module.conv1d.weight.squeeze(1).float()
        back = self.taps - 1
        if history is None:
            history = mixed.new_zeros(len(lengths), back, mixed.shape[1])
        kept = torch.empty_like(history)
        pieces: list[tuple[Tensor, Tensor]] = []
        for members, rows in groups(lengths, mixed.device):
            length = lengths[members[0]]
            long = torch.cat((history[members], mixed[rows]), 1)
            wide = long.float()
            total = wide[:, :length] * weight[:, 0]
            for tap in range(1, self.taps):
                total = total + wide[:, tap : tap + length] * weight[:, tap]
            pieces.append((rows.flatten(), total.to(mixed.dtype).flatten(0, 1)))
            kept[members] = long[:, length:].detach()
        order = torch.cat([rows for rows, _ in pieces])
        out = torch.cat([values for _, values in pieces]).index_select(0, order.argsort())
        return self.ops.activation(out, "silu"), kept

    def unit(self, x: Tensor) -> Tensor:
        """Normalises to length 1 in float32; repeats key heads for the value heads."""
        x = x.float()
        x = x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)
        return x.repeat_interleave(self.value_heads // self.key_heads, 1)


def delta_forward(name: str, module: nn.Module, ops: Ops) -> Any:
    """Exact forward of a model's own module: whole sequences, packed or padded."""
    delta = GatedDelta(name, module, ops)

    def forward(
        hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, packed: Packed | None = None,
        **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        if cache_params is not None:
            raise ExactnessError(
                "exact(model) scores whole sequences; for generation with a cache use ExactEngine (here: use_cache=False)"
            )
        b, t, size = hidden_states.shape
        flat = hidden_states.reshape(b * t, size)
        if attention_mask is not None and not bool(attention_mask.bool().all()):
            rows = attention_mask.reshape(-1).nonzero().squeeze(-1)
            out = delta.run(flat[rows], tuple(attention_mask.sum(-1).tolist()), None, None)[0]
            return torch.zeros_like(flat).index_copy(0, rows, out).view(b, t, size)
        lengths = packed.lengths if packed is not None else (t,) * b
        return delta.run(flat, lengths, None, None)[0].view(b, t, size)

    return forward


def is_gated_delta(module: nn.Module) -> bool:
    return all(hasattr(module, part) for part in ("A_log", "dt_bias", "conv1d", "num_k_heads", "head_v_dim"))
