"""The facade: concurrency, cancellation, limits, weights, prompt log-probabilities, metrics, refusals."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.world import VOCABULARY, build, clone_of, nudged
from tokentrue.engine import ExactEngine, ScheduleLimits
from tokentrue.errors import (
    ConfigError,
    EngineError,
    EngineRejected,
    ExactnessError,
    FileFormatError,
    LimitExceeded,
    PromptTooLong,
    SamplingError,
)
from tokentrue.numerics import exact, same_bits, score
from tokentrue.types import Finish, Sampling

PROMPT = list(range(7, 60))


@pytest.fixture(scope="module")
def model() -> Any:
    return build("qwen3")


@pytest.fixture
def engine(model: Any) -> Iterator[ExactEngine]:
    engine = ExactEngine(copy.deepcopy(model), limits=ScheduleLimits(max_requests=8, max_waiting=20))
    yield engine
    engine.close()


def trainer_bits(model: Any, prompt: list[int], tokens: tuple[int, ...], temperature: float = 1.0) -> torch.Tensor:
    with torch.no_grad():
        return score(model, torch.tensor([[*prompt, *tokens]]), temperature)[0, len(prompt) - 1 :]


async def test_greedy_is_hugging_faces_greedy(model: Any, engine: ExactEngine) -> None:
    """Against transformers' own generate: the same tokens until two logits are closer than rounding."""
    ids = torch.tensor([PROMPT])
    wanted = model.generate(
        ids, do_sample=False, max_new_tokens=40, attention_mask=torch.ones_like(ids), pad_token_id=0
    )
    found = await engine.generate(PROMPT, Sampling(temperature=0.0, max_tokens=40))
    assert list(found.token_ids) == wanted[0, len(PROMPT) :].tolist()
    assert same_bits(torch.tensor(found.logprobs), trainer_bits(model, PROMPT, found.token_ids))


async def test_samples_follow_the_distribution(model: Any, engine: ExactEngine) -> None:
    """600 first tokens against the softmax: total variation within what chance allows for that many draws."""
    several = [engine.core.local.forward.decoder.vocabulary]
    with torch.no_grad():
        probs = torch.softmax(model(torch.tensor([PROMPT])).logits[0, -1], -1)
    found = []
    for start in range(0, 600, 20):
        found += await asyncio.gather(
            *(engine.generate(PROMPT, Sampling(max_tokens=1, seed=start + i)) for i in range(20))
        )
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in found]), minlength=several[0]) / 600
    chance = (2 * probs * (1 - probs) / (torch.pi * 600)).sqrt().sum()  # expected sum of |frequency - p|
    assert (counts - probs).abs().sum() < 1.5 * chance


async def test_group_of_samples_pays_for_its_prompt_once(engine: ExactEngine) -> None:
    group = await engine.generate_n(PROMPT, Sampling(max_tokens=5, seed=3), 6)
    assert len({c.token_ids for c in group}) > 1
    assert group[0].token_ids == (await engine.generate(PROMPT, Sampling(max_tokens=5, seed=3))).token_ids
    metrics = engine.metrics()
    assert metrics["prefix_hit_tokens_total"] >= 6 * 48
    assert metrics["prompt_tokens_total"] < 2 * len(PROMPT)
    assert (
        metrics["first_token_seconds_p50"] > 0
        and metrics["kv_blocks_used"] == 0
        and metrics["sampled_tokens_total"] >= 30
    )


async def test_cancelling_frees_the_request_and_spares_the_others(engine: ExactEngine) -> None:
    task = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=400, seed=1)))
    other = asyncio.create_task(engine.generate(PROMPT[:20], Sampling(max_tokens=30, seed=2)))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len((await other).token_ids) == 30
    for _ in range(200):
        if not engine.core.busy:
            break
        await asyncio.sleep(0.02)
    assert not engine.core.busy and engine.core.pool.num_used == 0


