"""What a plan is cached by: the shapes of the new messages, what the kept earlier ones write, and the names of tools and
system message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from tokentrue.json_types import JsonObject
from tokentrue.plain_json import digest


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageShape:
    """What of a message can decide about structure: its role, whether it has text, its calls' names; never its text."""

    role: str
    has_content: bool
    call_names: tuple[str, ...]
    name: Any
    has_reasoning: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanKey:
    """Everything that decides where to cut. Two requests with equal keys share a plan.

    `kept` describes the earlier messages that are rendered with the new ones.
    `answers_older_call`: a tool message answers a call of an earlier turn, which only the real history shows.
    """

    shapes: tuple[MessageShape, ...]
    answers_older_call: bool
    kept: tuple[tuple[MessageShape, str], ...] | None
    tools: bytes
    system: bytes
    kwargs: str
    stop: str | None
    in_reasoning: bool


def describe_shape(message: JsonObject) -> MessageShape:
    return MessageShape(
        role=message["role"],
        has_content=bool(message["content"]),
        call_names=tuple(call["function"]["name"] for call in message.get("tool_calls") or ()),
        name=message.get("name", ""),
        has_reasoning="reasoning_content" in message,
    )


def answers_older_call(last: JsonObject, new: Sequence[JsonObject]) -> bool:
    calls = [call for message in (last, *new) for call in message.get("tool_calls") or ()]
    ids = {call["id"] for call in calls}
    return any(message["role"] == "tool" and (message.get("tool_call_id") or "") not in ids for message in new)


def spell(value: Any) -> bytes:
    """Tells apart what compares equal and is printed otherwise: `True` and `1`, other orders of keys."""
    try:
        data = orjson.dumps(value)
    except TypeError:  # no plain JSON
        return repr(value).encode()
    return data + repr(value).encode() if b"null" in data else data  # orjson writes NaN as null


def name_value(value: Any) -> bytes:
    """Names a request's tools or its system message exactly, in few bytes; empty where there is none."""
    return b"" if value is None else digest(spell(value))
