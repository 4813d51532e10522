"""What every provider must do, as one suite. Subclass it and give the fixtures `provider`, `truth` (a plain forward
pass) and `prompt`."""

from __future__ import annotations

import asyncio
import math

import pytest
import torch

from tokentrue.errors import SamplingError
from tokentrue.protocols import Provider
from tokentrue.providers.hf import filter_logprobs
from tokentrue.types import Completion, Finish, Sampling


class Truth:
    """log softmax of a model's logits over a whole sequence, by one plain forward pass."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    @torch.no_grad()
    def logprobs(self, prompt: list[int], sampled: tuple[int, ...], sampling: Sampling) -> list[float]:
        logits = self.model(torch.tensor([[*prompt, *sampled]])).logits[0].float()
        rows = logits[len(prompt) - 1 : -1] / (sampling.temperature or 1.0)
        return [
            float(filter_logprobs(torch.log_softmax(row, -1), sampling)[token])
            for row, token in zip(rows, sampled, strict=True)
        ]

    @torch.no_grad()
    def kept(self, prompt: list[int], sampled: tuple[int, ...], sampling: Sampling) -> list[list[int]]:
        logits = self.model(torch.tensor([[*prompt, *sampled]])).logits[0].float()
        rows = logits[len(prompt) - 1 : -1] / (sampling.temperature or 1.0)
        return [
            (filter_logprobs(torch.log_softmax(row, -1), sampling) > -torch.inf).nonzero().squeeze(-1).tolist()
            for row in rows
        ]


async def collected(
    provider: Provider, prompt: list[int], sampling: Sampling
) -> tuple[list[int], list[float], Completion, int]:
    ids, logprobs, chunks, final = [], [], 0, None
    async for chunk in provider.stream(prompt, sampling):
        if chunk.final is not None:
            assert final is None, "two final chunks"
            final = chunk.final
        else:
            assert final is None, "tokens after the final chunk"
            chunks += 1
            ids += chunk.token_ids
            logprobs += chunk.logprobs
    assert final is not None
    return ids, logprobs, final, chunks


async def refuses(provider: Provider, prompt: list[int], sampling: Sampling, *names: str) -> bool:
    """True if the engine says that it cannot do this. It may not do something else instead."""
    try:
        await provider.generate(prompt, sampling)
    except SamplingError as error:
        assert any(name in str(error) for name in names), f"names no setting: {error}"
        return True
    return False


class Conformance:
    tolerance = 2e-4

    async def test_ids_in_ids_and_logprobs_out(self, provider: Provider, prompt: list[int]) -> None:
        completion = await provider.generate(prompt, Sampling(max_tokens=12, seed=1))
        assert 0 < len(completion.token_ids) <= 12
        assert len(completion.logprobs) == len(completion.token_ids)
        assert all(math.isfinite(x) and -9000 < x <= 0 for x in completion.logprobs)
        assert completion.prompt_tokens == len(prompt)
        assert completion.finish in (Finish.STOP, Finish.LENGTH)

    async def test_stream_is_the_same_generation_in_pieces(self, provider: Provider, prompt: list[int]) -> None:
        ids, logprobs, final, chunks = await collected(provider, prompt, Sampling(max_tokens=12, seed=5))
        assert tuple(ids) == final.token_ids
        assert tuple(logprobs) == final.logprobs
        assert chunks > 1, "one big chunk is not streaming"
        assert final.prompt_tokens == len(prompt)

    async def test_length_limit(self, provider: Provider, prompt: list[int]) -> None:
        completion = await provider.generate(prompt, Sampling(temperature=0.0, max_tokens=3))
        assert len(completion.token_ids) == 3
        assert completion.finish is Finish.LENGTH

    async def test_stop_token_is_kept(self, provider: Provider, prompt: list[int]) -> None:
        free = await provider.generate(prompt, Sampling(temperature=0.0, max_tokens=6))
        stop = free.token_ids[2]
        first = free.token_ids.index(stop)
        stopped = await provider.generate(prompt, Sampling(temperature=0.0, max_tokens=6, stop_token_ids=(stop,)))
        assert stopped.finish is Finish.STOP
        assert stopped.token_ids == free.token_ids[: first + 1]
        assert stopped.stopped_by == stop

    async def test_seed_reproduces_or_is_refused(self, provider: Provider, prompt: list[int]) -> None:
        if await refuses(provider, prompt, Sampling(max_tokens=1, seed=7), "seed"):
            return
        runs = [await provider.generate(prompt, Sampling(max_tokens=10, seed=7)) for _ in range(2)]
        other = await provider.generate(prompt, Sampling(max_tokens=10, seed=8))
        assert runs[0].token_ids == runs[1].token_ids
        assert other.token_ids != runs[0].token_ids

    @pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
    async def test_logprobs_are_of_the_sampled_distribution(
        self, provider: Provider, truth: Truth, prompt: list[int], temperature: float
    ) -> None:
        sampling = Sampling(temperature=temperature, max_tokens=16, seed=3)
        completion = await provider.generate(prompt, sampling)
        expected = truth.logprobs(prompt, completion.token_ids, sampling)
        assert completion.logprobs == pytest.approx(expected, abs=self.tolerance)

    @pytest.mark.parametrize("setting", [{"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}])
    async def test_filters_are_truthful_or_disowned(
        self, provider: Provider, truth: Truth, prompt: list[int], setting: dict[str, float]
    ) -> None:
        sampling = Sampling(max_tokens=16, seed=11, **setting)  # type: ignore[arg-type]
        await provider.health()
        if not set(sampling.filters) <= (provider.truthful_filters or set()):
            if not await refuses(provider, prompt, sampling, *setting):
                completion = await provider.generate(prompt, sampling)
                kept = truth.kept(prompt, completion.token_ids, sampling)
                outside = [token for token, ids in zip(completion.token_ids, kept, strict=True) if token not in ids]
                assert not outside, f"sampled outside of {setting}: the filter was left out in silence"
            return
        completion = await provider.generate(prompt, sampling)
        expected = truth.logprobs(prompt, completion.token_ids, sampling)
        assert completion.logprobs == pytest.approx(expected, abs=self.tolerance)
        if completion.sampling_mask is not None:
            mask = completion.sampling_mask
            kept = truth.kept(prompt, completion.token_ids, sampling)
            assert [mask.row(i).tolist() for i in range(len(mask))] == kept, (
                "the recorded mask is what the filters kept"
            )
            chunks = [chunk async for chunk in provider.stream(prompt, sampling)]
            rows = [row.tolist() for chunk in chunks if chunk.sampling_mask for row in chunk.sampling_mask.rows()]
            assert chunks[-1].final is not None and chunks[-1].final.sampling_mask is not None
            assert rows == [row.tolist() for row in chunks[-1].final.sampling_mask.rows()], (
                "a turn that is cut off has its rows, too"
            )

    async def test_top_logprobs_or_a_refusal(self, provider: Provider, prompt: list[int]) -> None:
        sampling = Sampling(temperature=0.0, max_tokens=4, top_logprobs=3)
        if await refuses(provider, prompt, sampling, "top_logprobs"):
            return
        completion = await provider.generate(prompt, sampling)
        assert completion.top_logprobs is not None and len(completion.top_logprobs) == 4
        for token, logprob, top in zip(completion.token_ids, completion.logprobs, completion.top_logprobs, strict=True):
            assert len(top) >= 3
            assert top[token] == logprob == max(top.values())

    async def test_concurrent_requests_do_not_mix(self, provider: Provider, prompt: list[int]) -> None:
        alone = [await provider.generate(prompt[i:], Sampling(temperature=0.0, max_tokens=5)) for i in range(3)]
        together = await asyncio.gather(
            *(provider.generate(prompt[i:], Sampling(temperature=0.0, max_tokens=5)) for i in range(3))
        )
        assert [c.token_ids for c in together] == [c.token_ids for c in alone]

    async def test_closing_the_stream_cancels(self, provider: Provider, prompt: list[int]) -> None:
        stream = provider.stream(prompt, Sampling(max_tokens=200, seed=2))
        async for chunk in stream:
            assert chunk.token_ids
            break
        await asyncio.wait_for(stream.aclose(), 30)  # type: ignore[attr-defined]
        after = await asyncio.wait_for(provider.generate(prompt, Sampling(max_tokens=2)), 60)
        assert len(after.token_ids) <= 2

    async def test_unknown_extra_is_refused_by_name(self, provider: Provider, prompt: list[int]) -> None:
        with pytest.raises(SamplingError, match="no_such_setting"):
            await provider.generate(prompt, Sampling(max_tokens=2, extra={"no_such_setting": 1}))

    async def test_health_names_engine_and_version(self, provider: Provider) -> None:
        facts = await provider.health()
        assert facts["engine"] == provider.name
        assert isinstance(facts["version"], int)
