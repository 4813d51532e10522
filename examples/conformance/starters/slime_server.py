"""Starts slime's adapters for Chat Completions and Anthropic Messages: `python slime_server.py ENGINE PORT MODEL`. GET /ports
says where they are, GET /rows?id=… returns the samples of a session as they are trained."""

import asyncio
import copy
import sys

from aiohttp import web
from slime.agent.adapters.anthropic import AnthropicAdapter
from slime.agent.adapters.openai import OpenAIAdapter
from slime.utils.types import Sample
from transformers import AutoTokenizer


async def serve(app: web.Application, port: int) -> int:
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    return runner.addresses[0][1]


async def main(engine: str, port: str, model: str) -> None:
    how = {"sglang_url": engine, "tool_parser": "qwen25", "reasoning_parser": "qwen3"}
    tokenizer = AutoTokenizer.from_pretrained(model)
    adapters = {
        "chat": OpenAIAdapter(tokenizer=tokenizer, **how),
        "anthropic": AnthropicAdapter(tokenizer=tokenizer, **how),
    }
    ports = {name: await serve(adapter.app, 0) for name, adapter in adapters.items()}

    async def rows(request: web.Request) -> web.Response:
        out = []
        for adapter in adapters.values():
            manager = copy.deepcopy(adapter.manager)  # to read a session ends it
            for sample in manager.get_trajectory(request.query.get("id", ""), base_sample=Sample(index=0)):
                given = len(sample.tokens) - sample.response_length
                logprobs = [None] * given + list(sample.rollout_log_probs)
                out.append({"ids": sample.tokens, "mask": [0] * given + list(sample.loss_mask), "logprobs": logprobs})
        return web.json_response(out)

    async def list_ports(request: web.Request) -> web.Response:
        return web.json_response(ports)

    app = web.Application()
    app.add_routes([web.get("/rows", rows), web.get("/ports", list_ports)])
    await serve(app, int(port))
    await asyncio.Event().wait()


asyncio.run(main(*sys.argv[1:]))
