"""Reads one call in JSON with the places of its members, so that the arguments keep the model's own spelling."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tokentrue.renderers.json_types import is_object
from tokentrue.renderers.parsing.partial_calls import JsonCallFormat
from tokentrue.types import Status

_SPACE = " \t\r\n"
_SPACES = re.compile("[ \t\r\n]*")
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCall:
    """`arguments` is JSON text, `values` what it says; `call_id` is empty unless the model wrote one."""

    name: str
    arguments: str
    values: Mapping[str, Any]
    call_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFailure:
    """Why a region is no call."""

    status: Status
    detail: str
    name: str | None = None


class JsonSpan(NamedTuple):
    """A JSON value and the characters `[start, end)` that spell it."""

    start: int
    end: int
    value: Any


def read_json_call(
    call_format: JsonCallFormat, body: str, captures: Mapping[str, str]
) -> ParsedCall | CallFailure | None:
    """None where the body is not exactly one call of this format: whoever knows the format's other forms must look."""
    name: Any = captures.get("name")
    call_id = captures.get("id") or captures.get("call_id") or ""
    if call_format.arguments is None or call_format.name is None:
        found = _read_json(body, 0)
        if found is None or body[found.end :].strip(_SPACE):
            return None
    else:
        members = _read_members(body)
        keys = [key for key, _ in members]
        if call_format.name not in keys or call_format.arguments not in keys:
            return None
        if keys.count(call_format.name) > 1 or keys.count(call_format.arguments) > 1:
            return CallFailure(status=Status.MALFORMED, detail="the call says its name or its arguments twice")
        place = keys.index(call_format.arguments)
        name, found = members[keys.index(call_format.name)][1].value, members[place][1]
        # an id counts where it stands before the arguments: a stream has shown the call by then
        written = next(
            (value.value for key, value in members[:place] if key == "id" and isinstance(value.value, str)), ""
        )
        call_id = call_id or written
    if not isinstance(name, str) or not name.strip() or not is_object(found.value):
        return None
    return ParsedCall(name=name.strip(), arguments=body[found.start : found.end], values=found.value, call_id=call_id)


def _read_json(body: str, place: int) -> JsonSpan | None:
    start = _skip_space(body, place)
    try:
        value, end = _DECODER.raw_decode(body, start)
    except (ValueError, RecursionError):
        return None
    return JsonSpan(start, end, value)


def _read_members(body: str) -> list[tuple[str, JsonSpan]]:
    """The members of the one object that `body` is; empty where it is none."""
    place = _skip_space(body, 0)
    members: list[tuple[str, JsonSpan]] = []
    mark = "{"
    while body[place : place + 1] == mark:
        key = _read_json(body, place + 1)
        colon = _skip_space(body, key.end) if key is not None else 0
        if key is None or not isinstance(key.value, str) or body[colon : colon + 1] != ":":
            return []
        value = _read_json(body, colon + 1)
        if value is None:
            return []
        members.append((key.value, value))
        place, mark = _skip_space(body, value.end), ","
    is_whole = body[place : place + 1] == "}" and _skip_space(body, place + 1) == len(body)
    return members if is_whole else []


def _skip_space(body: str, place: int) -> int:
    found = _SPACES.match(body, place)
    return found.end() if found else place
