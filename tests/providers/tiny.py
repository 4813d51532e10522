"""A random Qwen3 small enough to sample from in a test."""

from __future__ import annotations

from typing import Any

import torch


def tiny_qwen3(*, vocab_size: int, positions: int, spread: float, **changes: Any) -> Any:
    """The same weights for the same arguments. `spread` makes its distribution more or less peaked; `changes` are to
    the configuration, by which it never ends by itself."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": positions,
        "initializer_range": spread,
        "eos_token_id": None,
        "bos_token_id": None,
    }
    return Qwen3ForCausalLM(Qwen3Config(**{**settings, **changes})).eval()
