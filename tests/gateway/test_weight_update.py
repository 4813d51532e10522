"""New weights in the middle of a generation, over HTTP: the client sees one answer, the record has two spans with their
own versions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
import torch
import uvicorn
from aiohttp.test_utils import TestServer
from openai import AsyncOpenAI

import tokentrue as tt
from tests import parts
from tests.gateway.inside import Parrot
from tests.providers.standin import SGLangStandIn
from tests.providers.tiny import tiny_qwen3
from tokentrue.gateway import Gateway, GatewayConfig
from tokentrue.providers.exact import ExactProvider
from tokentrue.providers.pool import Pool
from tokentrue.providers.sglang import SGLangProvider
from tokentrue.sessions.journal import Journal

TOKENS = 500  # enough to be overtaken
HELLO: list[Any] = [{"role": "user", "content": "Go on."}]


def renderer() -> Any:
    return tt.load_renderer(str(parts.own_dir("qwen3-like")))


def changed(model: Any) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor * 1.5 if "mlp" in name else tensor.clone()) for name, tensor in model.state_dict().items()]


@dataclass(slots=True)
class World:
    """A gateway on a socket, an engine behind it, and the trainer's way of giving that engine new weights."""

    url: str
    app: Gateway
    publish: Any
    stops: bool  # the engine must be stopped for new weights

    async def admin(self, path: str, **body: Any) -> Any:
        async with (
            aiohttp.ClientSession(headers={"authorization": "Bearer boss"}) as http,
            http.post(f"{self.url}{path}", json=body) as answer,
        ):
            assert answer.status in (200, 201), await answer.text()
            return await answer.json()


@asynccontextmanager
async def serving(provider: Any) -> AsyncIterator[tuple[Gateway, str]]:
    ready = renderer()
    app = Gateway(
        config=GatewayConfig(model="m", admin_key="boss"),
        renderer_for=lambda _: ready,
        provider=provider,
        journal=Journal("memory"),
    )
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield app, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        await app.close()


@asynccontextmanager
async def world(engine: str, folder: Any) -> AsyncIterator[World]:
    model = tiny_qwen3(vocab_size=renderer().codec.backend.get_vocab_size(), positions=1024, spread=0.3)
    if engine == "exact":
        provider = ExactProvider(model, version=1)
        async with serving(Pool([provider])) as (app, url):
            yield World(url, app, lambda: provider.publish(changed(model), version=2), stops=False)
        return
    standin = SGLangStandIn(model, incremental=True)
    standin.weight_version = "1"
    async with TestServer(standin.app()) as server:
        adapter = SGLangProvider(str(server.make_url("")), weights_dir=folder)
        async with serving(Pool([adapter])) as (app, url):
            yield World(url, app, lambda: adapter.publish(changed(model), version=2), stops=True)


@pytest.mark.parametrize(
    ("engine", "stream"),
    [
        ("exact", True),
        ("sglang", True),
        pytest.param("exact", False, marks=pytest.mark.slow),
        pytest.param("sglang", False, marks=pytest.mark.slow),
    ],
)
async def test_one_answer_two_policy_versions(engine: str, stream: bool, tmp_path: Any) -> None:
    async with world(engine, tmp_path) as at:
        made = await at.admin("/sessions")
        client = AsyncOpenAI(base_url=made["base_url"], api_key=made["api_key"], max_retries=0)
        asked: Any = {"model": "m", "messages": HELLO, "max_tokens": TOKENS, "seed": 5}
        answer = asyncio.create_task(streamed(client, asked) if stream else whole(client, asked))
        await begun(at, made)
        paused = await at.admin("/admin/pause", abort=True)
        assert paused["paused"] and paused["in_flight"] == 1
        assert paused["aborted"] == (1 if at.stops else 0)
        await at.publish()
        await asyncio.sleep(0.05)
        if at.stops:
            assert not answer.done(), "held until resume"
        await at.admin("/admin/resume")
        text, finish = await answer
        await client.close()
        check(at, made, text, finish)


async def begun(at: World, made: dict[str, str]) -> None:
    """Some tokens have been sampled."""
    await asyncio.sleep(0.05)
    known = at.app.services.sessions.get_loaded(made["session_id"])
    while known is None or not known.in_flight:
        await asyncio.sleep(0.01)
        known = at.app.services.sessions.get_loaded(made["session_id"])
    await asyncio.sleep(0.1)


async def streamed(client: AsyncOpenAI, asked: Any) -> tuple[str, Any]:
    text, finish = "", None
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        text += chunk.choices[0].delta.content or ""
        finish = chunk.choices[0].finish_reason or finish
    return text, finish


async def whole(client: AsyncOpenAI, asked: Any) -> tuple[str, Any]:
    answer = await client.chat.completions.create(**asked)
    return answer.choices[0].message.content or "", answer.choices[0].finish_reason


def check(at: World, made: dict[str, str], text: str, finish: Any) -> None:
    known = at.app.services.sessions.get_loaded(made["session_id"])
    assert known is not None
    (node,) = known.session.tree.in_order()
    tokens = len(node.sampled_ids)
    assert text == (node.served["content"] or "") and finish == ("length" if tokens == TOKENS else "stop")
    assert [span.version for span in node.versions] == [1, 2]
    first, second = node.versions
    assert (first.start, first.end, second.end) == (0, second.start, tokens) and 0 < first.end < tokens
    assert known.coverage().ratio == 1.0
    (sample,) = known.session.samples()
    sampled = [(span.end - span.start, span.policy_version) for span in sample.spans if span.kind == "sampled"]
    assert sampled == [(first.end, 1), (tokens - first.end, 2)] and sum(sample.loss_mask) == tokens


async def test_drain_and_abort_exclude_each_other() -> None:
    async with serving(Parrot()) as (app, url):
        at = World(url, app, None, stops=False)
        async with (
            aiohttp.ClientSession(headers={"authorization": "Bearer boss"}) as http,
            http.post(f"{url}/admin/pause", json={"drain": True, "abort": True}) as answer,
        ):
            assert answer.status == 400 and "drain and abort" in await answer.text()
        assert (await at.admin("/admin/pause", abort=True))["aborted"] == 0
        await at.admin("/admin/resume")
