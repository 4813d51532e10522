"""Wire fidelity: every answer and every event is valid for the vendors' own typed models, strictly and without a field
they do not know (but ours, listed here); the order of events is pinned by golden transcripts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter

from tokentrue.gateway.dialects.anthropic import Anthropic
from tokentrue.gateway.dialects.base import Dialect, HttpError, RequestHead
from tokentrue.gateway.dialects.openai_chat import OpenAIChat
from tokentrue.gateway.dialects.openai_responses import OpenAIResponses
from tokentrue.gateway.dialects.signing import ReasoningSigner
from tokentrue.types import Completion, Delta, Finish, Parsed, Reply, TurnEvent

GOLDEN = Path(__file__).parent / "golden"
SEAL = ReasoningSigner(b"fixed")
DIALECTS: dict[str, Dialect] = {
    "openai_chat": OpenAIChat(ReasoningSigner(b"secret")),
    "openai_responses": OpenAIResponses(SEAL),
    "anthropic": Anthropic(SEAL),
}
OURS = {"reasoning_content"}  # what open-weight servers add to Chat Completions
TOOL = {"name": "look", "description": "", "parameters": {"type": "object", "properties": {}}}
HEADS: dict[str, dict[str, Any]] = {
    "openai_chat": {
        "model": "m",
        "tools": [{"type": "function", "function": TOOL}],
        "stream_options": {"include_usage": True},
    },
    "openai_responses": {
        "model": "m",
        "tools": [{"type": "function", **TOOL, "strict": False}, {"type": "custom", "name": "patch"}],
    },
    "anthropic": {"model": "m", "max_tokens": 100, "tools": [{"name": "look", "input_schema": {"type": "object"}}]},
}


def reply(message: dict[str, Any], finish: Finish = Finish.STOP, stopped_by: Any = None) -> Reply:
    completion = Completion(token_ids=(5, 6, 7), logprobs=(-0.5, -0.25, -1.0), finish=finish, stopped_by=stopped_by)
    whole = {"role": "assistant", **message}
    return Reply(
        node="n0",
        message=whole,
        parsed=Parsed(message=whole),
        completion=completion,
        prompt_tokens=11,
        given_tokens=11,
        projection="root",
    )


def made(name: str, arguments: str, index: int) -> dict[str, Any]:
    return {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}


CASES: dict[str, tuple[list[Delta], Reply]] = {
    "text": ([Delta(content="It is"), Delta(content=" 4.")], reply({"content": "It is 4."})),
    "thinking_and_two_calls": (
        [
            Delta(reasoning="let me"),
            Delta(reasoning=" look"),
            Delta(content="Both."),
            Delta(call=0, call_id="call_0", name="look"),
            Delta(call=0, arguments='{"at":'),
            Delta(call=0, arguments=' "é"}'),
            Delta(call=1, call_id="call_1", name="look", arguments="{}"),
        ],
        reply(
            {
                "content": "Both.",
                "reasoning_content": "let me look",
                "tool_calls": [made("look", '{"at": "é"}', 0), made("look", "{}", 1)],
            }
        ),
    ),
    "cut_off": (
        [Delta(reasoning="half a th")],
        reply({"content": None, "reasoning_content": "half a th"}, Finish.LENGTH),
    ),
    "nothing": ([], reply({"content": ""})),
    "custom_tool": (
        [
            Delta(call=0, call_id="call_0", name="patch"),
            Delta(call=0, arguments='{"inp'),
            Delta(call=0, arguments='ut": "a\\'),
            Delta(call=0, arguments="nb \\ud83e"),
            Delta(call=0, arguments='\\uddea c"'),
            Delta(call=0, arguments="}"),
        ],
        reply({"content": None, "tool_calls": [made("patch", '{"input": "a\\nb \\ud83e\\uddea c"}', 0)]}),
    ),
    "call_that_breaks_off": (
        [
            Delta(content="Look."),
            Delta(call=0, call_id="call_0", name="look"),
            Delta(call=0, arguments='{"at": '),
            Delta(content=' <call>{"at": here}'),
        ],
        reply({"content": 'Look. <call>{"at": here}', "tool_calls": [made("look", '{"at": ', 0)]}),
    ),
}


def text_of(ids: Any) -> str:
    return "".join(chr(97 + i) for i in ids)


def head_of(name: str, **more: Any) -> RequestHead:
    body = {**HEADS[name], **more, DIALECTS[name].items_key: [{"role": "user", "content": "hi"}]}
    return DIALECTS[name].decode(json.dumps(body).encode()).head


def events_of(name: str, case: str) -> list[tuple[str, Any]]:
    deltas, done = CASES[case]
    encoder = DIALECTS[name].encoder(DIALECTS[name], head_of(name, stream=True), text_of)
    stream = encoder.feed(TurnEvent(node_id="n0"))
    for delta in deltas:
        stream += encoder.feed(TurnEvent(node_id="n0", delta=delta, token_ids=(5,), logprobs=(-0.5,)))
    stream += encoder.feed(TurnEvent(node_id="n0", reply=done)) + encoder.finish()
    return list(parsed(stream))


def parsed(stream: bytes) -> Iterator[tuple[str, Any]]:
    for block in stream.decode().strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        data = fields["data"]
        yield fields.get("event", ""), data if data == "[DONE]" else json.loads(data)


def strict(model: Any, value: Any) -> None:
    """Valid without coercion, and without a field that the vendor's model does not have."""
    validated = TypeAdapter(model).validate_json(json.dumps(value), strict=True)
    for field in unknown_fields(validated):
        assert field in OURS, f"{type(validated).__name__} has no field {field!r}"


