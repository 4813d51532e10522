"""Normalises messages and tools to the plain shape that one template takes; bad input is a MessageError with the field.
Arguments are parsed from JSON text, null content becomes "", parts are joined if the template takes strings, tool
results get the name and id of their call. No text is changed."""

import hashlib
import json
import re
from collections.abc import Sequence
from itertools import takewhile

from tokentrue.errors import MessageError
from tokentrue.json_types import JsonMapping, JsonObject, JsonValue, is_array, is_object
from tokentrue.plain_json import check_depth
from tokentrue.renderers.template import InputFormat, make_arguments, make_content
from tokentrue.types import Messages, Tools

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
REASONING = ("reasoning_content", "thinking", "reasoning")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def normalise_tools(tools: Tools | None, inputs: InputFormat) -> list[JsonObject] | None:
    if tools is None:
        return None
    out: list[JsonObject] = []
    for index, tool in enumerate(_check_array(tools, "tools", "a list of tool objects")):
        field = f"tools[{index}]"
        check_depth(_check_object(tool, field), field)
        wrapped = tool if "function" in tool else {"type": "function", "function": tool}
        function = _check_object(wrapped["function"], f"{field}.function")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise MessageError("must be a non-empty string", field=f"{field}.function.name")
        copied = _copy_json(wrapped, field)
        out.append(copied["function"] if inputs.bare_tools else copied)
    return out or None


def _check_array(value: JsonValue, field: str, what: str) -> Sequence[JsonValue]:
    if not is_array(value):
        raise MessageError(f"must be {what}, got {type(value).__name__}", field=field)
    return value


def _check_object(value: JsonValue, field: str) -> JsonMapping:
    if not is_object(value):
        raise MessageError(f"must be an object, got {type(value).__name__}", field=field)
    return value


def _check_text(value: JsonValue, field: str) -> None:
    if value is not None and not isinstance(value, str):
        raise MessageError(f"must be a string, got {type(value).__name__}", field=field)


def normalise_messages(
    messages: Messages,
    inputs: InputFormat,
    *,
    field: str = "messages",
    named: bool = False,
    calls: Sequence[JsonObject] = (),
) -> list[JsonObject]:
    """`named`: tool messages get the name (and a missing id) of the call they answer; `calls`: of the turn before."""
    check_messages(messages, field)
    out = [normalise_message(message, f"{field}[{index}]", inputs) for index, message in enumerate(messages)]
    return ToolNamer(calls).name(out) if named else out


def check_messages(messages: JsonValue, field: str) -> None:
    _check_array(messages, field, "a list of message objects")
    if not set(map(type, messages)) <= {dict}:
        for index, message in enumerate(messages):
            _check_object(message, f"{field}[{index}]")


def normalise_message(message: JsonMapping, field: str, inputs: InputFormat) -> JsonObject:
    check_depth(message, field)
    out: JsonObject = {
        key: _copy_json(value, f"{field}.{key}")
        for key, value in message.items()
        if key != "tool_calls" and not (key in REASONING and value is None)
    }
    role = out.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise MessageError(f"unknown role {role!r}; use one of {', '.join(sorted(ROLES))}", field=f"{field}.role")
    if role == "developer" and not inputs.developer:
        out["role"] = "system"
    out["content"] = _normalise_content(out.get("content"), f"{field}.content", inputs)
    reasoning = next((out[key] for key in REASONING if key in out), None)
    _check_text(reasoning, f"{field}.reasoning_content")
    if reasoning is not None:
        out["reasoning_content"] = reasoning
        out.setdefault("thinking", reasoning)
    if calls := message.get("tool_calls"):
        out["tool_calls"] = _normalise_calls(calls, f"{field}.tool_calls", inputs)
    call_id = out.get("tool_call_id")
    _check_text(call_id, f"{field}.tool_call_id")
    if inputs.short_ids and call_id is not None:
        out["tool_call_id"] = make_short_id(call_id)
    return out


