"""The SGLang adapter against a stand-in server that speaks its documented wire format (SGLang itself does not run on
CPU here)."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import peft
import pytest
import pytest_asyncio
import torch

from tests.providers.conformance import Conformance, Truth, collected
from tests.providers.standin import SGLangStandIn
from tokentrue.errors import EngineContractError, EngineRejected, EngineTimeout, EngineUnreachable
from tokentrue.providers.sglang import SGLangProvider
from tokentrue.types import Sampling


def adapt(model: Any, seed: int) -> Any:
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "o_proj", "down_proj"], lora_dropout=0.0)
    wrapped, generator = peft.get_peft_model(copy.deepcopy(model), config), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return wrapped.eval()


async def publish(provider: Any, wrapped: Any, version: int) -> bool:
    state, config = peft.get_peft_model_state_dict(wrapped).items(), wrapped.peft_config["default"]
    return await provider.publish_adapter(state, config, version=version, name="policy")


class TestSGLang(Conformance):
    @pytest_asyncio.fixture
    async def provider(self, standin: tuple[SGLangStandIn, str]) -> AsyncIterator[SGLangProvider]:
        provider = SGLangProvider(standin[1], sampling_mask=True, timeout_s=5)
        yield provider
        await provider.close()

    async def test_a_closed_stream_aborts_in_the_engine(
        self, provider: SGLangProvider, standin: tuple[SGLangStandIn, str], prompt: list[int]
    ) -> None:
        stream = provider.stream(prompt, Sampling(max_tokens=100, seed=2))
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        assert standin[0].aborted == [standin[0].requests[-1]["rid"]]

    async def test_a_finished_stream_aborts_nothing(
        self, provider: SGLangProvider, standin: tuple[SGLangStandIn, str], prompt: list[int]
    ) -> None:
        await collected(provider, prompt, Sampling(max_tokens=4, seed=2))
        assert standin[0].aborted == []

    async def test_retries_before_the_first_token(
        self, provider: SGLangProvider, standin: tuple[SGLangStandIn, str], prompt: list[int]
    ) -> None:
        standin[0].faults = ["503", "503"]
        assert (await provider.generate(prompt, Sampling(max_tokens=2))).token_ids
        assert len(standin[0].requests) == 3

    async def test_never_retries_after_it(
        self, provider: SGLangProvider, standin: tuple[SGLangStandIn, str], prompt: list[int]
    ) -> None:
        standin[0].faults = ["break"]
        got = []
        with pytest.raises((EngineUnreachable, EngineContractError)):
            async for chunk in provider.stream(prompt, Sampling(max_tokens=9, seed=1)):
                got += chunk.token_ids
        assert len(got) == 2
        assert len(standin[0].requests) == 1

    @pytest.mark.parametrize(
        ("fault", "error", "words"),
        [
            ("no_logprobs", EngineContractError, "output_token_logprobs"),
            ("sentinel", EngineContractError, "-9999"),
            ("swap", EngineContractError, "disagree"),
            ("recount", EngineContractError, "9 prompt tokens where 8"),
            ("400", EngineRejected, "too long"),
        ],
    )
    @pytest.mark.parametrize("streamed", [False, True])
    async def test_untrue_answers_are_refused(
        self,
        provider: SGLangProvider,
        standin: tuple[SGLangStandIn, str],
        prompt: list[int],
        fault: str,
        error: type[Exception],
        words: str,
        streamed: bool,
    ) -> None:
        standin[0].faults = [fault]
        with pytest.raises(error, match=words):
            if streamed:
                await collected(provider, prompt, Sampling(max_tokens=3, seed=1))
            else:
                await provider.generate(prompt, Sampling(max_tokens=3, seed=1))

    async def test_time_out(self, standin: tuple[SGLangStandIn, str], prompt: list[int]) -> None:
        provider = SGLangProvider(standin[1], timeout_s=0.2)
        standin[0].faults = ["hang"]
        with pytest.raises(EngineTimeout, match=r"0\.2 s"):
            await provider.generate(prompt, Sampling(max_tokens=2))
        await provider.close()

    async def test_weights_go_through_the_disk_and_raise_the_version(
        self, standin: tuple[SGLangStandIn, str], tiny_model: Any, prompt: list[int], tmp_path: Path
    ) -> None:
        provider = SGLangProvider(standin[1], weights_dir=tmp_path, timeout_s=5)
        standin[0].engine._model = copy.deepcopy(tiny_model)  # the other tests keep theirs
        before = await provider.generate(prompt, Sampling(temperature=0.0, max_tokens=4))
        await provider.publish([(name, -tensor) for name, tensor in tiny_model.state_dict().items()], version=12)
        after = await provider.generate(prompt, Sampling(temperature=0.0, max_tokens=4))
        assert (before.policy_version, after.policy_version) == (0, 12)
        assert before.logprobs != after.logprobs
        await provider.close()

    async def test_an_adapter_is_published_alone_and_has_its_version(
        self, standin: tuple[SGLangStandIn, str], tiny_model: Any, prompt: list[int], tmp_path: Path
    ) -> None:
        """The stand-in speaks the documented wire of /load_lora_adapter over peft."""
        provider = SGLangProvider(standin[1], weights_dir=tmp_path, timeout_s=5)
        asked = Sampling(max_tokens=6, seed=3)
        for version, seed in ((4, 1), (5, 2)):
            wrapped = adapt(tiny_model, seed)
            assert await publish(provider, wrapped, version)
            found = await provider.generate(prompt, asked)
            assert list(found.logprobs) == pytest.approx(
                Truth(wrapped).logprobs(prompt, found.token_ids, asked), abs=2e-4
            )
            assert [span.version for span in found.versions] == [version] and await provider.weight_version() == version
            assert [name.split(".")[0] for name in standin[0].adapters] == [f"policy@{version}"]
        assert provider.adapters[0] == "policy" and len(list(tmp_path.glob("*/*"))) == 1
        standin[0].adapters.clear()  # as after a restart
        assert await provider.weight_version() == 0
        await provider.rejoin()
        assert await provider.weight_version() == 5
        await provider.rejoin()
        standin[0].lora = False
        assert not await publish(provider, wrapped, 6)
        assert len(list(tmp_path.glob("*/*"))) == 1, "what was not loaded is not kept"
        await provider.close()

    async def test_every_prompt_is_sent_whole(
        self, provider: SGLangProvider, standin: tuple[SGLangStandIn, str], prompt: list[int]
    ) -> None:
        longer = [*prompt, 1, 2, 3]
        for ids in (prompt, longer, [*longer, 4], prompt, [7, 7]):
            await provider.generate(ids, Sampling(max_tokens=1), session="s")
            assert standin[0].requests[-1]["input_ids"] == ids


async def test_unreachable_says_where() -> None:
    provider = SGLangProvider("http://127.0.0.1:9", retries=0)
    with pytest.raises(EngineUnreachable, match=r"127\.0\.0\.1:9"):
        await provider.generate([1], Sampling(max_tokens=1))
    await provider.close()
