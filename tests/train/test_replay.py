"""What the rollout recorded is what the trainer computes with: kept ids under filters and the experts of a mixture, bit
for bit."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tokentrue as tt
from tests.engine.world import VOCABULARY, build, engine_of
from tests.train.rows import sample_of, small_model
from tokentrue.environments import SMALL_MODEL
from tokentrue.errors import TokenContractError
from tokentrue.mismatch import diagnose, loss_named, support_log_mass_of
from tokentrue.mismatch.routing import replay_routing, routing_of
from tokentrue.numerics import exact, score
from tokentrue.providers import load
from tokentrue.routing_replay import RoutedExperts, SamplingMask
from tokentrue.samples import audit, read_samples, write_samples
from tokentrue.samples.recorded_turns import read_turns
from tokentrue.train import ExactScorer, OptimConfig, PlainScorer, TrainConfig, Trainer
from tokentrue.train.rows import rows_from_groups
from tokentrue.types import Sample, Sampling, TurnRequest

FILTERS = {
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.05},
    "all": {"top_p": 0.9, "top_k": 20, "min_p": 0.02},
}


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.set_num_threads(1)
    return small_model()


async def rollouts(model: Any, count: int = 6, **filters: Any) -> list[Sample]:
    """Conversations of two turns with the exact engine, the second without filters where `mixed`."""
    provider = load("exact", model=copy.deepcopy(model))
    renderer = tt.load_renderer(str(SMALL_MODEL))

    async def one(index: int) -> Sample:
        session = tt.Session(renderer=renderer, provider=provider, group="g")
        messages: list[Any] = [
            {"role": "user", "content": f"Ann has {index + 3} pens and buys {index} more. How many?"}
        ]
        for turn in range(2):
            sampling = Sampling(temperature=1.3, max_tokens=24, seed=10 * index + turn, **filters)
            reply = await session.chat(messages, sampling=sampling)
            messages = [*messages, reply.message, {"role": "user", "content": "And twice that?"}]
        await session.reward(float(index % 2))
        (sample,) = session.samples()
        return sample

    try:
        return list(await asyncio.gather(*map(one, range(count))))
    finally:
        await provider.close()


def trainer_of(model: torch.nn.Module, *, is_exact: bool, **config: Any) -> Trainer:
    settings = TrainConfig(exact=is_exact, micro_tokens=512, **config)
    return Trainer(
        copy.deepcopy(model).requires_grad_(True), config=settings, optim=OptimConfig(lr=1e-4), loss=loss_named("dapo")
    )


def mean_ratio(model: torch.nn.Module, samples: Sequence[Sample], *, kept: bool) -> float:
    rows = rows_from_groups([samples])
    with torch.no_grad():
        found = PlainScorer()(model, rows if kept else [replace(row, kept=None) for row in rows])
    return diagnose(found.logprobs, [r.rollout for r in rows], [r.mask for r in rows], worst=0).metrics[
        "ratio/raw/mean"
    ]


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
async def test_the_trainer_has_the_bits_of_a_filtered_rollout(model: torch.nn.Module, filters: dict[str, Any]) -> None:
    samples = await rollouts(model, **filters)
    assert audit(samples).findings == []
    assert all(sample.sampling_mask is not None and len(sample.sampling_mask.token_ids) for sample in samples)
    report = trainer_of(model, is_exact=True).step([samples])
    assert report.agreement.compared == report.metrics["tokens_trained"] > 100
    assert report.agreement.differing == 0


async def cut_off_rollout(model: Any, seed: int) -> Sample:
    """A turn, one whose caller leaves after five tokens, and one that continues it, all under top-p."""
    provider: Any = load("exact", model=copy.deepcopy(model))
    session = tt.Session(renderer=tt.load_renderer(str(SMALL_MODEL)), provider=provider, group="g")

    def sampling(turn: int) -> Sampling:
        return Sampling(temperature=1.3, top_p=0.6, max_tokens=24, seed=10 * seed + turn)

    try:
        messages: list[Any] = [{"role": "user", "content": "what is 12 plus 5?"}]
        reply = await session.chat(messages, sampling=sampling(0))
        messages += [reply.message, {"role": "user", "content": "and plus 3?"}]
        received = 0
        async with aclosing(session.stream(TurnRequest(messages=messages, sampling=sampling(1)))) as events:
            async for event in events:
                received += len(event.token_ids)
                if received >= 5:
                    break
        cut = session.tree.in_order()[-1]
        assert cut.outcome == "disconnected"
        await session.chat([*messages, cut.served, {"role": "user", "content": "go on"}], sampling=sampling(2))
        await session.reward(float(seed % 2))
        return max(session.samples(), key=lambda sample: len(sample.token_ids))
    finally:
        await provider.close()


async def test_the_trainer_has_the_bits_of_a_filtered_turn_that_was_cut_off(model: torch.nn.Module) -> None:
    samples = [await cut_off_rollout(model, seed) for seed in range(4)]
    assert audit(samples).findings == []
    turns = [read_turns(sample) for sample in samples]
    assert [len(each) for each in turns] == [3] * 4, "the cut-off turn is continued"
    cut = [
        sample.sampling_mask.cut(each[1].start, each[1].end)
        for sample, each in zip(samples, turns, strict=True)
        if sample.sampling_mask
    ]
    assert len(cut) == 4 and all(len(mask.token_ids) for mask in cut)
    report = trainer_of(model, is_exact=True).step([samples])
    assert report.agreement.compared == report.metrics["tokens_trained"] > 100
    assert report.agreement.differing == 0


async def test_the_mean_ratio_under_top_p_is_one_with_kept_ids_and_less_without(model: torch.nn.Module) -> None:
    samples = await rollouts(model, count=12, top_p=0.8)
    assert mean_ratio(model, samples, kept=True) == pytest.approx(1.0, abs=1e-4)
    assert mean_ratio(model, samples, kept=False) < 0.95


async def test_the_mass_of_the_kept_ids_aligns_another_trainer(model: torch.nn.Module) -> None:
    """log p over the vocabulary minus the log mass of the kept ids is the rollout's log-probability."""
    (sample, *_) = await rollouts(model, count=2, top_p=0.8)
    ids = torch.tensor([list(sample.token_ids)])
    with torch.no_grad():
        logits = torch.nn.functional.pad(model(ids).logits[0, :-1].double() / 1.3, (0, 0, 1, 0))
    mass = support_log_mass_of(sample, logits)
    ours = logits.log_softmax(-1).gather(-1, ids[0, :, None])[:, 0] - mass
    sampled = torch.tensor(sample.loss_mask, dtype=torch.bool)
    theirs = torch.tensor([value or 0.0 for value in sample.rollout_logprobs], dtype=torch.float64)
    assert torch.allclose(ours[sampled], theirs[sampled], atol=1e-4)
    assert bool((mass[sampled] < 0).any()) and bool((mass[~sampled] == 0).all())


