"""Requests in the four dialects, written from the oracle's messages; and answers read back into messages."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tokentrue.conformance.agents.google import google_message, google_signatures
from tokentrue.conformance.agents.messages import Call, Message, Tool, arguments_from, object_from, visible_text

Json = dict[str, Any]
CHAT, RESPONSES, ANTHROPIC, GOOGLE = "chat", "responses", "anthropic", "google"
PATHS = {CHAT: "chat/completions", RESPONSES: "responses", ANTHROPIC: "messages"}
FINISHES = {
    CHAT: ("stop", "tool_calls", "length"),
    RESPONSES: ("completed", "completed", "incomplete"),
    ANTHROPIC: ("end_turn", "tool_use", "max_tokens"),
    GOOGLE: ("STOP", "STOP", "MAX_TOKENS"),
}
"""What each dialect calls the end of a text, of a turn with calls, and of one that the limit cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """How a harness writes what it sends; none of it changes the conversation."""

    inline: bool = False  # reasoning as <think> text
    parts: bool = False
    empty: str = "null"  # null, empty or missing
    extra: bool = False


def chat_body(messages: Sequence[Message], tools: Sequence[Tool], wire: Wire) -> Json:
    body: Json = {"messages": [chat_message(message, wire) for message in messages]}
    if tools:
        body["tools"] = [{"type": "function", "function": tool.function()} for tool in tools]
    return body


def chat_message(message: Message, wire: Wire) -> Json:
    if message.role != "assistant":
        answers = {"tool_call_id": message.answers} if message.role == "tool" else {}
        return {"role": message.role, **answers, "content": content_from(message, wire, "text", chat_image)}
    out: Json = {"role": "assistant"}
    text = visible_text(message, inline=wire.inline)
    if text:
        out["content"] = [{"type": "text", "text": text}] if wire.parts else text
    elif wire.empty != "missing" or not message.calls:
        out["content"] = None if wire.empty == "null" and message.calls else ""
    if message.reasoning and not wire.inline:
        out["reasoning_content"] = message.reasoning
    if message.calls:
        out["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.calls
        ]
    if wire.extra:
        out |= {"refusal": None, "annotations": [], "provider_specific_fields": {"trace": "x"}}
    return out


def content_from(message: Message, wire: Wire, kind: str, image: Callable[[str], Json]) -> Any:
    """The text and the images of a message that the model did not write; `image` makes a part from base64."""
    if not message.images and not wire.parts:
        return message.text
    images = [image(base64.b64encode(data).decode()) for data in message.images]
    return [{"type": kind, "text": message.text}, *images]


def chat_image(data: str) -> Json:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def responses_image(data: str) -> Json:
    return {"type": "input_image", "image_url": f"data:image/png;base64,{data}"}


def anthropic_image(data: str) -> Json:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def responses_body(messages: Sequence[Message], tools: Sequence[Tool], wire: Wire) -> Json:
    body: Json = {}
    if messages and messages[0].role == "system":
        body["instructions"] = messages[0].text
        messages = messages[1:]
    body["input"] = [item for message in messages for item in responses_items(message, wire)]
    if tools:
        body["tools"] = [{"type": "function", **tool.function()} for tool in tools]
    return body


