"""LoRA adapters and cache salts with real vLLM on CPU: `make test-vllm`. The truth is peft's own forward pass, or plain
transformers."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from tests.e2e.test_train_vllm import OPTIONS, rows_on_file, settings
from tests.providers.conformance import Truth
from tests.providers.test_vllm_real import serve
from tokentrue.app.background import embedded_gateway
from tokentrue.app.wiring import EngineConfig, ModelConfig, ServeConfig, ServerConfig
from tokentrue.cli.main import run as command
from tokentrue.client import AsyncClient
from tokentrue.environments import SMALL_MODEL
from tokentrue.errors import EngineContractError
from tokentrue.hub import load_causal_model
from tokentrue.protocols import AdapterSink, Adapting
from tokentrue.providers.vllm import VLLMProvider
from tokentrue.types import Sampling

peft = pytest.importorskip("peft")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]
NEAR, FAR = 1e-3, 0.02
PROMPT = [random.Random(1).randrange(200) for _ in range(400)]  # several blocks of the prefix cache
ASKED = Sampling(max_tokens=16, seed=1, extra={"ignore_eos": True})
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    python = os.environ.get("TOKENTRUE_VLLM_PYTHON")
    if not python:
        pytest.fail("TOKENTRUE_VLLM_PYTHON names no Python with vllm; see docs/engines.md")
    lora = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "16", "--max-logprobs", "20")
    log = tmp_path_factory.mktemp("vllm") / "log"
    process, url = serve(python, SMALL_MODEL, log, *OPTIONS, *lora, context=1024)
    yield url
    process.terminate()
    process.wait(30)


@pytest.fixture(scope="module")
def base() -> Any:
    return load_causal_model(str(SMALL_MODEL), dtype="float32").eval()


@pytest_asyncio.fixture
async def provider(server: str, tmp_path: Path) -> AsyncIterator[VLLMProvider]:
    made = VLLMProvider(server, weights_dir=tmp_path / "published")
    yield made
    await made.close()


def adapt(model: Any, seed: int, rank: int = 8) -> Any:
    config = peft.LoraConfig(r=rank, lora_alpha=12, target_modules=TARGETS, lora_dropout=0.0)
    wrapped = peft.get_peft_model(copy.deepcopy(model), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.06)
    return wrapped.eval()


async def publish(provider: VLLMProvider, wrapped: Any, version: int, name: str = "policy") -> None:
    state, config = peft.get_peft_model_state_dict(wrapped).items(), wrapped.peft_config["default"]
    assert await provider.publish_adapter(state, config, version=version, name=name)


def distance(model: Any, completion: Any, start: int = 0) -> float:
    """The largest difference between what the engine reported and a plain forward pass of `model`."""
    mine = Truth(model).logprobs(PROMPT, completion.token_ids, Sampling())
    return max(abs(a - b) for a, b in list(zip(mine, completion.logprobs, strict=True))[start:])


async def test_a_published_adapter_samples_with_its_version(provider: VLLMProvider, server: str, base: Any) -> None:
    assert isinstance(provider, AdapterSink) and isinstance(provider, Adapting)
    first, second = adapt(base, 1), adapt(base, 2)
    plain = await provider.generate(PROMPT, ASKED)
    await publish(provider, first, 7)
    one = await provider.generate(PROMPT, ASKED)
    scored = await provider.score(PROMPT)
    await publish(provider, second, 8)
    two = await provider.generate(PROMPT, ASKED)
    assert distance(base, plain) < NEAR and distance(first, one) < NEAR and distance(second, two) < NEAR
    assert min(distance(base, one), distance(first, two), distance(base, two)) > FAR, "the adapters differ too little"
    assert scored == pytest.approx(Truth(first).logprobs(PROMPT[:1], tuple(PROMPT[1:]), Sampling()), abs=NEAR)
    assert [span.version for span in one.versions] == [7] and [span.version for span in two.versions] == [8]
    assert await provider.weight_version() == 8
    names = [model.id for model in await provider._list_models()]
    assert len([name for name in names if name.startswith("policy@")]) == 1, f"the old one was unloaded: {names}"
    other = VLLMProvider(server)  # of another program: it finds the adapter by its name, which says the version
    (found,) = [name for name in names if name.startswith("policy@8")]
    asked = Sampling(max_tokens=16, seed=1, extra={"ignore_eos": True, "adapter": found})
    named, unnamed = await other.generate(PROMPT, asked), await other.generate(PROMPT, ASKED)
    assert distance(second, named) < NEAR and [span.version for span in named.versions] == [8]
    assert distance(base, unnamed) < NEAR and all(span.version == 0 for span in unnamed.versions)
    with pytest.raises(EngineContractError, match="`nobody` does not exist"):
        await other.generate(PROMPT, Sampling(extra={"adapter": "nobody"}))
    await other.close()


async def test_a_generation_in_flight_keeps_its_adapter(provider: VLLMProvider, base: Any, tmp_path: Path) -> None:
    """And its files, until nothing samples with it."""
    first, second = adapt(base, 3), adapt(base, 4)
    await publish(provider, first, 1)
    long = Sampling(max_tokens=300, seed=3, extra={"ignore_eos": True})
    running = asyncio.create_task(provider.generate(PROMPT, long))
    while not provider._running:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    assert not running.done()
    await publish(provider, second, 2)
    short = await provider.generate(PROMPT, ASKED)
    assert not running.done(), "the older generation ended too early to show anything"
    assert len(list((tmp_path / "published").glob("*/policy@*"))) == 2
    old = await running
    assert distance(first, old) < NEAR and [span.version for span in old.versions] == [1]
    assert distance(second, short) < NEAR and [span.version for span in short.versions] == [2]
    await publish(provider, second, 3)
    assert [path.name.split(".")[0] for path in (tmp_path / "published").glob("*/policy@*")] == ["policy@3"]


async def test_vllms_in_place_loading_changes_generations_in_flight(
    provider: VLLMProvider, base: Any, tmp_path: Path
) -> None:
    """Why each publication has a new name; and in place the files are read at every step."""
    first, second = adapt(base, 3), adapt(base, 4)
    for name, wrapped in (("a", first), ("b", second)):
        wrapped.save_pretrained(tmp_path / name)

    async def load(name: str) -> None:
        body = {"lora_name": "placed", "lora_path": str(tmp_path / name), "load_inplace": True}
        await provider._post("/v1/load_lora_adapter", body)

    await load("a")
    long = Sampling(max_tokens=300, seed=3, extra={"ignore_eos": True, "adapter": "placed"})
    running = asyncio.create_task(provider.generate(PROMPT, long))
    while not provider._running:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    await load("b")
    await provider.generate(PROMPT, Sampling(max_tokens=16, extra={"adapter": "placed"}))
    old = await running
    far = distance(first, old)
    print({"in place, of the adapter that it began with": far, "of the other": distance(second, old)})
    assert far > FAR, "a generation in flight kept its adapter: in-place loading would do"


async def test_requests_of_the_gateway_name_the_adapter(server: str, base: Any, tmp_path: Path) -> None:
    """`policy`, `base:policy` and, in training, any other name; a record of each has the version of its adapter."""
    options = {"weights_dir": str(tmp_path / "published")}
    engine = EngineConfig(name="vllm", urls=(server,), options=options)
    serving = ServeConfig(
        model=ModelConfig(path=str(SMALL_MODEL), name="base"),
        engine=engine,
        server=ServerConfig(port=0, store="memory"),
    )
    first, second = adapt(base, 5), adapt(base, 6)
    async with embedded_gateway(serving) as here, AsyncClient(here.base_url, here.admin_key) as client:
        (replica,) = here.provider.in_use  # type: ignore[attr-defined]
        await publish(replica, second, 4, name="other")
        await publish(replica, first, 9)
        listed = await here.provider.health() and here.provider.adapters  # type: ignore[attr-defined]
        assert {"policy", "other"} <= set(listed)
        for name, model, version in [
            ("policy", first, 9),
            ("base:policy", first, 9),
            ("claude", first, 9),
            ("other", second, 4),
        ]:
            async with client.session(sampling={"temperature": 1.0, "max_tokens": 24, "seed": 2}) as session:
                await session.openai().chat.completions.create(
                    model=name, messages=[{"role": "user", "content": "What is 12 + 30?"}]
                )
                (sample,) = await session.samples()
            prompt = sample.loss_mask.index(1)
            mine = Truth(model).logprobs(
                list(sample.token_ids[:prompt]), tuple(sample.token_ids[prompt:]), Sampling(temperature=1.0)
            )
            assert mine == pytest.approx(list(sample.rollout_logprobs[prompt:]), abs=NEAR), name
            assert [span.policy_version for span in sample.spans if span.policy_version is not None] == [version], name


def changed(model: Any, factor: float) -> Any:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if "mlp" in name:
                parameter.mul_(factor)
    return other.eval()


async def test_a_salt_keeps_versions_apart_without_resetting_the_cache(server: str, base: Any, tmp_path: Path) -> None:
    """The control has neither salt nor reset: its log-probabilities are of neither weights."""
    posts: list[str] = []

    class Careless(VLLMProvider):
        async def _post(self, path: str, body: Any = None) -> bytes:
            posts.append(path)
            if path.startswith("/reset_prefix_cache"):
                return b'{"success": true}'
            return await super()._post(path + "&clear_cache=false" if path.startswith("/pause") else path, body)

    kept = changed(base, 0.6)
    found: dict[str, float] = {}
    for name, kind, options in (("salt", VLLMProvider, {"cache_salt": True}), ("careless", Careless, {})):
        provider = kind(server, weights_dir=tmp_path / name, **options)
        await provider.publish(base.state_dict().items(), version=1)
        before = await provider.generate(PROMPT, ASKED)
        assert distance(base, before) < NEAR
        assert distance(base, await provider.generate(PROMPT, ASKED)) < NEAR, "now from the cache"
        await provider.publish(kept.state_dict().items(), version=2)
        found[name] = distance(kept, await provider.generate(PROMPT, ASKED))
        await provider.publish(base.state_dict().items(), version=2)  # an update that was refused has the same version
        found[f"{name}, back"] = distance(base, await provider.generate(PROMPT, ASKED))
        await provider.close()
    print(found)
    assert found["salt"] < NEAR and found["salt, back"] < NEAR
    assert found["careless"] > FAR, "the control does not see a stale cache"
    cure = VLLMProvider(server, weights_dir=tmp_path / "cure")  # what the control left in the cache
    await cure.publish(base.state_dict().items(), version=3)
    await cure.close()


async def test_with_a_salt_keys_and_values_in_flight_survive_an_update(server: str, base: Any, tmp_path: Path) -> None:
    """The tail is sampled by the new weights over the old keys and values; a reset computes them again."""
    kept = changed(base, 0.6)
    tails: dict[bool, float] = {}
    for salted in (True, False):
        provider = VLLMProvider(server, weights_dir=tmp_path / str(salted), cache_salt=salted)
        await provider.publish(base.state_dict().items(), version=1)
        ids: list[int] = []
        final: Any = None
        async for chunk in provider.stream(PROMPT, Sampling(max_tokens=200, seed=3, extra={"ignore_eos": True})):
            ids += chunk.token_ids
            if len(ids) == 20:
                await provider.publish(kept.state_dict().items(), version=2)
            final = chunk.final
        assert [span.version for span in final.versions] == [1, 2]
        tails[salted] = distance(kept, final, start=final.versions[1].start)
        await provider.publish(base.state_dict().items(), version=3)
        await provider.close()
    print(tails)
    assert tails[False] < NEAR and tails[True] > FAR


def test_training_publishes_the_adapter_alone(server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = {"train.lora_rank": 8, "optim.lr": 4e-3, "train.checkpoint_every": 1}
    assert command("train", settings(tmp_path, [server], 3, **more)) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    with capsys.disabled():
        for row in rows:
            print({key: row[key] for key in ("step", "reward", "probe/delta", "mismatch/delta_abs_mean")})
    assert [row["publish/adapter"] for row in rows] == [1.0] * 3
    assert all(row["probe/delta"] < NEAR and row["mismatch/delta_abs_mean"] < 1e-4 for row in rows)
    assert all(row["staleness_max"] == 0 and row["update/grad_norm"] > 0 for row in rows)
    (written,) = (tmp_path / "published").glob("*/*")
    assert written.name.startswith("policy@3.") and not list(written.glob("model*"))
    latest = tmp_path / "checkpoints" / "latest"
    whole = peft.PeftModel.from_pretrained(
        load_causal_model(str(SMALL_MODEL), dtype="float32"), str(latest / "adapter")
    )
    merged = load_causal_model(str(latest), dtype="float32").eval()
    a, b = (Truth(model).logprobs(PROMPT, tuple(PROMPT[:50]), Sampling()) for model in (whole.eval(), merged))
    assert a == pytest.approx(b, abs=1e-4), "adapter/ and model.safetensors are one policy"
    assert command("train", settings(tmp_path, [server], 4, **more)) == 0, "it resumes from its adapter"
    assert [row["step"] for row in rows_on_file(tmp_path)] == [0, 1, 2, 3]


def test_an_engine_that_does_not_use_the_adapter_stops_the_run(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It loads them and samples without."""

    monkeypatch.setattr(VLLMProvider, "_find_adapter", lambda self, sampling: None)
    assert command("train", settings(tmp_path, [server], 2, **{"train.lora_rank": 8})) == 2
    assert "does not take published weights" in capsys.readouterr().err


async def test_the_doctor_examines_the_engine_with_its_adapter(
    provider: VLLMProvider, server: str, base: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrapped = adapt(base, 9)
    await publish(provider, wrapped, 5)
    wrapped.save_pretrained(tmp_path / "adapter")
    name = next(model.id for model in await provider._list_models() if model.id.startswith("policy@5"))
    common = ["--engine", "vllm", "--url", server, "--model", str(SMALL_MODEL), "--dtype", "float32", "--json"]

    def examine(adapter: str) -> tuple[int, set[str]]:
        code = command("doctor", [*common, "--adapter", adapter])
        found = json.loads(capsys.readouterr().out)
        return code, {each["fault"] for each in found["findings"] if each["fault"]}

    code, faults = await asyncio.to_thread(examine, f"{name}={tmp_path / 'adapter'}")
    assert (code, faults) == (0, set())
    code, faults = await asyncio.to_thread(examine, str(tmp_path / "adapter"))
    assert code == 1 and "adapter_missing" in faults
