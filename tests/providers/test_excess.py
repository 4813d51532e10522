"""An engine that sends more than it was asked for, or less: nothing grows without bound, and every token that it
reported is in the account."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

import tokentrue as tt
from tests.turn.letters import Letters
from tokentrue.errors import EngineContractError, EngineUnreachable
from tokentrue.protocols import Provider
from tokentrue.providers.pool import Pool
from tokentrue.providers.sglang import SGLangProvider
from tokentrue.providers.vllm import VLLMProvider
from tokentrue.types import Sampling, TurnRequest

MIB = 1 << 20
MOST_SENT = 256 * MIB  # where the stand-in gives up: a reader without a bound takes all of it
ASKED = 64
OPENING = [{"role": "user", "content": "a"}]


def sglang(ids: list[int], *, done: int = 0, finish: str | None) -> dict[str, Any]:
    meta = {
        "completion_tokens": done + len(ids),
        "finish_reason": finish and {"type": finish},
        "output_token_logprobs": [[-0.5, i, None] for i in ids],
    }
    return {"output_ids": ids, "meta_info": meta}


def vllm(ids: list[int], *, done: int = 0, finish: str | None) -> dict[str, Any]:
    rows = [{"token_id": i, "logprob": -0.5, "top_logprobs": [{"token_id": i, "logprob": -0.5}]} for i in ids]
    return {"choices": [{"token_ids": ids, "logprobs": {"content": rows}, "finish_reason": finish}]}


class Engine:
    """Answers each generation with the next of `answers`: events, raw bytes that never end, or a status."""

    def __init__(self, name: str) -> None:
        self.report = sglang if name == "sglang" else vllm
        self.answers: list[list[Any] | bytes | int] = []
        self.sent = 0

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not body:
            return web.Response(status=400, text="empty")
        if body.get("sampling_params", {}).get("max_tokens") == 1:  # vLLM's adapter learns what log-probabilities mean
            return web.json_response(vllm([1], finish="length"))
        answer = self.answers.pop(0)
        if isinstance(answer, int):
            return web.Response(status=answer)
        response = web.StreamResponse()
        await response.prepare(request)
        if isinstance(answer, bytes):
            await self._send_without_end(response, b"data: " if body["stream"] else b"", answer)
        elif body["stream"]:
            for event in answer:
                await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
        else:
            await response.write(json.dumps(answer[-1]).encode())
        return response

    async def _send_without_end(self, response: web.StreamResponse, start: bytes, block: bytes) -> None:
        await response.write(start)
        while self.sent < MOST_SENT:
            await response.write(block)
            self.sent += len(block)

    async def ok(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})


@pytest_asyncio.fixture(params=["sglang", "vllm"])
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Engine, Provider]]:
    engine, app = Engine(request.param), web.Application()
    for path in ("/generate", "/inference/v1/generate"):
        app.router.add_post(path, engine.generate)
    for path in ("/abort_request", "/inference/v1/abort_requests"):
        app.router.add_post(path, engine.ok)
    app.router.add_get("/v1/models", engine.ok)
    server = TestServer(app)
    await server.start_server()
    kind = SGLangProvider if request.param == "sglang" else VLLMProvider
    provider = Pool([kind(str(server.make_url("/")), timeout_s=10, retries=0)])
    yield engine, provider
    await provider.close()
    await server.close()


async def take(session: tt.Session, *, streamed: bool) -> None:
    request = TurnRequest(messages=OPENING, sampling=Sampling(max_tokens=ASKED))
    if streamed:
        async for _ in session.stream(request):
            pass
    else:
        await session.turn(request)


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_answer_without_end_is_read_within_a_bound(engine: tuple[Engine, Provider], streamed: bool) -> None:
    server, provider = engine
    server.answers = [b'{"meta_info": "' + b"x" * MIB]
    session = tt.Session(renderer=Letters(), provider=provider)
    with pytest.raises(EngineContractError, match="more than 64 MiB"):
        await take(session, streamed=streamed)
    assert server.sent < 96 * MIB


@pytest.mark.parametrize("streamed", [pytest.param(False, marks=pytest.mark.slow), True])
async def test_more_tokens_than_asked_for_are_the_engines_fault(
    engine: tuple[Engine, Provider], streamed: bool
) -> None:
    server, provider = engine
    server.answers = [[server.report([100] * 262_100, finish="stop")]]
    session = tt.Session(renderer=Letters(), provider=provider)
    with pytest.raises(EngineContractError, match="more than max_tokens=64"):
        await take(session, streamed=streamed)
    coverage = session.coverage()
    assert (coverage.sampled, coverage.trained) == (ASKED, 0)
    assert [(item.tokens, item.why) for item in coverage.untrained] == [(ASKED, "engine_failed")]


async def test_a_stream_that_goes_past_the_limit_is_cut_there(engine: tuple[Engine, Provider]) -> None:
    server, provider = engine
    server.answers = [[server.report([100], done=i, finish=None) for i in range(1000)]]
    session = tt.Session(renderer=Letters(), provider=provider)
    with pytest.raises(EngineContractError, match="more than max_tokens=64"):
        await take(session, streamed=True)
    assert session.coverage().sampled == ASKED


async def test_what_follows_the_finish_reason_is_not_recorded(engine: tuple[Engine, Provider]) -> None:
    server, provider = engine
    server.answers = [[server.report([100, 101], finish="stop"), server.report([102], done=2, finish="stop")]]
    session = tt.Session(renderer=Letters(), provider=provider)
    await take(session, streamed=True)
    (node,) = session.tree.nodes.values()
    assert node.sampled_ids == (100, 101) and node.outcome == "served"


@pytest.mark.parametrize("streamed", [False, True])
async def test_tokens_before_an_abort_are_accounted_for_when_the_resumption_fails(
    engine: tuple[Engine, Provider], streamed: bool
) -> None:
    server, provider = engine
    server.answers = [[server.report([100, 101], finish="abort")], *[503] * 20]
    session = tt.Session(renderer=Letters(), provider=provider)
    with pytest.raises(EngineUnreachable):
        await take(session, streamed=streamed)
    coverage = session.coverage()
    assert (coverage.sampled, coverage.trained) == (2, 0)
    assert [(item.tokens, item.why) for item in coverage.untrained] == [(2, "engine_failed")]
