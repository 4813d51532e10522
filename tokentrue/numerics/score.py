"""The trainer's log-probabilities: one forward pass over whole sequences on the exact operators."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from tokentrue.errors import InputError
from tokentrue.numerics.logprob import logprobs_of
from tokentrue.numerics.ops import Packed
from tokentrue.numerics.patch import STATE, State, exact


def score(model: nn.Module, ids: Tensor, temperature: float = 1.0, cu_seqlens: Tensor | None = None) -> Tensor:
    """ids [B,T] -> float32 [B,T-1]: log-probability of ids[:,1:] under softmax(logits / temperature). Differentiable.

    Sequences start at position 0 and may be padded on the right with any id (causality hides it). Packed: ids [1,T] (or [T]) with
    `cu_seqlens` [S+1]; entries that would predict a sequence's first token from the one before it are 0.
    Outside `with exact(model)` the block is entered for this one call.
    """
    if temperature <= 0:
        raise InputError(f"score: temperature must be > 0, got {temperature}; greedy decoding has no log-probabilities of its own")
    flat = ids.dim() == 1
    batch = ids[None] if flat else ids
    if batch.dim() != 2 or batch.shape[1] == 0:
        raise InputError(f"score: ids must be [batch, tokens], got {tuple(ids.shape)}")
    if model.__dict__.get(STATE) is None:
        with exact(model):
            return score(model, ids, temperature, cu_seqlens)
    state: State = model.__dict__[STATE]
    packed = None if cu_seqlens is None else packed_of(batch, cu_seqlens)
    logits = logits_of(model, batch, packed)
    b, t, v = logits.shape
    found = logprobs_of(state.ops, logits[:, :-1].reshape(b * (t - 1), v), batch[:, 1:].reshape(-1), temperature).view(b, t - 1)
    if packed is not None and len(packed.lengths) > 1:
        inside = torch.ones(t - 1, dtype=torch.bool, device=found.device)
        inside[packed.cu_seqlens[1:-1].long() - 1] = False
        found = torch.where(inside, found, torch.zeros((), dtype=found.dtype, device=found.device))
    return found[0] if flat else found


def logits_of(model: nn.Module, ids_BT: Tensor, packed: Packed | None = None) -> Tensor:
    """The plain forward pass, [B,T,V] in the model's dtype; for use inside `exact`."""
    b, t = ids_BT.shape
    if packed is None:
        positions = torch.arange(t, device=ids_BT.device).expand(b, t)
        packed = Packed.of((t,) * b, ids_BT.device)
    else:
        positions = torch.cat([torch.arange(n, device=ids_BT.device) for n in packed.lengths])[None]
    return model(input_ids=ids_BT, position_ids=positions, use_cache=False, packed=packed).logits


def packed_of(ids: Tensor, cu_seqlens: Tensor) -> Packed:
    ends = cu_seqlens.tolist()
    if ids.shape[0] != 1 or ends[0] != 0 or ends[-1] != ids.shape[1] or any(b <= a for a, b in pairwise(ends)):
        raise InputError(f"score: cu_seqlens must rise from 0 to {ids.shape[1]} over one row of ids, got {ends}")
    lengths = tuple(b - a for a, b in pairwise(ends))
    return Packed(cu_seqlens=cu_seqlens.to(device=ids.device, dtype=torch.int32), lengths=lengths)
