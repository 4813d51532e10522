"""Further families and dtypes on CUDA under a random schedule, and adapters; each with the trainer's bits."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 64, "vocab_size": 110000, "max_position_embeddings": 4096,
}  # fmt: skip
HYBRID: dict[str, Any] = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 64, "linear_value_head_dim": 48,
    "partial_rotary_factor": 0.25, "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 192}
GLM: dict[str, Any] = {
    "partial_rotary_factor": 0.5, "n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 2, "topk_group": 1,
    "moe_intermediate_size": 192, "n_shared_experts": 1, "first_k_dense_replace": 1, "use_qk_norm": True,
}  # fmt: skip
GPT_OSS: dict[str, Any] = {"num_local_experts": 16, "num_experts_per_tok": 4, "sliding_window": 128}
GRANITE: dict[str, Any] = {"embedding_multiplier": 6.0, "residual_multiplier": 0.3, "logits_scaling": 3.0}
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 8, "kv_lora_rank": 64, "q_lora_rank": 96, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 192, "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip


def model_of(family: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    import transformers as t

    torch.manual_seed(1)
    makers = {
        "glm4_moe": lambda: t.Glm4MoeForCausalLM(t.Glm4MoeConfig(**SIZES, **GLM)),
        "qwen3_next": lambda: t.Qwen3NextForCausalLM(
            t.Qwen3NextConfig(**SIZES, **HYBRID, **EXPERTS, shared_expert_intermediate_size=128)
        ),
        "qwen3_5": lambda: t.Qwen3_5ForCausalLM(t.Qwen3_5TextConfig(**SIZES, **HYBRID)),
        "gpt_oss": lambda: t.GptOssForCausalLM(t.GptOssConfig(**SIZES, **GPT_OSS)),
        "deepseek_v3": lambda: t.DeepseekV3ForCausalLM(t.DeepseekV3Config(**{**SIZES, **DEEPSEEK})),
        "olmo3": lambda: t.Olmo3ForCausalLM(t.Olmo3Config(**SIZES, sliding_window=128)),
        "granite": lambda: t.GraniteForCausalLM(t.GraniteConfig(**SIZES, **GRANITE)),
        "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**SIZES)),
    }
    return makers[family]().to(device="cuda", dtype=dtype).eval()


def check(family: str) -> None:
    from benchmarks.engine_gpu import storm

    found = storm(model_of(family), 40, seed=3)
    assert found.tokens > 1000 and found.preemptions > 0
    assert found.wrong == 0, f"{family}: {found.wrong} of {found.tokens} log-probabilities differ: {found.first}"
    assert found.moved == 0, f"{family}: {found.moved} of {found.asked} requests differ when asked alone"


def test_glm_under_a_random_schedule() -> None:
    check("glm4_moe")


def test_qwen3_next_under_a_random_schedule() -> None:
    check("qwen3_next")


def test_qwen3_5_under_a_random_schedule() -> None:
    check("qwen3_5")


def test_gpt_oss_under_a_random_schedule() -> None:
    check("gpt_oss")


def test_deepseek_v3_under_a_random_schedule() -> None:
    check("deepseek_v3")


def test_olmo3_under_a_random_schedule() -> None:
    check("olmo3")


def test_granite_under_a_random_schedule() -> None:
    check("granite")


def test_float16_has_the_trainers_bits() -> None:
    from benchmarks import engine_gpu
    from tokentrue.engine import ExactEngine

    model, prompts = model_of("qwen3", torch.float16), engine_gpu.prompts_of(12, 150, seed=1)
    with ExactEngine(model, "cuda", "float16", max_len=4096, kv_tokens=24_000) as engine:
        run = engine_gpu.generate(engine, prompts, [engine_gpu.plain(60, seed=i) for i in range(12)])
    assert engine_gpu.count_differing(model, run) == (0, 720)


def adapter_state(
    targets: dict[str, tuple[int, int]], rank: int, dtype: torch.dtype, seed: int
) -> dict[str, torch.Tensor]:
    """A and B for `targets` (name -> inputs, outputs) of every layer of the small Qwen3."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"base_model.model.model.layers.{i}.{where}.lora_{part}.weight": (
            torch.randn(shape, generator=generator) * 0.1
        ).to(dtype)
        for i in range(4)
        for where, (inputs, outputs) in targets.items()
        for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank)))
    }


