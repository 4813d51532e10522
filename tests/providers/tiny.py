"""A random Qwen3 small enough to sample from in a test."""

from __future__ import annotations

from typing import Any

import torch


def tiny_qwen3(*, vocab_size: int, positions: int, spread: float) -> Any:
    """The same weights for the same arguments; it never ends by itself. `spread` makes its distribution more or less peaked."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=positions,
        initializer_range=spread,
        eos_token_id=None,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config).eval()
