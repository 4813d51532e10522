"""Routing that a mixture of experts took in the engine: it is the trainer's own choice, and replaying it changes no
bit."""

from __future__ import annotations

import pytest
import torch

from tests.engine.world import VOCABULARY, build, engine_of
from tokentrue.errors import SamplingError
from tokentrue.mismatch.routing import from_routed, record_routing, replay_routing
from tokentrue.numerics import exact, same_bits, score
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


def test_a_dense_model_has_no_routing() -> None:
    engine = engine_of(build("qwen3"), "float32", None)
    with pytest.raises(SamplingError, match="routed_experts"):
        engine.request([1, 2], Sampling(max_tokens=1, extra=ASKED))
    engine.close()
