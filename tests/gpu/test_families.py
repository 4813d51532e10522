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
    from benchmarks.gpu import runs
    from benchmarks.gpu.random_models import prompts_of
    from tokentrue.engine import ExactEngine

    model, prompts = model_of("qwen3", torch.float16), prompts_of(12, 150, seed=1)
    with ExactEngine(model, "cuda", "float16", max_len=4096, kv_tokens=24_000) as engine:
        run = runs.generate(engine, prompts, [runs.plain(60, seed=i) for i in range(12)])
    assert runs.count_differing(model, run) == (0, 720)


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
    from benchmarks.gpu import runs
    from benchmarks.gpu.random_models import prompts_of
    from tokentrue.engine.adapters import attach_adapter
    from tokentrue.numerics import exact, score
    from tokentrue.numerics.exact import STATE

    model = model_of("qwen3")
    config = model.config
    wide, hidden, inner = config.num_attention_heads * config.head_dim, config.hidden_size, config.intermediate_size
    few = {"self_attn.q_proj": (hidden, wide), "mlp.down_proj": (inner, hidden)}
    many = {**few, "self_attn.o_proj": (wide, hidden), "mlp.up_proj": (hidden, inner)}
    prompts = prompts_of(9, 100, seed=2)
    with runs.engine_of(model, kv_tokens=24_000) as engine:
        engine.load_adapter("a", adapter_state(many, 8, dtype, seed=3), config={"lora_alpha": 16})
        engine.load_adapter("b", adapter_state(few, 24, dtype, seed=4), config={"lora_alpha": 5})
        generation = engine.core.local.forward.bank.generation
        for seed in (3, 5):  # the second time with other weights in the place of "a"
            engine.load_adapter("a", adapter_state(many, 8, dtype, seed=seed))
            requests = [
                engine.request(p, runs.plain(40, seed=i), adapter=(None, "a", "b")[i % 3])
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


def delta_inputs(tokens: int) -> Any:
    """Random projections of one gated-delta layer in bf16: 2 key heads of 64, 4 value heads of 48."""
    from tokentrue.numerics.ops import DeltaInputs

    torch.manual_seed(0)
    key_heads, group, key, value = 2, 2, 64, 48
    sizes = (key_heads * key, key_heads * key, key_heads * group * value)
    row = torch.randn(tokens, sum(sizes), device="cuda").bfloat16()
    q, k, v = (part.view(tokens, key_heads, -1) for part in row.split(sizes, -1))
    b, a = torch.randn(2, tokens, key_heads, group, device="cuda").bfloat16()
    weight = (torch.randn(sum(sizes), 4, device="cuda") * 0.5).bfloat16()
    log, bias = torch.rand(2, key_heads * group, device="cuda").bfloat16()
    return DeltaInputs(q=q, k=k, v=v, b=b, a=a, convolution=weight, a_log=log, dt_bias=bias)


def cut_inputs(inputs: Any, rows: Any) -> Any:
    from dataclasses import replace

    return replace(inputs, **{name: getattr(inputs, name)[rows] for name in ("q", "k", "v", "b", "a")})


def test_the_delta_rule_does_not_depend_on_cuts() -> None:
    """Whole sequences without states, against pieces that carry history and state in slots of a larger table."""
    from tokentrue.numerics.delta import plain_rule
    from tokentrue.numerics.ops import DeltaStates, Packed, same_bits
    from tokentrue.numerics.triton import TritonOps

    tokens = 150
    inputs, ops = delta_inputs(tokens), TritonOps()
    whole = ops.delta_rule(inputs, Packed.of((tokens,), "cuda"), None)
    plain = plain_rule(ops, inputs, (tokens,), None)
    assert (whole.float() - plain.float()).abs().max() < 0.02 * plain.float().abs().max()
    for cuts in ((1,) * tokens, (77, 73), (64, 64, 22), (3, 147), (2, 1, 147)):
        states = DeltaStates(
            history=torch.zeros(5, 3, inputs.convolution.shape[0], dtype=torch.bfloat16, device="cuda"),
            state=torch.zeros(5, 4, 64, 48, device="cuda"), slots=torch.tensor([3], device="cuda"),
        )  # fmt: skip
        at, pieces = 0, []
        for cut in cuts:
            part = cut_inputs(inputs, slice(at, at + cut))
            pieces.append(ops.delta_rule(part, Packed.of((cut,), "cuda"), states))
            at += cut
        assert same_bits(torch.cat(pieces), whole), cuts
        assert not states.state[:3].any() and not states.state[4].any(), "other slots are untouched"
    both = cut_inputs(inputs, torch.cat((torch.arange(tokens), torch.arange(40))).cuda())
    merged = torch.cat([x.flatten(1) for x in (both.q, both.k, both.v)], -1)
    q, k, v = (x.view(tokens + 40, 2, -1) for x in merged.split((128, 128, 192), -1))
    from dataclasses import replace

    twice = ops.delta_rule(replace(both, q=q, k=k, v=v), Packed.of((tokens, 40), "cuda"), None)
    assert same_bits(twice, torch.cat((whole, whole[:40])))


def test_gradients_of_the_delta_rule_are_those_of_plain_torch() -> None:
    from tokentrue.numerics.delta import FIELDS, DeltaRule, scan_inputs, scan_sequences
    from tokentrue.numerics.ops import DeltaInputs, Packed
    from tokentrue.numerics.triton import TritonOps

    inputs, ops, lengths = delta_inputs(100), TritonOps(), (60, 40)
    weights = torch.randn(100, 4, 48, device="cuda")

    def gradients(scores: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        row = torch.cat([x.flatten(1) for x in (inputs.q, inputs.k, inputs.v)], -1).to(dtype).requires_grad_()
        q, k, v = (x.view(100, 2, -1) for x in row.split((128, 128, 192), -1))
        rest = [getattr(inputs, name).to(dtype).detach().requires_grad_() for name in FIELDS[3:]]
        (scores(q, k, v, *rest).float() * weights).sum().backward()
        return [x.grad.float() for x in (row, *rest) if x.grad is not None]

    def reference(*tensors: torch.Tensor) -> torch.Tensor:
        scanned, _ = scan_inputs(ops, DeltaInputs(**dict(zip(FIELDS, tensors, strict=True))), lengths, None)
        return scan_sequences(*scanned, lengths, None)[0]

    mine = gradients(lambda *tensors: DeltaRule.apply(ops, Packed.of(lengths, "cuda"), *tensors), torch.bfloat16)
    theirs = gradients(reference, torch.float32)
    assert len(mine) == len(theirs) == 6
    for a, b in zip(mine, theirs, strict=True):
        assert (a - b).norm() < 0.03 * b.norm()


def test_interleaved_experts_have_the_same_bits_in_either_layout() -> None:
    """A trainer has weights by input, an engine by output, which other kernels read."""
    from dataclasses import replace

    from tokentrue.numerics.ops import ClampedSwiglu, ExpertWeights, same_bits
    from tokentrue.numerics.triton import TritonOps
    from tokentrue.numerics.triton.experts import fits_descriptors

    torch.manual_seed(0)
    ops, experts, width, inner = TritonOps(), 8, 320, 208

    def randn(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, device="cuda") * 0.2).bfloat16()

    by_input = ExpertWeights(
        gate_up=randn(experts, width, 2 * inner), down=randn(experts, inner, width), act=ClampedSwiglu(alpha=1.702, limit=0.7),
        gate_up_bias=randn(experts, 2 * inner), down_bias=randn(experts, width), interleaved=True,
    )  # fmt: skip
    turned = {
        name: getattr(by_input, name).transpose(1, 2).contiguous().transpose(1, 2) for name in ("gate_up", "down")
    }
    by_output = replace(by_input, **turned)
    assert fits_descriptors(randn(1, width), by_output) and not fits_descriptors(randn(1, width), by_input)
    for tokens in (1, 5, 40, 300, 2000):
        x, index = randn(tokens, width), torch.rand(tokens, experts, device="cuda").topk(3).indices
        weight = torch.rand(tokens, 3, device="cuda").bfloat16()
        found = ops.experts(x, index, weight, by_output)
        assert same_bits(found, ops.experts(x, index, weight, by_input)), tokens
        other = ops.experts(x[:1].contiguous(), index[:1], weight[:1], by_output)
        assert same_bits(found[:1], other), tokens
