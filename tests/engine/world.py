"""A small world for bit tests: models of every family, a random schedule, and the judgement of its
log-probabilities."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.shaken import UnprovenEngine, compare, shake
from tokentrue.engine import ExactEngine, ScheduleLimits
from tokentrue.engine.runner import LocalRunner
from tokentrue.engine.schedule import Phase, Request
from tokentrue.numerics import Ops, exact, filter_logits, logits_of, modules, ops_for, same_bits, scale_logits, score
from tokentrue.numerics.exact import STATE
from tokentrue.types import Finish, Sampling

VOCABULARY = 211
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 90, "intermediate_size": 152, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.15, "eos_token_id": None, "bos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 40, "num_experts": 5, "num_experts_per_tok": 3}

SHARED_EXPERT = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
}
HYBRID = {
    "head_dim": 24, "num_hidden_layers": 3, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 20, "linear_conv_kernel_dim": 4, "partial_rotary_factor": 0.5,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
GLM = {
    "partial_rotary_factor": 0.5, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 2, "topk_group": 1,
    "moe_intermediate_size": 40, "n_shared_experts": 1, "first_k_dense_replace": 1, "norm_topk_prob": True, "use_qk_norm": True,
}  # fmt: skip

DEEPSEEK = {
    "num_key_value_heads": 6, "kv_lora_rank": 20, "q_lora_rank": 28, "qk_rope_head_dim": 8, "qk_nope_head_dim": 24, "v_head_dim": 18,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 40, "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
GPT_OSS = {
    "head_dim": 24, "num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 40,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "original_max_position_embeddings": 128,
                        "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
}  # fmt: skip
OLMO3 = {"hidden_size": 96, "sliding_window": 40, "layer_types": ["sliding_attention", "full_attention"]}
GRANITE = {
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.15,
    "logits_scaling": 3.0,
    "hidden_size": 108,
}


def build(kind: str, seed: int = 0, **changes: Any) -> Any:
    """A random model; odd sizes, because powers of two hide tails."""
    import transformers as t

    torch.manual_seed(seed)
    head = {"head_dim": 24}
    gemma = {
        **SIZES,
        **head,
        "query_pre_attn_scalar": 24,
        "sliding_window": 40,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    makers = {
        "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**{**SIZES, **head, **changes})),
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**{**SIZES, **head, "tie_word_embeddings": True, **changes})),
        "qwen2": lambda: t.Qwen2ForCausalLM(t.Qwen2Config(**{**SIZES, "hidden_size": 108, **changes})),
        "mistral": lambda: t.MistralForCausalLM(t.MistralConfig(**{**SIZES, **head, "sliding_window": 50, **changes})),
        "gemma3": lambda: t.Gemma3ForCausalLM(t.Gemma3TextConfig(**{**gemma, **changes})),
        "qwen3_moe": lambda: t.Qwen3MoeForCausalLM(
            t.Qwen3MoeConfig(**{**SIZES, **head, **EXPERTS, "norm_topk_prob": True, **changes})
        ),
        "mixtral": lambda: t.MixtralForCausalLM(
            t.MixtralConfig(
                **{**SIZES, **head, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None, **changes}
            )
        ),
        "qwen3_next": lambda: t.Qwen3NextForCausalLM(
            t.Qwen3NextConfig(**{**SIZES, **HYBRID, **SHARED_EXPERT, **changes})
        ),
        "qwen3_5": lambda: t.Qwen3_5ForCausalLM(t.Qwen3_5TextConfig(**{**SIZES, **HYBRID, **changes})),
        "glm4_moe": lambda: t.Glm4MoeForCausalLM(t.Glm4MoeConfig(**{**SIZES, **head, **GLM, **changes})),
        "gpt_oss": lambda: t.GptOssForCausalLM(t.GptOssConfig(**{**SIZES, **GPT_OSS, **changes})),
        "deepseek_v3": lambda: t.DeepseekV3ForCausalLM(t.DeepseekV3Config(**{**SIZES, **DEEPSEEK, **changes})),
        "olmo3": lambda: t.Olmo3ForCausalLM(t.Olmo3Config(**{**SIZES, **OLMO3, **changes})),
        "granite": lambda: t.GraniteForCausalLM(t.GraniteConfig(**{**SIZES, **GRANITE, **changes})),
        "smollm3": lambda: t.SmolLM3ForCausalLM(
            t.SmolLM3Config(**{**SIZES, "hidden_size": 108, "num_hidden_layers": 4, **changes})
        ),
    }
    model = makers[kind]().eval()
    with torch.no_grad():  # biases and norms as training leaves them, not as they are born
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@dataclass
class Run:
    """One random schedule: what was asked, in which order, and what came back."""

    engine: ExactEngine
    trainer: Any
    dtype: torch.dtype
    weights: dict[int, dict[str, torch.Tensor]]
    finished: list[Request] = field(default_factory=list)
    stats: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("steps", "mixed", "loads", "forced", "cancelled"), 0)
    )

    @property
    def tokens(self) -> int:
        return sum(r.num_sampled for r in self.finished)


def random_sampling(rng: random.Random) -> Sampling:
    shape: dict[str, Any] = rng.choice(
        [
            {},
            {},
            {},
            {"top_k": rng.randint(2, 40)},
            {"top_p": rng.uniform(0.3, 0.95)},
            {"min_p": 0.05},
            {"temperature": 0.0},
        ]
    )
    temperature = shape.pop("temperature", rng.choice([1.0, 1.0, 0.6, 1.4]))
    most, seed, top = rng.randint(1, 60), rng.getrandbits(40), rng.choice([0, 0, 3])
    return Sampling(temperature=temperature, max_tokens=most, seed=seed, top_logprobs=top, **shape)


def random_prompt(rng: random.Random, past: list[Request]) -> list[int]:
    """Fresh, or sharing a prefix with an earlier prompt, or a further turn of a finished request."""
    fresh = [rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 2, 3, 15, 16, 17, 40, 127, 128, 129, 170]))]
    kind = rng.random()
    if past and kind < 0.3:
        shared = rng.choice(past).prompt_ids
        return [*shared[: rng.randint(1, len(shared))], *fresh[:20]]
    if past and kind < 0.5:
        return [*rng.choice(past).tokens, *fresh[:10]][:300]
    return fresh


def engine_of(
    model: Any,
    dtype: str,
    rng: random.Random | None,
    *,
    ops: Ops | None = None,
    unproven: bool = False,
    **options: Any,
) -> ExactEngine:
    limits = ScheduleLimits(max_requests=7, step_tokens=150, chunk_tokens=90)
    make = UnprovenEngine if unproven else ExactEngine
    engine = make(copy.deepcopy(model), dtype=dtype, limits=limits, max_len=400, kv_tokens=1200, ops=ops, **options)
    if rng is not None:
        shake(engine, rng)
    return engine


def random_run(
    model: Any,
    dtype: str,
    seed: int,
    *,
    tokens: int,
    ops: Ops | None = None,
    loads: int = 2,
    unproven: bool = False,
    **options: Any,
) -> Run:
    """Arrivals, chunks, preemptions, cancellations, prefix hits, page order, temperatures and weight updates, all by
    chance. `options` of the engine: pipeline, tensor, leaves."""
    rng = random.Random(seed)
    engine = engine_of(model, dtype, rng, ops=ops, unproven=unproven, **options)
    core = engine.core
    trainer = copy.deepcopy(model).to(getattr(torch, dtype))
    run = Run(engine, trainer, getattr(torch, dtype), {0: clone_of(trainer)})
    pending: list[Request] = []
    at_loads = sorted(rng.randint(tokens // 10, tokens) for _ in range(loads))
    while run.tokens + sum(r.num_sampled for r in pending) < tokens or pending:
        enough = run.tokens + sum(r.num_sampled for r in pending) >= tokens
        if not enough and rng.random() < 0.35:
            request = engine.request(random_prompt(rng, run.finished), random_sampling(rng))
            core.add(request)
            pending.append(request)
        if core.scheduler.running and rng.random() < 0.04:
            core.scheduler.preempt(rng.choice(core.scheduler.running))
            run.stats["forced"] += 1
        if pending and rng.random() < 0.004:
            rng.choice(pending).cancelled = True
            run.stats["cancelled"] += 1
        if at_loads and run.tokens >= at_loads[0]:
            at_loads.pop(0)
            version = core.version + 1
            run.weights[version] = nudged(run.weights[core.version], rng.getrandbits(30))
            core.load(run.weights[version], version)
            run.stats["loads"] += 1
        core.step()
        run.stats["steps"] += 1
        run.stats["mixed"] += len(core.scheduler.running) > 1
        for request in [r for r in pending if r.phase is Phase.FINISHED]:
            assert request.error is None, request.error
            pending.remove(request)
            run.finished.append(request)
    assert core.pool.num_used == 0, "blocks leak"
    return run


def clone_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def nudged(weights: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    fresh = {name: t + (torch.randn(t.shape, generator=generator) * 0.02).to(t.dtype) for name, t in weights.items()}
    if "lm_head.weight" in fresh and torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"]):
        fresh["lm_head.weight"] = fresh["model.embed_tokens.weight"]
    return fresh


def judge(run: Run, *, without: frozenset[str] = frozenset(), ops: Ops | None = None) -> tuple[int, int, str]:
    """(log-probabilities compared, of them different in bits, the first difference): against one plain trainer forward
    per request."""
    compared = different = 0
    first = ""
    for version, weights in run.weights.items():
        run.trainer.load_state_dict(weights)
        with torch.no_grad(), leaving_out(*without), exact(run.trainer, ops=ops, leaves=run.engine.leaves):
            trainer_ops = run.trainer.__dict__[STATE].ops
            for request in run.finished:
                spans = [
                    s for s in (request.completion("").versions if request.num_sampled else ()) if s.version == version
                ]
                for span in spans:
                    bad = judge_span(run, request, span.start, span.end, trainer_ops)
                    compared += span.end - span.start
                    different += len(bad)
                    if bad and not first:
                        first = f"request {request.number}, sampled token {bad[0]}, version {version}; {replayed(run, request, version)}"
    return compared, different, first


def operator_of(module: Any) -> str:
    """Which operators' exact form a module has."""
    name = type(module).__name__
    if isinstance(module, torch.nn.Linear):
        return "linear"
    if name.endswith("RMSNorm") or "RotaryEmbedding" in name:
        return "norms"
    if modules.activation_kind(module) is not None:
        return "activation"
    if modules.softmax_router(module) is not None:
        return "router"
    return "experts" if modules.is_experts(module) else "functions"