def _normalise_content(content: JsonValue, field: str, inputs: InputFormat) -> JsonValue:
    if content is None or isinstance(content, str):
        return make_content(content or "", inputs)
    parts: list[JsonObject] = []
    for index, part in enumerate(_check_array(content, field, "a string, a list of parts or null")):
        text: JsonValue = part
        if not isinstance(part, str):
            where = f"{field}[{index}]"
            text, kind = _check_object(part, where).get("text"), part.get("type")
            if kind == "image":  # whether this model takes it, ImageInputs decides
                parts.append({"type": "image"})
                continue
            if kind not in ("text", "input_text", "output_text", None) or not isinstance(text, str):
                raise MessageError(f"only text parts can be rendered, got type {kind!r}", field=where)
        parts.append({"type": "text", "text": text})
    if inputs.parts or any(part["type"] == "image" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def _normalise_calls(calls: JsonValue, field: str, inputs: InputFormat) -> list[JsonObject]:
    out: list[JsonObject] = []
    for index, call in enumerate(_check_array(calls, field, "a list")):
        where = f"{field}[{index}]"
        function = call.get("function", call) if is_object(call) else None
        if not is_object(function):
            raise MessageError("must be an object with a function object", field=where)
        if not isinstance(function.get("name"), str):
            raise MessageError("must be a string", field=f"{where}.function.name")
        body = _copy_json(function, f"{where}.function")
        body["arguments"] = _normalise_arguments(body.get("arguments"), inputs)
        call_id = _copy_json(str(call.get("id") or ""), f"{where}.id")
        call_id = make_short_id(call_id) if inputs.short_ids else call_id
        out.append({"type": "function", "id": call_id, "function": body})
    return out


def _normalise_arguments(arguments: JsonValue, inputs: InputFormat) -> JsonValue:
    """Text that is not JSON, is nested too deeply or escapes a lone surrogate stays text."""
    if isinstance(arguments, str) and arguments.strip():
        try:
            parsed: JsonValue = json.loads(arguments)
            check_depth(parsed, "arguments")
            parsed = _copy_json(parsed, "arguments")
        except (ValueError, RecursionError, MessageError):
            return arguments
        arguments = parsed if is_object(parsed) else arguments
    if arguments is None or arguments == "":
        arguments = {}
    return arguments if isinstance(arguments, str) else make_arguments(arguments, inputs)


class ToolNamer:
    """Gives tool messages the name (and a missing id) of the call they answer. A copy can go on after another turn."""

    def __init__(self, calls: Sequence[JsonObject] = ()) -> None:
        """`calls`: of the turn before."""
        self._names: dict[str, str] = {}
        self._waiting: list[JsonObject] = []
        self._note(calls)

    def copy(self) -> "ToolNamer":
        copied = ToolNamer()
        copied._names, copied._waiting = dict(self._names), list(self._waiting)
        return copied

    def name(self, messages: Sequence[JsonObject]) -> list[JsonObject]:
        """Copies the tool messages that had no name. The tool messages after one turn must come together."""
        out = list(messages)
        for index, message in enumerate(messages):
            if message["role"] == "assistant" and message.get("tool_calls"):
                self._note(message["tool_calls"])
            elif message["role"] == "tool":
                call_id = message.get("tool_call_id")
                answered = self._find_answered(messages, index)
                if answered is not None:
                    self._waiting.remove(answered)
                    out[index] = dict(message)
                    if not call_id and answered["id"]:
                        out[index]["tool_call_id"] = answered["id"]
                    out[index].setdefault("name", answered["function"]["name"])
                elif call_id in self._names:
                    out[index] = {**message, "name": message.get("name", self._names[call_id])}
        return out

    def _note(self, calls: Sequence[JsonObject]) -> None:
        self._waiting = list(calls)
        self._names |= {call["id"]: call["function"]["name"] for call in calls if call["id"]}

    def _find_answered(self, messages: Sequence[JsonObject], index: int) -> JsonObject | None:
        """By id, else by name, else by position if there is one result per waiting call. Never guesses."""
        message, waiting = messages[index], self._waiting
        if call_id := message.get("tool_call_id"):
            return next((call for call in waiting if call["id"] == call_id), None)
        if name := message.get("name"):
            return next((call for call in waiting if call["function"]["name"] == name), None)
        group = list(
            takewhile(lambda other: other["role"] == "tool" and not other.get("tool_call_id"), messages[index:])
        )
        return waiting[0] if waiting and len(group) == len(waiting) else None


def make_short_id(call_id: str) -> str:
    """Nine letters or digits; an id that already fits is kept."""
    if len(call_id) == 9 and call_id.isascii() and call_id.isalnum():
        return call_id
    number = int.from_bytes(hashlib.sha256(call_id.encode()).digest()[:8], "big")
    return "".join(_ALPHABET[number // 62**place % 62] for place in range(9))


def _copy_json(value: JsonValue, field: str) -> JsonValue:
    """To plain types, so that a sandboxed template never sees objects with methods of ours."""
    if isinstance(value, str):
        if not value.isascii() and (lone := _LONE_SURROGATE.search(value)):
            detail = f"holds a lone surrogate (U+{ord(lone[0]):04X}), which no tokenizer can encode"
            raise MessageError(detail, field=field)
        return value
    if value is None or isinstance(value, bool | int | float):
        return value
    if is_object(value):
        return {_copy_json(str(key), field): _copy_json(item, f"{field}.{key}") for key, item in value.items()}
    if is_array(value):
        return [_copy_json(item, f"{field}[{index}]") for index, item in enumerate(value)]
    raise MessageError(f"cannot be rendered: {type(value).__name__} is not a JSON type", field=field)
