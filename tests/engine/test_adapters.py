"""LoRA adapters, unmerged on both sides: the engine's log-probabilities are those of the peft model under `exact`, bit
for bit."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.world import VOCABULARY, build, clone_of, engine_of, nudged
from tests.marks import slow_except
from tokentrue.engine import ExactEngine
from tokentrue.engine.adapters import IGNORED, READ, merge_low_rank, read_directory, read_pairs
from tokentrue.engine.schedule import Phase, Request
from tokentrue.errors import ConfigError, EngineError, EngineRejected, ExactnessError, FileFormatError
from tokentrue.numerics import exact, same_bits, score
from tokentrue.types import Sampling

peft = pytest.importorskip("peft")
lora = pytest.importorskip("peft.tuners.lora.config")
EVERYTHING = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapted(
    model: Any, seed: int, *, targets: list[str] | None = None, dtype: torch.dtype | None = None, **settings: Any
) -> Any:
    """A peft model whose adapter is not the identity; adapters are float32 unless `dtype` is given, as peft makes
    them."""
    config = peft.LoraConfig(
        r=settings.pop("r", 5), lora_alpha=7, target_modules=targets or EVERYTHING, lora_dropout=0.0, **settings
    )
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
        return score(wrapped, torch.tensor([request.tokens]), request.sampling.temperature)[
            0, len(request.prompt_ids) - 1 :
        ]


def drain(engine: ExactEngine, requests: list[Request], rng: random.Random | None = None) -> None:
    for request in requests:
        engine.core.add(request)
    while engine.core.busy:
        running = engine.core.scheduler.running
        if rng is not None and running and rng.random() < 0.06:
            engine.core.scheduler.preempt(rng.choice(running))
        engine.core.step()
    assert all(r.phase is Phase.FINISHED and r.error is None for r in requests)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    slow_except(
        {"qwen3-bfloat16", "qwen3_moe-float32"},
        [(kind, dtype) for kind in ("qwen3", "qwen3_moe") for dtype in ("float32", "bfloat16", "float16")],
        name="-".join,
    ),
)
def test_several_adapters_in_one_batch_have_the_trainers_bits(kind: str, dtype: str) -> None:
    rng, real = random.Random(4), getattr(torch, dtype)
    model = build(kind).to(real)
    targets = EVERYTHING[:4] if kind == "qwen3_moe" else None
    trainers: dict[str | None, Any] = {None: model, "wide": adapted(model, 1, targets=targets), "narrow": adapted(model, 2, targets=["q_proj", "o_proj"], dtype=real, r=3)}  # fmt: skip
    engine = engine_of(model, dtype, rng)
    for name in ("wide", "narrow"):
        engine.load_adapter(name, state_of(trainers[name]), config=trainers[name].peft_config["default"])
    shared = [rng.randrange(VOCABULARY) for _ in range(40)]
    names = [None, "wide", "narrow"] * 4
    requests = [
        engine.request([*shared, *range(i)], Sampling(max_tokens=25, seed=i, temperature=0.8), adapter=name)
        for i, name in enumerate(names)
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
    assert (
        same_bits(found[:12], old[:12]) and same_bits(found[12:24], new[12:24]) and same_bits(found[24:], newest[24:])
    )
    assert not same_bits(found[12:24], old[12:24])
    engine.close()


def test_a_directory_saved_by_peft_is_loaded(tmp_path: Path) -> None:
    model = build("llama")
    wrapped = adapted(
        model, 3, use_rslora=True, alpha_pattern={"layers.1.self_attn.q_proj": 11, "model.layers.0.mlp.up_proj": 3}
    )
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
        assert all(
            same_bits(score(wrapped, ids[i : i + 1, :n]), whole[i : i + 1, : n - 1])
            for i, n in ((0, 2), (1, 17), (2, 50), (0, 33))
        )


def test_what_has_no_exact_form_is_refused() -> None:
    model = build("qwen3")
    engine = engine_of(model, "float32", None)
    state = state_of(adapted(model, 1))
    with pytest.raises(EngineError, match="config="):
        engine.load_adapter("a", state)
    with pytest.raises(ExactnessError, match="use_dora"):
        engine.load_adapter("a", state, config={"r": 5, "lora_alpha": 7, "use_dora": True})
    with pytest.raises(ExactnessError, match="embed_tokens"):
        engine.load_adapter(
            "a", {"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(2, 2)}, config={"lora_alpha": 1}
        )
    with pytest.raises(EngineError, match="maps 9 to"):
        wrong = {n: torch.zeros(5, 9) if "layers.0.self_attn.q_proj.lora_A" in n else v for n, v in state.items()}
        engine.load_adapter("a", wrong, config={"lora_alpha": 7})
    engine.close()
    with pytest.raises(ExactnessError, match=r"engine\.load_adapter"):
        ExactEngine(adapted(model, 1))
    with pytest.raises(ExactnessError, match="adapter"), exact(adapted(model, 1, use_dora=True)):
        pass


def train_a_little(wrapped: Any, seed: int = 1) -> Any:
    """Move A and B away from their first values, as training does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                parameter += torch.randn(parameter.shape, generator=generator) * 0.1
    return wrapped


