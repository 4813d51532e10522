"""What the gateway serves can be sent back as it is, and continues the recorded turn; what cannot be sent back is
refused before a turn."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gateway.inside import ask, gateway, new_session
from tests.gateway.world import call, renderer
from tokentrue.nesting import MAX_DEPTH
from tokentrue.providers.scripted import ScriptedProvider

USER = {"role": "user", "content": "go"}


def gateway_that_says(*texts: str) -> Any:
    r = renderer()
    return gateway(
        ScriptedProvider([{"text": text} for text in texts], encode=r.encode_sampled, stop_id=r.stop_token_ids[0])
    )


async def post(app: Any, session: dict[str, Any], path: str, body: dict[str, Any]) -> tuple[int, str]:
    status, answer = await ask(app, "POST", path, json.dumps(body).encode(), key=session["api_key"])
    return status, answer.decode() if isinstance(answer, bytes) else answer


async def edges(app: Any, session: dict[str, Any]) -> list[str | None]:
    _, answer = await ask(app, "GET", "/sessions/" + session["session_id"])
    return [node["why"] for node in json.loads(answer)["nodes"]]


def last_response(stream: str) -> dict[str, Any]:
    (line,) = [line for line in stream.splitlines() if line.startswith("data: ") and '"response.completed"' in line]
    return json.loads(line[6:])["response"]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("text", ["", "\n\n", "<think>\nhm\n</think>\n\n"])
async def test_an_empty_answer_over_responses_is_continued(text: str, streamed: bool) -> None:
    app = gateway_that_says(text, "B")
    session = await new_session(app)
    status, answer = await post(app, session, "/v1/responses", {"model": "m", "input": [USER], "stream": streamed})
    assert status == 200, answer
    output = (last_response(answer) if streamed else json.loads(answer))["output"]
    assert [item["type"] for item in output][-1] == "message"
    kept = [item for item in output if item["type"] == "message"]  # a harness may drop reasoning
    assert (await post(app, session, "/v1/responses", {"model": "m", "input": [USER, *kept, USER]}))[0] == 200
    assert await edges(app, session) == ["first", None]


@pytest.mark.parametrize("depth", range(MAX_DEPTH - 6, MAX_DEPTH + 3))
async def test_deep_arguments_come_back(depth: int) -> None:
    arguments = '{"a":' * depth + "1" + "}" * depth
    app = gateway_that_says(call("f", arguments), "B")
    session = await new_session(app)
    body: dict[str, Any] = {"model": "m", "max_tokens": 9999, "messages": [USER]}
    body["tools"] = [{"name": "f", "input_schema": {"type": "object"}}]
    content = json.loads((await post(app, session, "/v1/messages", body))[1])["content"]
    result = {"type": "tool_result", "tool_use_id": content[-1]["id"], "content": "r"}
    body["messages"] += [{"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
    status, answer = await post(app, session, "/v1/messages", body)
    assert (status, await edges(app, session)) == (200, ["first", None]), answer


@pytest.mark.parametrize("depth", range(MAX_DEPTH - 6, MAX_DEPTH + 3))
async def test_deep_arguments_come_back_from_google(depth: int) -> None:
    app = gateway_that_says(call("f", '{"a":' * depth + "1" + "}" * depth), "B")
    session = await new_session(app)
    path = "/v1beta/models/m:generateContent"
    body: dict[str, Any] = {"contents": [{"role": "user", "parts": [{"text": "go"}]}]}
    body["tools"] = [{"functionDeclarations": [{"name": "f", "parametersJsonSchema": {"type": "object"}}]}]
    status, answer = await post(app, session, path, body)
    assert status == 200, answer
    content = json.loads(answer)["candidates"][0]["content"]
    result = {"functionResponse": {"name": "f", "response": {"output": "r"}}}
    body["contents"] += [content, {"role": "user", "parts": [result]}]
    status, answer = await post(app, session, path, body)
    assert (status, await edges(app, session)) == (200, ["first", None]), answer


async def test_a_deep_field_within_a_field_is_refused_before_the_turn() -> None:
    app = gateway_that_says("A")
    session = await new_session(app)
    deep = json.loads('{"a":' * 300 + "1" + "}" * 300)
    body = {"model": "m", "input": "hi", "text": {"format": {"type": "text", "x": deep}}}
    status, answer = await post(app, session, "/v1/responses", body)
    assert status == 400 and "text.format: is nested deeper than 128 levels" in answer
    assert await edges(app, session) == []
