"""Random weights in the shapes of published models, random prompts and adapters: what the GPU benchmarks and every engine
beside them are given."""

from __future__ import annotations

import random
from typing import Any

import torch

PROMPT = 256
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8},
    "30B-A3B": {
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "norm_topk_prob": True, "decoder_sparse_step": 1,
    },
    "MoE": {
        "hidden_size": 1024, "intermediate_size": 3072, "moe_intermediate_size": 384, "num_experts": 64, "num_experts_per_tok": 8,
        "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 4, "norm_topk_prob": True, "decoder_sparse_step": 1,
    },
}  # fmt: skip
LINEAR: dict[str, Any] = {
    "num_attention_heads": 16, "head_dim": 256, "partial_rotary_factor": 0.25, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip
# Family -> its classes in transformers, and the shape.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt-oss-20b": ("GptOssForCausalLM", "GptOssConfig", {
        "num_hidden_layers": 24, "num_local_experts": 32, "num_experts_per_tok": 4, "vocab_size": 201088, "tie_word_embeddings": False,
    }),
    "Qwen3.5-4B": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", {
        **LINEAR, "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32, "num_key_value_heads": 4, "vocab_size": 248320,
    }),
    "Qwen3-Next": ("Qwen3NextForCausalLM", "Qwen3NextConfig", {
        **LINEAR, "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 24, "num_key_value_heads": 2, "num_experts": 64,
        "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "tie_word_embeddings": False,
    }),
}  # fmt: skip

# Agents: 32 sessions in 8 groups that share a prompt of 3,000 tokens, ten turns of 400 given and 160 sampled tokens.
GROUPS, SESSIONS, TURNS, OPENING, GIVEN, SAMPLED = 8, 32, 10, 3000, 400, 160
AGENT_TOKENS, AGENT_LENGTH = 300_000, 12_000
"""Tokens that a key-value cache holds under agents (a round writes 203,000), and the longest sequence allowed."""
RANK, ALPHA, TARGETS = 16, 32, ("q_proj", "k_proj", "v_proj", "o_proj")

Prompts = list[list[int]]


def counts_of(shape: str) -> tuple[tuple[int, ...], int]:
    """Numbers of sequences, and tokens sampled for each."""
    return ((1, 32, 256), 256) if shape == "0.6B" else ((1, 32, 128), 128)


def model_of(shape: str, seed: int = 0, device: str = "cuda", **changes: Any) -> Any:
    import transformers

    common = {"vocab_size": 151936, "max_position_embeddings": 16384, "tie_word_embeddings": True}
    if shape in FAMILIES:
        name, config, sizes = FAMILIES[shape]
    else:
        name, config, sizes = "Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 128, **SHAPES[shape]}
        if "num_experts" in sizes:
            name, config = "Qwen3MoeForCausalLM", "Qwen3MoeConfig"
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = getattr(transformers, name)(getattr(transformers, config)(**{**common, **sizes, **changes}))
    finally:
        torch.set_default_dtype(torch.float32)
    return model.eval()


def prompts_of(count: int, length: int, seed: int) -> Prompts:
    chance = random.Random(seed)
    return [[chance.randrange(1000, 100000) for _ in range(length)] for _ in range(count)]


def adapter_state(model: Any, seed: int) -> dict[str, torch.Tensor]:
    """A random adapter on the attention's projections, under PEFT's names."""
    generator = torch.Generator("cuda").manual_seed(seed)
    state = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in TARGETS:
            for part, shape in (("A", (RANK, module.in_features)), ("B", (module.out_features, RANK))):
                weight = torch.randn(shape, generator=generator, device="cuda") * 0.02
                state[f"base_model.model.{name}.lora_{part}.weight"] = weight.bfloat16()
    return state
