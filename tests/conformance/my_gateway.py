"""The gateway that docs/conformance.md writes an adapter for: a proxy with one record per call. `python -m my_gateway
--port PORT --upstream URL`."""

import argparse
import json
from typing import Any

import aiohttp
from aiohttp import web

calls: dict[str, list[dict[str, Any]]] = {}


async def open_session(request: web.Request) -> web.Response:
    name = f"session-{len(calls)}"
    calls[name] = []
    return web.json_response({"id": name})


async def chat(request: web.Request) -> web.StreamResponse:
    body = {**await request.json(), "return_token_ids": True, "logprobs": True}
    if body.get("n", 1) > 1:  # one record holds one answer
        return web.json_response({"error": {"message": "n must be 1"}}, status=400)
    record: dict[str, Any] = {"prompt_ids": [], "sampled_ids": [], "logprobs": []}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{request.app['upstream']}/chat/completions", json=body) as got,
    ):
        if got.status != 200 or not body.get("stream"):
            answer = await got.json()
            note(record, answer)
            calls[request.match_info["id"]] += [record] if got.status == 200 else []
            return web.json_response(answer, status=got.status)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        async for line in got.content:
            if line.startswith(b"data: {"):
                note(record, json.loads(line[6:]))
            if line.startswith(b"data: [DONE]"):
                calls[request.match_info["id"]].append(record)
            await response.write(line)
        return response


def note(record: dict[str, Any], answer: dict[str, Any]) -> None:
    record["prompt_ids"] = record["prompt_ids"] or answer.get("prompt_token_ids") or []
    for choice in answer.get("choices", ()):
        record["sampled_ids"] += choice["token_ids"]
        record["logprobs"] += [row["logprob"] for row in choice["logprobs"]["content"]]


async def list_calls(request: web.Request) -> web.Response:
    return web.json_response(calls[request.match_info["id"]])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--upstream")
    asked = parser.parse_args()
    app = web.Application()
    app["upstream"] = asked.upstream
    app.add_routes([web.post("/sessions", open_session), web.post("/sessions/{id}/v1/chat/completions", chat)])
    app.add_routes([web.get("/sessions/{id}/calls", list_calls)])
    web.run_app(app, host="127.0.0.1", port=asked.port, print=None)


if __name__ == "__main__":
    main()