def unknown_fields(value: Any) -> Iterator[str]:
    if isinstance(value, BaseModel):
        yield from value.model_extra or {}
        for name in type(value).model_fields:
            yield from unknown_fields(getattr(value, name))
    elif isinstance(value, list):
        for item in value:
            yield from unknown_fields(item)


def models(name: str) -> tuple[Any, Any]:
    if name == "openai_chat":
        from openai.types.chat import ChatCompletion, ChatCompletionChunk

        return ChatCompletion, ChatCompletionChunk
    if name == "openai_responses":
        from openai.types.responses import Response, ResponseStreamEvent

        return Response, ResponseStreamEvent
    from anthropic.types import Message, RawMessageStreamEvent

    return Message, RawMessageStreamEvent


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", DIALECTS)
def test_answers_fit_the_sdk_models_strictly(name: str, case: str) -> None:
    answer = DIALECTS[name].build_answer(head_of(name), [CASES[case][1]], text_of)
    strict(models(name)[0], json.loads(json.dumps(answer)))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", DIALECTS)
def test_events_fit_the_sdk_models_strictly(name: str, case: str) -> None:
    for kind, data in events_of(name, case):
        if data == "[DONE]" or kind == "ping":
            continue
        strict(models(name)[1], data)


def test_logprobs_fit_the_sdk_models_strictly() -> None:
    asked = head_of("openai_chat", logprobs=True, top_logprobs=2)
    answer = DIALECTS["openai_chat"].build_answer(asked, [CASES["text"][1]], text_of)
    strict(models("openai_chat")[0], answer)
    assert [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]] == [-0.5, -0.25, -1.0]
    asked = head_of("openai_responses", include=["message.output_text.logprobs"])
    strict(models("openai_responses")[0], DIALECTS["openai_responses"].build_answer(asked, [CASES["text"][1]], text_of))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", DIALECTS)
def test_order_of_events_is_golden(name: str, case: str) -> None:
    """The transcripts were written by hand from the vendors' documentation, one line per event."""
    golden = (GOLDEN / f"{name}.txt").read_text().split("== ")
    wanted = {block.split("\n", 1)[0].strip(): block.split("\n", 1)[1].strip().splitlines() for block in golden[1:]}
    assert [outline(kind, data) for kind, data in events_of(name, case)] == wanted[case]


