from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import Mamba2Config, Mamba2ForCausalLM

from tests.providers.conformance import Conformance, Truth
from tokentrue.errors import ConfigError, ExactnessError, SamplingError
from tokentrue.providers.exact import ExactProvider
from tokentrue.providers.hf import HFProvider
from tokentrue.types import Finish, Sampling


class TestHF(Conformance):
    @pytest.fixture
    def provider(self, tiny_model: Any) -> HFProvider:
        return HFProvider(tiny_model, decode=lambda ids: " ".join(map(str, ids)))

    async def test_stop_string(self, provider: HFProvider, prompt: list[int]) -> None:
        free = await provider.generate(prompt, Sampling(temperature=0.0, max_tokens=6))
        stop = f"{free.token_ids[1]} {free.token_ids[2]}"
        stopped = await provider.generate(prompt, Sampling(temperature=0.0, max_tokens=6, stop=(stop,)))
        assert stopped.token_ids == free.token_ids[:3]
        assert (stopped.finish, stopped.stopped_by) == (Finish.STOP, stop)

    async def test_context_limit_is_named(self, provider: HFProvider) -> None:
        with pytest.raises(SamplingError, match="512 positions"):
            await provider.generate([1] * 512, Sampling(max_tokens=1))

    async def test_published_weights_carry_their_version(self, tiny_model: Any, prompt: list[int]) -> None:
        import copy

        provider = HFProvider(copy.deepcopy(tiny_model))
        before = await provider.generate(prompt, Sampling(temperature=0.0, max_tokens=5))
        weights = {
            name: -tensor for name, tensor in tiny_model.state_dict().items() if "lm_head" in name or "mlp" in name
        }
        await provider.publish(weights.items(), version=4)
        after = await provider.generate(prompt, Sampling(temperature=0.0, max_tokens=5))
        assert (before.policy_version, after.policy_version) == (0, 4)
        assert after.logprobs != before.logprobs


@pytest.mark.parametrize("setting", [{"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}])
async def test_the_suite_notices_a_filter_that_is_left_out(tiny_model: Any, prompt: list[int], setting: Any) -> None:
    class Deaf(HFProvider):
        truthful_filters = frozenset[str]()

        def stream(self, prompt_ids: Any, sampling: Sampling, **more: Any) -> Any:
            return super().stream(prompt_ids, replace(sampling, top_k=0, top_p=1.0, min_p=0.0), **more)

    with pytest.raises(AssertionError, match="left out in silence"):
        await Conformance().test_filters_are_truthful_or_disowned(Deaf(tiny_model), Truth(tiny_model), prompt, setting)


def test_missing_model_is_one_line() -> None:
    with pytest.raises(ConfigError, match="no/such/model"):
        HFProvider("no/such/model")


@pytest.mark.parametrize(
    ("engine", "error", "words"),
    [(HFProvider, ConfigError, "needs a key-value cache"), (ExactProvider, ExactnessError, "has no positions")],
)
def test_a_model_of_recurrent_layers_is_refused_by_name(engine: Any, error: type[Exception], words: str) -> None:
    shape = {"num_heads": 4, "head_dim": 16, "hidden_size": 32, "state_size": 16, "n_groups": 1, "num_hidden_layers": 1}
    with pytest.raises(error, match=f"Mamba2ForCausalLM.*{words}|{words}.*Mamba2ForCausalLM"):
        engine(Mamba2ForCausalLM(Mamba2Config(**shape, vocab_size=64)))
