"""Splits a branch into blocks: each message with its tokens.

A block includes what the template puts before the message; the generation prompt belongs to the sampled turn it
opens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from tokentrue.errors import TokenTrueError
from tokentrue.json_types import JsonMapping, JsonObject, JsonValue
from tokentrue.types import Ids, Message, Parsed, Span
from tokentrue.viewer.records import Branch, TurnMessages, ViewRenderer


def cut_blocks(branch: Branch, turns: Sequence[TurnMessages] | None) -> list[JsonObject]:
    blocks: list[JsonObject] = []
    pending: int | None = None  # where inserted tokens before the next message begin
    inserted = set(branch.inserted or ())
    for span in branch.sample.spans:
        if span.kind == "given" and ((span.start, span.end) in inserted or span.role in {"assistant", "structure"}):
            pending = span.start if pending is None else pending
            continue
        last = blocks[-1] if blocks else None
        if pending is None and last is not None and _continues(last, span):
            last["end"] = span.end
            if (
                branch.inserted is None and span.kind == "given"
            ):  # the template's part before a message is a separate span
                last["body"] = span.start
            continue
        start = span.start if pending is None else pending
        blocks.append(
            {
                "start": start,
                "end": span.end,
                "turn": span.turn,
                "role": span.role,
                "kind": span.kind,
                "body": span.start,
            }
        )
        pending = None
    if pending is not None:
        end = len(branch.sample.token_ids)
        last_turn = branch.sample.spans[-1].turn
        blocks.append(
            {"start": pending, "end": end, "turn": last_turn, "role": "structure", "kind": "given", "body": pending}
        )
    _attach(blocks, turns)
    return blocks


def _continues(block: JsonMapping, span: Span) -> bool:
    return (block["turn"], block["role"], block["kind"]) == (span.turn, span.role, span.kind)


def _attach(blocks: list[JsonObject], turns: Sequence[TurnMessages] | None) -> None:
    # By their order in the turn; omitted if their numbers differ.
    if turns is None:
        return
    for number, turn in enumerate(turns):
        given = [block for block in blocks if block["turn"] == number and block["kind"] == "given"]
        if len(given) == len(turn.given):
            for block, message in zip(given, turn.given, strict=True):
                block["message"] = readable_message(message)
        sampled = [block for block in blocks if block["turn"] == number and block["kind"] == "sampled"]
        if sampled and turn.served is not None:
            sampled[0]["message"] = readable_message(turn.served)


def readable_message(message: Message) -> JsonObject:
    shown: JsonObject = {"role": message.get("role", ""), "content": text_of(message.get("content"))}
    if reasoning := message.get("reasoning_content"):
        shown["reasoning"] = str(reasoning)
    if name := message.get("name"):
        shown["name"] = str(name)
    calls = message.get("tool_calls") or ()
    if calls:
        shown["calls"] = [
            {"name": str(call["function"].get("name", "")), "arguments": _arguments(call["function"].get("arguments"))}
            for call in calls
            if isinstance(call.get("function"), Mapping)
        ]
    return shown


def _arguments(value: JsonValue) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def text_of(content: JsonValue) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[JsonValue] = list(content)
    return "\n".join(
        str(part.get("text", f"[{part.get('type', 'part')}]")) if hasattr(part, "get") else str(part) for part in parts
    )


def messages_from_tokens(branch: Branch, renderer: ViewRenderer) -> tuple[TurnMessages, ...]:
    """Decodes given text and parses sampled turns."""
    ids = branch.sample.token_ids
    blocks = cut_blocks(branch, None)
    turns: list[TurnMessages] = []
    for number in sorted({span.turn for span in branch.sample.spans}):
        spans = [span for span in branch.sample.spans if span.turn == number]
        given: list[Message] = []
        calls = [call["id"] for call in (turns[-1].served or {}).get("tool_calls") or ()] if turns else []
        for block in blocks:
            if block["turn"] == number and block["kind"] == "given" and block["role"] != "structure":
                content = renderer.decode(ids[block["body"] : block["end"]])
                extra = {"tool_call_id": calls.pop(0)} if block["role"] == "tool" and calls else {}
                given.append({"role": block["role"], "content": content, **extra})
        sampled = [span for span in spans if span.kind == "sampled"]
        served = parse_turn(ids, sampled, renderer) if sampled else None
        turns.append(TurnMessages(given=tuple(given), served=None if served is None else served.message))
    return tuple(turns)


def parse_turn(ids: Ids, sampled: Sequence[Span], renderer: ViewRenderer) -> Parsed | None:
    start, end = sampled[0].start, sampled[-1].end
    try:
        return renderer.parse(ids[start:end], prompt_ids=ids[:start])
    except TokenTrueError:
        return None
