"""Canonical keys of messages: what no known lossy projection can change, hashed and chained.

A key only finds candidates. For an assistant message it leaves out everything that a harness may drop or re-spell (reasoning,
call ids, spacing of arguments, outer whitespace), so a candidate must still be checked by `projections`. For every other role
the key holds all that is rendered: there, a different key is an edit.
Worked example: `{"role": "assistant", "content": "4"}` and `{"role": "assistant", "content": [{"type": "text", "text": " 4"}]}`
have one key; `{"role": "user", "content": "4"}` and `{"role": "user", "content": " 4"}` have two.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, cast

from tokentrue.errors import MessageError
from tokentrue.types import Message, Tools

CallRef = tuple[int, int]
"""Where a tool result points: the index of the assistant message in the conversation, and of the call in it."""

_TEXT_PARTS = {"text", "input_text", "output_text"}
_REASONING_PARTS = {"thinking", "reasoning", "think"}
_INLINE = re.compile(r"\s*<(think|thinking|thought)>(.*?)</\1>(.*)\Z", re.DOTALL)
_TAIL_ONLY = re.compile(r"(.*?)</think>(.*)\Z", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """An assistant message taken apart: reasoning (from its field, a part, or inlined tags), visible text, calls."""

    reasoning: str
    content: str
    calls: tuple[tuple[str, Any], ...]  # (name, arguments as given)
    inlined: bool = False


def text_of(content: Any) -> str:
    """The text of a string or of parts; a part that is not text stands as its canonical JSON behind a NUL."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise MessageError(f"content must be a string, a list of parts or null, got {type(content).__name__}")
    return "".join(_part_text(part) for part in cast("Sequence[Any]", content))


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise MessageError(f"a content part must be an object, got {type(part).__name__}")
    fields = cast("Mapping[str, Any]", part)
    kind = fields.get("type", "text")
    if kind in _TEXT_PARTS:
        return str(fields.get("text") or "")
    if kind in _REASONING_PARTS:
        return ""
    return "\0" + json.dumps({k: v for k, v in fields.items() if k != "cache_control"}, sort_keys=True, default=str)


def reasoning_of(message: Message) -> str:
    for field in ("reasoning_content", "reasoning"):
        value = message.get(field)
        if isinstance(value, str) and value:
            return value
    content = message.get("content")
    if not isinstance(content, (list, tuple)):
        return ""
    found: list[str] = []
    for part in cast("Sequence[Any]", content):
        if isinstance(part, Mapping):
            fields = cast("Mapping[str, Any]", part)
            if fields.get("type") in _REASONING_PARTS:
                found.append(str(fields.get("thinking") or fields.get("text") or ""))
    return "".join(found)


def calls_of(message: Message) -> Sequence[Mapping[str, Any]]:
    return cast("Sequence[Mapping[str, Any]]", message.get("tool_calls") or ())


def said(message: Message, *, tags: bool = True) -> Said:
    """`tags=False` takes think tags in the content for the text that they are."""
    content, reasoning, inlined = text_of(message.get("content")), reasoning_of(message), False
    if not tags:
        pass
    elif "</" in content and (found := _INLINE.match(content)):
        inlined, content = True, found.group(3)
        reasoning = reasoning or found.group(2)
    elif "</think>" in content and (found := _TAIL_ONLY.match(content)):
        inlined, content = True, found.group(2)
        reasoning = reasoning or found.group(1)
    calls = tuple(_call(call) for call in calls_of(message))
    return Said(reasoning=reasoning, content=content, calls=calls, inlined=inlined)


def _call(call: Mapping[str, Any]) -> tuple[str, Any]:
    function = cast("Mapping[str, Any]", call.get("function") or call)
    return str(function.get("name") or ""), function.get("arguments")


def loose_arguments(arguments: Any) -> str:
    """Arguments up to key order, spacing, escapes, spelling of numbers, and empty against `{}`; what is no JSON stays as it is."""
    if arguments is None:
        return "{}"
    if isinstance(arguments, str):
        if not arguments.strip():
            return "{}"
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return "\0" + arguments.strip()
    try:
        return json.dumps(_loose(arguments), sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError):
        return "\0" + repr(arguments)


def _loose(value: Any) -> Any:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, (int, float)):
        try:
            number = float(value)  # what a JavaScript harness keeps of it
        except OverflowError:
            return str(value)
        return number if math.isfinite(number) else str(value)
    if isinstance(value, (dict, Mapping)):
        return {str(key): _loose(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, Sequence):
        return [_loose(item) for item in cast("Sequence[Any]", value)]
    raise TypeError(type(value).__name__)


def _digest(previous: bytes, fields: Sequence[str]) -> bytes:
    parts = [previous]
    for field in fields:
        data = field.encode("utf-8", "surrogatepass")
        parts += (b"%d:" % len(data), data)
    return blake2b(b"".join(parts), digest_size=16).digest()


class Bases:
    """Base keys of tool sets seen lately: comparing two equal sets is cheaper than spelling one out."""

    def __init__(self) -> None:
        self._seen: list[tuple[Tools, bytes]] = []

    def key(self, tools: Tools | None) -> bytes:
        if not tools:
            return base_key(None)
        for seen, key in self._seen:
            if seen is tools or seen == tools:
                return key
        key = base_key(tools)
        self._seen.insert(0, (tools, key))
        del self._seen[4:]
        return key


def base_key(tools: Tools | None) -> bytes:
    """Where every conversation under these tools begins. The order of tools, and of keys inside one, does not matter."""
    if not tools:
        return _digest(b"", ["tools"])
    described = sorted(json.dumps({k: v for k, v in tool.items() if k != "cache_control"}, sort_keys=True, default=str) for tool in tools)
    return _digest(b"", ["tools", *described])


def role_of(message: Message, field: str = "messages[]") -> str:
    role = message.get("role") if isinstance(message, (dict, Mapping)) else None  # pyright: ignore[reportUnnecessaryIsInstance]
    if not isinstance(role, str) or not role:
        raise MessageError("a message needs a role", field=field)
    return "system" if role == "developer" else role


def next_key(previous: bytes, message: Message, reference: CallRef | str | None) -> bytes:
    """The chained key after `message`. `reference` is where a tool result points (the raw id where it points nowhere)."""
    role = role_of(message)
    if role == "assistant":
        parts = said(message)
        fields = [role, parts.content.strip()]
        for name, arguments in parts.calls:
            fields += [name, loose_arguments(arguments)]
        return _digest(previous, fields)
    name = message.get("name")
    return _digest(previous, [role, text_of(message.get("content")), str(name or ""), "" if reference is None else repr(reference)])
