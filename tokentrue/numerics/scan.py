"""The recurrence of the gated delta rule in plain torch.

A token's sums run over the key size of its own state, by one multiplication and one reduction, so they do not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def groups(lengths: Sequence[int], device: torch.device) -> Iterator[tuple[list[int], Tensor]]:
    """Sequences of equal length, and their rows: sequence after sequence."""
    starts, members = [0], dict[int, list[int]]()
    for index, length in enumerate(lengths):
        starts.append(starts[-1] + length)
        members.setdefault(length, []).append(index)
    for length, own in members.items():
        if length:
            first = torch.tensor([starts[i] for i in own], device=device)
            yield own, (first[:, None] + torch.arange(length, device=device)).flatten()


def recurrent_scan(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """q, k [S,n,H,K], v [S,n,H,V], decay, beta [S,n,H], state [S,H,K,V], float32: out [S,n,H,V] and the last state, token by token."""
    factor, scaled = torch.exp(decay), q * q.shape[-1] ** -0.5
    out = torch.empty_like(v)
    for t in range(q.shape[1]):
        key = k[:, t].unsqueeze(-1)
        state = state * factor[:, t, :, None, None]
        delta = (v[:, t] - (state * key).sum(-2)) * beta[:, t].unsqueeze(-1)
        state = state + key * delta.unsqueeze(-2)
        out[:, t] = (state * scaled[:, t].unsqueeze(-1)).sum(-2)
    return out, state


def scan_sequences(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, lengths: Sequence[int], state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`Ops.delta_scan` in plain torch: sequences of equal length together. Differentiable from zero states."""
    heads, key_size, value_size = q.shape[1], q.shape[2], v.shape[2]
    last = q.new_zeros(len(lengths), heads, key_size, value_size) if state is None else state.clone()
    inputs, pieces = (q, k, v, decay, beta), list[tuple[Tensor, Tensor]]()
    differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    for members, rows in groups(lengths, q.device):
        together = [x[rows].view(len(members), -1, *x.shape[1:]) for x in inputs]
        if differentiable:
            out: Any = DeltaScan.apply(*together)
        else:
            out, last[members] = recurrent_scan(*together, last[members])
        pieces.append((rows, out.flatten(0, 1)))
    order = torch.cat([rows for rows, _ in pieces]).argsort()
    return torch.cat([values for _, values in pieces]).index_select(0, order), last


class DeltaScan(torch.autograd.Function):
    """Exact forward of whole sequences [S,n,H,·] from zero states; backward by transformers' chunked form."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v, decay, beta)
        return recurrent_scan(q, k, v, decay, beta, q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3]))[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            q, k, v, decay, beta = leaves
            out, _ = torch_chunk_gated_delta_rule(q, k, v, g=decay, beta=beta)
            found = torch.autograd.grad(out, leaves, grads[0])
        return found
