"""What a plan is remembered by: the shapes of a call's messages, never their texts, and small numbers for what is long.

`plain_shapes` reads off messages of the plainest form, as they are, what `shape` says of them after they were copied and filled in.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from copy import deepcopy
from typing import Any

from tokentrue.renderers.template import Plain
from tokentrue.types import Messages

Shape = tuple[str, bool, tuple[str, ...], Any, bool]
_TURN = frozenset({"role", "content", "reasoning_content", "tool_calls"})
_FUNCTION = frozenset({"name", "arguments"})


class Seen:
    """Small numbers for large values, by equality with a copy: what the caller changes in place afterwards is a new value."""

    def __init__(self) -> None:
        self._values: list[tuple[Any, Any, int]] = []
        self._next = 1

    def number(self, value: Any, made: Any) -> tuple[Any, int]:
        if not value:
            return made() if value is not None else None, 0
        for index, (seen, result, number) in enumerate(self._values):
            if seen == value:
                if index:
                    self._values.insert(0, self._values.pop(index))
                return result, number
        result, number = made(), self._next
        self._next += 1
        self._values.insert(0, (deepcopy(value), result, number))
        del self._values[64:]
        return result, number


def shape(message: Plain) -> Shape:
    """What of a message can decide about structure: its role, whether it has text, its calls' names; never its text."""
    names = tuple(call["function"]["name"] for call in message.get("tool_calls") or ())
    return message["role"], bool(message["content"]), names, message.get("name", ""), "reasoning_content" in message


def recent(messages: Messages) -> Hashable:
    """The kinds of the messages shortly before the last turn: a template that carries state over turns shows it after these."""
    before = messages[max(0, len(messages) - 9) : len(messages) - 1]
    return frozenset([(str(message.get("role")), bool(message.get("tool_calls"))) for message in before])


def plain_shapes(last: Any, new: Messages) -> tuple[Shape, ...] | None:
    """Of a turn and of what follows it, for messages that `plain_messages` and `filled_in` only copy and name; None for any others."""
    names = _call_names(last)
    if names is None or not isinstance(new, list | tuple):
        return None
    shapes: list[Shape] = [
        ("assistant", bool(last.get("content")), tuple(names.values()), "", last.get("reasoning_content") is not None),
    ]  # fmt: skip
    for message in new:
        found = _plain_shape(message, names) if type(message) is dict else None
        if found is None:
            return None
        shapes.append(found)
    return tuple(shapes)


def _plain_shape(message: dict[str, Any], names: Mapping[str, str]) -> Shape | None:
    """A text of the user or the system, or the result of a call of these names; none is empty."""
    role, content = message.get("role"), message.get("content")
    if type(content) is not str or not content:
        return None
    if role == "user" or role == "system":
        return (role, True, (), "", False) if len(message) == 2 else None
    call_id = message.get("tool_call_id")
    if role != "tool" or len(message) != 3 or type(call_id) is not str or call_id not in names:
        return None
    return role, True, (), names[call_id], False


def _call_names(last: Any) -> dict[str, str] | None:
    """The id of each call to its name; None where the turn has anything but text, reasoning and calls with all that a call has."""
    if type(last) is not dict or not last.keys() <= _TURN:
        return None
    calls = last.get("tool_calls")
    if not (_is_text(last.get("content")) and _is_text(last.get("reasoning_content")) and (calls is None or type(calls) is list)):
        return None
    names: dict[str, str] = {}
    for call in calls or ():
        function = call.get("function") if type(call) is dict else None
        if type(function) is not dict or function.keys() != _FUNCTION or type(function["arguments"]) is not str:
            return None
        call_id, name = call.get("id"), function["name"]
        if type(call_id) is not str or type(name) is not str or not call_id or not name or call_id in names:
            return None
        names[call_id] = name
    return names


def _is_text(value: Any) -> bool:
    return value is None or type(value) is str
