"""Calls are streamed as they are sampled, in every dialect, and what was streamed is what is recorded, also of a call
that breaks off."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gateway.inside import Parrot, ask, gateway, new_session
from tests.gateway.test_wire import models, parsed, strict
from tests.gateway.world import PARAMETERS, TOOLS, call, renderer
from tokentrue.gateway import Gateway
from tokentrue.types import Finish

ARGUMENTS = '{"depth":3,   "at": "café \\u00e9 <b> 🧪 and further on"}'
WHOLE = f"<think>\nhm\n</think>\n\nLook.\n{call('look', ARGUMENTS)}\n{call('wait', '{}')}"
MALFORMED = call("look", '{"at": "shelf", "depth": three}')
UNCLOSED = f"Look.\n{call('look', ARGUMENTS)}".removesuffix("}\n</tool_call>")[:-9]
PATHS = {"openai_chat": "/v1/chat/completions", "openai_responses": "/v1/responses", "anthropic": "/v1/messages"}


def body(name: str, history: list[Any], *, stream: bool = True) -> dict[str, Any]:
    if name == "openai_chat":
        return {"model": "m", "messages": history, "tools": TOOLS, "stream": stream}
    if name == "openai_responses":
        return {
            "model": "m",
            "input": history,
            "tools": [{"type": "function", **tool["function"]} for tool in TOOLS],
            "stream": stream,
        }
    tools = [{"name": "look", "input_schema": PARAMETERS}, {"name": "wait", "input_schema": {"type": "object"}}]
    return {"model": "m", "max_tokens": 500, "messages": history, "tools": tools, "stream": stream}


def saying(text: str, *, cut: bool = False) -> Gateway:
    parrot = Parrot(text)
    if cut:
        parrot.ids = parrot.ids[:-1]
        parrot.finish = Finish.LENGTH
    return gateway(parrot)


def pieces(name: str, events: list[tuple[str, Any]]) -> list[str]:
    """Every piece of arguments, in order."""
    if name == "openai_chat":
        deltas = [data["choices"][0]["delta"] for _, data in events if data != "[DONE]" and data["choices"]]
        return [piece["function"]["arguments"] for delta in deltas for piece in delta.get("tool_calls", [])]
    if name == "openai_responses":
        return [data["delta"] for kind, data in events if kind == "response.function_call_arguments.delta"]
    deltas = [data["delta"] for kind, data in events if kind == "content_block_delta"]
    return [delta["partial_json"] for delta in deltas if delta["type"] == "input_json_delta"]


async def turn(app: Gateway, session: dict[str, str], name: str, history: list[Any], *, stream: bool = True) -> Any:
    status, answer = await ask(
        app, "POST", PATHS[name], json.dumps(body(name, history, stream=stream)).encode(), key=session["api_key"]
    )
    assert status == 200, answer
    return list(parsed(answer)) if stream else json.loads(answer)


def served(app: Gateway, session: dict[str, str]) -> Any:
    known = app.services.sessions.get_loaded(session["session_id"])
    assert known is not None
    return known.session.tree.in_order()[-1]


def opening(name: str) -> list[Any]:
    return [{"role": "user", "content": "Look."}]


@pytest.mark.parametrize("name", PATHS)
async def test_arguments_flow_as_they_are_sampled(name: str) -> None:
    app = saying(WHOLE)
    session = await new_session(app)
    events = await turn(app, session, name, opening(name))
    for kind, data in events:
        if data != "[DONE]" and kind != "ping":
            strict(models(name)[1], data)
    found = [piece for piece in pieces(name, events) if piece]
    tokens = len(renderer().encode_sampled(ARGUMENTS))
    assert name == "anthropic" or len(found) >= tokens - 6, f"{len(found)} pieces of {tokens} tokens"
    assert "".join(found) == ARGUMENTS + "{}"
    recorded = served(app, session)
    assert [made["function"]["arguments"] for made in recorded.served["tool_calls"]] == [ARGUMENTS, "{}"]
    plain = await turn(app, await new_session(app), name, opening(name), stream=False)
    assert said(name, plain) == said(name, as_answer(name, events))
    await app.close()


def as_answer(name: str, events: list[tuple[str, Any]]) -> Any:
    """What the vendor's SDK makes of the stream."""
    if name == "openai_chat":
        from openai.lib.streaming.chat._completions import ChatCompletionStreamState
        from openai.types.chat import ChatCompletionChunk

        state = ChatCompletionStreamState()
        for _, data in events:
            if data != "[DONE]":
                state.handle_chunk(ChatCompletionChunk.model_validate(data))
        return json.loads(state.current_completion_snapshot.model_dump_json())
    if name == "openai_responses":
        return events[-1][1]["response"]
    from anthropic.lib.streaming._messages import accumulate_event
    from anthropic.types import RawMessageStreamEvent
    from pydantic import TypeAdapter

    adapter, snapshot, buffers = TypeAdapter(RawMessageStreamEvent), None, {}
    for kind, data in events:
        if kind != "ping":
            snapshot = accumulate_event(
                event=adapter.validate_python(data), current_snapshot=snapshot, json_bufs=buffers
            )
    assert snapshot is not None
    return json.loads(snapshot.model_dump_json())