def assert_merged_as_peft_does(model: Any, folder: Path, wrapped: Any) -> None:
    """The base weights with the adapter that was saved are those of peft's own merge."""
    found = dict(model.state_dict())
    for module, low in read_pairs("a", *read_directory(folder), folder).items():
        found[f"{module}.weight"] = merge_low_rank(found[f"{module}.weight"], low)
    expected = wrapped.merge_and_unload().state_dict()
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(
            found[name], weight, rtol=0, atol=2e-5, msg=lambda said, name=name: f"{name}: {said}"
        )


def test_what_is_read_or_ignored_is_a_field_of_pefts_config() -> None:
    """Every other field is refused by name, see below."""
    assert not READ & IGNORED
    assert {field.name for field in dataclasses.fields(peft.LoraConfig)} >= READ | IGNORED


@pytest.mark.parametrize(
    "settings",
    [
        {"init_lora_weights": "gaussian"}, {"init_lora_weights": False}, {"init_lora_weights": "orthogonal"}, {"init_lora_weights": "mica"},
        {"lora_dropout": 0.3}, {"layers_to_transform": [1]}, {"layers_to_transform": 0, "layers_pattern": "layers"}, {"use_rslora": True},
        {"exclude_modules": ["layers.0.self_attn.q_proj"]}, {"target_modules": "all-linear"}, {"target_modules": r".*\.1\..*(k|up)_proj"},
        {"runtime_config": peft.LoraRuntimeConfig(ephemeral_gpu_offload=True)}, {"task_type": "CAUSAL_LM", "revision": "main"},
        {"use_rslora": True, "rank_pattern": {"q_proj": 2, "^model.layers.1.mlp.up_proj": 6}, "alpha_pattern": {"0.self_attn.q_proj": 3.5}},
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_leave_the_computation_alone_give_pefts_merge(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = build("qwen3")
    config = peft.LoraConfig(r=4, lora_alpha=7, **{"target_modules": ["q_proj", "v_proj", "up_proj"], **settings})
    wrapped = train_a_little(peft.get_peft_model(copy.deepcopy(model), config))
    wrapped.save_pretrained(tmp_path)
    assert_merged_as_peft_does(model, tmp_path, wrapped)


@pytest.mark.filterwarnings("ignore:lora with eva initialization")
def test_an_adapter_that_eva_started_gives_pefts_merge(tmp_path: Path) -> None:
    """EVA gives each layer its own rank and alpha."""
    model, ids = build("qwen3"), torch.randint(0, VOCABULARY, (4, 40), generator=torch.Generator().manual_seed(1))
    eva = peft.EvaConfig(rho=2.0, adjust_scaling_factors=True)
    config = peft.LoraConfig(
        r=4, lora_alpha=7, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights="eva", eva_config=eva
    )
    wrapped = peft.get_peft_model(copy.deepcopy(model), config)
    rows = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}] * 3
    peft.initialize_lora_eva_weights(wrapped, rows, show_progress_bar=False)
    train_a_little(wrapped).save_pretrained(tmp_path)
    assert wrapped.peft_config["default"].alpha_pattern
    assert_merged_as_peft_does(model, tmp_path, wrapped)


def prepare_corda(model: Any, config: Any) -> None:
    from peft.tuners.lora.corda import preprocess_corda

    ids = torch.randint(0, VOCABULARY, (1, 400), generator=torch.Generator().manual_seed(1))
    preprocess_corda(model, config, run_model=lambda: model(input_ids=ids))


def prepare_lora_ga(model: Any, config: Any) -> None:
    from peft.tuners.lora.loraga import preprocess_loraga

    ids = torch.randint(0, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(1))
    preprocess_loraga(model, config, lambda: model(input_ids=ids, labels=ids).loss.backward())


STARTS: dict[str, tuple[dict[str, Any], Callable[[Any, Any], None]]] = {
    "pissa": ({}, lambda *_: None),
    "pissa_niter_4": ({}, lambda *_: None),
    "olora": ({}, lambda *_: None),
    "corda": ({"corda_config": lora.CordaConfig(corda_method="kpm")}, prepare_corda),
    "lora_ga": ({"lora_ga_config": lora.LoraGAConfig()}, prepare_lora_ga),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # peft advises to convert it, which happens here
@pytest.mark.parametrize("start", STARTS)
def test_an_adapter_over_changed_base_weights_is_refused_until_it_is_converted(tmp_path: Path, start: str) -> None:
    model, (settings, prepare) = build("qwen3"), STARTS[start]
    config = peft.LoraConfig(
        r=4, lora_alpha=7, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=start, **settings
    )
    changed = copy.deepcopy(model)
    prepare(changed, config)
    wrapped = peft.get_peft_model(changed, config)
    assert not torch.equal(
        wrapped.model.model.layers[0].self_attn.q_proj.base_layer.weight, model.model.layers[0].self_attn.q_proj.weight
    )
    wrapped.save_pretrained(tmp_path / "initial")
    train_a_little(wrapped).save_pretrained(tmp_path / "trained")
    with pytest.raises(ExactnessError, match=f"{start}.*path_initial_model_for_weight_conversion"):
        read_pairs("a", *read_directory(tmp_path / "trained"))
    wrapped.save_pretrained(tmp_path / "converted", path_initial_model_for_weight_conversion=str(tmp_path / "initial"))
    assert_merged_as_peft_does(model, tmp_path / "converted", wrapped)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain adapter of `engine`'s model, as peft saves it."""
    folder = tmp_path_factory.mktemp("plain")
    adapted(build("qwen3"), 1, targets=["q_proj", "v_proj"]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(plain: Path) -> Iterator[ExactEngine]:
    with ExactEngine(build("qwen3"), max_len=400, kv_tokens=1200) as engine:
        engine.load_adapter("kept", plain)
        yield engine


def refused_unchanged(engine: ExactEngine, error: type[Exception], words: str, *sources: Any, **options: Any) -> str:
    """A new name and a name in use are refused in one line; what was loaded stays."""
    before = dict(engine.core.adapters)
    for name in ("new", "kept"):
        with pytest.raises(error, match=words) as caught:
            engine.load_adapter(name, *sources, **options)
    assert engine.core.adapters == before and list(before) == ["kept"]
    assert "\n" not in str(caught.value)
    return str(caught.value)


VALUES: dict[str, Any] = {
    "alora_invocation_tokens": [5, 6], "bias": "all", "modules_to_save": ["lm_head"], "trainable_token_indices": [1],
    "target_parameters": ["q_proj.weight"], "layer_replication": [[0, 2]],
}  # fmt: skip
CONFIGURED = {
    field.name: VALUES.get(field.name, {"nblocks": 2} if field.name.endswith(("config", "bdlora")) else True)
    for field in dataclasses.fields(peft.LoraConfig)
    if field.name not in READ | IGNORED
}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *CONFIGURED.items(), *(("init_lora_weights", start) for start in ("pissa", "OLoRA", "loftq", "corda_new", "later", 3)),
        ("peft_type", "ADALORA"), ("a_field_of_the_future", {"on": True}), ("rank", 5),
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_compute_something_else_are_refused_by_name(
    engine: ExactEngine, plain: Path, field: str, value: Any
) -> None:
    state, config = read_directory(plain)
    refused_unchanged(engine, ExactnessError, field, state, config={**config, field: value})


def test_unknown_settings_are_accepted_where_they_are_empty_or_have_pefts_default(
    engine: ExactEngine, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, config = read_directory(plain)
    monkeypatch.setattr(peft.LoraConfig, "group_size", 16, raising=False)
    for known in ({"later": None}, {"later": []}, {"group_size": 16}):
        assert read_pairs("a", state, {**config, **known})
    refused_unchanged(
        engine, ExactnessError, "sets group_size, which has no exact form", state, config={**config, "group_size": 8}
    )


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("adapter_config.json", b"", "is not JSON"), ("adapter_config.json", b"{nope", "is not JSON"),
        ("adapter_config.json", b"\xff\xfe", "is not JSON"), ("adapter_config.json", b"[" * 100_000, "is not JSON"),
        ("adapter_config.json", b"[]", "holds a list"), ("adapter_config.json", b"null", "holds a NoneType"),
        ("adapter_model.safetensors", b"", "is damaged"), ("adapter_model.safetensors", b"xx", "is damaged"),
        ("adapter_model.safetensors", b"\x02\0\0\0\0\0\0\0{}extra", "is damaged"),
        ("adapter_model.safetensors", b"\x02\0\0\0\0\0\0\0{}", "holds no weights"),
        ("adapter_config.json", None, "as peft's save_pretrained writes them"),
        ("adapter_model.safetensors", None, "as peft's save_pretrained writes them"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_one_line_that_names_it(
    engine: ExactEngine, plain: Path, tmp_path: Path, file: str, content: bytes | None, words: str
) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_bytes((plain / name).read_bytes())
    (tmp_path / file).unlink() if content is None else (tmp_path / file).write_bytes(content)
    said = refused_unchanged(engine, EngineError if words == "holds no weights" else FileFormatError, words, tmp_path)
    assert str(tmp_path) in said and file in said


def test_a_truncated_file_of_weights_is_one_line(engine: ExactEngine, plain: Path, tmp_path: Path) -> None:
    whole = (plain / "adapter_model.safetensors").read_bytes()
    (tmp_path / "adapter_config.json").write_bytes((plain / "adapter_config.json").read_bytes())
    for size in (7, 8, 20, len(whole) // 2, len(whole) - 1):
        (tmp_path / "adapter_model.safetensors").write_bytes(whole[:size])
        refused_unchanged(
            engine, FileFormatError, r"adapter_model\.safetensors is not a safetensors file, or is damaged", tmp_path
        )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lora_alpha": None}, "lora_alpha is missing"), ({"lora_alpha": float("nan")}, "lora_alpha is nan; Expected `float`"),
        ({"lora_alpha": float("-inf")}, "lora_alpha is -inf"), ({"lora_alpha": 1e39}, "lora_alpha is 1e"), ({"r": "5"}, "r is '5'"),
        ({"lora_alpha": 10**400}, "lora_alpha is 1000"), ({"lora_alpha": True}, "lora_alpha is True"),
        ({"lora_alpha": "8"}, "lora_alpha is '8'"), ({"alpha_pattern": [3]}, r"alpha_pattern is \[3\]"),
        ({"alpha_pattern": {"q_proj": float("inf")}}, r"alpha_pattern is \{'q_proj': inf\}"),
        ({"alpha_pattern": {"(": 3}}, "alpha_pattern is no regular expression"), ({"use_rslora": "false"}, "use_rslora is 'false'"),
    ],
    ids=str,
)  # fmt: skip
def test_a_bad_setting_is_refused_by_name(
    engine: ExactEngine, plain: Path, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    state, config = read_directory(plain)
    refused_unchanged(engine, ConfigError, words, state, config={**config, **change})
    (tmp_path / "adapter_model.safetensors").write_bytes((plain / "adapter_model.safetensors").read_bytes())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, **change}))
    assert str(tmp_path / "adapter_config.json") in refused_unchanged(engine, ConfigError, words, tmp_path)


def test_a_rank_that_contradicts_the_weights_and_a_config_of_another_type_are_refused(
    engine: ExactEngine, plain: Path
) -> None:
    state, config = read_directory(plain)
    refused_unchanged(
        engine, EngineError, "r is 4 for .*q_proj, but its lora_A has 5 rows", state, config={**config, "r": 4}
    )
    refused_unchanged(engine, ConfigError, "config= is a list", state, config=[1])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: a * float("nan"), "holds NaN or infinity"), (lambda a: a.bfloat16().fill_(float("-inf")), "holds NaN or infinity"),
        (lambda a: a.to(torch.int8), "is torch.int8 of shape"), (lambda a: a.to(torch.float8_e4m3fn), "is torch.float8"),
        (lambda a: a[0], "is torch.float32 of shape"), (lambda a: a[:0], "is torch.float32 of shape"), (lambda a: a.numpy(), "is ndarray"),
    ],
)  # fmt: skip
def test_a_bad_tensor_is_refused_by_name(
    engine: ExactEngine, plain: Path, change: Callable[[Any], Any], words: str
) -> None:
    state, config = read_directory(plain)
    key = next(key for key in state if "layers.1.self_attn.v_proj.lora_A" in key)
    said = refused_unchanged(engine, EngineError, words, {**state, key: change(state[key])}, config=config)
    assert key in said


