"""How many floating-point operations a model needs for a row, from its parameters and its configuration, for model
FLOPs utilisation.

A product of a token with a matrix of n weights is 2n operations; attention of a row of T tokens, causal, is
2·T²·heads·head_dim a layer (scores and values, half of the square each). A backward pass counts as two forward passes;
what is computed again to save memory is not counted. Not known, and then absent, never guessed: layers that are not
full attention, and mixtures whose configuration does not say how many experts a token takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

COUNTS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlops:
    """`weights` that each token is multiplied with; `attention` is layers · heads · head_dim."""

    weights: float
    attention: float

    def forward(self, lengths: Sequence[int]) -> float:
        return sum(2.0 * self.weights * length + 2.0 * self.attention * length * length for length in lengths)


def flops_of(model: nn.Module) -> ModelFlops | None:
    """None where the configuration does not say enough."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers, heads = getattr(config, "num_hidden_layers", None), getattr(config, "num_attention_heads", None)
    kinds = getattr(config, "layer_types", None) or ()
    if not layers or not heads or any(kind != "full_attention" for kind in kinds):
        return None
    share = expert_share(config)
    weights = 0.0
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or is_lookup(model, name):
            continue
        if ".experts." in name:
            if share is None:
                return None
            weights += parameter.numel() * share
        else:
            weights += parameter.numel()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return ModelFlops(weights=weights, attention=float(layers * heads * head_dim))


def expert_share(config: Any) -> float | None:
    """The share of the experts that a token takes."""
    taken = getattr(config, "num_experts_per_tok", None)
    total = next((getattr(config, name) for name in COUNTS_OF_EXPERTS if getattr(config, name, None)), None)
    return None if not taken or not total else taken / total


def is_lookup(model: nn.Module, name: str) -> bool:
    """An embedding is read, not multiplied; where it is also the head, its one parameter counts as the head."""
    owner = name.rpartition(".")[0]
    is_embedding = isinstance(model.get_submodule(owner), nn.Embedding)
    config: Any = getattr(model, "config", None)
    return is_embedding and not getattr(config, "tie_word_embeddings", False)
