"""What the gateway serves can be sent back as it is, and continues the recorded turn; what cannot be sent back is
refused before a turn."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gateway.inside import ask, gateway, new_session
from tests.gateway.world import call, renderer
from tokentrue.plain_json import MAX_DEPTH
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


WHOLE = ["250000000000000000001", "-18446744073709551617", "18446744073709551615", "9007199254740993", "7" * 400]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 10**30}}}


def post_chat(history: list[Any]) -> tuple[str, dict[str, Any]]:
    function = {"name": "f", "parameters": SCHEMA}
    return "/v1/chat/completions", {
        "model": "m",
        "messages": history,
        "tools": [{"type": "function", "function": function}],
    }


def post_responses(history: list[Any]) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"input": history, "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]}


def post_anthropic(history: list[Any]) -> tuple[str, dict[str, Any]]:
    return "/v1/messages", {
        "model": "m", "max_tokens": 9999, "messages": history, "tools": [{"name": "f", "input_schema": SCHEMA}],
    }  # fmt: skip


def post_google(history: list[Any]) -> tuple[str, dict[str, Any]]:
    tools = [{"functionDeclarations": [{"name": "f", "parametersJsonSchema": SCHEMA}]}]
    return "/v1beta/models/m:generateContent", {"contents": history, "tools": tools}


def chat_turn(answer: Any, result: Any) -> tuple[Any, list[Any]]:
    (made,) = answer["choices"][0]["message"]["tool_calls"]
    said = {"role": "tool", "tool_call_id": made["id"], "content": json.dumps(result)}
    return json.loads(made["function"]["arguments"]), [answer["choices"][0]["message"], said]


def responses_turn(answer: Any, result: Any) -> tuple[Any, list[Any]]:
    made = answer["output"][-1]
    said = {"type": "function_call_output", "call_id": made["call_id"], "output": json.dumps(result)}
    return json.loads(made["arguments"]), [*answer["output"], said]


def anthropic_turn(answer: Any, result: Any) -> tuple[Any, list[Any]]:
    made = answer["content"][-1]
    said = {"type": "tool_result", "tool_use_id": made["id"], "content": json.dumps(result)}
    return made["input"], [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [said]}]


def google_turn(answer: Any, result: Any) -> tuple[Any, list[Any]]:
    content = answer["candidates"][0]["content"]
    said = {"functionResponse": {"name": "f", "response": {"output": result}}}
    return content["parts"][-1]["functionCall"]["args"], [content, {"role": "user", "parts": [said]}]


GO = {"role": "user", "content": "go"}
ROUTES: dict[str, tuple[Any, Any, Any]] = {
    "chat": (post_chat, chat_turn, GO),
    "responses": (post_responses, responses_turn, GO),
    "anthropic": (post_anthropic, anthropic_turn, GO),
    "google": (post_google, google_turn, {"role": "user", "parts": [{"text": "go"}]}),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("digits", WHOLE, ids=lambda text: text[:22])
async def test_integers_keep_all_their_digits(route: str, digits: str) -> None:
    """Served, sent back, as a tool's result and in a tool's schema; and a sibling one off is another turn."""
    build, read, opening = ROUTES[route]
    near = str(int(digits) + 1)
    app = gateway_that_says(call("f", f'{{"a": {digits}}}'), call("f", f'{{"a": {near}}}'), "A", "B")
    session = await new_session(app)
    histories: list[list[Any]] = []
    for number in (digits, near):
        status, answer = await post(app, session, *build([opening]))
        assert status == 200, answer
        assert number in answer
        given, turn = read(json.loads(answer), int(number))
        assert given == {"a": int(number)}
        histories.append([opening, *turn])
    for history in histories:
        status, answer = await post(app, session, *build(history))
        assert status == 200, answer
    known = app.services.sessions.get_loaded(session["session_id"])
    assert known is not None
    first, second, third, fourth = known.session.tree.in_order()
    assert (third.parent, fourth.parent) == (first.id, second.id)
    decode = renderer().decode
    assert digits in decode(third.given_ids) and near in decode(fourth.given_ids)
    assert str(10**30) in decode(first.given_ids)
