"""A chat route whose calls ART captures by its HTTPX hooks: `python art_server.py ENGINE PORT MODEL`. GET /ID/rows returns
what ART's trainer makes of the captured histories."""

import asyncio
import math
import sys

from aiohttp import web
from art.auto_trajectory import AutoTrajectoryContext, auto_trajectory_context_var
from art.preprocessing.tokenize import tokenize_trajectory
from art.trajectories import History
from openai import APIStatusError, AsyncOpenAI, AsyncStream
from transformers import AutoTokenizer


async def main(engine: str, port: str, model: str) -> None:
    tokenizer, client = (
        AutoTokenizer.from_pretrained(model),
        AsyncOpenAI(base_url=f"{engine}/v1", api_key="none", max_retries=0),
    )
    contexts: dict[str, AutoTrajectoryContext] = {}

    async def chat(request: web.Request) -> web.StreamResponse:
        """As an agent calls the OpenAI SDK."""
        auto_trajectory_context_var.set(contexts.setdefault(request.match_info["id"], AutoTrajectoryContext()))
        try:
            answer = await client.chat.completions.create(**await request.json(), logprobs=True)
            if not isinstance(answer, AsyncStream):
                return web.json_response(answer.model_dump(exclude_unset=True))
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            async for chunk in answer:
                await response.write(b"data: " + chunk.model_dump_json(exclude_unset=True).encode() + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
            return response
        except APIStatusError as error:
            return web.json_response({"error": {"message": str(error)}}, status=error.status_code)

    async def rows(request: web.Request) -> web.Response:
        trajectory, out = contexts[request.match_info["id"]].trajectory, []
        first = History(messages_and_choices=trajectory.messages_and_choices, tools=trajectory.tools)
        for history in (first, *trajectory.additional_histories):
            made = tokenize_trajectory(tokenizer, None, history, 1.0, False, trajectory)
            if made is not None:
                logprobs = [None if math.isnan(value) else value for value in made.logprobs]
                out.append({"ids": made.token_ids, "mask": made.assistant_mask, "logprobs": logprobs})
        return web.json_response(out)

    app = web.Application()
    app.add_routes([web.post("/{id}/chat", chat), web.get("/{id}/rows", rows)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", int(port)).start()
    await asyncio.Event().wait()


asyncio.run(main(*sys.argv[1:]))
