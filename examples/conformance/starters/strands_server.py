"""A chat route over strands-sglang's model, one model object per session: `python strands_server.py ENGINE PORT MODEL`."""

import asyncio
import json
import sys

from aiohttp import web
from strands_sglang import SGLangClient, SGLangModel
from transformers import AutoTokenizer


def text_of(content: str | list | None) -> str:
    return "".join(part["text"] for part in content) if isinstance(content, list) else content or ""


def strands_message(message: dict) -> dict:
    if message["role"] == "tool":
        result = {
            "toolUseId": message["tool_call_id"],
            "status": "success",
            "content": [{"text": text_of(message["content"])}],
        }
        return {"role": "user", "content": [{"toolResult": result}]}
    blocks = [{"text": text_of(message.get("content"))}]
    for call in message.get("tool_calls") or ():
        given = json.loads(call["function"]["arguments"])
        blocks.append({"toolUse": {"toolUseId": call["id"], "name": call["function"]["name"], "input": given}})
    return {"role": message["role"], "content": blocks}


async def main(engine: str, port: str, folder: str) -> None:
    client, tokenizer = SGLangClient(base_url=engine), AutoTokenizer.from_pretrained(folder)
    models: dict[str, SGLangModel] = {}

    async def chat(request: web.Request) -> web.Response:
        body, model = (
            await request.json(),
            models.setdefault(request.match_info["id"], SGLangModel(client=client, tokenizer=tokenizer)),
        )
        asked = {name: body[name] for name in ("temperature", "top_p") if name in body}
        model.update_config(sampling_params={**asked, "max_new_tokens": body["max_tokens"]})
        system = next((text_of(m["content"]) for m in body["messages"] if m["role"] == "system"), None)
        messages = [strands_message(m) for m in body["messages"] if m["role"] != "system"]
        specs = [
            {"name": f["name"], "description": f["description"], "inputSchema": {"json": f["parameters"]}}
            for f in (tool["function"] for tool in body.get("tools") or ())
        ]
        text, calls = "", []
        async for event in model.stream(messages, specs or None, system):
            if use := event.get("contentBlockStart", {}).get("start", {}).get("toolUse"):
                calls.append({"id": use["toolUseId"], "type": "function", "function": {"name": use["name"]}})
            delta = event.get("contentBlockDelta", {}).get("delta", {})
            text += delta.get("text", "")
            if "toolUse" in delta:
                calls[-1]["function"]["arguments"] = delta["toolUse"]["input"]
        reasoning, _, shown = text.rpartition("</think>")  # the library hands over one text
        message = {"role": "assistant", "content": "" if calls else shown.strip(), "tool_calls": calls}
        message["reasoning_content"] = reasoning.removeprefix("<think>").strip()
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop"}
        return web.json_response({"id": "x", "model": body["model"], "choices": [choice]})

    async def rows(request: web.Request) -> web.Response:
        rollout = models[request.match_info["id"]].rollout
        return web.json_response([{"ids": rollout.token_ids, "mask": rollout.loss_mask, "logprobs": rollout.logprobs}])

    app = web.Application()
    app.add_routes([web.post("/{id}/chat", chat), web.get("/{id}/rows", rows)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", int(port)).start()
    await asyncio.Event().wait()


asyncio.run(main(*sys.argv[1:]))
