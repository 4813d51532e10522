"""What an engine may answer, and that everything else is the engine's fault in the engine's own words."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.gateway.inside import Parrot, ask, gateway, new_session
from tests.providers.conformance import collected
from tokentrue.errors import EngineContractError, EngineError, EngineRejected, PromptTooLong
from tokentrue.ids import TokenIds
from tokentrue.protocols import Provider
from tokentrue.providers.remote import rejected
from tokentrue.providers.sglang import SGLangProvider
from tokentrue.providers.vllm import VLLMProvider
from tokentrue.types import Completion, Sampling, SamplingMask

PROMPT = TokenIds([3, 1, 4])


def sglang(**changes: Any) -> dict[str, Any]:
    meta = {
        "completion_tokens": 2,
        "prompt_tokens": 3,
        "weight_version": "7",
        "finish_reason": {"type": "stop", "matched": 9},
        "output_token_logprobs": [[-0.5, 8, None], [-0.25, 9, None]],
    }
    return {"output_ids": [8, 9], "meta_info": meta | changes}


def vllm(**changes: Any) -> dict[str, Any]:
    rows = [{"token_id": i, "logprob": -0.5, "top_logprobs": [{"token_id": i, "logprob": -0.5}]} for i in (8, 9)]
    choice = {"token_ids": [8, 9], "logprobs": {"content": rows}, "finish_reason": "stop", "stop_reason": 9}
    return {"choices": [choice | changes], "usage": {"prompt_tokens": 3}}


class Engine:
    """Answers every generation with `answer`: as one body, or as the events of a stream."""

    def __init__(self) -> None:
        self.answer: Any = None
        self.probed: Any = vllm()  # vLLM's adapter learns from it what log-probabilities mean
        self.requests: list[dict[str, Any]] = []

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not body:
            return web.Response(status=400, text="empty")
        self.requests.append(body)
        answer = self.answer
        if isinstance(answer, web.Response):
            return answer
        if body.get("sampling_params", {}).get("max_tokens") == 1:
            answer = self.probed
        if not body["stream"]:
            return web.Response(body=answer if isinstance(answer, bytes) else json.dumps(answer).encode())
        response = web.StreamResponse()
        await response.prepare(request)
        for event in answer if isinstance(answer, list) else [answer]:
            await response.write(
                b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n"
            )
        await response.write(b"data: [DONE]\n\n")
        return response

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"data": [{"id": "m"}, {"id": "other", "root": "/models/other", "max_model_len": 2048}]}
        )

    async def ok(self, request: web.Request) -> web.Response:
        return web.json_response({})


@pytest_asyncio.fixture(params=["sglang", "vllm"])
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Engine, Provider]]:
    engine, app = Engine(), web.Application()
    for path in ("/generate", "/inference/v1/generate"):
        app.router.add_post(path, engine.generate)
    for path in ("/abort_request", "/inference/v1/abort_requests"):
        app.router.add_post(path, engine.ok)
    app.router.add_get("/v1/models", engine.models)
    server = TestServer(app)
    await server.start_server()
    kind = SGLangProvider if request.param == "sglang" else VLLMProvider
    provider = kind(str(server.make_url("/")), timeout_s=5, retries=0)
    yield engine, provider
    await provider.close()
    await server.close()


MALFORMED: dict[str, Any] = {
    "not JSON": b"<html>",
    "empty": b"",
    "an array": [[1]],
    "a number": 7,
    "null": None,
    "nothing in it": {},
    "an error as text": {"error": "CUDA out of memory"},
    "an error as an object": {"error": {"message": "CUDA out of memory"}},
    "an error without words": {"error": {}},
}
SGLANG: dict[str, Any] = {
    "meta_info is a text": {"meta_info": "x"},
    "no rows": sglang(output_token_logprobs=None),
    "rows of one": sglang(output_token_logprobs=[[-0.5], [-0.25]]),
    "an id that is a text": sglang(output_token_logprobs=[[-0.5, "8", None], [-0.25, 9, None]]),
    "a negative id": {**sglang(output_token_logprobs=[[-0.5, 8, None], [-0.25, -9, None]]), "output_ids": [8, -9]},
    "an id of 40 bits": {
        **sglang(output_token_logprobs=[[-0.5, 8, None], [-0.25, 2**40, None]]),
        "output_ids": [8, 2**40],
    },
    "a count that is a text": sglang(completion_tokens="2"),
    "a count below": sglang(completion_tokens=-1),
    "a count above": sglang(completion_tokens=5),
    "a missing log-probability": sglang(output_token_logprobs=[[-0.5, 8, None], [None, 9, None]]),
    "a positive log-probability": sglang(output_token_logprobs=[[-0.5, 8, None], [0.25, 9, None]]),
    "an unknown end": sglang(finish_reason={"type": "bored"}),
    "an end that is a number": sglang(finish_reason=4),
    "a version beyond 64 bits": sglang(weight_version="20261115213000123456"),
}
VLLM: dict[str, Any] = {
    "no choices": {"choices": []},
    "choices is a text": {"choices": "x"},
    "no log-probabilities": vllm(logprobs=None),
    "rows of other ids": vllm(token_ids=[8, 10]),
    "an id that is a text": vllm(token_ids=["8", "9"]),
    "a negative id": vllm(token_ids=[-1], logprobs={"content": [{"token_id": -1, "logprob": -0.5}]}),
    "an unknown end": vllm(finish_reason="bored"),
    "versions that leave a gap": vllm(weight_versions=[{"start": 1, "end": 2, "version": "3"}]),
    "a version beyond 64 bits": vllm(weight_versions=[{"start": 0, "end": 2, "version": str(2**63)}]),
    "experts that are none": vllm(routed_experts="AAAA"),
}


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_good_answer_is_taken_and_names_what_was_sent(engine: tuple[Engine, Provider], streamed: bool) -> None:
    server, provider = engine
    server.answer = sglang() if provider.name == "sglang" else vllm()
    sampling = Sampling(max_tokens=4)
    done = (
        (await collected(provider, list(PROMPT), sampling))[2]
        if streamed
        else await provider.generate(PROMPT, sampling)
    )
    assert done.token_ids == (8, 9) and done.prompt_digest == PROMPT.sha256()
    assert server.requests[-1].get("input_ids", server.requests[-1].get("token_ids")) == PROMPT.tolist()


@pytest.mark.parametrize("streamed", [False, True])
async def test_any_other_shape_is_the_engines_fault(engine: tuple[Engine, Provider], streamed: bool) -> None:
    server, provider = engine
    shapes = MALFORMED | (SGLANG if provider.name == "sglang" else VLLM)
    for name, answer in shapes.items():
        server.answer = answer
        with pytest.raises(EngineError) as raised:
            if streamed:
                await collected(provider, list(PROMPT), Sampling(max_tokens=4))
            else:
                await provider.generate(PROMPT, Sampling(max_tokens=4))
        if "memory" in str(answer):
            assert "CUDA out of memory" in str(raised.value), name
    server.answer = sglang() if provider.name == "sglang" else vllm()
    assert (await provider.generate(PROMPT, Sampling(max_tokens=4))).token_ids == (8, 9)


@pytest.mark.parametrize(
    "engine", ["sglang"], indirect=True
)  # vLLM's events are incremental: there is nothing to rewrite
async def test_a_final_event_that_rewrites_earlier_ids_is_refused(engine: tuple[Engine, Provider]) -> None:
    server, provider = engine
    first = sglang(completion_tokens=1, finish_reason=None, output_token_logprobs=[[-0.5, 8, None]])
    first["output_ids"] = [8]
    last = sglang(output_token_logprobs=[[-0.5, 7, None], [-0.25, 9, None]])
    last["output_ids"] = [7, 9]
    server.answer = [first, last]
    got: list[int] = []
    with pytest.raises(EngineError, match="already streamed"):
        async for chunk in provider.stream(PROMPT, Sampling(max_tokens=4)):
            got += chunk.token_ids
    assert got == [8]  # what was sampled before is not lost


async def test_tokens_before_garbage_are_handed_over(engine: tuple[Engine, Provider]) -> None:
    server, provider = engine
    if provider.name == "sglang":
        first = sglang(completion_tokens=1, finish_reason=None, output_token_logprobs=[[-0.5, 8, None]])
        first["output_ids"] = [8]
    else:
        first = vllm(token_ids=[8], finish_reason=None, logprobs={"content": [{"token_id": 8, "logprob": -0.5}]})
    server.answer = [first, b"{no"]
    got: list[int] = []
    with pytest.raises(EngineError, match="unexpected"):
        async for chunk in provider.stream(PROMPT, Sampling(max_tokens=4)):
            got += chunk.token_ids
    assert got == [8]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("engine", ["vllm"], indirect=True)
async def test_a_sampling_mask_is_kept_or_refused(engine: tuple[Engine, Provider], streamed: bool) -> None:
    server, provider = engine

    async def ask(mask: Any) -> Completion:
        server.answer = vllm(sampling_mask=mask)
        sampling = Sampling(max_tokens=4, top_k=5)
        return (
            (await collected(provider, list(PROMPT), sampling))[2]
            if streamed
            else await provider.generate(PROMPT, sampling)
        )

    assert (await ask([[8, 3], [9]])).sampling_mask == SamplingMask.from_rows([[3, 8], [9]])
    assert (await ask(None)).sampling_mask is None
    for wrong in ([[8], [7]], [[8]], [[8], [9, -4]], [[8], [2**40]], "x"):
        with pytest.raises(EngineError):
            await ask(wrong)


TOO_LONG = {
    "vllm": "You passed 2223 input tokens. However, the model's context length is only 2048 tokens.",
    "vllm, engine core": "The decoder prompt (length 2223) is longer than the maximum model length of 2048.",
    "sglang": "The input (2223 tokens) is longer than the model's context length (2048 tokens).",
    "sglang, scheduler": "Input length (2223 tokens) exceeds the maximum allowed length (2047 tokens).",
}


@pytest.mark.parametrize("engine", ["vllm"], indirect=True)
async def test_health_tells_what_the_server_says_of_the_model_in_use(engine: tuple[Engine, VLLMProvider]) -> None:
    _, first = engine
    assert [(await first.health())[key] for key in ("model", "path", "max_model_len")] == ["m", None, None]
    chosen, missing = (VLLMProvider(first._http.url, model=name, retries=0) for name in ("other", "third"))
    try:
        assert [(await chosen.health())[key] for key in ("model", "path", "max_model_len")] == [
            "other",
            "/models/other",
            2048,
        ]
        with pytest.raises(EngineContractError, match="serves m, other, not third"):
            await missing.health()
    finally:
        await chosen.close()
        await missing.close()


@pytest.mark.parametrize("engine", ["vllm"], indirect=True)
async def test_a_server_that_reports_logits_is_refused_with_the_option_that_mends_it(
    engine: tuple[Engine, VLLMProvider],
) -> None:
    server, provider = engine
    row = {"token_id": 8, "logprob": 3.5, "top_logprobs": [{"token_id": 8, "logprob": 3.5}]}
    server.probed = vllm(token_ids=[8], logprobs={"content": [row]})
    with pytest.raises(EngineContractError, match=r"returned 3\.5 .* --logprobs-mode processed_logprobs"):
        await provider.health()


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("words", [*TOO_LONG.values(), "seed must be positive"])
async def test_a_prompt_that_is_too_long_is_told_from_other_refusals(
    engine: tuple[Engine, Provider], words: str, streamed: bool
) -> None:
    server, provider = engine
    if provider.name == "vllm":
        await provider.health()
    server.answer = web.json_response({"object": "error", "message": words, "code": 400}, status=400)
    with pytest.raises(EngineRejected, match=re.escape(words.partition("'")[0])) as refused:
        if streamed:
            async for _ in provider.stream(PROMPT, Sampling()):
                pass
        else:
            await provider.generate(PROMPT, Sampling())
    assert isinstance(refused.value, PromptTooLong) == (words in TOO_LONG.values())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_the_client_learns_that_its_prompt_is_too_long(path: str) -> None:
    class Short(Parrot):
        async def generate(self, prompt_ids: Any, sampling: Any, *, session: str | None = None) -> Any:
            raise rejected(TOO_LONG["sglang"])

    app = gateway(Short())
    session = await new_session(app)
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    status, answer = await ask(app, "POST", path, json.dumps(body).encode(), key=session["api_key"])
    assert status == 400 and "prompt is too long" in json.loads(answer)["error"]["message"]
    assert path != "/v1/chat/completions" or json.loads(answer)["error"]["code"] == "context_length_exceeded"
    await app.close()
