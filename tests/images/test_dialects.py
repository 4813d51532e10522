"""Official SDKs send images, in user messages and in tool results; every dialect records the same."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest
from google import genai
from google.genai import types

from tests.gateway.inside import ask, new_session
from tests.images.double import PAD, Eyes, count_tokens, data_url, picture, seeing_gateway

ONE, TWO = picture(56, 28), picture(28, 84, "JPEG", (200, 0, 0))
NAME_1, NAME_2 = (hashlib.sha256(data).hexdigest() for data in (ONE, TWO))
ARGUMENTS = {"x": 1}
CALL = f"@zoom {json.dumps(ARGUMENTS)}"
TOOL_SCHEMA: dict[str, Any] = {"type": "object", "properties": {"x": {"type": "integer"}}}


async def by_chat(session: dict[str, str], http: httpx.AsyncClient, stream: bool) -> None:
    client = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key=session["api_key"], http_client=http)
    tools: Any = [{"type": "function", "function": {"name": "zoom", "parameters": TOOL_SCHEMA, "strict": True}}]
    messages: list[Any] = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "look"},
                {"type": "image_url", "image_url": {"url": data_url(ONE), "detail": "high"}},
            ],
        }
    ]
    if stream:
        async with client.chat.completions.stream(model="m", messages=messages, tools=tools) as events:
            answer = await events.get_final_completion()
    else:
        answer = await client.chat.completions.create(model="m", messages=messages, tools=tools)
    said = answer.choices[0].message
    assert said.tool_calls
    messages += [
        {"role": "assistant", "content": None, "tool_calls": [said.tool_calls[0].model_dump()]},
        {
            "role": "tool",
            "tool_call_id": said.tool_calls[0].id,
            "content": [
                {"type": "text", "text": "nearer"},
                {"type": "image_url", "image_url": {"url": data_url(TWO, "image/jpeg")}},
            ],
        },
    ]
    await client.chat.completions.create(model="m", messages=messages, tools=tools)


async def by_responses(session: dict[str, str], http: httpx.AsyncClient, stream: bool) -> None:
    client = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key=session["api_key"], http_client=http)
    tools: Any = [{"type": "function", "name": "zoom", "parameters": TOOL_SCHEMA, "strict": False}]
    items: list[Any] = [
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "look"},
                {"type": "input_image", "image_url": data_url(ONE), "detail": "auto"},
            ],
        }
    ]
    if stream:
        async with client.responses.stream(model="m", input=items, tools=tools) as events:
            answer = await events.get_final_response()
    else:
        answer = await client.responses.create(model="m", input=items, tools=tools)
    call = answer.output[0]
    assert call.type == "function_call"
    result = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": [
            {"type": "input_text", "text": "nearer"},
            {"type": "input_image", "image_url": data_url(TWO, "image/jpeg"), "detail": "low"},
        ],
    }
    # By id: the images of the first turn come from the record.
    await client.responses.create(model="m", previous_response_id=answer.id, input=[result], tools=tools)  # type: ignore[list-item]


async def by_anthropic(session: dict[str, str], http: httpx.AsyncClient, stream: bool) -> None:
    inner = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=http._transport.app))  # type: ignore[attr-defined]
    client = anthropic.AsyncAnthropic(base_url="http://localhost", api_key=session["api_key"], http_client=inner)

    def block(data: bytes, media_type: str) -> Any:
        source = {"type": "base64", "media_type": media_type, "data": base64.b64encode(data).decode()}
        return {"type": "image", "source": source, "cache_control": {"type": "ephemeral"}}

    tools: Any = [{"name": "zoom", "input_schema": TOOL_SCHEMA}]
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "look"}, block(ONE, "image/png")]}]
    if stream:
        async with client.messages.stream(model="m", max_tokens=99, messages=messages, tools=tools) as events:
            answer = await events.get_final_message()
    else:
        answer = await client.messages.create(model="m", max_tokens=99, messages=messages, tools=tools)
    (call,) = answer.content
    assert call.type == "tool_use"
    content = [{"type": "text", "text": "nearer"}, block(TWO, "image/jpeg")]
    messages += [
        {"role": "assistant", "content": [{"type": "tool_use", "id": call.id, "name": call.name, "input": call.input}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": content}]},
    ]
    await client.messages.create(model="m", max_tokens=99, messages=messages, tools=tools)
    counted = await client.messages.count_tokens(model="m", messages=messages, tools=tools)
    assert counted.input_tokens > count_tokens(56, 28) + count_tokens(28, 84)
    await client.close()


async def by_google(session: dict[str, str], http: httpx.AsyncClient, stream: bool) -> None:
    options = types.HttpOptions(base_url="http://localhost", httpx_async_client=http)
    client = genai.Client(api_key=session["api_key"], http_options=options).aio
    declared = types.FunctionDeclaration(name="zoom", parameters_json_schema=TOOL_SCHEMA)
    automatic = types.AutomaticFunctionCallingConfig(disable=True)
    config = types.GenerateContentConfig(
        tools=[types.Tool(function_declarations=[declared])], automatic_function_calling=automatic
    )
    shown = types.Part(inline_data=types.Blob(mime_type="image/png", data=ONE))
    contents: list[Any] = [types.Content(role="user", parts=[types.Part(text="look"), shown])]
    if stream:
        chunks = [
            each
            async for each in await client.models.generate_content_stream(model="m", contents=contents, config=config)
        ]
        said = next(each.candidates[0].content for each in chunks if each.function_calls)  # type: ignore[index]
    else:
        answer = await client.models.generate_content(model="m", contents=contents, config=config)
        said = answer.candidates[0].content  # type: ignore[index]
    blob = types.FunctionResponseBlob(mime_type="image/jpeg", data=TWO, display_name="near.jpg")
    result = types.FunctionResponse(
        id=said.parts[0].function_call.id,  # type: ignore[index,union-attr]
        name="zoom",
        response={"output": "nearer"},
        parts=[types.FunctionResponsePart(inline_data=blob)],
    )
    contents += [said, types.Content(role="user", parts=[types.Part(function_response=result)])]
    await client.models.generate_content(model="m", contents=contents, config=config)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("send", [by_chat, by_responses, by_anthropic, by_google])
async def test_both_images_reach_the_engine_and_the_record(send: Any, stream: bool) -> None:
    engine = Eyes(CALL)
    app = seeing_gateway(engine)
    session = await new_session(app)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app)) as http:  # type: ignore[arg-type]
        await send(session, http, stream)
    (first_ids, first), (ids, images) = engine.seen
    assert [image.data for image in first] == [ONE] and [image.data for image in images] == [ONE, TWO]
    assert [image.media_type for image in images] == ["image/png", "image/jpeg"]
    assert ids[: len(first_ids)] == first_ids
    for image, size in zip(images, ((56, 28), (28, 84)), strict=True):
        run = image.run
        assert run.count == count_tokens(*size) and run.grid == (1, size[1], size[0])
        assert list(ids[run.start : run.start + run.count]) == [PAD] * run.count
        assert PAD not in (ids[run.start - 1], ids[run.start + run.count])
    after = bytes(token for token in ids[len(first_ids) :] if token < 256).decode()
    assert "nearer" in after
    status, body = await ask(app, "GET", f"/sessions/{session['session_id']}/samples")
    (sample,) = json.loads(body)["samples"]
    assert status == 200 and [image["sha256"] for image in sample["images"]] == [NAME_1, NAME_2]
    for image in sample["images"]:
        assert image.keys() == {"sha256", "start", "count", "grid", "processor"}
        assert sample["token_ids"][image["start"] : image["start"] + image["count"]] == [PAD] * image["count"]
    for name, data in ((NAME_1, ONE), (NAME_2, TWO)):
        path = f"/sessions/{session['session_id']}/images/{name}"
        for key in ("boss", session["api_key"]):
            assert await ask(app, "GET", path, key=key) == (200, data)
        other = await new_session(app)
        assert (await ask(app, "GET", path, key=other["api_key"]))[0] == 403
        assert (await ask(app, "GET", path, key=None))[0] == 401
        forged = f"tt-{session['session_id']}-{'0' * 40}"
        assert (await ask(app, "GET", path, key=forged))[0] == 401
        assert (await ask(app, "GET", f"/sessions/{other['session_id']}/images/{name}"))[0] == 404
    await app.close()