def test_adapters_have_the_bits_of_the_adapted_model() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        check_adapters(dtype)


def check_adapters(dtype: torch.dtype) -> None:
    """Rows of two adapters and of none in one captured step; one of them is then replaced in place."""
    from benchmarks import engine_gpu
    from tokentrue.engine.adapters import attach_adapter
    from tokentrue.numerics import exact, score
    from tokentrue.numerics.exact import STATE

    model = model_of("qwen3")
    config = model.config
    wide, hidden, inner = config.num_attention_heads * config.head_dim, config.hidden_size, config.intermediate_size
    few = {"self_attn.q_proj": (hidden, wide), "mlp.down_proj": (inner, hidden)}
    many = {**few, "self_attn.o_proj": (wide, hidden), "mlp.up_proj": (hidden, inner)}
    prompts = engine_gpu.prompts_of(9, 100, seed=2)
    with engine_gpu.engine_of(model, kv_tokens=24_000) as engine:
        engine.load_adapter("a", adapter_state(many, 8, dtype, seed=3), config={"lora_alpha": 16})
        engine.load_adapter("b", adapter_state(few, 24, dtype, seed=4), config={"lora_alpha": 5})
        generation = engine.core.local.forward.bank.generation
        for seed in (3, 5):  # the second time with other weights in the place of "a"
            engine.load_adapter("a", adapter_state(many, 8, dtype, seed=seed))
            requests = [
                engine.request(p, engine_gpu.plain(40, seed=i), adapter=(None, "a", "b")[i % 3])
                for i, p in enumerate(prompts)
            ]
            for request in requests:
                engine.core.add(request)
            while engine.core.busy:
                engine.core.step()
            adapters = dict(engine.core.adapters)
            with exact(model), torch.no_grad():
                for request in requests:
                    ids = torch.tensor([request.tokens], device="cuda")
                    ops = model.__dict__[STATE].ops
                    name = request.adapter
                    with contextlib.nullcontext() if name is None else attach_adapter(model, ops, adapters[name]):
                        wanted = score(model, ids)[0][len(request.prompt_ids) - 1 :]
                    found = torch.tensor(request.logprobs, device="cuda")
                    assert torch.equal(wanted.view(torch.int32), found.view(torch.int32)), (name, seed)
        assert engine.core.bursts is not None and (16, generation) in engine.core.bursts.graphs._captured
        assert engine.core.local.forward.bank.generation == generation, "weights of the same shape are written in place"


def test_scan_does_not_depend_on_cuts() -> None:
    from tokentrue.numerics.delta import scan_sequences
    from tokentrue.numerics.triton import TritonOps

    torch.manual_seed(0)
    heads, tokens = 4, 150
    q, k = (torch.nn.functional.normalize(torch.randn(tokens, heads, 64, device="cuda"), dim=-1) for _ in range(2))
    v, decay = torch.randn(tokens, heads, 48, device="cuda"), -torch.rand(tokens, heads, device="cuda")
    beta = torch.rand(tokens, heads, device="cuda")
    inputs, ops = (q, k, v, decay, beta), TritonOps()
    whole, last = ops.delta_scan(*inputs, (tokens,), None)
    plain, _ = scan_sequences(*inputs, (tokens,), None)
    assert (whole - plain).abs().max() < 1e-4
    for cuts in ((1,) * tokens, (77, 73), (64, 64, 22), (3, 147)):
        state, at, pieces = None, 0, []
        for cut in cuts:
            found, state = ops.delta_scan(*(x[at : at + cut] for x in inputs), (cut,), state)
            pieces.append(found)
            at += cut
        assert torch.equal(torch.cat(pieces).view(torch.int32), whole.view(torch.int32)), cuts
        assert state is not None and torch.equal(state, last)
    twice, _ = ops.delta_scan(*(torch.cat((x, x[:40])) for x in inputs), (tokens, 40), None)
    assert torch.equal(twice, torch.cat((whole, whole[:40])))
