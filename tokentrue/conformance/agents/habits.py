"""What harnesses lose of a conversation on its way back. A gateway that matches by what it served sees through all of it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokentrue.conformance.agents.messages import Call, Message, load_finite


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Of the conversation itself; `Wire` has those of its spelling."""

    reasoning: bool = False
    ids: bool = False
    arguments: str = ""
    whitespace: str = ""


def lose(messages: Sequence[Message], losses: Losses, rng: random.Random) -> list[Message]:
    """The same conversation as a lossy harness sends it back. The client's own messages stay as they are."""
    renamed: dict[str, str] = {}
    out: list[Message] = []
    for message in messages:
        if message.role == "tool" and message.answers in renamed:
            message = replace(message, answers=renamed[message.answers])
        elif message.served:
            message = lose_one(message, losses, renamed, rng)
        out.append(message)
    return out


def lose_one(message: Message, losses: Losses, renamed: dict[str, str], rng: random.Random) -> Message:
    calls: list[Call] = []
    for call in message.calls:
        if losses.ids:
            renamed[call.id] = f"call_{rng.getrandbits(40):x}"
        calls.append(
            replace(call, id=renamed.get(call.id, call.id), arguments=respell(call.arguments, losses.arguments))
        )
    text = message.text
    if losses.whitespace == "trim":
        text = text.strip()
    elif losses.whitespace == "pad" and text.strip():
        text = f"\n{text} "
    return replace(message, text=text, reasoning="" if losses.reasoning else message.reasoning, calls=tuple(calls))


def respell(arguments: str, how: str) -> str:
    if not how or (how == "floats" and "." in arguments):
        return arguments
    try:
        value = load_finite(arguments)
    except ValueError:
        return arguments
    if not isinstance(value, dict):
        return arguments
    if how == "sorted":
        return json.dumps(value, sort_keys=True, ensure_ascii=False)
    if how == "reversed":
        return json.dumps(dict(reversed(value.items())), ensure_ascii=False)
    if how == "escaped":
        return json.dumps(value, ensure_ascii=True)
    if how == "spaced":
        return json.dumps(value, ensure_ascii=False, indent=2)
    if how == "floats":
        return json.dumps({key: float_of(item) for key, item in value.items()}, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")) if value else ""


def float_of(value: Any) -> Any:
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
