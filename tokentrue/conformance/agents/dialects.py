"""Requests in the three dialects, written from the oracle's messages; and answers read back into messages."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokentrue.conformance.agents.google import message_of, signatures_in
from tokentrue.conformance.agents.messages import Call, Message, Tool, arguments_from, object_from

Json = dict[str, Any]
CHAT, RESPONSES, ANTHROPIC, GOOGLE = "chat", "responses", "anthropic", "google"
PATHS = {CHAT: "chat/completions", RESPONSES: "responses", ANTHROPIC: "messages"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """How a harness spells what it sends; none of it changes the conversation."""

    inline: bool = False  # reasoning as <think> text
    parts: bool = False
    empty: str = "null"  # null, empty or missing
    extra: bool = False
    bare: bool = False  # Google: results without ids
    native: bool = True  # Responses: custom and namespaced tools as such, not as plain functions


def chat_body(messages: Sequence[Message], tools: Sequence[Tool], wire: Wire) -> Json:
    body: Json = {"messages": [chat_message(message, wire) for message in messages]}
    if tools:
        body["tools"] = [{"type": "function", "function": tool.function()} for tool in tools]
    return body


def chat_message(message: Message, wire: Wire) -> Json:
    if message.role == "tool":
        return {"role": "tool", "tool_call_id": message.answers, "content": content_of(message.text, wire, "text")}
    if message.role != "assistant":
        return {"role": message.role, "content": content_of(message.text, wire, "text")}
    out: Json = {"role": "assistant"}
    text = visible(message, wire)
    if text:
        out["content"] = content_of(text, wire, "text")
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


def visible(message: Message, wire: Wire) -> str:
    return (
        f"<think>\n{message.reasoning}\n</think>\n\n{message.text}"
        if wire.inline and message.reasoning
        else message.text
    )


def content_of(text: str, wire: Wire, kind: str) -> Any:
    return [{"type": kind, "text": text}] if wire.parts else text


def responses_body(messages: Sequence[Message], tools: Sequence[Tool], wire: Wire) -> Json:
    body: Json = {}
    if messages and messages[0].role == "system":
        body["instructions"] = messages[0].text
        messages = messages[1:]
    by_name = {tool.name: tool for tool in tools} if wire.native else {}
    body["input"] = [item for message in messages for item in responses_items(message, by_name, wire)]
    if tools:
        body["tools"] = responses_tools(tools, wire)
    return body


def responses_items(message: Message, tools: dict[str, Tool], wire: Wire) -> list[Json]:
    if message.role == "tool":
        return [{"type": "function_call_output", "call_id": message.answers, "output": message.text}]
    if message.role != "assistant":
        return [{"type": "message", "role": message.role, "content": content_of(message.text, wire, "input_text")}]
    items: list[Json] = []
    if message.reasoning and not wire.inline:
        items.append(
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": message.reasoning}]}
        )
    text = visible(message, wire)
    if text or not (message.calls or items):
        part = {"type": "output_text", "text": text, "annotations": []}
        items.append({"type": "message", "role": "assistant", "content": [part] if wire.parts or not text else text})
    return [*items, *(responses_call(call, tools) for call in message.calls)]


def custom_input(call: Call, tools: dict[str, Tool]) -> str | None:
    """The input of a call that is sent as a custom tool's; None for a function's."""
    tool = tools.get(call.name)
    if tool is None or not tool.custom:
        return None
    try:
        given = json.loads(call.arguments or "{}")
    except ValueError:
        return None
    return (
        given["input"]
        if isinstance(given, dict) and set(given) == {"input"} and isinstance(given["input"], str)
        else None
    )


def is_sent_as_input(call: Call, tools: dict[str, Tool]) -> bool:
    return custom_input(call, tools) is not None


def responses_call(call: Call, tools: dict[str, Tool]) -> Json:
    if (given := custom_input(call, tools)) is not None:
        return {"type": "custom_tool_call", "call_id": call.id, "name": call.name, "input": given}
    tool = tools.get(call.name)
    item = {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments}
    if tool is not None and tool.namespace:
        item |= {"name": call.name.removeprefix(tool.namespace + "__"), "namespace": tool.namespace}
    return item


def responses_tools(tools: Sequence[Tool], wire: Wire) -> list[Json]:
    out: list[Json] = []
    for tool in tools:
        if tool.custom and wire.native:
            out.append(
                {"type": "custom", "name": tool.name, "description": tool.description, "format": {"type": "text"}}
            )
        elif tool.namespace and wire.native:
            inner = {"type": "function", **tool.function(), "name": tool.name.removeprefix(tool.namespace + "__")}
            out.append({"type": "namespace", "name": tool.namespace, "description": "", "tools": [inner]})
        else:
            out.append({"type": "function", **tool.function()})
    return out


def anthropic_body(messages: Sequence[Message], tools: Sequence[Tool], wire: Wire, signatures: dict[str, str]) -> Json:
    body: Json = {"max_tokens": 100_000}
    if messages and messages[0].role == "system":
        body["system"] = content_of(messages[0].text, wire, "text")
        messages = messages[1:]
    out: list[Json] = []
    results: list[Json] = []
    for message in messages:
        if message.role == "tool":
            if not results:
                out.append({"role": "user", "content": results})
            results.append(
                {
                    "type": "tool_result",
                    "tool_use_id": message.answers,
                    "content": content_of(message.text, wire, "text"),
                }
            )
            continue
        results = []
        content = (
            anthropic_blocks(message, wire, signatures)
            if message.role == "assistant"
            else content_of(message.text, wire, "text")
        )
        out.append({"role": message.role, "content": content})
    body["messages"] = out
    if tools:
        body["tools"] = [{"name": t.name, "description": t.description, "input_schema": t.parameters} for t in tools]
    return body


def anthropic_blocks(message: Message, wire: Wire, signatures: dict[str, str]) -> Any:
    blocks: list[Json] = []
    if message.reasoning and not wire.inline:
        blocks.append(
            {"type": "thinking", "thinking": message.reasoning, "signature": signatures.get(message.reasoning, "")}
        )
    if text := visible(message, wire):
        blocks.append({"type": "text", "text": text})
    for call in message.calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": object_from(call.arguments)})
    if len(blocks) == 1 and text and not wire.parts:
        return text
    return blocks or ""


# Answers.


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """`node` is the gateway's own name of the turn, which the answer's id carries."""

    message: Message
    node: str
    finish: str


def answers_of(dialect: str, whole: Json) -> list[Answer]:
    return {CHAT: chat_answers, RESPONSES: responses_answers, ANTHROPIC: anthropic_answers, GOOGLE: google_answers}[
        dialect
    ](whole)


def node_of(whole: Json) -> str:
    found = re.search(r"[0-9a-f]{32}", whole["id"])
    return found.group() if found else whole["id"]


def chat_answers(whole: Json) -> list[Answer]:
    node = node_of(whole)
    out: list[Answer] = []
    for choice in sorted(whole["choices"], key=lambda choice: choice["index"]):
        said = choice["message"]
        calls = tuple(
            Call(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
            for call in said.get("tool_calls") or ()
        )
        message = Message(
            role="assistant",
            text=said.get("content") or "",
            reasoning=said.get("reasoning_content") or said.get("reasoning") or "",
            calls=calls,
            served=True,
        )
        out.append(Answer(message=message, node=node, finish=choice["finish_reason"]))
    return out


def responses_answers(whole: Json) -> list[Answer]:
    text = reasoning = ""
    calls: list[Call] = []
    for item in whole["output"]:
        if item["type"] == "reasoning":
            reasoning += "".join(part["text"] for part in item.get("content") or item.get("summary") or ())
        elif item["type"] == "message":
            text += "".join(part["text"] for part in item["content"])
        elif item["type"] == "custom_tool_call":
            calls.append(
                Call(
                    id=item["call_id"],
                    name=item["name"],
                    arguments=json.dumps({"input": item["input"]}, ensure_ascii=False),
                )
            )
        else:
            name = f"{item['namespace']}__{item['name']}" if item.get("namespace") else item["name"]
            calls.append(Call(id=item["call_id"], name=name, arguments=item["arguments"]))
    message = Message(role="assistant", text=text, reasoning=reasoning, calls=tuple(calls), served=True)
    return [Answer(message=message, node=node_of(whole), finish=whole["status"])]


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
    message = Message(role="assistant", text=text, reasoning=reasoning, calls=tuple(calls), served=True)
    return [Answer(message=message, node=node_of(whole), finish=whole["stop_reason"])]


def google_answers(whole: Json) -> list[Answer]:
    (candidate,) = whole["candidates"]
    return [
        Answer(
            message=message_of(candidate["content"]["parts"]),
            node=whole.get("responseId", ""),
            finish=candidate["finishReason"],
        )
    ]


def signatures_of(dialect: str, whole: Json) -> dict[str, str]:
    if dialect == GOOGLE:
        return signatures_in(whole)
    if dialect != ANTHROPIC:
        return {}
    return {block["thinking"]: block.get("signature", "") for block in whole["content"] if block["type"] == "thinking"}
