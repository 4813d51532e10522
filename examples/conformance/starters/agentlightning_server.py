"""Starts Agent Lightning's LLMProxy before a store: `python agentlightning_server.py ENGINE PORT`. POST /open makes a
rollout, GET /rows?id=… returns its triplets."""

import asyncio
import socket
import sys

from agentlightning import LLMProxy, LlmProxyTraceToTriplet
from agentlightning.store.memory import InMemoryLightningStore
from aiohttp import web


async def main(engine: str, port: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        proxy_port = free.getsockname()[1]
    store = InMemoryLightningStore(thread_safe=True)
    served = {"model": "hosted_vllm/standin", "api_base": f"{engine}/v1"}
    models = [{"model_name": "standin", "litellm_params": served}]
    proxy = LLMProxy(port=proxy_port, host="127.0.0.1", model_list=models, store=store, launch_mode="thread")
    await proxy.start()

    async def open_session(request: web.Request) -> web.Response:
        made = await store.start_rollout(input={})
        path = f"/rollout/{made.rollout_id}/attempt/{made.attempt.attempt_id}"
        return web.json_response({"id": made.rollout_id, "url": f"http://127.0.0.1:{proxy_port}{path}"})

    async def rows(request: web.Request) -> web.Response:
        triplets = LlmProxyTraceToTriplet().adapt(await store.query_spans(request.query["id"]))
        return web.json_response([(one.prompt["token_ids"], one.response["token_ids"]) for one in triplets])

    app = web.Application()
    app.add_routes([web.post("/open", open_session), web.get("/rows", rows)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", int(port)).start()
    await asyncio.Event().wait()


asyncio.run(main(*sys.argv[1:]))
