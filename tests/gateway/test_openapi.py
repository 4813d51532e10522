"""The OpenAPI document says what the gateway takes: its schemas are those of the bodies, its paths those of the routes."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator

from tests.gateway.inside import ask, gateway
from tokentrue.gateway.dialects.anthropic import MessagesBody
from tokentrue.gateway.dialects.openai_chat import ChatBody
from tokentrue.gateway.dialects.openai_responses import ResponsesBody

CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
# As the vendors document them.
BODIES: dict[str, Any] = {
    "/v1/chat/completions": {
        "model": "m",
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "look"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "nothing"},
        ],
        "tools": [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}],
        "tool_choice": "auto",
        "max_completion_tokens": 4096,
        "stream_options": {"include_usage": True},
        "stream": True,
        "stop": "###",
        "parallel_tool_calls": True,
        "reasoning_effort": "low",
        "logprobs": True,
        "top_logprobs": 2,
    },
    "/v1/messages": {
        "model": "m",
        "max_tokens": 8192,
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "look"}]}],
        "thinking": {"type": "enabled", "budget_tokens": 2048},
    },
    "/v1/responses": {"model": "m", "input": "look", "reasoning": {"effort": "low"}, "include": [], "store": False},
    "/v1beta/models/{model}:generateContent": {
        "contents": [{"role": "user", "parts": [{"text": "look"}]}],
        "generationConfig": {"maxOutputTokens": 4096, "topK": 40.0, "thinkingConfig": {"includeThoughts": True}},
    },
}


async def read_document() -> dict[str, Any]:
    app = gateway()
    status, body = await ask(app, "GET", "/openapi.json", key=None)
    await app.close()
    assert status == 200
    return json.loads(body)


@pytest.mark.parametrize("path", BODIES)
async def test_a_documented_request_fits_and_a_misspelt_one_does_not(path: str) -> None:
    document = await read_document()
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    validator = Draft202012Validator({**schema, "components": document["components"]})
    assert not list(validator.iter_errors(BODIES[path]))
    assert list(validator.iter_errors({**BODIES[path], "max_tokns": 1}))


@pytest.mark.parametrize("body", [ChatBody, MessagesBody, ResponsesBody])
async def test_every_field_of_a_body_is_there(body: type[msgspec.Struct]) -> None:
    schemas = (await read_document())["components"]["schemas"]
    assert set(schemas[body.__name__]["properties"]) == {field.encode_name for field in msgspec.structs.fields(body)}


async def test_a_tool_may_speak() -> None:
    schemas = (await read_document())["components"]["schemas"]
    assert "tool" in schemas["ChatBody"]["properties"]["messages"]["items"]["properties"]["role"]["enum"]


async def test_a_path_that_is_shown_is_served() -> None:
    app = gateway()
    for path, methods in (await read_document())["paths"].items():
        for method in methods:
            where = path.replace("{session_id}", "none").replace("{model}", "m")
            status, body = await ask(app, method.upper(), where, b"{}", key="boss", x_session_id="s")
            assert where in ("/view", "/metrics") or (b"unknown_path" not in body and status != 405), (where, status)
    await app.close()
