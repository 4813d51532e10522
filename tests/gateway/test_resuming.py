"""A session that is resumed: under a new key, in a new process, with the history that its agent kept."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.inside import Parrot, ask, gateway, new_session
from tests.gateway.world import call
from tokentrue.gateway import Gateway
from tokentrue.types import Completion, Ids, Sampling

QUESTION = "what is 2 + 2?"


async def post(app: Gateway, path: str, body: Any, key: str, **headers: str) -> Any:
    status, answer = await ask(app, "POST", path, json.dumps(body).encode(), key=key, **headers)
    assert status == 200, answer
    return json.loads(answer)


async def anthropic(app: Gateway, key: str, history: list[Any]) -> list[Any]:
    body = {"model": "m", "max_tokens": 64, "messages": [*history, {"role": "user", "content": QUESTION}]}
    answer = await post(app, "/v1/messages", body, key)
    assert answer["content"][0]["type"] == "thinking"
    return [*body["messages"], {"role": "assistant", "content": answer["content"]}]


async def responses(app: Gateway, key: str, history: list[Any]) -> list[Any]:
    """As Codex: reasoning comes back sealed alone."""
    body = {"model": "m", "store": False, "input": [*history, {"role": "user", "content": QUESTION}]}
    answer = await post(app, "/v1/responses", body, key)
    kept = [
        {name: value for name, value in item.items() if name not in ("content", "status")}
        for item in answer["output"][:1]
    ]
    return [*body["input"], *kept, *answer["output"][1:]]


async def google(app: Gateway, key: str, history: list[Any]) -> list[Any]:
    """As gemini-cli: thoughts are hidden, their signatures kept."""
    body = {"contents": [*history, {"role": "user", "parts": [{"text": QUESTION}]}]}
    answer = await post(app, "/v1beta/models/m:generateContent", body, key)
    return [*body["contents"], answer["candidates"][0]["content"]]


@pytest.mark.parametrize("agent", [anthropic, responses, google])
async def test_sealed_reasoning_outlives_the_key_of_its_session(agent: Any, tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path / 'j.sqlite'}"
    app = gateway(store=store)
    session = await new_session(app)
    path, history, key = f"/sessions/{session['session_id']}", [], session["api_key"]
    for _ in range(2):  # renewed twice: what the second key sealed must hold, too
        history = await agent(app, key, history)
        _, renewed = await ask(app, "POST", f"{path}/key")
        key = json.loads(renewed)["api_key"]
        await app.close()
        app = gateway(store=store)
    await agent(app, key, history)
    _, shown = await ask(app, "GET", path)
    nodes = json.loads(shown)["nodes"]
    assert [node["projection"] for node in nodes] == ["root", "exact", "exact"], nodes
    await app.close()


ODD_ARGUMENTS = (
    '{"n": 18446744073709551616}', '{"n": -0.0}', '{"n": 1e400}', '{"n": NaN}', '{"a": 1, "a": 2}', '{"s": "\\ud800"}', '{"s": "\\u0000"}',
    '{"_raw_arguments": "x"}', '{"_raw_arguments": "{"}', "[1]", "null", "{",
)  # fmt: skip


@pytest.mark.parametrize("arguments", ODD_ARGUMENTS)
async def test_calls_with_odd_arguments_come_back_as_they_were_served(arguments: str) -> None:
    """Both dialects carry arguments as an object, which is another JSON text when it comes back."""
    app = gateway(Parrot(call("look", arguments)))
    tools = (
        {"tools": [{"name": "look", "input_schema": {"type": "object"}}]},
        {"tools": [{"functionDeclarations": [{"name": "look"}]}]},
    )
    results = {"type": "tool_result", "content": "ok"}, {"name": "look", "response": {"output": "ok"}}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    contents: list[Any] = [{"role": "user", "parts": [{"text": QUESTION}]}]
    sessions = await new_session(app), await new_session(app)
    for _ in range(2):
        body = {"model": "m", "max_tokens": 64, "messages": messages, **tools[0]}
        blocks = (await post(app, "/v1/messages", body, sessions[0]["api_key"]))["content"]
        called = [{**results[0], "tool_use_id": block["id"]} for block in blocks if block["type"] == "tool_use"]
        messages += [{"role": "assistant", "content": blocks}, {"role": "user", "content": called or "go on"}]
        answer = await post(
            app, "/v1beta/models/m:generateContent", {"contents": contents, **tools[1]}, sessions[1]["api_key"]
        )
        content = answer["candidates"][0]["content"]
        parts = [{"functionResponse": results[1]} for part in content["parts"] if "functionCall" in part] or [
            {"text": "go on"}
        ]
        contents += [content, {"role": "user", "parts": parts}]
    for session in sessions:
        _, shown = await ask(app, "GET", f"/sessions/{session['session_id']}")
        first, second = json.loads(shown)["nodes"]
        assert second["parent"] == first["id"], second
    await app.close()


class Waits(Parrot):
    """Answers when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.go_on = 0, asyncio.Event()

    async def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None) -> Completion:
        self.asked += 1
        await self.go_on.wait()
        return await super().generate(prompt_ids, sampling, session=session)


async def test_two_sdks_may_send_the_same_body_at_once() -> None:
    """The body is a request of both dialects; each SDK names its first attempt, and its retry, by the body."""
    engine = Waits()
    app = gateway(engine)
    session = await new_session(app)
    body = {"model": "m", "max_tokens": 64, "messages": [{"role": "user", "content": QUESTION}]}
    paths = ("/v1/chat/completions", "/v1/messages")
    running = [
        asyncio.create_task(post(app, path, body, session["api_key"], x_stainless_retry_count="0")) for path in paths
    ]
    await asyncio.sleep(0.05)
    engine.go_on.set()
    chat, message = await asyncio.gather(*running)
    retries = [await post(app, path, body, session["api_key"], x_stainless_retry_count="1") for path in paths]
    assert (
        chat["choices"] == retries[0]["choices"] and message["content"] == retries[1]["content"] and engine.asked == 2
    )
    await app.close()