async def test_too_many_waiting_are_turned_away(engine: ExactEngine) -> None:
    with engine.paused():
        tasks = [asyncio.create_task(engine.generate([1, 2], Sampling(max_tokens=1))) for _ in range(25)]
        done, _ = await asyncio.wait(tasks, timeout=0.2)
        assert len(done) == 5 and all(isinstance(t.exception(), LimitExceeded) for t in done)
    assert sum(not isinstance(r, Exception) for r in await asyncio.gather(*tasks, return_exceptions=True)) == 20


@pytest.mark.parametrize(
    ("prompt", "sampling", "error", "says"),
    [
        ([], Sampling(), EngineRejected, "empty"),
        ([VOCABULARY], Sampling(), EngineRejected, "vocabulary of 211"),
        ([-1], Sampling(), EngineRejected, "-1"),
        ([1] * 512, Sampling(), PromptTooLong, "prompt is too long: 512 tokens"),
        ([1], Sampling(extra={"guided_json": {}}), SamplingError, "guided_json"),
        ([1], Sampling(stop=("x",)), SamplingError, "stop_token_ids"),
    ],
)
async def test_a_bad_request_is_refused_at_the_door(
    engine: ExactEngine, prompt: list[int], sampling: Sampling, error: Any, says: str
) -> None:
    with pytest.raises(error, match=says):
        await engine.generate(prompt, sampling)
    assert len((await engine.generate([1, 2], Sampling(max_tokens=2))).token_ids) == 2


