"""Routing flips of a mixture of experts: how often other weights send a token to other experts.

A flip changes which weights a token meets at all, so that a tiny change of the router's input can be a large change of
the output: δ gets tails that a dense model does not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def is_mixture(model: nn.Module) -> bool:
    return bool(getattr(model.config, "num_experts", 0))


@torch.no_grad()
def routing_flips(model: nn.Module, other: Iterable[tuple[str, Tensor]], token_ids: Sequence[int]) -> float:
    """The share of (token, layer) whose set of experts differs between the model's weights and `other`, over one
    sequence."""
    ids = torch.tensor([list(token_ids)], device=next(model.parameters()).device)
    mine = chosen_experts(model, dict(model.named_parameters()), ids)
    theirs = chosen_experts(model, dict(other), ids)
    return float((mine != theirs).any(dim=-1).float().mean())


def chosen_experts(model: nn.Module, weights: dict[str, Tensor], ids: Tensor) -> Tensor:
    """[layers, T, k], each token's experts in ascending order."""
    config: Any = model.config
    said = torch.func.functional_call(model, weights, (ids,), {"output_router_logits": True, "use_cache": False})
    logits = torch.stack([layer.reshape(-1, layer.shape[-1]) for layer in said.router_logits])
    return logits.topk(config.num_experts_per_tok, dim=-1).indices.sort(dim=-1).values
