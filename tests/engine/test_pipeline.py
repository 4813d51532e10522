"""A model over several processes: the bits of one process under any schedule, weights and adapters to every stage, a
clear end."""

from __future__ import annotations

import asyncio
import copy
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.engine.world import SIZES, Run, build, clone_of, judge, nudged, random_run
from tests.marks import IS_THOROUGH
from tokentrue.engine import ExactEngine
from tokentrue.engine.adapters import attach_adapter
from tokentrue.engine.processes import Stage, StageSpec, cut_layers
from tokentrue.errors import ConfigError, EngineError, EngineRejected, ExactnessError
from tokentrue.numerics import exact, same_bits, score
from tokentrue.numerics.exact import STATE
from tokentrue.types import Sampling

PROMPT = list(range(7, 60))
FIVE = {"num_hidden_layers": 5}
HYBRID = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}


def checked(run: Run) -> None:
    compared, different, first = judge(run)
    assert run.stats["loads"] == 2 and run.stats["forced"] > 0 and run.engine.core.scheduler.prefix_hits > 0
    assert compared == run.tokens and different == 0, f"{different} of {compared} log-probabilities differ: {first}"
    run.engine.close()


@pytest.mark.parametrize(
    ("kind", "stages", "dtype", "sizes"),
    [
        pytest.param("qwen3", 2, "bfloat16", {"num_hidden_layers": 3}, marks=pytest.mark.slow),
        pytest.param("qwen3_5", 2, "float32", HYBRID, marks=pytest.mark.slow),
        pytest.param("llama", 4, "float32", FIVE, marks=pytest.mark.slow),
    ],
)
def test_random_schedule_over_stages(kind: str, stages: int, dtype: str, sizes: dict[str, Any]) -> None:
    tokens = 120 if IS_THOROUGH else 60
    checked(random_run(build(kind, **sizes), dtype, 3, tokens=tokens, pipeline=stages))


def test_weights_that_go_to_the_wrong_layer_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the same tests on stages that got each other's weights."""
    model, plain = build("llama", num_hidden_layers=2), Stage.part_of

    def swapped(spec: StageSpec, name: str, value: torch.Tensor) -> tuple[str, torch.Tensor] | None:
        other = {"0": "1", "1": "0"}
        return plain(spec, re.sub(r"layers\.(\d)\.mlp", lambda found: f"layers.{other[found[1]]}.mlp", name), value)

    monkeypatch.setattr(Stage, "part_of", staticmethod(swapped))
    run = random_run(model, "float32", 3, tokens=60, loads=0, pipeline=2)
    assert judge(run)[1] > 0
    run.engine.close()


@pytest.fixture(scope="module")
def model() -> Any:
    return build("qwen3_moe", num_hidden_layers=3)


@pytest.fixture(scope="module")
def engine(model: Any) -> Iterator[ExactEngine]:
    with ExactEngine(copy.deepcopy(model), pipeline=2, max_len=400, kv_tokens=2000, version=1) as engine:
        yield engine


def trainer_bits(model: Any, tokens: tuple[int, ...]) -> torch.Tensor:
    with torch.no_grad():
        return score(model, torch.tensor([[*PROMPT, *tokens]]))[0, len(PROMPT) - 1 :]


async def test_one_process_and_two_stages_answer_the_same(model: Any, engine: ExactEngine) -> None:
    """Tokens, log-probabilities, prompt log-probabilities, chosen experts and fingerprint."""
    extra = {"prompt_logprobs": True, "routed_experts": True}
    sampling = Sampling(max_tokens=25, seed=4, top_logprobs=2, repetition_penalty=1.1, extra=extra)
    with ExactEngine(copy.deepcopy(model), max_len=400, version=1) as one:
        wanted = await one.generate(PROMPT, sampling)
    assert await engine.generate(PROMPT, sampling) == wanted
    assert wanted.routed_experts is not None and wanted.routed_experts.shape == (len(PROMPT) + 24, 3, 3)