async def test_filters_without_kept_ids_are_refused(model: torch.nn.Module) -> None:
    samples = [replace(sample, sampling_mask=None) for sample in await rollouts(model, count=2, top_p=0.8)]
    with pytest.raises(TokenContractError, match=r"top_p.*sampling mask"):
        trainer_of(model, is_exact=False).step([samples])


async def test_a_changed_mask_is_found(model: torch.nn.Module, tmp_path: Path) -> None:
    """By the trainer's bits, and by the audit of a file in any format."""
    samples = await rollouts(model, count=2, top_p=0.8)
    mask = samples[0].sampling_mask
    assert mask is not None
    at = next(i for i in range(len(mask)) if len(mask.row(i)) > 1)
    rows = [mask.row(i).tolist() for i in range(len(mask))]
    rows[at] = [i for i in rows[at] if i == samples[0].token_ids[at]]
    broken = [replace(samples[0], sampling_mask=SamplingMask.from_rows(rows)), samples[1]]
    with pytest.raises(Exception, match="ulp"):
        trainer_of(model, is_exact=True).step([broken])
    write_samples(broken, tmp_path / "s.jsonl")
    assert any("seal" in str(finding) for finding in audit(read_samples(tmp_path / "s.jsonl")).findings)
    rows[at] = [i for i in range(3) if i != samples[0].token_ids[at]]
    other = replace(samples[0], sampling_mask=SamplingMask.from_rows(rows))
    assert any("not among the ids" in str(finding) for finding in audit([other]).findings)


@pytest.mark.parametrize("scorer", [ExactScorer(), PlainScorer()], ids=["exact", "plain"])
def test_gradient_and_entropy_are_those_of_the_kept_ids(model: torch.nn.Module, scorer: Any) -> None:
    """Against a dense masked softmax in float64; ids that were removed get no gradient through the head."""
    ids = torch.tensor([5, 9, 11, 3, 8])
    mask = SamplingMask.from_rows([[], [9, 4, 2], [], [3], [8, 600]])
    sample = sample_of(ids.tolist(), [True, False, False, False, False], [-1.0] * 5, name="s", group="g", reward=1.0)
    row = rows_from_groups([[replace(sample, sampling_mask=mask)]])[0]
    ours = copy.deepcopy(model)
    with scorer.active(ours):
        scores = scorer(ours, [row], entropy=True)
        assert scores.entropy is not None
        (scores.logprobs[0].sum() + 0.1 * scores.entropy[0].sum()).backward()
    dense = copy.deepcopy(model)
    logits = dense(ids[None]).logits[0, :-1].double()
    allowed = torch.ones_like(logits, dtype=torch.bool)
    for at in range(1, 5):
        if len(mask.row(at)):
            allowed[at - 1] = False
            allowed[at - 1, mask.row(at).tolist()] = True
    table = logits.masked_fill(~allowed, -torch.inf).log_softmax(-1)
    values = table.gather(-1, ids[1:, None])[:, 0]
    entropy = -(table.exp() * table.masked_fill(~allowed, 0.0)).sum(-1)
    (values.sum() + 0.1 * entropy.sum()).backward()
    assert torch.allclose(scores.logprobs[0][1:].double(), values, atol=1e-4)
    assert torch.allclose(scores.entropy[0][1:].double(), entropy, atol=1e-4)
    for mine, theirs in zip(ours.parameters(), dense.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, atol=2e-3, rtol=1e-2)


