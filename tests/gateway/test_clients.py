"""Real clients against a real server process: ten turns with tools each, streamed and not; every sampled token comes
back, bit for bit.

Each test is also the how-to for its client.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.gateway.world import TOOLS, Server, check_recorded, result_of, scripted_server, ten_turns

QUESTION = "Look around and tell me what x is."
SYSTEM = "You are careful."
STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The script starts again after its ten turns: one server serves all clients, one after the other."""
    server = scripted_server(tmp_path_factory.mktemp("clients"), ten_turns(), "--set", "engine.options.loop=true")
    yield server
    assert server.stop() == 0
    assert "Traceback" not in server.log.read_text()


def check(server: Server, session_id: str, *, fast: bool = True) -> None:
    check_recorded(server, session_id, ten_turns())
    _, shown = server.ask("GET", f"/sessions/{session_id}")
    assert [node["why"] for node in shown["nodes"]] == ["first", *[None] * 9], [node["why"] for node in shown["nodes"]]


@STREAMED
def test_openai_chat(server: Server, streamed: bool) -> None:
    from openai import OpenAI

    session = server.session()
    with OpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
        turns = 0
        while True:
            turns += 1
            message = _chat_turn(client, messages, streamed)
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                break
            for made in message.tool_calls:
                said = result_of(made.function.name, json.loads(made.function.arguments))
                messages.append({"role": "tool", "tool_call_id": made.id, "content": said})
    assert turns == 10
    assert message.content == "Done: it is *4*.\n\n```py\nx = 4\n```"
    check(server, session.session_id)


def _chat_turn(client: Any, messages: list[Any], streamed: bool) -> Any:
    if not streamed:
        return client.chat.completions.create(model="m", messages=messages, tools=TOOLS).choices[0].message
    with client.chat.completions.stream(model="m", messages=messages, tools=TOOLS) as stream:
        pieces = sum(1 for event in stream if event.type == "chunk")
        assert pieces > 3  # tokens flow; it is not one big chunk
        return stream.get_final_completion().choices[0].message


@STREAMED
@pytest.mark.parametrize("stored", [False, True], ids=["items", "previous_response_id"])
def test_openai_responses(server: Server, streamed: bool, stored: bool) -> None:
    from openai import OpenAI

    session = server.session()
    tools: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
    conversation: list[Any] = [{"role": "user", "content": QUESTION}]
    previous, turns = None, 0
    with OpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        while True:
            turns += 1
            settings: dict[str, Any] = {
                "model": "m",
                "instructions": SYSTEM,
                "tools": tools,
                "input": conversation,
                "store": stored,
            }
            if previous is not None:
                settings["previous_response_id"] = previous
            response = _responses_turn(client, settings, streamed)
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                break
            results = [_call_output(item) for item in calls]
            if stored:
                previous, conversation = response.id, results
            else:
                conversation = [
                    *conversation,
                    *[item.model_dump(exclude_none=True) for item in response.output],
                    *results,
                ]
    assert turns == 10
    assert response.output_text == "Done: it is *4*.\n\n```py\nx = 4\n```"
    check(server, session.session_id)


def _call_output(item: Any) -> dict[str, Any]:
    return {
        "type": "function_call_output",
        "call_id": item.call_id,
        "output": result_of(item.name, json.loads(item.arguments)),
    }


def _responses_turn(client: Any, settings: dict[str, Any], streamed: bool) -> Any:
    if not streamed:
        return client.responses.create(**settings)
    with client.responses.stream(**settings) as stream:
        assert sum(1 for _ in stream) > 3
        return stream.get_final_response()


@STREAMED
def test_anthropic(server: Server, streamed: bool) -> None:
    from anthropic import Anthropic

    session = server.session()
    tools: Any = [
        {
            "name": t["function"]["name"],
            "description": t["function"]["description"],
            "input_schema": t["function"]["parameters"],
        }
        for t in TOOLS
    ]
    system = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    turns = 0
    with Anthropic(base_url=session.anthropic_base_url, api_key=session.api_key) as client:
        assert client.messages.count_tokens(model="m", messages=messages, tools=tools, system=SYSTEM).input_tokens > 100
        while True:
            turns += 1
            settings: dict[str, Any] = {
                "model": "m",
                "max_tokens": 4096,
                "system": system,
                "tools": tools,
                "messages": messages,
            }
            message = _anthropic_turn(client, settings, streamed)
            messages.append(
                {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in message.content]}
            )
            if message.stop_reason != "tool_use":
                break
            uses = [block for block in message.content if block.type == "tool_use"]
            results = [
                {"type": "tool_result", "tool_use_id": b.id, "content": result_of(b.name, b.input)} for b in uses
            ]
            messages.append({"role": "user", "content": results})
    assert (turns, message.stop_reason) == (10, "end_turn")
    assert [block.type for block in message.content] == ["thinking", "text"]
    check(server, session.session_id)