async def test_weights_reach_every_stage_and_wrong_ones_none(model: Any, engine: ExactEngine) -> None:
    new = nudged(clone_of(model), 5)
    engine.load_weights(((f"_fsdp_wrapped_module.{name}", value) for name, value in new.items()), version=2)
    found = await engine.generate(PROMPT, Sampling(max_tokens=20, seed=1))
    other = copy.deepcopy(model)
    other.load_state_dict(new)
    assert same_bits(torch.tensor(found.logprobs), trainer_bits(other, found.token_ids)) and engine.version == 2
    with pytest.raises(EngineError, match=r"missing 1 tensors, first 'model\.layers\.2"):
        engine.load_weights({k: v for k, v in new.items() if k != "model.layers.2.self_attn.o_proj.weight"}, version=3)
    again = await engine.generate(PROMPT, Sampling(max_tokens=20, seed=1))
    assert again.logprobs == found.logprobs and engine.version == 2
    engine.load_weights(clone_of(model), version=4)


async def test_an_adapter_over_stages_has_the_bits_of_the_adapted_model(model: Any, engine: ExactEngine) -> None:
    generator = torch.Generator().manual_seed(3)
    state = {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{part}.weight": torch.randn(shape, generator=generator) * 0.2
        for layer in (0, 2) for part, shape in (("A", (4, 90)), ("B", (144, 4)))
    }  # fmt: skip
    with pytest.raises(EngineError, match="layer 2 q_proj maps"):
        wrong = {
            name: value[:, :80] if "layers.2" in name and "lora_A" in name else value for name, value in state.items()
        }
        engine.load_adapter("a", wrong, config={"lora_alpha": 8})
    with pytest.raises(EngineRejected, match="'a' is not loaded"):
        await engine.generate(PROMPT, Sampling(), adapter="a")
    engine.load_adapter("a", state, config={"lora_alpha": 8})
    plain, found = await asyncio.gather(
        engine.generate(PROMPT, Sampling(max_tokens=20, seed=1)),
        engine.generate(PROMPT, Sampling(max_tokens=20, seed=1), adapter="a"),
    )
    assert same_bits(torch.tensor(plain.logprobs), trainer_bits(model, plain.token_ids))
    trainer = copy.deepcopy(model)
    with exact(trainer), attach_adapter(trainer, trainer.__dict__[STATE].ops, engine.core.adapters["a"]):
        assert same_bits(torch.tensor(found.logprobs), trainer_bits(trainer, found.token_ids))
    engine.unload_adapter("a")


async def test_a_stage_that_dies_is_an_error_and_not_a_hang() -> None:
    before = time.monotonic()
    engine = ExactEngine(build("llama", num_hidden_layers=2), pipeline=2, max_len=400, kv_tokens=2000)
    children = [stage.process for stage in engine.core.runner._stages]  # type: ignore[attr-defined]
    tasks = [asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=300, seed=i))) for i in range(4)]
    await asyncio.sleep(0.3)
    os.kill(children[random.Random(before).randrange(2)].pid, signal.SIGKILL)
    for result in await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30):
        assert isinstance(result, EngineError)
        assert "stage" in str(result) and "died (exit code -9); start the engine again" in str(result)
    with pytest.raises(EngineError, match="died"):
        await asyncio.wait_for(engine.generate(PROMPT, Sampling(max_tokens=2)), 10)
    with pytest.raises(EngineError, match="died"):
        engine.load_weights(clone_of(build("llama", num_hidden_layers=2)), version=2)
    engine.close()
    assert not any(child.is_alive() for child in children), "the other stage ends, too"


def test_layers_are_cut_evenly_and_not_below_one() -> None:
    assert cut_layers(5, 2) == (range(0, 2), range(2, 5)) and [len(r) for r in cut_layers(36, 4)] == [9] * 4
    with pytest.raises(ConfigError, match="pipeline=3: choose 1 to 2"):
        cut_layers(2, 3)


def test_what_one_process_refuses_stages_refuse_by_name() -> None:
    from transformers import CohereConfig, CohereForCausalLM

    model = CohereForCausalLM(CohereConfig(**SIZES))
    with pytest.raises(ExactnessError, match=r"CohereLayerNorm\) has no exact form"):
        ExactEngine(model, pipeline=2)