@contextmanager
def leaving_out(*operators: str) -> Iterator[None]:
    """For negative controls: `exact` leaves these unreplaced."""
    names = import_module("tokentrue.numerics.exact")
    plan_of, of, attach = names.plan_of, names.Preparation.of, names.AttentionParts.attach
    if not operators:
        yield
        return
    with (
        patch.object(names, "plan_of", lambda *args: [p for p in plan_of(*args) if operator_of(p[0]) not in operators]),
        patch.object(names, "prepare", lambda model, leaves: of(model, ops_for("cpu", leaves))),
        patch.object(names.AttentionParts, "attach", (lambda *_: None) if "attention" in operators else attach),
    ):
        yield


def replayed(run: Run, request: Request, version: int) -> str:
    """Where the request's bits part from the trainer's, in a replay token by token, in pieces, or whole."""
    core = run.engine.core
    if not isinstance(core.runner, LocalRunner):
        return "not replayed: the model is in several processes"
    if core.version != version:
        core.load(run.weights[version], version)
    found = (compare(core, request.tokens, run.trainer, pieces) for pieces in ((1,), (2, 5, 1), (400,)))
    return str(next((difference for difference in found if difference), "not seen in a replay"))


def judge_span(run: Run, request: Request, start: int, end: int, ops: Ops) -> list[int]:
    """Sampled tokens [start, end) whose recorded bits are not the trainer's."""
    ids, at = torch.tensor([request.tokens]), len(request.prompt_ids) - 1
    temperature = request.sampling.temperature or 1.0
    s = request.sampling
    raw = score(run.trainer, ids, temperature)[0, at + start : at + end]
    recorded = torch.tensor((request.raw_logprobs if s.filters else request.logprobs)[start:end])
    wrong = recorded.view(torch.int32) != raw.view(torch.int32)
    if s.filters:
        rows = scale_logits(logits_of(run.trainer, ids)[0, at + start : at + end], temperature)
        tables = [
            ops.log_softmax(filter_logits(row, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p)[None])[0] for row in rows
        ]
        shaped = torch.stack([t[token] for t, token in zip(tables, request.sampled_ids[start:end], strict=True)])
        recorded = torch.tensor(request.logprobs[start:end])
        wrong |= recorded.view(torch.int32) != shaped.view(torch.int32)
    return [start + i for i in wrong.nonzero().flatten().tolist()]


def alone(run: Run, model: Any, dtype: str, request: Request) -> list[int]:
    """The same request by itself in a fresh engine; weights change where they changed for it."""
    engine = engine_of(model, dtype, None)
    core = engine.core
    again = engine.request(request.prompt_ids, request.sampling)
    versions = request.versions
    core.load(run.weights[versions[0]], versions[0])
    core.add(again)
    while again.phase is not Phase.FINISHED and again.num_sampled < len(versions):
        wanted = versions[again.num_sampled]
        if wanted != core.version:
            core.load(run.weights[wanted], wanted)
        core.step()
    engine.close()
    if request.finish is not Finish.ABORT:
        assert again.finish is request.finish
    return again.sampled_ids


__all__ = ["alone", "build", "engine_of", "judge", "random_run", "same_bits"]
