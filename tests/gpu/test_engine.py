"""The engine on CUDA under a random schedule: log-probabilities are the trainer's, requests as if they were alone; and
the controls."""

from __future__ import annotations

from typing import Any

import torch

SMALL: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "vocab_size": 110000, "max_position_embeddings": 4096,
}  # fmt: skip


def model_of(family: str) -> Any:
    import transformers

    extra = (
        {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 192, "head_dim": 64}
        if family == "Qwen3Moe"
        else {}
    )
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**SMALL, **extra)
    return getattr(transformers, f"{family}ForCausalLM")(config).to(device="cuda", dtype=torch.bfloat16).eval()


def test_random_schedule_has_the_trainers_bits() -> None:
    from benchmarks.engine_gpu import storm

    for family in ("Qwen3", "Llama", "Qwen2", "Qwen3Moe"):
        found = storm(model_of(family), 40, seed=3)
        assert found.tokens > 1000 and found.preemptions > 0 and found.prefix_hits > 0
        assert found.wrong == 0, f"{family}: {found.wrong} of {found.tokens} log-probabilities differ: {found.first}"
        assert found.moved == 0, f"{family}: {found.moved} of {found.asked} requests differ when asked alone"


def test_replayed_prefills_have_the_trainers_bits() -> None:
    """Prompts around every captured size, alone and a few together; their first tokens come from a replayed step."""
    from benchmarks.gpu import runs
    from benchmarks.gpu.random_models import prompts_of
    from tokentrue.engine.graphs import SIZES

    groups = [
        (2,),
        (63,),
        (64,),
        (65,),
        (129,),
        (500,),
        (512,),
        (513,),
        (1000,),
        (1024,),
        (3, 100, 20),
        (60,) * 8,
        (120, 2, 300, 90),
    ]
    model = model_of("Qwen3")
    with runs.engine_of(model, kv_tokens=24_000) as engine:
        core = engine.core
        for seed, lengths in enumerate(groups):
            prompts = [prompts_of(1, length, seed=100 * seed + i)[0] for i, length in enumerate(lengths)]
            requests = [engine.request(prompt, runs.plain(3, seed=seed)) for prompt in prompts]
            for request in requests:
                core.add(request)
            while core.busy:
                core.step()
            completions = [request.completion("") for request in requests]
            wrong, tokens = runs.count_differing(model, runs.Run(prompts, completions, 1.0, [1.0] * len(prompts)))
            assert tokens == 3 * len(lengths) and wrong == 0, (
                f"prompts of {lengths}: {wrong} of {tokens} log-probabilities differ"
            )
        assert core.local.prefills is not None
        assert {size for size, _ in core.local.prefills._captured} == set(SIZES), "every size was captured"


def test_without_exact_operators_bits_differ() -> None:
    """The negative control of the test above."""
    from benchmarks.gpu import runs
    from benchmarks.gpu.random_models import prompts_of

    model = model_of("Qwen3")
    prompts = prompts_of(24, 200, seed=1)
    with runs.engine_of(model, inexact=True, kv_tokens=24_000) as engine:
        run = runs.generate(engine, prompts, [runs.plain(60, seed=i) for i in range(24)])
    wrong, _ = runs.count_differing(model, run)
    assert wrong > 0


def test_new_weights_between_bursts() -> None:
    """Tokens after a load are those of the new weights over the whole context, and carry its version."""
    from benchmarks.gpu import runs
    from benchmarks.gpu.random_models import prompts_of
    from tokentrue.numerics import exact, score

    model, other = model_of("Qwen3"), model_of("Qwen3")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.01)
    with runs.engine_of(model, kv_tokens=24_000, version=1) as engine:
        core = engine.core
        requests = [engine.request(p, runs.plain(80, seed=i)) for i, p in enumerate(prompts_of(6, 100, seed=2))]
        for request in requests:
            core.add(request)
        while requests[0].num_sampled < 30:
            core.step()
        core.load(dict(other.state_dict()), 2)
        while core.busy:
            core.step()
        with exact(model), torch.no_grad():
            for request in requests:
                assert request.error is None and set(request.versions) == {1, 2}
                trainer = score(model, torch.tensor(request.tokens, device="cuda")[None])[
                    0, len(request.prompt_ids) - 1 :
                ]
                rollout = torch.tensor(request.logprobs, device="cuda")
                new = torch.tensor(request.versions, device="cuda") == 2
                assert torch.equal(trainer[new].view(torch.int32), rollout[new].view(torch.int32))