def _anthropic_turn(client: Any, settings: dict[str, Any], streamed: bool) -> Any:
    if not streamed:
        return client.messages.create(**settings)
    with client.messages.stream(**settings) as stream:
        assert sum(1 for _ in stream) > 3
        return stream.get_final_message()


GOOGLE_TOOLS = [
    {
        "name": t["function"]["name"],
        "description": t["function"]["description"],
        "parameters_json_schema": t["function"]["parameters"],
    }
    for t in TOOLS
]


@STREAMED
@pytest.mark.parametrize("thoughts", [False, True], ids=["thoughts-hidden", "thoughts-shown"])
def test_google(server: Server, streamed: bool, thoughts: bool) -> None:
    """`client.chats` keeps every chunk as a content of its own; results go back without ids."""
    from google import genai
    from google.genai import types

    session = server.session()
    client = genai.Client(api_key=session.api_key, http_options=types.HttpOptions(base_url=session.google_base_url))
    assert (client.models.count_tokens(model="m", contents=QUESTION).total_tokens or 0) > 5
    config = types.GenerateContentConfig(
        system_instruction=SYSTEM,
        tools=[types.Tool(function_declarations=[types.FunctionDeclaration(**tool) for tool in GOOGLE_TOOLS])],
        automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
        thinking_config=types.ThinkingConfig(include_thoughts=thoughts),
    )
    chat = client.chats.create(model="m", config=config)
    said: Any = QUESTION
    turns = shown = 0
    while True:
        turns += 1
        chunks = list(chat.send_message_stream(said)) if streamed else [chat.send_message(said)]
        parts = [part for chunk in chunks for part in chunk.candidates[0].content.parts]
        shown += any(part.thought for part in parts)
        calls = [part.function_call for part in parts if part.function_call]
        if not calls:
            break
        said = [
            types.Part.from_function_response(name=c.name, response={"output": result_of(c.name, c.args)})
            for c in calls
        ]
    client.close()
    assert (turns, chunks[-1].candidates[0].finish_reason) == (10, types.FinishReason.STOP)
    assert "".join(part.text or "" for part in parts if not part.thought) == "Done: it is *4*.\n\n```py\nx = 4\n```"
    assert (shown > 3) is thoughts
    check(server, session.session_id)


@pytest.fixture
def a_loop_to_find() -> Iterator[None]:
    """litellm's synchronous calls take the thread's event loop, and make one that nobody closes where there is none."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    asyncio.set_event_loop(None)
    loop.close()


@STREAMED
@pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::ResourceWarning"
)  # its own, at import and in use
def test_litellm(server: Server, streamed: bool, monkeypatch: pytest.MonkeyPatch, a_loop_to_find: None) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    session = server.session()
    where = {"model": "openai/m", "api_base": session.base_url, "api_key": session.api_key}
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    turns = 0
    while True:
        turns += 1
        answer = litellm.completion(**where, messages=messages, tools=TOOLS, stream=streamed)
        if streamed:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        message = answer.choices[0].message
        messages.append(message.model_dump())
        if not message.tool_calls:
            break
        for made in message.tool_calls:
            said = result_of(made.function.name, json.loads(made.function.arguments))
            messages.append({"role": "tool", "tool_call_id": made.id, "name": made.function.name, "content": said})
    assert turns == 10
    check(server, session.session_id)


@STREAMED
@pytest.mark.parametrize("api", [pytest.param("chat", marks=pytest.mark.slow), "responses"])
def test_openai_agents(server: Server, streamed: bool, api: str) -> None:
    agents = pytest.importorskip("agents")
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)

    async def tool(context: Any, arguments: str) -> str:
        return result_of(context.tool_name, json.loads(arguments or "{}"))

    def function_tool(spec: dict[str, Any]) -> Any:
        return agents.FunctionTool(
            name=spec["name"],
            description=spec["description"],
            params_json_schema=spec["parameters"],
            on_invoke_tool=tool,
            strict_json_schema=False,
        )

    async def play() -> str:
        session = server.session()
        async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
            kind = agents.OpenAIChatCompletionsModel if api == "chat" else agents.OpenAIResponsesModel
            agent = agents.Agent(
                name="careful",
                instructions=SYSTEM,
                model=kind(model="m", openai_client=client),
                tools=[function_tool(spec["function"]) for spec in TOOLS],
            )
            if not streamed:
                result = await agents.Runner.run(agent, QUESTION, max_turns=12)
            else:
                result = agents.Runner.run_streamed(agent, QUESTION, max_turns=12)
                async for _ in result.stream_events():
                    pass
        assert result.final_output == "Done: it is *4*.\n\n```py\nx = 4\n```"
        return session.session_id

    check(server, asyncio.run(play()))
