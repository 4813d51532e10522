"""Starts verifiers' interception server with its training client: `python verifiers_server.py ENGINE PORT MODEL`.
POST /open makes a rollout session, GET /rows?id=… returns its branches as prime-rl trains them."""

import asyncio
import sys

from aiohttp import web
from renderers.configs import Qwen3RendererConfig
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.interception import InterceptionServer
from verifiers.v1.session import RolloutSession
from verifiers.v1.task import TaskData
from verifiers.v1.trace import AgentInfo, Trace, TraceTask


async def main(engine: str, port: str, model: str) -> None:
    client = TrainClientConfig(base_url=f"{engine}/v1", renderer=Qwen3RendererConfig(), renderer_model_name=model)
    server = InterceptionServer()
    sessions: dict[str, RolloutSession] = {}

    async def open_session(request: web.Request) -> web.Response:
        trace = Trace(task=TraceTask(type="T", data=TaskData()), agent=AgentInfo(config={}))
        session = RolloutSession(ctx=ModelContext(model="standin", client=client), trace=trace)
        secret, _ = server.register(session)
        sessions[trace.id] = session
        return web.json_response({"id": trace.id, "url": server.base_url, "key": secret})

    async def rows(request: web.Request) -> web.Response:
        out, trained = [], set()
        for branch in sessions[request.query["id"]].trace.branches:
            mask: list[int] = []
            for node in branch.nodes:  # a node that several branches share is trained in the first
                mask += [int(one and id(node) not in trained) for one in node.mask]
                trained.add(id(node))
            if branch.trainable:
                out.append({"ids": branch.token_ids, "mask": mask, "logprobs": branch.logprobs})
        return web.json_response(out)

    async with server:
        app = web.Application()
        app.add_routes([web.post("/open", open_session), web.get("/rows", rows)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", int(port)).start()
        await asyncio.Event().wait()


asyncio.run(main(*sys.argv[1:]))