async def test_a_failing_step_fails_its_requests_and_not_the_engine(
    engine: ExactEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = engine.core.local.forward.step
    monkeypatch.setattr(
        engine.core.local.forward, "step", lambda *args: (_ for _ in ()).throw(RuntimeError("no memory"))
    )
    with pytest.raises(EngineError, match="no memory"):
        await engine.generate(PROMPT, Sampling(max_tokens=2))
    monkeypatch.setattr(engine.core.local.forward, "step", step)
    assert (await engine.generate(PROMPT, Sampling(max_tokens=2))).finish is Finish.LENGTH


async def test_prompt_logprobs_are_the_trainers(model: Any, engine: ExactEngine) -> None:
    await engine.generate(PROMPT, Sampling(max_tokens=1))  # its cached prefix must not hide prompt positions
    found = await engine.generate(
        PROMPT, Sampling(max_tokens=3, temperature=0.7, seed=1, extra={"prompt_logprobs": True})
    )
    assert found.prompt_logprobs is not None
    with torch.no_grad():
        wanted = score(model, torch.tensor([PROMPT]), 0.7)[0]
    assert same_bits(torch.tensor(found.prompt_logprobs), wanted)


async def test_new_weights_reach_a_running_request(model: Any, engine: ExactEngine) -> None:
    """Tokens before the update carry the old version's bits, later ones those of the new weights over the whole
    context."""
    weights = {0: clone_of(model), 5: nudged(clone_of(model), 1)}
    tokens = 0
    async for chunk in engine.stream(PROMPT, Sampling(max_tokens=200, seed=4)):
        tokens += len(chunk.token_ids)
        if tokens >= 3 and engine.version != 5:
            await engine.publish(weights[5].items(), version=5)
        final = chunk.final
    assert final is not None and [s.version for s in final.versions] == [0, 5]
    assert final.policy_version == 5 and final.versions[0].end >= 3
    trainer = copy.deepcopy(model)
    for span in final.versions:
        trainer.load_state_dict(weights[span.version])
        bits = trainer_bits(trainer, PROMPT, final.token_ids)[span.start : span.end]
        assert same_bits(bits, torch.tensor(final.logprobs[span.start : span.end]))
    with exact(trainer) as contract:
        contract.require(final.fingerprint)


async def test_bad_weights_are_refused_and_leave_the_engine_as_it_was(model: Any, engine: ExactEngine) -> None:
    good = clone_of(model)
    before = await engine.generate(PROMPT, Sampling(max_tokens=5, seed=1))
    for change, says in (
        ({k: v for k, v in good.items() if "layers.1" not in k}, "missing"),
        ({**good, "model.norm.weight": torch.zeros(3)}, r"norm.*shape \(3,\)"),
        ({**good, "strange": torch.zeros(1)}, "strange"),
    ):
        with pytest.raises(EngineError, match=says):
            engine.load_weights(change, version=2)
    after = await engine.generate(PROMPT, Sampling(max_tokens=5, seed=1))
    assert (after.token_ids, after.logprobs, after.policy_version) == (before.token_ids, before.logprobs, 0)
    with pytest.raises(EngineError, match="missing"):  # a stream that ends too early has already overwritten something
        engine.load_weights(iter(list(good.items())[:5]), version=3)
    with pytest.raises(EngineError, match="half way"):
        await engine.generate(PROMPT, Sampling(max_tokens=5, seed=1))
    engine.load_weights({f"_orig_mod.{k}": v for k, v in good.items()}, version=4)
    again = await engine.generate(PROMPT, Sampling(max_tokens=5, seed=1))
    assert (again.logprobs, again.policy_version) == (before.logprobs, 4)


async def test_weights_that_are_not_finite_fail_the_request_and_poison_nothing(model: Any, engine: ExactEngine) -> None:
    good = clone_of(model)
    before = await engine.generate(PROMPT, Sampling(max_tokens=5, seed=1))
    engine.load_weights({**good, "model.norm.weight": good["model.norm.weight"] * torch.nan}, version=1)
    with pytest.raises(EngineError, match="not finite"):
        await engine.generate(PROMPT, Sampling(max_tokens=5, seed=1))
    engine.load_weights(good, version=2)
    assert (await engine.generate(PROMPT, Sampling(max_tokens=5, seed=1))).logprobs == before.logprobs


async def test_from_a_directory_and_weights_from_a_directory(tmp_path: Path) -> None:
    first, second = build("llama"), build("llama", seed=9)
    first.save_pretrained(tmp_path / "a")
    second.save_pretrained(tmp_path / "b")
    with ExactEngine(tmp_path / "a", dtype="bfloat16") as engine:
        engine.load_weights(tmp_path / "b", version=3)
        found = await engine.generate(PROMPT, Sampling(max_tokens=8, seed=1))
    assert found.policy_version == 3
    assert same_bits(torch.tensor(found.logprobs), trainer_bits(second.bfloat16(), PROMPT, found.token_ids))


async def test_moe_checkpoint_directory_is_converted(tmp_path: Path) -> None:
    """Checkpoints of experts have one tensor per expert; the model holds them stacked."""
    model = build("qwen3_moe", seed=4)
    model.save_pretrained(tmp_path)
    with ExactEngine(build("qwen3_moe", seed=5)) as engine:
        engine.load_weights(tmp_path, version=1)
        found = await engine.generate(PROMPT, Sampling(max_tokens=6, seed=1))
    assert same_bits(torch.tensor(found.logprobs), trainer_bits(model, PROMPT, found.token_ids))


def test_refusals_at_load_name_the_part(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

    with pytest.raises(ExactnessError, match="LayerNorm"):
        ExactEngine(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2)).eval())
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    small = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    with pytest.raises(ExactnessError, match="dynamic"):
        ExactEngine(Qwen3ForCausalLM(Qwen3Config(vocab_size=50, intermediate_size=32, rope_parameters=rope, **small)))
    with pytest.raises(FileFormatError, match="nowhere"):
        ExactEngine(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="pipeline=3: choose 1 to 2"):
        ExactEngine(build("qwen3"), pipeline=3)
    with pytest.raises(ConfigError, match="float64"):
        ExactEngine(build("qwen3"), dtype="float64")


async def test_closing_fails_what_is_pending_and_restores_the_model(model: Any) -> None:
    mine = copy.deepcopy(model)
    engine = ExactEngine(mine)
    assert (await engine.generate(PROMPT, Sampling(max_tokens=3))).finish is Finish.LENGTH
    engine.close()
    assert "forward" not in mine.model.norm.__dict__
    with pytest.raises(EngineError, match="closed"):
        await engine.generate(PROMPT, Sampling(max_tokens=3))
