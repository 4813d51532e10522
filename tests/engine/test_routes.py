"""Routing that a mixture of experts took in the engine: it is the trainer's own choice, and replaying it changes no
bit."""

from __future__ import annotations

import pytest
import torch

from tests.engine.world import VOCABULARY, build, engine_of
from tokentrue.errors import SamplingError
from tokentrue.numerics import exact, same_bits, score
from tokentrue.numerics.routing import from_routed, record_routing, replay_routing
from tokentrue.routing_replay import FREE
from tokentrue.types import Completion, Sampling

ASKED = {"ignore_eos": True, "routed_experts": True}


def whole_routing(prompt: list[int], completion: Completion) -> torch.Tensor:
    """[tokens, layers, top_k] of the whole sequence, given positions too; free at the last token, which is no input."""
    assert completion.routed_experts is not None
    rows = from_routed(completion.routed_experts)
    assert (completion.routed_experts.start, rows.shape[0]) == (0, len(prompt) + len(completion.token_ids) - 1)
    return torch.cat((rows, torch.full((1, *rows.shape[1:]), FREE, dtype=torch.int16)))


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_routing_is_the_trainers_and_replays_to_the_same_bits(kind: str, dtype: str) -> None:
    model = build(kind)
    engine = engine_of(model, dtype, None)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in (1, 40, 170)]
    requests = [engine.request(p, Sampling(max_tokens=25, seed=i, extra=ASKED)) for i, p in enumerate(prompts)]
    requests.append(engine.request(prompts[1], Sampling(max_tokens=25, seed=1, extra={"ignore_eos": True})))
    for request in requests:
        engine.core.add(request)
    while engine.core.busy:
        engine.core.step()
    *asked, plain = [engine.result(request) for request in requests]
    assert plain.routed_experts is None
    assert (plain.token_ids, plain.logprobs) == (asked[1].token_ids, asked[1].logprobs), (
        "asking for the routing changed the answer"
    )
    with exact(engine.model), torch.no_grad():
        for prompt, completion in zip(prompts, asked, strict=True):
            ids = torch.tensor([[*prompt, *completion.token_ids]])
            with record_routing(engine.model) as record:
                own = score(engine.model, ids)
            whole = whole_routing(prompt, completion)
            taken = whole[:, 0, 0] != FREE
            assert torch.equal(record.experts[taken], whole[taken])
            with replay_routing(engine.model, whole):
                replayed = score(engine.model, ids)
            assert same_bits(replayed, own)
            assert same_bits(own[0, len(prompt) - 1 :], torch.tensor(completion.logprobs))
            wrong = torch.where(whole == FREE, whole, (whole + 1) % 5)  # the control: other experts, other bits
            with replay_routing(engine.model, wrong):
                assert not same_bits(score(engine.model, ids), own)
            assert same_bits(score(engine.model, ids), own), "the exact router is back after a replay"
    engine.close()


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_next"])
def test_cached_blocks_keep_their_routing(kind: str) -> None:
    """A second request reads the prefix of the first and has the trainer's routing of every position; after a request
    that recorded none, a prefix is computed again."""
    engine = engine_of(build(kind), "float32", None)
    scheduler, generator = engine.core.scheduler, torch.Generator().manual_seed(4)
    first, other = (torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in (170, 100))

    def ask(prompt: list[int], seed: int, **extra: bool) -> tuple[Completion, int]:
        before = scheduler.prefix_hits
        request = engine.request(prompt, Sampling(max_tokens=20, seed=seed, extra={"ignore_eos": True, **extra}))
        engine.core.add(request)
        while engine.core.busy:
            engine.core.step()
        return engine.result(request), scheduler.prefix_hits - before

    start, hits = ask(first, 1, routed_experts=True)
    assert hits == 0
    turns = [(first, 2), ([*first, *start.token_ids, *other[:30]], 3)]
    asked = [(prompt, *ask(prompt, seed, routed_experts=True)) for prompt, seed in turns]
    assert all(hits >= 150 for _, _, hits in asked)
    assert ask(other, 5)[1] == 0
    asked.append((other, *ask(other, 6, routed_experts=True)))
    assert asked[-1][2] == 0, "the blocks of a request that recorded nothing have no routing"
    asked.append((other, *ask(other, 7, routed_experts=True)))
    with exact(engine.model), torch.no_grad():
        for prompt, completion, _ in asked:
            ids = torch.tensor([[*prompt, *completion.token_ids]])
            with record_routing(engine.model) as record:
                own = score(engine.model, ids)
            whole = whole_routing(prompt, completion)
            taken = whole[:, 0, 0] != FREE
            assert int(taken.sum()) == len(prompt) + len(completion.token_ids) - 1
            assert torch.equal(record.experts[taken], whole[taken])
            assert same_bits(own[0, len(prompt) - 1 :], torch.tensor(completion.logprobs))
    engine.core.load(dict(engine.model.state_dict()), 2)
    assert not scheduler.pool.routes, "routing of earlier weights"
    engine.close()


def test_a_dense_model_has_no_routing() -> None:
    engine = engine_of(build("qwen3"), "float32", None)
    with pytest.raises(SamplingError, match="routed_experts"):
        engine.request([1, 2], Sampling(max_tokens=1, extra=ASKED))
    engine.close()
