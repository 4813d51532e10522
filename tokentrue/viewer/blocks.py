"""Splits a branch into blocks: each message with its tokens and what the template puts before it."""

import json
from collections.abc import Sequence

from tokentrue.errors import TokenTrueError
from tokentrue.json_types import JsonObject, JsonValue, is_object
from tokentrue.types import Message
from tokentrue.viewer.records import Branch, TurnMessages, ViewRenderer


def cut_blocks(branch: Branch, turns: Sequence[TurnMessages] | None) -> list[JsonObject]:
    blocks: list[JsonObject] = []
    pending: int | None = None  # where inserted tokens before the next message begin
    inserted = set(branch.inserted or ())
    for span in branch.sample.spans:
        if span.kind == "given" and ((span.start, span.end) in inserted or span.role in {"assistant", "structure"}):
            pending = span.start if pending is None else pending
            continue
        names: JsonObject = {"turn": span.turn, "role": span.role, "kind": span.kind}
        if pending is None and blocks and names.items() <= blocks[-1].items():
            blocks[-1]["end"] = span.end
            if branch.inserted is None and span.kind == "given":  # the template's part before a message is its own span
                blocks[-1]["body"] = span.start
            continue
        start = span.start if pending is None else pending
        blocks.append({"start": start, "end": span.end, **names, "body": span.start})
        pending = None
    if pending is not None:
        names = {"turn": branch.sample.spans[-1].turn, "role": "structure", "kind": "given"}
        blocks.append({"start": pending, "end": len(branch.sample.token_ids), **names, "body": pending})
    # Messages belong to blocks by their order in the turn; omitted if their numbers differ.
    for number, turn in enumerate(turns or ()):
        given = [block for block in blocks if block["turn"] == number and block["kind"] == "given"]
        if len(given) == len(turn.given):
            for block, message in zip(given, turn.given, strict=True):
                block["message"] = readable_message(message)
        sampled = [block for block in blocks if block["turn"] == number and block["kind"] == "sampled"]
        if sampled and turn.served is not None:
            sampled[0]["message"] = readable_message(turn.served)
    return blocks


def readable_message(message: Message) -> JsonObject:
    content: JsonValue = message.get("content") or ""
    if not isinstance(content, str):
        parts = (part if is_object(part) else {"text": part} for part in content)
        content = "\n".join(str(part.get("text", f"[{part.get('type', 'part')}]")) for part in parts)
    shown: JsonObject = {"role": message.get("role", ""), "content": content}
    if reasoning := message.get("reasoning_content"):
        shown["reasoning"] = str(reasoning)
    if name := message.get("name"):
        shown["name"] = str(name)
    for call in message.get("tool_calls") or ():
        function = call.get("function")
        if is_object(function):
            arguments: JsonValue = function.get("arguments")
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            shown.setdefault("calls", []).append({"name": str(function.get("name", "")), "arguments": text})
    return shown


def messages_from_tokens(branch: Branch, renderer: ViewRenderer) -> tuple[TurnMessages, ...]:
    ids = branch.sample.token_ids
    blocks = cut_blocks(branch, None)
    turns: list[TurnMessages] = []
    for number in sorted({span.turn for span in branch.sample.spans}):
        given: list[Message] = []
        calls = [call["id"] for call in (turns[-1].served or {}).get("tool_calls") or ()] if turns else []
        for block in blocks:
            if block["turn"] == number and block["kind"] == "given" and block["role"] != "structure":
                content = renderer.decode(ids[block["body"] : block["end"]])
                extra = {"tool_call_id": calls.pop(0)} if block["role"] == "tool" and calls else {}
                given.append({"role": block["role"], "content": content, **extra})
        sampled = [span for span in branch.sample.spans if span.turn == number and span.kind == "sampled"]
        served = None
        if sampled:
            start, end = sampled[0].start, sampled[-1].end
            try:
                served = renderer.parse(ids[start:end], prompt_ids=ids[:start]).message
            except TokenTrueError:
                served = None
        turns.append(TurnMessages(given=tuple(given), served=served))
    return tuple(turns)