def mixture_samples(engine: Any, count: int = 4) -> list[Sample]:
    generator = torch.Generator().manual_seed(5)
    extra = {"ignore_eos": True, "routed_experts": True}
    prompts = [torch.randint(0, VOCABULARY, (8 + 5 * i,), generator=generator).tolist() for i in range(count)]
    requests = [
        engine.request(prompt, Sampling(max_tokens=12, seed=i, extra=extra)) for i, prompt in enumerate(prompts)
    ]
    for request in requests:
        engine.core.add(request)
    while engine.core.busy:
        engine.core.step()
    made: list[Sample] = []
    for index, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
        done = engine.result(request)
        ids, given = [*prompt, *done.token_ids], [True] * len(prompt) + [False] * len(done.token_ids)
        sample = sample_of(
            ids, given, [0.0] * len(prompt) + list(done.logprobs), name=f"s{index}", group="g", reward=float(index % 2)
        )
        made.append(replace(sample, routed_experts=done.routed_experts))
    return made


def copy_of(engine: Any) -> torch.nn.Module:
    """The engine's weights in a model without the engine's patches."""
    fresh = build("qwen3_moe")
    fresh.load_state_dict(engine.model.state_dict())
    fresh.config._experts_implementation = "eager"  # torch's grouped product wants larger layers than these
    return fresh


def test_replayed_experts_leave_the_exact_trainers_bits_alone() -> None:
    engine = engine_of(build("qwen3_moe"), "float32", None)
    samples = mixture_samples(engine)
    for mode in ("off", "experts", "weights"):
        report = trainer_of(copy_of(engine), is_exact=True, routing_replay=mode).step([samples])
        assert report.agreement.compared > 0 and report.agreement.differing == 0, mode
    engine.close()


@pytest.mark.parametrize("is_exact", [True, False])
def test_a_router_that_moved_takes_the_rollouts_experts(is_exact: bool) -> None:
    """All positions, the given ones too: free prompts leave more of the difference, and weights leave least."""
    engine = engine_of(build("qwen3_moe"), "float32", None)
    samples = mixture_samples(engine, count=6)
    moved = copy_of(engine)
    with torch.no_grad():
        for name, parameter in moved.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.15)

    def distance(mode: str, rows: list[Sample]) -> float:
        config: dict[str, Any] = {"routing_replay": mode, "offline": True}
        trainer = trainer_of(moved, is_exact=is_exact, **config)
        trainer.version = 1  # these weights sampled nothing: differences are measured, not refused
        return trainer.step([rows]).metrics["mismatch/delta_abs_mean"]

    def sampled_only(sample: Sample) -> Sample:
        routed = sample.routed_experts
        assert routed is not None
        given = sample.loss_mask.index(1) - 1
        free = b"\xff" * (2 * given * routed.shape[1] * routed.shape[2])
        return replace(sample, routed_experts=replace(routed, data=free + routed.data[len(free) :]))

    without, experts, whole = (distance(mode, samples) for mode in ("off", "experts", "weights"))
    partly = distance("weights", [sampled_only(sample) for sample in samples])
    assert without > experts > whole and partly > whole
    assert whole < 1e-5
    engine.close()


def test_a_preempted_and_a_shared_prompt_keep_the_routing_of_every_position() -> None:
    """Two requests with one prompt: the second may not skip the positions whose experts it must report."""
    engine = engine_of(build("qwen3_moe"), "float32", None)
    prompt = torch.randint(0, VOCABULARY, (80,), generator=torch.Generator().manual_seed(2)).tolist()
    extra = {"ignore_eos": True, "routed_experts": True}
    found: list[RoutedExperts] = []
    for index in range(2):
        request = engine.request(prompt, Sampling(max_tokens=6, seed=3, extra=extra))
        engine.core.add(request)
        for _ in range(4):
            engine.core.step()
        if index:
            engine.core.scheduler.restart()  # as a weight update does: everything is computed again
        while engine.core.busy:
            engine.core.step()
        done = engine.result(request)
        assert done.routed_experts is not None and done.routed_experts.shape[0] == len(prompt) + 5
        found.append(done.routed_experts)
    assert found[0] == found[1]
    ids = torch.tensor([[*prompt, *done.token_ids]])
    sample = sample_of(ids[0].tolist(), [True] * 80 + [False] * 6, [-1.0] * 86, name="s", group="g", reward=0.0)
    with (
        exact(engine.model),
        torch.no_grad(),
        replay_routing(engine.model, routing_of(replace(sample, routed_experts=found[0]))),
    ):
        assert score(engine.model, ids)[0, 79:].tolist() == list(done.logprobs)
    engine.close()
