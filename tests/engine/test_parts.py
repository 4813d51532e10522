"""The pure parts alone: blocks, schedule, noise, filters."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.marks import examples
from tokentrue.engine.sample import GOLDEN, MASK, child_seed, gumbel, mix, stream_key
from tokentrue.engine.schedule import BlockPool, Phase, Request, Sampled, ScheduleLimits, Scheduler, block_hash
from tokentrue.numerics import filter_logits, logprobs_of, ops_for, scale_logits
from tokentrue.types import Finish, Sampling, VersionSpan


def request_of(prompt: list[int], max_tokens: int = 4) -> Request:
    return Request(prompt_ids=tuple(prompt), sampling=Sampling(), seed=0, stop_ids=frozenset(), max_tokens=max_tokens)


def test_names_follow_the_whole_prefix_and_outlive_their_owner() -> None:
    pool = BlockPool(5, 4)
    first = block_hash(b"", [1, 2, 3, 4])
    assert block_hash(first, [5, 6, 7, 8]) != block_hash(b"", [5, 6, 7, 8])
    block = pool.take()
    pool.name(block, first)
    pool.release(block)
    assert pool.num_used == 0 and pool.share(first) == block and pool.share(first) == block
    pool.release(block)
    assert pool.num_used == 1
    pool.release(block)
    taken = [pool.take() for _ in range(4)]
    assert sorted(taken) == [1, 2, 3, 4] and taken[-1] == block, "a named block is given away last"
    assert pool.share(first) is None


def test_nothing_has_a_name_after_forget() -> None:
    pool = BlockPool(3, 2)
    block = pool.take()
    pool.name(block, b"x")
    pool.forget()
    assert pool.share(b"x") is None and pool.num_used == 1


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 10**6))
def test_any_schedule_serves_everyone_and_loses_no_block(seed: int) -> None:
    """Random arrivals into a cache too small for all; a fake model that only appends tokens."""
    rng = random.Random(seed)
    pool = BlockPool(rng.randint(8, 20), 4)
    scheduler = Scheduler(
        pool,
        ScheduleLimits(max_requests=rng.randint(1, 5), step_tokens=rng.randint(3, 20), chunk_tokens=rng.randint(1, 9)),
    )
    requests = [
        request_of([rng.randint(0, 2) for _ in range(rng.randint(1, 16))], rng.randint(1, 8))
        for _ in range(rng.randint(1, 8))
    ]
    todo = list(requests)
    for _ in range(2000):
        if todo and rng.random() < 0.5:
            scheduler.add(todo.pop())
        if scheduler.running and rng.random() < 0.05:
            scheduler.preempt(rng.choice(scheduler.running))
        batch = scheduler.next_batch()
        owned = [block for request in scheduler.running for block in set(request.blocks)]
        assert 0 not in owned and sum(work.count for work in batch) <= scheduler.limits.step_tokens
        assert [work.count > 1 for work in batch] == sorted(work.count > 1 for work in batch), "decodes come first"
        for work in batch:
            assert len(work.request.blocks) * 4 >= work.start + work.count
            scheduler.record(work)
            if work.samples:
                work.request.take(Sampled(token_id=rng.randint(0, 2), logprob=0.0, raw_logprob=0.0), 1)
                if work.request.num_sampled == work.request.max_tokens:
                    scheduler.finish(work.request)
        if not todo and all(request.phase is Phase.FINISHED for request in requests):
            break
    assert all(request.phase is Phase.FINISHED for request in requests), "somebody starves"
    assert pool.num_used == 0


def test_a_group_waits_for_the_first_to_compute_the_prompt() -> None:
    scheduler = Scheduler(BlockPool(50, 4), ScheduleLimits())
    group = [request_of([1, 2, 3, 4, 5, 6, 7, 8, 9]) for _ in range(3)]
    for request in group:
        scheduler.add(request)
    (work,) = scheduler.next_batch()
    assert work.request is group[0] and work.count == 9
    scheduler.record(work)
    group[0].take(Sampled(token_id=1, logprob=0.0, raw_logprob=0.0), 0)
    later = {w.request: w for w in scheduler.next_batch()}
    assert {w.start for r, w in later.items() if r is not group[0]} == {8} and scheduler.prefix_hits == 16
    assert group[1].blocks[:2] == group[0].blocks[:2] and group[1].blocks[2] != group[0].blocks[2]


def test_noise_is_the_hash_and_nothing_else() -> None:
    found = gumbel([5, 7], [3, 9], 300, torch.device("cpu"))
    for row, (seed, position) in enumerate(((5, 3), (7, 9))):
        for token in range(300):
            uniform = ((mix((stream_key(seed, position) + (token + 1) * GOLDEN) & MASK) >> 11) + 0.5) * 2.0**-53
            assert found[row, token].item() == pytest.approx(-math.log(-math.log(uniform)), rel=1e-12, abs=1e-12)
    assert torch.equal(gumbel([7], [9], 300, torch.device("cpu"))[0], found[1])
    many = gumbel(list(range(200)), [11] * 200, 500, torch.device("cpu"))
    assert abs(many.mean().item() - 0.5772156649) < 0.01 and abs(many.var().item() - math.pi**2 / 6) < 0.03
    assert child_seed(9, 0) == 9 and len({child_seed(9, i) for i in range(50)}) == 50


def test_filters_by_hand() -> None:
    row = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625]).log()
    kept = lambda **k: torch.isfinite(filter_logits(row, **k)).tolist()  # noqa: E731
    assert kept() == [True] * 5
    assert kept(top_k=2) == [True, True, False, False, False]
    assert kept(top_p=0.5) == [True, False, False, False, False]
    assert kept(top_p=0.7) == [True, True, False, False, False]
    assert kept(min_p=0.2) == [True, True, True, False, False]
    assert kept(top_k=4, min_p=0.2) == [True, True, True, False, False]
    shaped = torch.log_softmax(filter_logits(row, top_k=2), -1)
    assert shaped[:2].tolist() == pytest.approx([math.log(2 / 3), math.log(1 / 3)])


def test_logprob_is_log_softmax_of_logits_over_temperature() -> None:
    logits, ids = torch.randn(5, 40), torch.tensor([0, 39, 7, 7, 1])
    wanted = torch.log_softmax(logits.double() / 0.7, -1).gather(-1, ids[:, None]).squeeze(-1)
    found = logprobs_of(ops_for("cpu"), logits, ids, 0.7)
    per_row = logprobs_of(ops_for("cpu"), logits, ids, torch.full((5,), 0.7))
    assert found.dtype == torch.float32 and torch.equal(found, per_row)
    assert (found - wanted).abs().max() < 1e-6
    assert torch.equal(scale_logits(logits, 1.0), logits)


def test_version_spans_cover_without_gap() -> None:
    request = request_of([1])
    request.finish = Finish.ABORT
    assert request.completion("").versions == ()
    for version in (3, 3, 4, 4, 4):
        request.take(Sampled(token_id=1, logprob=-1.0, raw_logprob=-1.0), version)
    first, second = VersionSpan(start=0, end=2, version=3), VersionSpan(start=2, end=5, version=4)
    assert request.completion("").versions == (first, second)
