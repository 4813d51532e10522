"""The recurrence of the gated delta rule in plain torch.

A token's sums run over the key size of its own state, by one multiplication and one reduction, so they do not depend on
the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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


def recurrent_scan(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """q, k [S,n,H,K], v [S,n,H,V], decay, beta [S,n,H], state [S,H,K,V], float32: out [S,n,H,V] and the last state,
    token by token."""
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
    """`Ops.delta_scan` in plain torch, without gradients: sequences of equal length together."""
    last = q.new_zeros(len(lengths), q.shape[1], q.shape[2], v.shape[2]) if state is None else state.clone()
    out = torch.empty_like(v)
    for members, rows in groups(lengths, q.device):
        qm, km, vm, decays, betas = (x[rows].view(len(members), -1, *x.shape[1:]) for x in (q, k, v, decay, beta))
        found, last[members] = recurrent_scan(qm, km, vm, decays, betas, last[members])
        out[rows] = found.flatten(0, 1)
    return out, last


Scan = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Sequence[int], Tensor | None], tuple[Tensor, Tensor]]


class DeltaScan(torch.autograd.Function):
    """Whole sequences from zero states: forward by an exact scan, backward by transformers' chunked form of the same
    function."""

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
        for members, rows in groups(ctx.lengths, grads[0].device):

            def together(x: Tensor, rows: Tensor = rows, count: int = len(members)) -> Tensor:
                return x[rows].view(count, -1, *x.shape[1:])

            with torch.enable_grad():
                leaves = [together(x).detach().requires_grad_() for x in inputs]
                q, k, v, decay, beta = leaves
                out, _ = torch_chunk_gated_delta_rule(q, k, v, g=decay, beta=beta)
                parts = torch.autograd.grad(out, leaves, together(grads[0]))
            for whole, part in zip(found, parts, strict=True):
                whole[rows] = part.flatten(0, 1)
        return (*found, None, None)


def differentiable_scan(
    scan: Scan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    lengths: Sequence[int],
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`scan`, with gradients where the inputs need them (and the sequences start from zero states)."""
    if state is None and torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, decay, beta)):
        return DeltaScan.apply(q, k, v, decay, beta, tuple(lengths), scan)  # pyright: ignore[reportReturnType]
    return scan(q, k, v, decay, beta, lengths, state)
