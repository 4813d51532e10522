"""Streamed events put together again as a client does it, with what each protocol promises checked on the way."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tokentrue.conformance.agents.dialects import CHAT, GOOGLE, RESPONSES
from tokentrue.conformance.agents.google import assemble_google

Json = dict[str, Any]


class Broken(Exception):
    """The stream ended in an error event, or before its last event."""


class Unsound(Exception):
    """The stream contradicts itself."""


def assemble(dialect: str, events: Sequence[Any]) -> Json:
    """The whole answer that these events are; `events` are the parsed data lines, with "[DONE]" as text."""
    for event in events:
        if (
            isinstance(event, dict)
            and ("error" in event or event.get("type") == "error")
            and event.get("object") != "response"
        ):
            raise Broken(json.dumps(event)[:300])
    if dialect == GOOGLE:
        whole = assemble_google(events)
        if isinstance(whole, str):
            raise Broken(whole)
        return whole
    return {CHAT: assemble_chat, RESPONSES: assemble_responses}.get(dialect, assemble_anthropic)(events)


def is_shown(events: Sequence[Any]) -> bool:
    """Whether some text or reasoning of the answer is in these events."""
    deltas: list[Any] = []
    for event in events:
        if not isinstance(event, dict):
            continue
        deltas += [choice["delta"] for choice in event.get("choices") or ()]
        deltas += [part for one in event.get("candidates") or () for part in one["content"]["parts"]]
        delta = event.get("delta")
        deltas.append({"text": delta} if isinstance(delta, str) else delta or {})
    names = ("content", "reasoning_content", "reasoning", "text", "thinking")
    return any(delta.get(name) for delta in deltas for name in names)


def assemble_chat(events: Sequence[Any]) -> Json:
    if not events or events[-1] != "[DONE]":
        raise Broken("no [DONE]")
    choices: dict[int, Json] = {}
    whole: Json = {}
    for chunk in events[:-1]:
        whole = whole or {"id": chunk["id"], "model": chunk["model"]}
        if (chunk["id"], chunk["model"]) != (whole["id"], whole["model"]):
            raise Unsound("chunks of one stream have different ids or models")
        for choice in chunk["choices"]:
            made = choices.setdefault(
                choice["index"],
                {"index": choice["index"], "message": {"content": "", "reasoning_content": ""}, "finish_reason": None},
            )
            if made["finish_reason"] is not None:
                raise Unsound("a chunk after the finish reason")
            made["finish_reason"] = choice["finish_reason"]
            add_chat_delta(made["message"], choice["delta"])
    if any(choice["finish_reason"] is None for choice in choices.values()):
        raise Broken("a choice without finish reason")
    return {**whole, "choices": list(choices.values())}


def add_chat_delta(message: Json, delta: Json) -> None:
    for name in ("content", "reasoning_content"):
        message[name] += delta.get(name) or ""
    for piece in delta.get("tool_calls") or ():
        calls: list[Json] = message.setdefault("tool_calls", [])
        if piece["index"] == len(calls):
            calls.append(
                {
                    "id": piece["id"],
                    "type": piece["type"],
                    "function": {"name": piece["function"]["name"], "arguments": ""},
                }
            )
        elif piece["index"] != len(calls) - 1:
            raise Unsound("a piece of a call that is not the last one")
        elif piece.get("id") or piece["function"].get("name"):
            raise Unsound("a call is opened twice")
        calls[-1]["function"]["arguments"] += piece["function"].get("arguments") or ""


def assemble_responses(events: Sequence[Any]) -> Json:
    items: list[Json] = []
    final: Json | None = None
    for number, event in enumerate(events):
        if event.get("sequence_number", number) != number:
            raise Unsound(f"sequence number {event['sequence_number']} where {number} was due")
        kind = event["type"]
        if kind == "response.failed":
            raise Broken(json.dumps(event["response"]["error"]))
        if kind == "response.output_item.added":
            if event["output_index"] != len(items):
                raise Unsound("output items out of order")
            items.append({"added": event["item"], "pieces": ""})
            continue
        item = items[event["output_index"]] if "output_index" in event else {}
        if item and event.get("item_id", item["added"].get("id")) != item["added"].get("id"):
            raise Unsound(
                f"{kind} of item {event['item_id']}, and item {event['output_index']} is {item['added']['id']}"
            )
        if kind.endswith(".delta"):
            item["pieces"] += event["delta"]
        elif kind == "response.output_item.done":
            item["done"] = event["item"]
            check_item(item["added"], event["item"], item["pieces"])
        elif kind.endswith(".done") and kind.startswith(
            ("response.function", "response.custom", "response.output_text", "response.reasoning")
        ):
            check_done(event, item)
        elif kind in {"response.completed", "response.incomplete"}:
            final = event["response"]
    if final is None:
        raise Broken("no response.completed")
    hidden = {"encrypted_content", "logprobs"}
    done = [strip(item.get("done"), hidden) for item in items]
    if done != [strip(item, hidden) for item in final["output"]]:
        raise Unsound(f"the items as streamed are not those of the last event:\n{done}\n{final['output']}")
    return final


def check_done(event: Json, item: Json) -> None:
    said = event.get("text", event.get("arguments", event.get("input")))
    if said is not None and said != item["pieces"]:
        raise Unsound(f"{event['type']} says {said!r}, the deltas were {item['pieces']!r}")
    if "name" in event and event["name"] != item["added"]["name"]:
        raise Unsound(f"arguments.done names {event['name']}, the item was added as {item['added']['name']}")


def check_item(added: Json, done: Json, pieces: str) -> None:
    for name in ("type", "id", "call_id", "name", "namespace"):
        if added.get(name) != done.get(name):
            raise Unsound(f"an item was added as {added} and is done as {done}")
    said = done.get("arguments", done.get("input"))
    if said is None:
        said = "".join(part["text"] for part in done.get("content") or done.get("summary") or ())
    if said != pieces:
        raise Unsound(f"the item says {said!r}, the deltas were {pieces!r}")


def strip(value: Any, hidden: set[str]) -> Any:
    if isinstance(value, dict):
        return {key: strip(item, hidden) for key, item in value.items() if key not in hidden}
    return [strip(item, hidden) for item in value] if isinstance(value, list) else value


def assemble_anthropic(events: Sequence[Any]) -> Json:
    whole: Json = {}
    blocks: list[Json] = []
    stopped = False
    for event in events:
        kind = event["type"]
        if kind == "message_start":
            whole = {**event["message"], "usage": {}}
        elif kind == "content_block_start":
            if event["index"] != len(blocks):
                raise Unsound("content blocks out of order")
            blocks.append({**event["content_block"], "json": ""})
        elif kind == "content_block_delta":
            if event["index"] != len(blocks) - 1:
                raise Unsound("a delta of a block that is not open")
            add_block_delta(blocks[-1], event["delta"])
        elif kind == "message_delta":
            whole |= event["delta"]
            whole["usage"] = event["usage"]
        stopped = stopped or kind == "message_stop"
    if not stopped:
        raise Broken("no message_stop")
    for block in blocks:
        text = block.pop("json")
        if block["type"] == "tool_use":
            try:
                block["input"] = json.loads(text) if text else {}
            except ValueError:
                raise Unsound(f"the input of a tool call is not JSON: {text!r}") from None
    return {**whole, "content": blocks}


def add_block_delta(block: Json, delta: Json) -> None:
    kind = delta["type"]
    if kind == "text_delta":
        block["text"] += delta["text"]
    elif kind == "thinking_delta":
        block["thinking"] += delta["thinking"]
    elif kind == "signature_delta":
        block["signature"] = delta["signature"]
    else:
        block["json"] += delta["partial_json"]
