"""LoRA adapters, unmerged on both sides: the engine's log-probabilities are those of the peft model under `exact`, bit for bit."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.world import VOCABULARY, build, clone_of, engine_of, nudged
from tokentrue.engine import ExactEngine
from tokentrue.engine.scheduling.request import Phase, Request
from tokentrue.errors import EngineError, EngineRejected, ExactnessError
from tokentrue.numerics import exact, same_bits, score
from tokentrue.types import Sampling

peft = pytest.importorskip("peft")
EVERYTHING = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapted(model: Any, seed: int, *, targets: list[str] | None = None, dtype: torch.dtype | None = None, **settings: Any) -> Any:
    """A peft model whose adapter is not the identity; adapters are float32 unless `dtype` is given, as peft makes them."""
    config = peft.LoraConfig(r=settings.pop("r", 5), lora_alpha=7, target_modules=targets or EVERYTHING, lora_dropout=0.0, **settings)
    wrapped = peft.get_peft_model(copy.deepcopy(model), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
                parameter.data = parameter.data.to(dtype or parameter.dtype)
    return wrapped.eval()


def state_of(wrapped: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in peft.get_peft_model_state_dict(wrapped).items()}


def trainer_bits(wrapped: Any, request: Request) -> torch.Tensor:
    with torch.no_grad():
        return score(wrapped, torch.tensor([request.tokens]), request.sampling.temperature)[0, len(request.prompt_ids) - 1 :]


def drain(engine: ExactEngine, requests: list[Request], rng: random.Random | None = None) -> None:
    for request in requests:
        engine.core.add(request)
    while engine.core.busy:
        running = engine.core.scheduler.running
        if rng is not None and running and rng.random() < 0.06:
            engine.core.scheduler.preempt(rng.choice(running))
        engine.core.step()
    assert all(r.phase is Phase.FINISHED and r.error is None for r in requests)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_several_adapters_in_one_batch_have_the_trainers_bits(kind: str, dtype: str) -> None:
    rng, real = random.Random(4), getattr(torch, dtype)
    model = build(kind).to(real)
    targets = EVERYTHING[:4] if kind == "qwen3_moe" else None
    trainers: dict[str | None, Any] = {None: model, "wide": adapted(model, 1, targets=targets), "narrow": adapted(model, 2, targets=["q_proj", "o_proj"], dtype=real, r=3)}  # fmt: skip # noqa: E501
    engine = engine_of(model, dtype, rng)
    for name in ("wide", "narrow"):
        engine.load_adapter(name, state_of(trainers[name]), config=trainers[name].peft_config["default"])
    shared = [rng.randrange(VOCABULARY) for _ in range(40)]
    names = [None, "wide", "narrow"] * 4
    requests = [
        engine.request([*shared, *range(i)], Sampling(max_tokens=25, seed=i, temperature=0.8), adapter=name) for i, name in enumerate(names)
    ]
    drain(engine, requests, rng)
    assert engine.core.scheduler.prefix_hits > 0 and engine.core.scheduler.preemptions > 0
    for request, name in zip(requests, names, strict=True):
        assert same_bits(torch.tensor(request.logprobs), trainer_bits(trainers[name], request)), f"adapter {name}"
    outputs = {tuple(r.sampled_ids) for r in requests[:3]}
    assert len(outputs) == 3, "the adapters change what is sampled"
    engine.close()


def test_publishing_the_adapter_alone_and_the_base_weights() -> None:
    model = build("qwen3")
    first, second = adapted(model, 1), adapted(model, 2)
    engine = engine_of(model, "float32", random.Random(1))
    engine.load_adapter("policy", state_of(first), config={"r": 5, "lora_alpha": 7}, version=3)
    request = engine.request(range(5, 60), Sampling(max_tokens=40, seed=1), adapter="policy")
    engine.core.add(request)
    while request.num_sampled < 12:
        engine.core.step()
    engine.load_adapter("policy", state_of(second), version=4)
    while request.num_sampled < 24:
        engine.core.step()
    fresh = nudged(clone_of(model), 5)
    engine.core.load(fresh, 9)
    while engine.core.busy:
        engine.core.step()
    assert sorted(set(request.versions)) == [3, 4]
    old, new = trainer_bits(first, request), trainer_bits(second, request)
    third = copy.deepcopy(model)
    third.load_state_dict(fresh)
    newest = trainer_bits(adapted(third, 2), request)
    found = torch.tensor(request.logprobs)
    assert same_bits(found[:12], old[:12]) and same_bits(found[12:24], new[12:24]) and same_bits(found[24:], newest[24:])
    assert not same_bits(found[12:24], old[12:24])
    engine.close()


def test_a_directory_saved_by_peft_is_loaded(tmp_path: Path) -> None:
    model = build("llama")
    wrapped = adapted(model, 3, use_rslora=True, alpha_pattern={"layers.1.self_attn.q_proj": 11, "model.layers.0.mlp.up_proj": 3})
    wrapped.save_pretrained(tmp_path)
    with ExactEngine(copy.deepcopy(model), max_len=400, kv_tokens=1200) as engine:
        engine.load_adapter("saved", tmp_path)
        assert engine.adapters == ["saved"]
        request = engine.request(range(40), Sampling(max_tokens=20, seed=2, extra={"adapter": "saved"}))
        drain(engine, [request])
        assert same_bits(torch.tensor(request.logprobs), trainer_bits(wrapped, request))
        engine.unload_adapter("saved")
        with pytest.raises(EngineRejected, match="not loaded"):
            engine.request([1], Sampling(max_tokens=1), adapter="saved")


def test_merged_weights_drift() -> None:
    """The negative control: merging into bfloat16 weights gives other log-probabilities."""
    model = build("qwen3").bfloat16()
    wrapped = adapted(model, 1)
    ids = torch.randint(0, VOCABULARY, (1, 60), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        apart, merged = score(wrapped, ids), score(wrapped.merge_and_unload(), ids)
    assert not same_bits(apart, merged) and (apart - merged).abs().mean() > 1e-3


def test_gradients_reach_the_adapter_alone_and_are_peft_s() -> None:
    wrapped = adapted(build("qwen3"), 1)
    ids = torch.randint(0, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(1))
    score(wrapped, ids).sum().backward()
    mine = {name: p.grad.clone() for name, p in wrapped.named_parameters() if p.grad is not None}
    assert mine and all("lora_" in name for name in mine)
    wrapped.zero_grad()
    table = torch.log_softmax(wrapped(input_ids=ids, use_cache=False).logits[:, :-1], -1)
    table.gather(-1, ids[:, 1:, None]).sum().backward()
    for name, parameter in wrapped.named_parameters():
        if parameter.grad is not None:
            assert (mine[name] - parameter.grad).norm() <= 1e-4 * parameter.grad.norm() + 1e-6, name


def test_rows_of_a_peft_model_do_not_depend_on_the_batch() -> None:
    wrapped = adapted(build("qwen3").bfloat16(), 1)
    ids = torch.randint(0, VOCABULARY, (3, 50), generator=torch.Generator().manual_seed(2))
    with torch.no_grad(), exact(wrapped):
        whole = score(wrapped, ids)
        assert all(same_bits(score(wrapped, ids[i : i + 1, :n]), whole[i : i + 1, : n - 1]) for i, n in ((0, 2), (1, 17), (2, 50), (0, 33)))


def test_what_has_no_exact_form_is_refused() -> None:
    model = build("qwen3")
    engine = engine_of(model, "float32", None)
    state = state_of(adapted(model, 1))
    with pytest.raises(EngineError, match="config="):
        engine.load_adapter("a", state)
    with pytest.raises(ExactnessError, match="DoRA"):
        engine.load_adapter("a", state, config={"r": 5, "lora_alpha": 7, "use_dora": True})
    with pytest.raises(ExactnessError, match="embed_tokens"):
        engine.load_adapter("a", {"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(2, 2)}, config={"lora_alpha": 1})
    with pytest.raises(EngineError, match="maps 9 to"):
        wrong = {n: torch.zeros(5, 9) if "layers.0.self_attn.q_proj.lora_A" in n else v for n, v in state.items()}
        engine.load_adapter("a", wrong, config={"lora_alpha": 7})
    engine.close()
    with pytest.raises(ExactnessError, match=r"engine\.load_adapter"):
        ExactEngine(adapted(model, 1))
    with pytest.raises(ExactnessError, match="adapter"), exact(adapted(model, 1, use_dora=True)):
        pass
