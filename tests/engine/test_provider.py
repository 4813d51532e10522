from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from tests.providers.conformance import Conformance, Truth
from tests.providers.conftest import prompt, tiny_model, truth  # noqa: F401
from tokentrue.errors import EngineRejected
from tokentrue.providers import load
from tokentrue.providers.exact import ExactProvider
from tokentrue.types import Finish, Sampling


class TestExact(Conformance):
    tolerance = 2e-5

    @pytest.fixture
    def provider(self, tiny_model: Any) -> Iterator[ExactProvider]:  # noqa: F811
        provider = load("exact", model=copy.deepcopy(tiny_model), decode=lambda ids: " ".join(map(str, ids)))
        assert isinstance(provider, ExactProvider)
        yield provider
        provider.engine.close()

    async def test_stop_string(self, provider: ExactProvider, prompt: list[int]) -> None:  # noqa: F811
        free = await provider.generate(prompt, Sampling(temperature=0.0, max_tokens=6))
        stop = f"{free.token_ids[1]} {free.token_ids[2]}"
        stopped = await provider.generate(prompt, Sampling(temperature=0.0, max_tokens=6, stop=(stop,)))
        assert stopped.token_ids == free.token_ids[:3]
        assert (stopped.finish, stopped.stopped_by) == (Finish.STOP, stop)

    async def test_tokens_arrive_while_a_turn_that_is_not_streamed_is_sampled(
        self,
        provider: ExactProvider,
        prompt: list[int],  # noqa: F811
    ) -> None:
        """Where such a turn is cancelled, the tokens that arrived are recorded."""
        sampling = Sampling(max_tokens=64, seed=4)
        chunks = [chunk async for chunk in provider.stream(prompt, sampling, whole=True)]
        assert [len(chunk.token_ids) for chunk in chunks if chunk.final is None and chunk.token_ids][1:]

    async def test_context_limit_is_named(self, provider: ExactProvider) -> None:
        with pytest.raises(EngineRejected, match="511"):
            await provider.generate([1] * 512, Sampling(max_tokens=1))

    @pytest.mark.parametrize(
        "setting",
        [{"repetition_penalty": 1.3}, {"presence_penalty": 0.5}, {"frequency_penalty": 0.4, "top_k": 20, "top_p": 0.9}],
    )
    async def test_penalties_change_the_distribution_and_both_are_told(
        self,
        provider: ExactProvider,
        truth: Truth,  # noqa: F811
        prompt: list[int],  # noqa: F811
        setting: dict[str, float],
    ) -> None:
        completion = await provider.generate(prompt, Sampling(max_tokens=20, seed=4, **setting))  # type: ignore[arg-type]
        raw = truth.logprobs(prompt, completion.token_ids, Sampling())
        assert completion.raw_logprobs == pytest.approx(raw, abs=self.tolerance)
        assert completion.logprobs != completion.raw_logprobs
