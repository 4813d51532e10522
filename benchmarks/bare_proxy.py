"""The yardstick: a reverse proxy with nothing in it. Starlette and an aiohttp client; JSON parsed and dumped both ways
with orjson.

Run: `python -m benchmarks.bare_proxy UPSTREAM_URL [ids]`; it prints its port. With `ids` it asks the engine for the ids
and log-probabilities of prompt and answer, and relays them: the least that a gateway that records tokens has to do.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

HEADERS = {"content-type": "application/json"}
IDLE_CONNECTION_S = 600  # the benchmark asks a proxy only at the turns that it measures


def application(upstream: str, more: dict[str, Any]) -> Starlette:
    clients: list[aiohttp.ClientSession] = []

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, read_bufsize=2**24) as client:  # ids are one long line
            clients.append(client)
            yield

    async def relay(request: Request) -> Response:
        body: dict[str, Any] = {**orjson.loads(await request.body()), **more}
        if body.get("stream"):
            return StreamingResponse(events(orjson.dumps(body)), media_type="text/event-stream")
        async with clients[0].post(
            upstream + "/v1/chat/completions", data=orjson.dumps(body), headers=HEADERS
        ) as answer:
            return Response(orjson.dumps(orjson.loads(await answer.read())), media_type="application/json")

    async def events(body: bytes) -> AsyncIterator[bytes]:
        async with clients[0].post(upstream + "/v1/chat/completions", data=body, headers=HEADERS) as answer:
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    yield b"data: " + orjson.dumps(orjson.loads(line[6:])) + b"\n\n"
                elif line.startswith(b"data:"):
                    yield line + b"\n"

    return Starlette(routes=[Route("/v1/chat/completions", relay, methods=["POST"])], lifespan=lifespan)


async def main(upstream: str, *, relays_ids: bool) -> None:
    bound = socket.create_server(("127.0.0.1", 0), backlog=4096)
    print(bound.getsockname()[1], flush=True)
    config = uvicorn.Config(
        application(upstream, {"return_token_ids": True, "logprobs": True} if relays_ids else {}),
        loop="uvloop",
        http="httptools",
        log_config=None,
        access_log=False,
        ws="none",
        timeout_keep_alive=IDLE_CONNECTION_S,
    )
    await uvicorn.Server(config).serve(sockets=[bound])


if __name__ == "__main__":
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(sys.argv[1], relays_ids="ids" in sys.argv[2:]))
