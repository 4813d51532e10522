"""A streamed answer, put together by the vendors' own SDKs, is the object that an unstreamed request gets: several
different tools in one turn, functions beside custom tools, a turn that is cut off, one with nothing in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.gateway.world import Made, Server, call, scripted_server

PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
FUNCTIONS = {
    name: {"name": name, "description": f"{name}.", "parameters": PARAMETERS}
    for name in ("read_file", "delete_file", "list_dir")
}
PATCH = call("patch", '{"input": "*** Begin\\n+é \\"x\\" \\ud83e\\uddea"}')
CASES: dict[str, tuple[str, int]] = {  # what is sampled, and after how many tokens it is cut
    "two_tools": (call("read_file", '{"path": "a.txt"}') + "\n" + call("delete_file", '{"path": "b.txt"}'), 999),
    "everything": (
        "<think>\nRead, then list.\n</think>\n\nBoth at once.\n"
        + "\n".join(
            call(name, f'{{"path": "{n} café"}}')
            for n, name in enumerate(("read_file", "list_dir", "read_file", "delete_file"))
        ),
        999,
    ),
    "no_arguments": (call("list_dir", "{}") + "\n" + call("read_file", '{"path": ""}'), 999),
    "text": ("<think>\nhm\n</think>\n\nIt is *4*.", 999),
    "cut_in_text": ("<think>\nhm\n</think>\n\n" + "word " * 30, 20),
    "cut_in_reasoning": ("<think>\n" + "word " * 30, 12),
    "nothing": ("", 999),
}
CUSTOM_CASES: dict[str, tuple[str, int]] = {
    "function_then_custom": (
        call("read_file", '{"path": "a.txt"}') + "\n" + PATCH + "\n" + call("delete_file", '{"path": "b"}'),
        999,
    ),
    "custom_then_function": (PATCH + "\n" + call("delete_file", '{"path": "b.txt"}'), 999),
    "custom_of_another_shape": (call("patch", '{"at": "x"}') + "\n" + call("patch", '{"input": "a", "and": "b"}'), 999),
}
EVERY = {**CASES, **CUSTOM_CASES}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Each test asks twice, whole and streamed, and the engine samples the same for both: a gateway per case would take
    too long."""
    turns = [text for text, _ in EVERY.values()]
    server = scripted_server(tmp_path_factory.mktemp("equal"), turns, "--set", "engine.options.loop=true")
    yield server
    assert server.stop() == 0
    assert "Traceback" not in server.log.read_text()


def plain(value: Any, node: str) -> Any:
    """Without what differs between two requests (ids, times) and what only the SDKs add."""
    if isinstance(value, dict):
        dropped = {
            "created",
            "created_at",
            "parsed",
            "parsed_arguments",
            "parsed_output",
            "encrypted_content",
            "signature",
        }
        return {name: plain(item, node) for name, item in value.items() if name not in dropped and item is not None}
    if isinstance(value, list):
        return [plain(item, node) for item in value]
    return value.replace(node, "NODE").replace(node[:20], "NODE") if isinstance(value, str) else value


def skip_to(server: Server, session: Made, case: str) -> None:
    """The script goes in circles: the answers before this case's are asked for and thrown away."""
    wanted = json.dumps(EVERY[case][0])
    while True:
        _, ready = server.ask("GET", "/ready")
        left = ready["engine"]["left"] or len(EVERY)
        upcoming = list(EVERY.values())[len(EVERY) - left]
        if json.dumps(upcoming[0]) == wanted:
            return
        server.ask(
            "POST",
            "/v1/chat/completions",
            {"model": "m", "messages": [{"role": "user", "content": "skip"}]},
            key=session.api_key,
        )


