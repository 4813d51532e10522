"""Whatever proposes, the verified provider returns the exact engine's tokens and bits; a good proposer is only
quicker."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.engine.world import build
from tests.providers.conformance import Conformance
from tests.providers.conftest import prompt, tiny_model, truth  # noqa: F401
from tokentrue.engine import ExactEngine
from tokentrue.errors import SamplingError
from tokentrue.providers.exact import ExactProvider
from tokentrue.providers.hf import HFProvider
from tokentrue.providers.verified import VerifiedProvider
from tokentrue.types import Sampling

PROMPT = list(range(3, 40))


class TestVerified(Conformance):
    tolerance = 2e-5

    @pytest.fixture
    def provider(self, tiny_model: Any) -> VerifiedProvider:  # noqa: F811
        return VerifiedProvider(HFProvider(tiny_model), copy.deepcopy(tiny_model), chunk=4)


CASES = [
    Sampling(max_tokens=40, seed=9),
    Sampling(max_tokens=40, temperature=0.0),
    Sampling(max_tokens=30, seed=2, top_k=7),
]


@pytest.mark.parametrize("sampling", [CASES[0], *(pytest.param(each, marks=pytest.mark.slow) for each in CASES[1:])])
async def test_tokens_and_bits_are_the_exact_engines(sampling: Sampling) -> None:
    model = build("qwen3", initializer_range=0.05)
    with ExactEngine(copy.deepcopy(model)) as engine:
        wanted = await engine.generate(PROMPT, sampling)
    rates = {}
    other = build("qwen3", seed=1, initializer_range=0.05)
    proposers = {
        "itself": ExactProvider(copy.deepcopy(model)),
        "hf": HFProvider(copy.deepcopy(model)),
        "another model": HFProvider(other),
    }
    for name, proposer in proposers.items():
        provider = VerifiedProvider(proposer, copy.deepcopy(model), chunk=8)
        found = await provider.generate(PROMPT, sampling)
        assert (found.token_ids, found.logprobs, found.raw_logprobs) == (
            wanted.token_ids,
            wanted.logprobs,
            wanted.raw_logprobs,
        ), name
        rates[name] = provider.acceptance.rate
        await provider.close()
    assert rates["itself"] == 1.0
    assert rates["another model"] < 0.6
    if sampling.temperature == 0:
        assert rates["hf"] > 0.9


async def test_what_cannot_be_verified_is_refused() -> None:
    model = build("qwen3")
    provider = VerifiedProvider(HFProvider(copy.deepcopy(model)), model)
    with pytest.raises(SamplingError, match="no penalties"):
        await provider.generate(PROMPT, Sampling(max_tokens=3, presence_penalty=1.0))
    await provider.close()