def outline(kind: str, data: Any) -> str:
    """One event in a line: its type, its place, and what it adds."""
    if data == "[DONE]":
        return "[DONE]"
    if "choices" in data:
        return chat_outline(data)
    place = " ".join(str(data[key]) for key in ("output_index", "content_index", "index") if key in data)
    shown = data.get("delta", data.get("text", data.get("arguments", data.get("input"))))
    if isinstance(shown, dict):
        shown = {k: v for k, v in shown.items() if k != "signature"}
    block = data.get("item") or data.get("content_block") or data.get("part") or {}
    said = json.dumps(shown, ensure_ascii=False) if shown is not None else ""
    return " ".join(filter(None, [kind, place, block.get("type"), said])).strip()


def chat_outline(data: dict[str, Any]) -> str:
    if not data["choices"]:
        return f"usage {data['usage']['prompt_tokens']}+{data['usage']['completion_tokens']}"
    choice = data["choices"][0]
    return " ".join(filter(None, [json.dumps(choice["delta"], ensure_ascii=False), choice["finish_reason"]]))


@pytest.mark.parametrize("name", DIALECTS)
def test_streamed_pieces_add_up_to_the_answer(name: str) -> None:
    events = events_of(name, "thinking_and_two_calls")
    answer = DIALECTS[name].build_answer(head_of(name), [CASES["thinking_and_two_calls"][1]], text_of)
    if name == "openai_chat":
        message = answer["choices"][0]["message"]
        deltas = [data["choices"][0]["delta"] for _, data in events if data != "[DONE]" and data["choices"]]
        assert "".join(d.get("reasoning_content", "") for d in deltas) == message["reasoning_content"]
        assert "".join(d.get("content") or "" for d in deltas) == message["content"]
        spoken = ["", ""]
        for piece in (c for d in deltas for c in d.get("tool_calls", [])):
            spoken[piece["index"]] += piece["function"]["arguments"]
        assert spoken == [c["function"]["arguments"] for c in message["tool_calls"]]
    elif name == "openai_responses":
        done = [data["item"] for kind, data in events if kind == "response.output_item.done"]
        assert done == answer["output"]
        assert events[-1][1]["response"]["output"] == answer["output"]
        assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    else:
        signatures = [
            d["delta"]["signature"]
            for k, d in events
            if k == "content_block_delta" and d["delta"]["type"] == "signature_delta"
        ]
        assert signatures == [answer["content"][0]["signature"]]


@pytest.mark.parametrize("name", DIALECTS)
def test_error_envelopes(name: str) -> None:
    problem = HttpError(429, "too_many_in_flight", "later", retry_after_s=1)
    error = DIALECTS[name].build_error(problem)["error"]
    assert (error["type"], error["code"], error["message"]) == ("rate_limit_error", "too_many_in_flight", "later")
    if name == "anthropic":
        from anthropic.types import ErrorResponse

        TypeAdapter(ErrorResponse).validate_json(
            json.dumps({**DIALECTS[name].build_error(problem), "request_id": None}), strict=True
        )


def test_a_changed_thinking_block_is_refused_and_an_intact_one_comes_back() -> None:
    from tokentrue.errors import MessageError

    dialect = DIALECTS["anthropic"]
    call = head_of("anthropic")
    block = dialect.build_answer(call, [CASES["thinking_and_two_calls"][1]], text_of)["content"][0]
    (message,) = dialect.parse_item({"role": "assistant", "content": [block]}, "messages[0]")
    assert message["reasoning_content"] == "let me look"
    for changed in ({**block, "thinking": "let me lie"}, {**block, "signature": block["signature"][:-2] + "AA"}):
        with pytest.raises(MessageError, match=r"messages\[0\].content\[0\].signature"):
            dialect.parse_item({"role": "assistant", "content": [changed]}, "messages[0]")


def test_sealed_reasoning_survives_a_client_that_keeps_only_the_seal() -> None:
    dialect = DIALECTS["openai_responses"]
    call = head_of("openai_responses")
    item = dialect.build_answer(call, [CASES["thinking_and_two_calls"][1]], text_of)["output"][0]
    assert item["type"] == "reasoning"
    kept = {"type": "reasoning", "id": item["id"], "summary": [], "encrypted_content": item["encrypted_content"]}
    (message,) = dialect.parse_item(kept, "input[0]")
    assert message["reasoning_content"] == "let me look"
    other = ReasoningSigner(b"another session")
    assert other.unwrap(item["encrypted_content"]) is None
