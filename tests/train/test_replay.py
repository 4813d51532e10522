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
from experiments.gradients import flat_gradient
from tests.engine.world import VOCABULARY, build, engine_of
from tests.marks import slow_except
from tests.train.rows import sample_of, small_model
from tokentrue.environments import SMALL_MODEL
from tokentrue.errors import ConfigError, TokenContractError
from tokentrue.mismatch import PRESETS, diagnose, loss_named
from tokentrue.numerics import exact, score
from tokentrue.numerics.routing import replay_routing, routing_of
from tokentrue.providers import load
from tokentrue.routing_replay import RoutedExperts, SamplingMask, TopLogprobs
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


@pytest.mark.parametrize("name", slow_except({"all"}, FILTERS))
async def test_the_trainer_has_the_bits_of_a_filtered_rollout(model: torch.nn.Module, name: str) -> None:
    samples = await rollouts(model, **FILTERS[name])
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


def centring_trainer(model: torch.nn.Module, preset: str, *, is_exact: bool, baseline: str = "dr_grpo") -> Trainer:
    trainer = Trainer(
        copy.deepcopy(model).requires_grad_(True),
        config=TrainConfig(exact=is_exact, micro_tokens=160, offline=True, baseline=baseline),  # type: ignore[arg-type]
        optim=OptimConfig(lr=1e-4),
        loss=loss_named("reinforce", correction=PRESETS[preset]),
    )
    trainer.version = 1  # the weights have moved since they sampled
    return trainer


def move(model: torch.nn.Module) -> torch.nn.Module:
    moved, generator = copy.deepcopy(model), torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.std(), alpha=0.05)
    return moved


def centred_gradient(model: Any, sampler: Any, samples: Sequence[Sample], k: int, cap: float | None) -> torch.Tensor:
    """The gradient of the paper's estimator over both models' whole tables, in float64 and one sample at a time."""
    rewards = torch.tensor([float(sample.reward or 0.0) for sample in samples], dtype=torch.float64)
    tokens = sum(sum(sample.loss_mask) for sample in samples)
    model.zero_grad()
    for sample, advantage in zip(samples, rewards - rewards.mean(), strict=True):
        ids, at = torch.tensor(list(sample.token_ids)), torch.tensor(sample.loss_mask, dtype=torch.bool)[1:]

        def table(of: Any, ids: torch.Tensor = ids, at: torch.Tensor = at, sample: Sample = sample) -> torch.Tensor:
            logits = of(ids[None]).logits[0, :-1].double() / 1.3
            for row in range(len(logits)):
                kept = [] if sample.sampling_mask is None else sample.sampling_mask.row(row + 1).tolist()
                if kept:
                    removed = torch.ones(logits.shape[-1], dtype=torch.bool)
                    removed[kept] = False
                    logits = torch.where((torch.arange(len(logits)) == row)[:, None] & removed, -torch.inf, logits)
            return logits.log_softmax(-1)[at]

        log_p = table(model)
        with torch.no_grad():
            p, q = log_p.exp(), table(sampler).exp()
            beyond = torch.ones_like(q, dtype=torch.bool).scatter_(1, q.topk(k).indices, False)
            mass, rest = (q * beyond).sum(-1, keepdim=True), (p * beyond).sum(-1, keepdim=True)
            q = torch.where(beyond, p * mass / rest.clamp(min=1e-300), q)
            weight = torch.ones_like(q) if cap is None else (p / q.clamp(min=1e-300)).clamp(max=cap)
            scores = -q * weight
            own = ids[1:][at][:, None]
            true_q = table(sampler).exp().gather(-1, own)
            own_weight = 1.0 if cap is None else (p.gather(-1, own) / true_q).clamp(max=cap)
            scores = scores.scatter_add(1, own, torch.ones_like(own, dtype=torch.float64) * own_weight)
        (-advantage * (scores * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum() / tokens).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@pytest.mark.parametrize(
    ("preset", "cap", "filters", "is_exact"),
    [
        ("score_centering", None, {}, True),
        pytest.param("score_centering_tis", 2.0, {}, False, marks=pytest.mark.slow),
        pytest.param("score_centering", None, {"top_k": 6}, False, marks=pytest.mark.slow),
        ("score_centering_tis", 2.0, {"top_k": 6}, True),
    ],
)
async def test_score_centering_trains_by_the_papers_gradient(
    model: torch.nn.Module, preset: str, cap: float | None, filters: dict[str, Any], is_exact: bool
) -> None:
    """From the engine's own record to the gradient of the weights; under top-k the recorded ids are the whole support."""
    samples = await rollouts(model, count=4, top_logprobs=6, **filters)
    assert audit(samples).findings == []
    moved = move(model)
    flat, metrics = flat_gradient(centring_trainer(moved, preset, is_exact=is_exact), [samples])
    wanted = centred_gradient(copy.deepcopy(moved), model, samples, 6, cap)
    assert float((flat.double() - wanted).norm() / wanted.norm()) < 1e-3
    assert metrics["centering/head_mass"] == pytest.approx(1.0, abs=1e-5 if filters else 0.2)
    plain, _ = flat_gradient(centring_trainer(moved, "bypass_pg_is", is_exact=is_exact), [samples])
    assert float((flat - plain).norm() / plain.norm()) > 0.01, "the test would not notice a missing term"


async def test_samples_without_the_samplers_ids_are_refused(model: torch.nn.Module, tmp_path: Path) -> None:
    samples = await rollouts(model, count=2)
    trainer = centring_trainer(model, "score_centering", is_exact=False)
    with pytest.raises(TokenContractError, match=r"trained tokens have no top log-probabilities.*top_logprobs = 128"):
        trainer.step([samples])
    with pytest.raises(ConfigError, match="dr_grpo or rloo"):
        centring_trainer(model, "score_centering", is_exact=False, baseline="grpo")
    (whole, other) = await rollouts(model, count=2, top_logprobs=3)
    tops = whole.top_logprobs
    assert tops is not None and other.top_logprobs is not None
    counts = {end - start for start, end in zip(tops.offsets, tops.offsets[1:], strict=False)}
    assert counts == {0, 3}, "the sampled id is not added to those that were asked for"
    changed = bytes([tops.logprobs[0] ^ 1]) + tops.logprobs[1:]
    broken = replace(whole, top_logprobs=TopLogprobs(token_ids=tops.token_ids, offsets=tops.offsets, logprobs=changed))
    assert [finding.what for finding in audit([broken]).findings if "seal" in finding.what]
    write_samples([whole], tmp_path / "s.parquet")
    assert list(read_samples(tmp_path / "s.parquet")) == [whole]


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