def test_a_nan_in_a_file_names_the_file(engine: ExactEngine, plain: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    (tmp_path / "adapter_config.json").write_bytes((plain / "adapter_config.json").read_bytes())
    state, _ = read_directory(plain)
    save_file({key: value * float("nan") for key, value in state.items()}, tmp_path / "adapter_model.safetensors")
    assert str(tmp_path / "adapter_model.safetensors") in refused_unchanged(engine, EngineError, "NaN", tmp_path)


def test_two_tensors_for_one_place_and_layers_of_another_part_are_refused(engine: ExactEngine, plain: Path) -> None:
    state, config = read_directory(plain)
    second = {key.replace(".weight", ".other.weight"): value * 2 for key, value in state.items()}
    refused_unchanged(engine, EngineError, "is the second lora_A of", {**state, **second}, config=config)
    inner = {
        key.replace("model.model.layers", "model.model.language_model.layers"): value for key, value in state.items()
    }
    refused_unchanged(engine, EngineError, "two names stand for", {**state, **inner}, config=config)
    vision = {key.replace("model.model.layers", "model.vision_tower.layers"): value for key, value in state.items()}
    refused_unchanged(engine, ExactnessError, "vision_tower", vision, config=config)


@pytest.mark.parametrize(
    "settings",
    [
        {"alora_invocation_tokens": [5, 6], "task_type": "CAUSAL_LM"}, {"kasa_config": lora.KasaConfig()},
        {"monteclora_config": lora.MontecloraConfig()}, {"velora_config": lora.VeloraConfig()},
    ],
    ids=lambda settings: next(iter(settings)),
)  # fmt: skip
def test_a_peft_model_of_another_kind_has_no_exact_form(settings: dict[str, Any]) -> None:
    with (
        pytest.raises(ExactnessError, match="plain LoRA"),
        exact(adapted(build("qwen3"), 1, targets=["q_proj"], **settings)),
    ):
        pass


def test_a_peft_model_that_mica_started_is_exact() -> None:
    wrapped = adapted(build("qwen3"), 1, targets=["q_proj"], init_lora_weights="mica")
    ids = torch.randint(0, VOCABULARY, (1, 30), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = score(wrapped, ids)
        table = torch.log_softmax(wrapped(input_ids=ids, use_cache=False).logits[:, :-1], -1)
    torch.testing.assert_close(found, table.gather(-1, ids[:, 1:, None])[..., 0], rtol=0, atol=1e-4)