@pytest.mark.parametrize("case", CASES)
def test_chat(server: Server, case: str) -> None:
    from openai import OpenAI
    from openai.lib.streaming.chat._completions import ChatCompletionStreamState

    session, side = server.session(), server.session()
    tools: Any = [{"type": "function", "function": function} for function in FUNCTIONS.values()]
    settings: Any = {
        "model": "m",
        "messages": [{"role": "user", "content": "go"}],
        "tools": tools,
        "max_tokens": CASES[case][1],
    }
    settings |= {"logprobs": True, "extra_body": {"return_token_ids": True}}
    with OpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        skip_to(server, side, case)
        whole = client.chat.completions.create(**settings)
        skip_to(server, side, case)
        state, token_ids = ChatCompletionStreamState(), None
        for chunk in client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True}):
            state.handle_chunk(chunk)
            token_ids = token_ids or next((getattr(choice, "token_ids", None) for choice in chunk.choices), None)
    streamed = state.current_completion_snapshot
    nodes = [one.id.removeprefix("chatcmpl-") for one in (whole, streamed)]
    wanted, got = (plain(one.model_dump(), node) for one, node in zip((whole, streamed), nodes, strict=True))
    assert got.pop("object") and wanted.pop("object")
    assert wanted["choices"][0].pop("token_ids") == token_ids  # a field of ours, which the SDK does not add up
    assert wanted.pop("prompt_token_ids"), "of whole answers alone"
    for choice in got["choices"]:
        for made in choice["message"].get("tool_calls", []):
            made.pop("index", None)  # of the delta
    assert got == wanted


@pytest.mark.parametrize("case", EVERY)
def test_responses(server: Server, case: str) -> None:
    from openai import OpenAI

    session, side = server.session(), server.session()
    tools: Any = [{"type": "function", **function} for function in FUNCTIONS.values()] + [
        {"type": "custom", "name": "patch"}
    ]
    settings: Any = {"model": "m", "input": "go", "tools": tools, "max_output_tokens": EVERY[case][1]}
    with OpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        skip_to(server, side, case)
        whole = client.responses.create(**settings)
        skip_to(server, side, case)
        events = list(client.responses.create(**settings, stream=True))
    final = events[-1].response
    nodes = [one.id.removeprefix("resp_") for one in (whole, final)]
    wanted, got = (plain(one.model_dump(), node) for one, node in zip((whole, final), nodes, strict=True))
    assert got == wanted
    done = [plain(event.item.model_dump(), nodes[1]) for event in events if event.type == "response.output_item.done"]
    assert done == wanted["output"]
    assert pieces(events) == {index: text_of(item) for index, item in enumerate(wanted["output"])}
    assert [event.sequence_number for event in events] == list(range(len(events)))


def text_of(item: dict[str, Any]) -> str:
    return item.get("arguments", item.get("input", "")) if "call_id" in item else item["content"][0]["text"]


def pieces(events: list[Any]) -> dict[int, str]:
    """What the deltas of each item add up to."""
    out = {event.output_index: "" for event in events if event.type == "response.output_item.added"}
    for event in events:
        if event.type.endswith(".delta"):
            out[event.output_index] += event.delta
    return out


@pytest.mark.parametrize("case", CASES)
def test_messages(server: Server, case: str) -> None:
    from anthropic import Anthropic

    session, side = server.session(), server.session()
    tools: Any = [{"name": name, "description": "d", "input_schema": PARAMETERS} for name in FUNCTIONS]
    settings: Any = {
        "model": "m",
        "messages": [{"role": "user", "content": "go"}],
        "tools": tools,
        "max_tokens": CASES[case][1],
    }
    with Anthropic(base_url=session.anthropic_base_url, api_key=session.api_key) as client:
        skip_to(server, side, case)
        whole = client.messages.create(**settings)
        skip_to(server, side, case)
        with client.messages.stream(**settings) as stream:
            final = stream.get_final_message()
    nodes = [one.id.removeprefix("msg_") for one in (whole, final)]
    wanted, got = (plain(one.model_dump(), node) for one, node in zip((whole, final), nodes, strict=True))
    assert got == wanted
    for whole_block, final_block in zip(whole.content, final.content, strict=True):
        assert getattr(whole_block, "signature", None) == getattr(final_block, "signature", None)


def test_responses_with_logprobs(server: Server) -> None:
    from openai import OpenAI

    session, side = server.session(), server.session()
    settings: Any = {"model": "m", "input": "go", "include": ["message.output_text.logprobs"]}
    settings["tools"] = [{"type": "function", **function} for function in FUNCTIONS.values()]
    with OpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        skip_to(server, side, "everything")
        whole = client.responses.create(**settings)
        skip_to(server, side, "everything")
        events = list(client.responses.create(**settings, stream=True))
    final = events[-1].response
    wanted, got = (plain(one.model_dump(), one.id.removeprefix("resp_")) for one in (whole, final))
    assert got == wanted and len(wanted["output"][1]["content"][0]["logprobs"]) > 10
    done = {
        event.output_index: event.item.model_dump() for event in events if event.type == "response.output_item.done"
    }
    assert [done[index] for index in sorted(done)] == [item.model_dump() for item in final.output]
