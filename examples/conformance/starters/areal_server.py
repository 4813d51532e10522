"""A chat route over AReaL's OpenAI client, one client per session: `python areal_server.py ENGINE PORT MODEL`. The engine is
AReaL's SGLang request and answer, without its scheduler. GET /ID/rows returns the interactions (style `individual`)."""

import asyncio
import sys

import aiohttp
from aiohttp import web
from areal.api import ModelResponse
from areal.engine.sglang_remote import SGLangBackend
from areal.experimental.openai.client import ArealOpenAI
from transformers import AutoTokenizer


class Engine:
    def __init__(self, url: str) -> None:
        self.url, self.backend = url, SGLangBackend()

    def get_version(self) -> int:
        return 0

    async def agenerate(self, request) -> ModelResponse:
        asked = self.backend.build_generation_request(request, with_lora=False, version=0)
        async with aiohttp.ClientSession() as http, http.post(self.url + asked.endpoint, json=asked.payload) as answer:
            answer.raise_for_status()
            made = self.backend.parse_generation_response(await answer.json())
        return ModelResponse(
            input_tokens=list(request.input_ids), output_tokens=made.output_tokens, output_logprobs=made.output_logprobs,
            output_versions=[0] * len(made.output_tokens), stop_reason=made.stop_reason, tokenizer=request.tokenizer,
        )  # fmt: skip


async def main(engine: str, port: str, model: str) -> None:
    tokenizer, clients = AutoTokenizer.from_pretrained(model), dict[str, ArealOpenAI]()

    def client_for(request: web.Request) -> ArealOpenAI:
        made = lambda: ArealOpenAI(engine=Engine(engine), tokenizer=tokenizer, api_key="none")  # noqa: E731
        return clients.setdefault(request.match_info["id"], made())

    async def chat(request: web.Request) -> web.StreamResponse:
        try:
            answer = await client_for(request).chat.completions.create(**await request.json())
        except NotImplementedError as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        except aiohttp.ClientError as error:
            return web.json_response({"error": {"message": str(error)}}, status=502)
        if hasattr(answer, "model_dump"):
            return web.json_response(answer.model_dump())
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        async for chunk in answer:
            await response.write(b"data: " + chunk.model_dump_json().encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def rows(request: web.Request) -> web.Response:
        out = []
        for one in client_for(request).export_interactions("individual").values():
            got = one.model_response
            mask = [0] * len(got.input_tokens) + [1] * len(got.output_tokens)
            logprobs = [None] * len(got.input_tokens) + list(got.output_logprobs)
            out.append({"ids": got.input_tokens + got.output_tokens, "mask": mask, "logprobs": logprobs})
        return web.json_response(out)

    app = web.Application()
    app.add_routes([web.post("/{id}/chat", chat), web.get("/{id}/rows", rows)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", int(port)).start()
    await asyncio.Event().wait()


asyncio.run(main(*sys.argv[1:]))