def said(name: str, answer: Any) -> Any:
    """Text and calls."""
    if name == "openai_chat":
        message = answer["choices"][0]["message"]
        calls = [(made["function"]["name"], made["function"]["arguments"]) for made in message.get("tool_calls") or []]
        return message["content"], message.get("reasoning_content"), calls
    if name == "openai_responses":
        items = answer["output"]
        calls = [(item["name"], item["arguments"]) for item in items if item["type"] == "function_call"]
        return [item["content"][0]["text"] for item in items if item["type"] != "function_call"], calls
    blocks = answer["content"]
    calls = [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
    return [block.get("text") or block["thinking"] for block in blocks if block["type"] != "tool_use"], calls


BREAKS = {"malformed": (MALFORMED, False, '{"at": "shelf", "depth": t'), "unclosed": (UNCLOSED, True, None)}


@pytest.mark.parametrize("kind", BREAKS)
@pytest.mark.parametrize("name", PATHS)
async def test_a_call_that_breaks_off(name: str, kind: str) -> None:
    """The client holds a call that is no JSON; the record says why; the conversation goes on from it, fully trained."""
    text, cut, shown = BREAKS[kind]
    app = saying(text, cut=cut)
    session = await new_session(app)
    events = await turn(app, session, name, opening(name))
    for event, data in events:
        if data != "[DONE]" and event != "ping":
            strict(models(name)[1], data)
    node = served(app, session)
    arguments = node.served["tool_calls"][0]["function"]["arguments"]
    sent = "".join(pieces(name, events))
    assert arguments == (json.loads(sent)["_raw_arguments"] if name == "anthropic" else sent) and (
        shown is None or arguments == shown
    )
    with pytest.raises(ValueError):
        json.loads(arguments)
    before = text.partition("<tool_call>")[0].strip()  # the call's own text is not shown a second time
    assert (node.served["content"] or "") == before and [a.status for a in node.attempts] == [
        "unclosed" if cut else "invalid_json"
    ]
    answer = as_answer(name, events)  # the SDKs must not fall over it
    new = {"role": "user", "content": "Again."}
    if name == "openai_chat":
        message = answer["choices"][0]["message"]
        assert (message["content"] or "") == before and answer["choices"][0]["finish_reason"] == (
            "length" if cut else "tool_calls"
        )
        history = [*opening(name), {k: v for k, v in message.items() if v is not None}, result(name, node), new]
    elif name == "openai_responses":
        history = [*opening(name), *answer["output"], result(name, node), new]
    else:
        history = [*opening(name), {"role": "assistant", "content": answer["content"]}, result(name, node), new]
    await turn(app, session, name, history)
    known = app.services.sessions.get_loaded(session["session_id"])
    assert known is not None and known.coverage().ratio == 1.0
    later = served(app, session)
    assert later.parent == node.id, (later.edge_reason, later.detail)
    await app.close()


def result(name: str, node: Any) -> dict[str, Any]:
    call_id = node.served["tool_calls"][0]["id"]
    if name == "openai_chat":
        return {"role": "tool", "tool_call_id": call_id, "content": "bad arguments"}
    if name == "openai_responses":
        return {"type": "function_call_output", "call_id": call_id, "output": "bad arguments"}
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call_id, "content": "bad arguments"}]}


async def test_unstreamed_the_text_of_a_broken_call_is_all_there_is() -> None:
    app = saying(MALFORMED)
    session = await new_session(app)
    answer = await turn(app, session, "openai_chat", opening("openai_chat"), stream=False)
    message = answer["choices"][0]["message"]
    assert (
        message["content"] == MALFORMED
        and "tool_calls" not in message
        and answer["choices"][0]["finish_reason"] == "stop"
    )
    await app.close()


async def test_a_retry_of_a_broken_stream_gets_the_recorded_answer() -> None:
    app = saying(MALFORMED)
    session = await new_session(app)
    raw = json.dumps(body("openai_chat", opening("openai_chat"))).encode()
    answers = [
        await ask(app, "POST", PATHS["openai_chat"], raw, key=session["api_key"], idempotency_key="k") for _ in range(2)
    ]
    first, second = (as_answer("openai_chat", list(parsed(answer))) for _, answer in answers)
    assert first["choices"][0]["message"] == second["choices"][0]["message"]
    await app.close()


async def test_a_repeated_stream_has_reasoning_and_text_in_chunks_of_their_own() -> None:
    """As the first stream: clients look for one or the other in a chunk."""
    app = gateway()
    session = await new_session(app)
    sent = json.dumps(body("openai_chat", [{"role": "user", "content": "go"}])).encode()
    for _ in range(2):
        _, answer = await ask(app, "POST", PATHS["openai_chat"], sent, key=session["api_key"], idempotency_key="k")
        chunks = [json.loads(line[6:]) for line in answer.split(b"\n") if line.startswith(b"data: {")]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "hm"
        assert "".join(delta.get("content") or "" for delta in deltas) == "ok"
        assert not [delta for delta in deltas if delta.get("reasoning_content") and delta.get("content")]


async def test_a_repeated_stream_has_its_log_probabilities() -> None:
    app = gateway()
    session = await new_session(app)
    asked = {**body("openai_chat", [{"role": "user", "content": "go"}]), "logprobs": True}
    sent, heard = json.dumps(asked).encode(), list[Any]()
    for _ in range(2):
        _, answer = await ask(app, "POST", PATHS["openai_chat"], sent, key=session["api_key"], idempotency_key="k")
        chunks = [json.loads(line[6:]) for line in answer.split(b"\n") if line.startswith(b"data: {")]
        choices = [chunk["choices"][0] for chunk in chunks]
        heard.append([token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["content"]])
    assert heard[0] == heard[1] and len(heard[0]) == len(Parrot().ids)
