"""What the client is served: the parsed turn with its call ids, cut at a stop string. Pure.

Call ids come from the node, so that they are the same in a stream and in the committed turn, and name the turn when they come back:
two answers to one prompt never share an id. An id that the model wrote itself stays (it is in its tokens), and so does the short form
that some templates insist on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from tokentrue.sessions.keys import calls_of
from tokentrue.types import Delta, Message, Parsed

_MADE_UP = re.compile(r"call_[0-9a-f]{24}")  # by a parser, for a format that carries no ids


def call_id(node_id: str, index: int) -> str:
    return f"call_{node_id[:20]}{index:04x}"


def _own_id(written: str, node_id: str, index: int) -> str:
    return call_id(node_id, index) if not written or _MADE_UP.fullmatch(written) else written


def served_message(parsed: Parsed, node_id: str, *, stopped_by: int | str | None) -> Message:
    message: dict[str, Any] = dict(parsed.message)
    calls = calls_of(message)
    if calls:
        message["tool_calls"] = [_with_id(call, node_id, index) for index, call in enumerate(calls)]
    content = message.get("content")
    if isinstance(stopped_by, str) and isinstance(content, str) and stopped_by and stopped_by in content:
        message["content"] = content[: content.index(stopped_by)]
    return message


def _with_id(call: Mapping[str, Any], node_id: str, index: int) -> dict[str, Any]:
    return {**call, "id": _own_id(str(call.get("id") or ""), node_id, index), "type": call.get("type", "function")}


class Deltas:
    """Streamed deltas as the client may see them: call ids filled in, text held back while it may be the start of a stop string."""

    def __init__(self, node_id: str, stops: tuple[str, ...]) -> None:
        self._node, self._stops = node_id, tuple(stop for stop in stops if stop)
        self._held, self._cut = "", False

    def feed(self, delta: Delta) -> Delta | None:
        if delta.call is not None and (delta.name or delta.call_id):
            delta = replace(delta, call_id=_own_id(delta.call_id, self._node, delta.call))
        if not delta.content or not self._stops:
            return delta
        return self._pass(delta, self._release(delta.content))

    def finish(self) -> Delta | None:
        held, self._held = self._held, ""
        return Delta(content=held) if held and not self._cut else None

    def _pass(self, delta: Delta, text: str) -> Delta | None:
        out = replace(delta, content=text)
        return out if (text or out.reasoning or out.call is not None) else None

    def _release(self, text: str) -> str:
        if self._cut:
            return ""
        text = self._held + text
        at = min((place for stop in self._stops if (place := text.find(stop)) >= 0), default=-1)
        if at >= 0:
            self._cut, self._held = True, ""
            return text[:at]
        keep = max((size for stop in self._stops for size in range(1, len(stop)) if text.endswith(stop[:size])), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def deltas_of(message: Message) -> Iterator[Delta]:
    """A whole message as deltas: for a recorded answer that is streamed again."""
    if message.get("reasoning_content"):
        yield Delta(reasoning=str(message["reasoning_content"]))
    if message.get("content"):
        yield Delta(content=str(message["content"]))
    for index, call in enumerate(calls_of(message)):
        function: Mapping[str, Any] = call["function"]
        yield Delta(call=index, call_id=str(call["id"]), name=str(function["name"]))
        yield Delta(call=index, arguments=str(function.get("arguments") or ""))
