"""What a plan is cached by: the shapes of the new messages, what the kept earlier ones write, and small numbers for
tools and system message."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import orjson

from tokentrue.renderers.json_types import JsonObject

T = TypeVar("T")


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
    tools: int
    system: int
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
        return orjson.dumps(value)
    except TypeError:  # no plain JSON
        return repr(value).encode()


class NormalisedValues(Generic[T]):
    """Normalises large values (a request's tools, its system message) once, and numbers them for `PlanKey`.

    Found again by equality with a copy that is spelled alike: what the caller changes in place afterwards is a new
    value. Holds the last
    64. Large requests are extended in threads, and no two values may have one number.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[bytes, Any, T | None, int]] = []
        self._next = 1
        self._lock = threading.Lock()

    def get(self, value: Any, normalise: Callable[[], T | None]) -> tuple[T | None, int]:
        """The normalised value and its number; 0 is "none"."""
        if not value:
            return (None if value is None else normalise()), 0
        spelled = spell(value)
        with self._lock:
            for index, (spelling, seen, result, number) in enumerate(self._entries):
                if spelling == spelled and seen == value:
                    if index:
                        self._entries.insert(0, self._entries.pop(index))
                    return result, number
            result, number = normalise(), self._next
            self._next += 1
            self._entries.insert(0, (spelled, deepcopy(value), result, number))
            del self._entries[64:]
            return result, number
