"""One HTTP exchange of an agent: a whole answer, or the events of a stream, put together as a client does it."""

import json
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tokentrue.conformance.agents.dialects import CHAT, GOOGLE, RESPONSES, Json


@dataclass(slots=True, kw_only=True)
class Heard:
    """What a client got; `broken` where the connection ended early."""

    status: int = 0
    whole: Any = None
    events: list[Any] = field(default_factory=list[Any])
    broken: str = ""
    kind: str = ""


async def read_events(answer: aiohttp.ClientResponse, heard: Heard) -> AsyncIterator[Any]:
    """Events as they come, also gathered in `heard`; none for a whole answer."""
    heard.status, heard.kind = answer.status, answer.content_type
    try:
        if answer.content_type != "text/event-stream":
            heard.whole = decoded(await answer.read())
            return
        rest = b""
        async for block in answer.content.iter_any():
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    data = line[5:].strip()
                    heard.events.append("[DONE]" if data == b"[DONE]" else json.loads(data))
                    yield heard.events[-1]
                elif line.startswith(b"{"):  # an error in Google's dialect is bare JSON
                    heard.events.append(json.loads(line))
    except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
        heard.broken = repr(error)


def decoded(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode("utf-8", "replace")


def is_shown(events: Sequence[Any]) -> bool:
    """Whether they have some text or reasoning of the answer."""
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


class Broken(Exception):
    """The stream ended in an error event, or before its last event."""


class Unsound(Exception):
    """The stream contradicts itself."""


def assemble(dialect: str, events: Sequence[Any]) -> Json:
    """`events` are the parsed data lines, with "[DONE]" as text."""
    for event in events:
        is_error = isinstance(event, dict) and ("error" in event or event.get("type") == "error")
        if is_error and event.get("object") != "response":
            raise Broken(json.dumps(event)[:300])
    chosen = {CHAT: assemble_chat, RESPONSES: assemble_responses, GOOGLE: assemble_google}
    return chosen.get(dialect, assemble_anthropic)(events)


def assemble_chat(events: Sequence[Any]) -> Json:
    if not events or events[-1] != "[DONE]":
        raise Broken("no [DONE]")
    choices: dict[int, Json] = {}
    for chunk in events[:-1]:
        for choice in chunk["choices"]:
            empty: Json = {"content": "", "reasoning_content": ""}
            made = choices.setdefault(choice["index"], {**choice, "message": empty, "finish_reason": None})
            if made["finish_reason"] is not None:
                raise Unsound("a chunk after the finish reason")
            made["finish_reason"] = choice["finish_reason"]
            add_chat_delta(made["message"], choice["delta"])
    if any(choice["finish_reason"] is None for choice in choices.values()):
        raise Broken("a choice without finish reason")
    return {"id": events[0]["id"], "model": events[0]["model"], "choices": list(choices.values())}


def add_chat_delta(message: Json, delta: Json) -> None:
    for name in ("content", "reasoning_content"):
        message[name] += delta.get(name) or ""
    for piece in delta.get("tool_calls") or ():
        calls: list[Json] = message.setdefault("tool_calls", [])
        said = piece["function"]
        if piece["index"] == len(calls):
            made = {"name": said["name"], "arguments": ""}
            calls.append({"id": piece["id"], "type": piece["type"], "function": made})
        elif piece["index"] != len(calls) - 1 or piece.get("id") or said.get("name"):
            raise Unsound("a piece of a call that is not the last one, or a call that is opened twice")
        calls[-1]["function"]["arguments"] += said.get("arguments") or ""


def assemble_responses(events: Sequence[Any]) -> Json:
    """Deltas, finished items and the last event must say the same."""
    said: defaultdict[int, str] = defaultdict(str)
    done: list[Json] = []
    final: Json | None = None
    for event in events:
        kind = event["type"]
        if kind == "response.failed":
            raise Broken(json.dumps(event["response"]["error"]))
        if kind.endswith(".delta"):
            said[event["output_index"]] += event["delta"]
        elif kind == "response.output_item.done":
            done.append(without_hidden(event["item"]))
        elif kind in {"response.completed", "response.incomplete"}:
            final = event["response"]
    if final is None:
        raise Broken("no response.completed")
    if done != without_hidden(final["output"]):
        raise Unsound(f"the items as streamed are not those of the last event:\n{done}\n{final['output']}")
    for at, item in enumerate(done):
        text = item.get("arguments", item.get("input"))
        if text is None:
            text = "".join(part["text"] for part in item.get("content") or item.get("summary") or ())
        if text != said[at]:
            raise Unsound(f"item {at} says {text!r}, the deltas were {said[at]!r}")
    return final


def without_hidden(value: Any) -> Any:
    if isinstance(value, dict):
        hidden = {"encrypted_content", "logprobs"}
        return {key: without_hidden(item) for key, item in value.items() if key not in hidden}
    return [without_hidden(item) for item in value] if isinstance(value, list) else value


def assemble_anthropic(events: Sequence[Any]) -> Json:
    whole: Json = {}
    blocks: list[Json] = []
    for event in events:
        kind = event["type"]
        if kind == "message_start":
            whole = {**event["message"], "usage": {}}
        elif kind == "content_block_start":
            blocks.append({**event["content_block"], "json": ""})
        elif kind == "content_block_delta":
            if event["index"] != len(blocks) - 1:
                raise Unsound("a delta of a block that is not open")
            for name, piece in event["delta"].items():
                name = "json" if name == "partial_json" else name
                if name != "type":
                    blocks[-1][name] = piece if name == "signature" else blocks[-1][name] + piece
        elif kind == "message_delta":
            whole |= {**event["delta"], "usage": event["usage"]}
    if not any(event["type"] == "message_stop" for event in events):
        raise Broken("no message_stop")
    for block in blocks:
        text = block.pop("json")
        if block["type"] == "tool_use":
            try:
                block["input"] = json.loads(text or "{}")
            except ValueError:
                raise Unsound(f"the input of a tool call is not JSON: {text!r}") from None
    return {**whole, "content": blocks}


def assemble_google(events: Sequence[Any]) -> Json:
    parts: list[Json] = []
    whole: Json = {}
    for event in events:
        (candidate,) = event["candidates"]
        parts += candidate["content"]["parts"]
        if "finishReason" in candidate:
            whole = {**event, "candidates": [{**candidate, "content": {"role": "model", "parts": parts}}]}
    if not whole:
        raise Broken("no finish reason")
    return whole
