"""Events that arrive together are handed on together: one read from the engine is one chunk per policy version."""

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
from tokentrue.errors import EngineContractError, EngineError
from tokentrue.providers.pool import Pool
from tokentrue.providers.sglang import SGLangProvider
from tokentrue.types import Chunk, Sampling, SamplingMask, TurnEvent, TurnRequest, VersionSpan

OPENING = [{"role": "user", "content": "a"}]


def event(ids: list[int], *, done: int, version: str = "1", finish: str | None = None, **meta: Any) -> bytes:
    rows = [[-0.5, i, None] for i in ids]
    known = {
        "completion_tokens": done + len(ids),
        "weight_version": version,
        "finish_reason": finish and {"type": finish},
    }
    answer = {"output_ids": ids, "meta_info": {**known, "output_token_logprobs": rows, **meta}}
    return b"data: " + json.dumps(answer).encode() + b"\n\n"


class Engine:
    """Answers every generation with the same reads: each of them is one write."""

    def __init__(self) -> None:
        self.reads: list[bytes] = []

    async def generate(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for read in self.reads:
            await response.write(read)
        return response

    async def ok(self, request: web.Request) -> web.Response:
        return web.json_response({})


@pytest_asyncio.fixture
async def at() -> AsyncIterator[tuple[Engine, Pool]]:
    engine, app = Engine(), web.Application()
    app.router.add_post("/generate", engine.generate)
    app.router.add_post("/abort_request", engine.ok)
    async with TestServer(app) as server:
        pool = Pool([SGLangProvider(str(server.make_url("/")), timeout_s=10, retries=0, sampling_mask=True)])
        yield engine, pool
        await pool.close()


async def read_chunks(pool: Pool, sampling: Sampling | None = None) -> list[Chunk]:
    return [chunk async for chunk in pool.stream([1, 2], sampling or Sampling(max_tokens=64))]


async def test_events_of_one_read_are_one_chunk(at: tuple[Engine, Pool]) -> None:
    engine, pool = at
    events = [event([100 + i], done=i, finish="stop" if i == 149 else None) for i in range(150)]
    engine.reads = [b"".join(events) + b"data: [DONE]\n\n"]
    *chunks, last = await read_chunks(pool, Sampling(max_tokens=150))
    assert [i for chunk in chunks for i in chunk.token_ids] == list(range(100, 250))
    assert len(chunks) < 10, "reads may be cut by the socket, but not into single events"
    assert last.final is not None and last.final.token_ids == tuple(range(100, 250))


async def test_a_read_that_spans_two_versions_is_two_chunks(at: tuple[Engine, Pool]) -> None:
    engine, pool = at
    parts = [event([100 + i], done=i, version="1" if i < 3 else "step-2") for i in range(5)]
    engine.reads = [b"".join(parts) + event([], done=5, version="step-2", finish="length")]
    *chunks, last = await read_chunks(pool)
    assert [(tuple(chunk.token_ids), chunk.policy_version) for chunk in chunks] == [
        ((100, 101, 102), 1),
        ((103, 104), 2),
    ]
    assert last.final is not None
    assert last.final.versions == (VersionSpan(start=0, end=3, version=1), VersionSpan(start=3, end=5, version=2))


async def test_masks_of_one_read_are_joined(at: tuple[Engine, Pool]) -> None:
    engine, pool = at
    kept = [[100, 7], [101], [102, 9]]
    parts = [
        event(
            [100 + i],
            done=i,
            finish="stop" if i == 2 else None,
            output_token_sampling_logprobs=[-0.25],
            output_token_sampling_mask=[row],
        )
        for i, row in enumerate(kept)
    ]
    engine.reads = [b"".join(parts)]
    *chunks, last = await read_chunks(pool, Sampling(max_tokens=64, top_k=2))
    expected = SamplingMask.from_rows([sorted(row) for row in kept])
    assert last.final is not None and last.final.sampling_mask == expected
    assert [chunk.sampling_mask for chunk in chunks] == [expected] and last.final.raw_logprobs == (-0.5,) * 3


@pytest.mark.parametrize(
    "faulty",
    [
        b'data: {"error": {"message": "out of memory"}}\n\n',
        b"data: {no\n\n",
        event([-1], done=2),
        event([102], done=2, output_token_logprobs=[[0.5, 102, None]]),
    ],
)
async def test_tokens_before_a_fault_in_the_same_read_are_recorded(at: tuple[Engine, Pool], faulty: bytes) -> None:
    engine, pool = at
    engine.reads = [event([100], done=0) + event([101], done=1) + faulty]
    session = tt.Session(renderer=Letters(), provider=pool)
    seen: list[TurnEvent] = []
    with pytest.raises(EngineError):
        async for one in session.stream(TurnRequest(messages=OPENING)):
            seen.append(one)
    assert [i for one in seen for i in one.token_ids] == [100, 101]
    (node,) = session.tree.nodes.values()
    assert node.sampled_ids == (100, 101) and node.outcome == "engine_failed"


async def test_tokens_past_the_limit_inside_a_read_are_cut_off(at: tuple[Engine, Pool]) -> None:
    engine, pool = at
    engine.reads = [b"".join(event([100 + i], done=i) for i in range(8))]
    session = tt.Session(renderer=Letters(), provider=pool)
    seen: list[TurnEvent] = []
    with pytest.raises(EngineContractError, match="more than max_tokens=5"):
        async for one in session.stream(TurnRequest(messages=OPENING, sampling=Sampling(max_tokens=5))):
            seen.append(one)
    assert [i for one in seen for i in one.token_ids] == [100, 101, 102, 103, 104]
    (node,) = session.tree.nodes.values()
    assert node.sampled_ids == (100, 101, 102, 103, 104) and session.coverage().trained == 0


async def test_a_reader_that_was_away_gets_all_events_at_once(at: tuple[Engine, Pool]) -> None:
    engine, pool = at
    engine.reads = [event([100], done=0), event([101], done=1), event([102], done=2, finish="stop")]
    session = tt.Session(renderer=Letters(), provider=pool)
    batches = session.stream_batches(TurnRequest(messages=OPENING))
    (turn,) = session._single_flight._running
    await turn._task  # type: ignore[misc]
    (events,) = [batch async for batch in batches]
    assert [i for one in events for i in one.token_ids] == [100, 101, 102] and events[-1].reply is not None