def responses_items(message: Message, wire: Wire) -> list[Json]:
    if message.role == "tool":
        output = content_from(message, wire, "input_text", responses_image) if message.images else message.text
        return [{"type": "function_call_output", "call_id": message.answers, "output": output}]
    if message.role != "assistant":
        content = content_from(message, wire, "input_text", responses_image)
        return [{"type": "message", "role": message.role, "content": content}]
    items: list[Json] = []
    if message.reasoning and not wire.inline:
        items.append(
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": message.reasoning}]}
        )
    text = visible_text(message, inline=wire.inline)
    if text or not (message.calls or items):
        part = {"type": "output_text", "text": text, "annotations": []}
        items.append({"type": "message", "role": "assistant", "content": [part] if wire.parts or not text else text})
    for call in message.calls:
        items.append({"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments})
    return items


def anthropic_body(messages: Sequence[Message], tools: Sequence[Tool], wire: Wire, signatures: dict[str, str]) -> Json:
    body: Json = {"max_tokens": 100_000}
    if messages and messages[0].role == "system":
        body["system"] = content_from(messages[0], wire, "text", anthropic_image)
        messages = messages[1:]
    out: list[Json] = []
    results: list[Json] = []
    for message in messages:
        content = content_from(message, wire, "text", anthropic_image)
        if message.role == "tool":
            if not results:
                out.append({"role": "user", "content": results})
            results.append({"type": "tool_result", "tool_use_id": message.answers, "content": content})
            continue
        results = []
        if message.role == "assistant":
            content = anthropic_blocks(message, wire, signatures)
        out.append({"role": message.role, "content": content})
    body["messages"] = out
    if tools:
        body["tools"] = [{"name": t.name, "description": t.description, "input_schema": t.parameters} for t in tools]
    return body


def anthropic_blocks(message: Message, wire: Wire, signatures: dict[str, str]) -> Any:
    blocks: list[Json] = []
    if message.reasoning and not wire.inline:
        signature = signatures.get(message.reasoning, "")
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": signature})
    if text := visible_text(message, inline=wire.inline):
        blocks.append({"type": "text", "text": text})
    for call in message.calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": object_from(call.arguments)})
    if len(blocks) == 1 and text and not wire.parts:
        return text
    return blocks or ""


# Answers.


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """`finish` is the dialect's word (`FINISHES`)."""

    message: Message
    finish: str


def read_answers(dialect: str, whole: Json) -> list[Answer]:
    return {CHAT: chat_answers, RESPONSES: responses_answers, ANTHROPIC: anthropic_answers, GOOGLE: google_answers}[
        dialect
    ](whole)


def answer_from(text: str, reasoning: str, calls: Sequence[Call], finish: str) -> Answer:
    message = Message(role="assistant", text=text, reasoning=reasoning, calls=tuple(calls), served=True)
    return Answer(message=message, finish=finish)


def chat_answers(whole: Json) -> list[Answer]:
    out: list[Answer] = []
    for choice in sorted(whole["choices"], key=lambda choice: choice["index"]):
        said = choice["message"]
        calls = [
            Call(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
            for call in said.get("tool_calls") or ()
        ]
        reasoning = said.get("reasoning_content") or said.get("reasoning") or ""
        out.append(answer_from(said.get("content") or "", reasoning, calls, choice["finish_reason"]))
    return out


def responses_answers(whole: Json) -> list[Answer]:
    text = reasoning = ""
    calls: list[Call] = []
    for item in whole["output"]:
        if item["type"] == "reasoning":
            reasoning += "".join(part["text"] for part in item.get("content") or item.get("summary") or ())
        elif item["type"] == "message":
            text += "".join(part["text"] for part in item["content"])
        else:
            calls.append(Call(id=item["call_id"], name=item["name"], arguments=item["arguments"]))
    return [answer_from(text, reasoning, calls, whole["status"])]


def anthropic_answers(whole: Json) -> list[Answer]:
    text = reasoning = ""
    calls: list[Call] = []
    for block in whole["content"]:
        if block["type"] == "thinking":
            reasoning += block["thinking"]
        elif block["type"] == "text":
            text += block["text"]
        else:
            calls.append(Call(id=block["id"], name=block["name"], arguments=arguments_from(block["input"])))
    return [answer_from(text, reasoning, calls, whole["stop_reason"])]


def google_answers(whole: Json) -> list[Answer]:
    (candidate,) = whole["candidates"]
    return [Answer(message=google_message(candidate["content"]["parts"]), finish=candidate["finishReason"])]


def read_signatures(dialect: str, whole: Json) -> dict[str, str]:
    if dialect == GOOGLE:
        return google_signatures(whole)
    if dialect != ANTHROPIC:
        return {}
    return {block["thinking"]: block.get("signature", "") for block in whole["content"] if block["type"] == "thinking"}
