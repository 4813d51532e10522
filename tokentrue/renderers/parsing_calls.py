"""Reads the body of a tool-call region: a list of calls, or the reason why it is none.

A call keeps the model's own spelling of its arguments where the format is JSON (spacing, key order, escapes), so that nothing is
re-serialised. Where the format is untyped (XML-like), each value is typed by the tool's own JSON schema and stays a string otherwise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import regex
from transformers.utils.chat_parsing.content_parsers import process_field
from transformers.utils.chat_parsing.response_templates import ResponseTemplateField

from tokentrue.renderers.parsing_early import JsonShape, TagShape
from tokentrue.types import Status, Tools

_NAMES, _ARGUMENTS = ("name", "function_name", "tool_name"), ("arguments", "parameters", "args", "input")
_TRAILERS = regex.compile(r"\s*(?:</function>|</invoke>|</tool>)?\s*")
_TRUE, _FALSE = {"true", "1"}, {"false", "0"}
_SPACE = " \t\r\n"
_ENDS = re.compile(r"[ \t\r\n]*\}[ \t\r\n]*")
_SPACES = re.compile("[ \t\r\n]*")
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """`arguments` is JSON text, `values` what it says; `call_id` is empty unless the model wrote one."""

    name: str
    arguments: str
    values: Mapping[str, Any]
    call_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoCall:
    status: Status
    detail: str
    name: str | None = None


def read_calls(
    field: ResponseTemplateField,
    body: str,
    captures: Mapping[str, str],
    schemas: Mapping[str, Any],
    *,
    shape: JsonShape | TagShape | None = None,
) -> list[Call] | NoCall:
    """`schemas`: tool name to its parameter schemas, as `parameter_schemas` gives them; `shape`: of this field, where it has one."""
    if isinstance(shape, JsonShape) and (found := _plain_call(shape, body, captures)) is not None:
        return found
    try:
        value = process_field(body, field, dict(captures))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return _diagnose(field, body, captures, schemas, error)
    calls = _calls(field, value, body, captures, schemas)
    if isinstance(calls, NoCall):
        return calls
    if field.content == "xml-inline" and (wrong := _left_over(field, body) or _twice(field, body)):
        return NoCall(status=Status.MALFORMED, detail=wrong, name=calls[0].name)
    return calls


def _plain_call(shape: JsonShape, body: str, captures: Mapping[str, str]) -> list[Call] | NoCall | None:
    """A call as its format has it, read in one pass; None for anything else, which is looked at more closely."""
    name, call_id = captures.get("name"), captures.get("id") or captures.get("call_id") or ""
    if shape.arguments is None or shape.name is None:
        found = _json_at(body, 0)
        if found is None or body[found[1] :].strip(_SPACE):
            return None
    elif (usual := shape.usual.match(body)) and (found := _json_at(body, usual.end())) and _ENDS.fullmatch(body, found[1]):
        name = usual[1]
    else:
        read = _named_members(shape, body)
        if read is None or isinstance(read, NoCall):
            return read
        name, written, found = read
        call_id = call_id or written
    start, end, values = found
    if not isinstance(name, str) or not name.strip() or not isinstance(values, dict):
        return None
    return [Call(name=name.strip(), arguments=body[start:end], values=cast(dict[str, Any], values), call_id=call_id)]


def _named_members(shape: JsonShape, body: str) -> tuple[Any, str, tuple[int, int, Any]] | NoCall | None:
    """Name, written id and arguments, wherever they stand in the object. An id counts where it stands before the arguments."""
    members = _members(body)
    keys = [key for key, _ in members or ()]
    if members is None or shape.name not in keys or shape.arguments not in keys:
        return None
    if keys.count(shape.name) > 1 or keys.count(shape.arguments) > 1:
        return NoCall(status=Status.MALFORMED, detail="the call says its name or its arguments twice")
    place = keys.index(shape.arguments)
    written = next((value[2] for key, value in members[:place] if key == "id" and isinstance(value[2], str)), "")
    return members[keys.index(shape.name)][1][2], written, members[place][1]


def _json_at(body: str, place: int) -> tuple[int, int, Any] | None:
    start = _after_space(body, place)
    try:
        value, end = _DECODER.raw_decode(body, start)
    except (ValueError, RecursionError):
        return None
    return start, end, value


def _members(body: str) -> list[tuple[str, tuple[int, int, Any]]] | None:
    """The members of the one object that `body` is: key, and its value with the place where it stands."""
    place = _after_space(body, 0)
    members: list[tuple[str, tuple[int, int, Any]]] = []
    mark = "{"
    while body[place : place + 1] == mark:
        key = _json_at(body, place + 1)
        colon = _after_space(body, key[1]) if key is not None else 0
        if key is None or not isinstance(key[2], str) or body[colon : colon + 1] != ":":
            return None
        value = _json_at(body, colon + 1)
        if value is None:
            return None
        members.append((key[2], value))
        place, mark = _after_space(body, value[1]), ","
    whole = members and body[place : place + 1] == "}" and _after_space(body, place + 1) == len(body)
    return members if whole else None


def _after_space(body: str, place: int) -> int:
    found = _SPACES.match(body, place)
    return found.end() if found else place


def parameter_value(match: Any, schema: Any) -> Any:
    """The value of one matched parameter: as it says itself, else as the schema types it."""
    said = match.groupdict().get("string")
    return typed(match["value"], schema) if said is None else _as_said(match["value"], said == "true")


def _twice(field: ResponseTemplateField, body: str) -> str:
    if field.content_args.get("merge_duplicates"):
        return ""
    keys = [match["key"] for match in regex.finditer(field.content_args["tag_pattern"], body, flags=regex.DOTALL)]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    return f"parameter {twice!r} is written twice" if twice is not None else ""


def parameter_schemas(tools: Tools | None) -> dict[str, Mapping[str, Any]]:
    """Tool name to its parameters' schemas. Tools may be wrapped (`{"type": "function", "function": …}`) or bare."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools or ():
        function: Any = tool.get("function", tool) if isinstance(tool, Mapping) else {}
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str):
            parameters = function.get("parameters") or function.get("input_schema") or {}
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            found[name] = properties if isinstance(properties, Mapping) else {}
    return found


def _calls(
    field: ResponseTemplateField, value: Any, body: str, captures: Mapping[str, str], schemas: Mapping[str, Any]
) -> list[Call] | NoCall:
    items = cast(list[Any], value) if isinstance(value, list) else [value]
    written = _written_ids(field, body, captures, len(items))
    calls: list[Call] = []
    for place, item in enumerate(items):
        call = _call(field, item, body if len(items) == 1 else "", schemas, place)
        if isinstance(call, NoCall):
            return call
        calls.append(call if call.call_id else replace(call, call_id=written[place]))
    return calls or NoCall(status=Status.MALFORMED, detail="an empty list of calls")


def _written_ids(field: ResponseTemplateField, body: str, captures: Mapping[str, str], count: int) -> list[str]:
    """Ids that the model wrote itself: captured by the opening pattern, or an `id` in the JSON."""
    captured = captures.get("id") or captures.get("call_id") or ""
    if captured or field.content != "json" or not _valid(body) or "name" in captures:  # else the body is the arguments
        return [captured] * count
    value = json.loads(body)
    items = cast(list[Any], value) if isinstance(value, list) else [value]
    found = [item.get("id") if isinstance(item, Mapping) else None for item in items]
    return [id_ if isinstance(id_, str) else "" for id_ in found] if len(found) == count else [""] * count


def _call(field: ResponseTemplateField, item: Any, body: str, schemas: Mapping[str, Any], place: int) -> Call | NoCall:
    function = item.get("function", item) if isinstance(item, Mapping) else None
    if not isinstance(function, Mapping):
        return NoCall(status=Status.MALFORMED, detail=f"call {place} is not an object")
    name = _first(function, _NAMES)
    if not isinstance(name, str) or not name.strip():
        return NoCall(status=Status.MISSING_NAME, detail=f"call {place} has no name")
    name, values, spelled = name.strip(), _first(function, _ARGUMENTS), ""
    if isinstance(values, str):  # arguments encoded twice
        spelled = values or "{}"
        try:
            values = json.loads(spelled)
        except ValueError as error:
            return NoCall(status=Status.INVALID_JSON, detail=f"arguments: {error}", name=name)
    if values is None:
        values = {}
    if not isinstance(values, Mapping):
        return NoCall(status=Status.MALFORMED, detail=f"arguments are {type(values).__name__}, not an object", name=name)
    if field.content == "json":
        spelled = spelled or _spelling(body, values)
    else:
        said = _said_types(field, body)
        values = {
            key: _as_said(value, said[key]) if key in said else typed(value, schemas.get(name, {}).get(key))
            for key, value in values.items()
        }
    written = item.get("id") if isinstance(item, Mapping) else None
    text = spelled or json.dumps(values, ensure_ascii=False)
    return Call(name=name, arguments=text, values=dict(values), call_id=str(written) if written else "")


def _first(mapping: Mapping[str, Any], keys: Sequence[str]) -> Any:
    return next((mapping[key] for key in keys if key in mapping), None)


def _spelling(body: str, values: Mapping[str, Any]) -> str:
    """The model's own text of the arguments inside `body`, or "" where they cannot be told apart."""
    start = body.find("{")
    if start < 0:
        return ""
    for begin in (start, *(match.end() for match in regex.finditer(r'"(?:arguments|parameters|args|input)"\s*:\s*', body))):
        try:
            found, end = json.JSONDecoder(strict=False).raw_decode(body, begin)
        except (ValueError, RecursionError):
            continue
        if found == values and isinstance(found, dict) and _valid(body[begin:end]):
            return body[begin:end]
    return ""


def _valid(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _left_over(field: ResponseTemplateField, body: str) -> str:
    rest = regex.sub(field.content_args["tag_pattern"], "", body, flags=regex.DOTALL)
    return "" if _TRAILERS.fullmatch(rest) else f"text outside the parameters: {rest.strip()[:60]!r}"


def _said_types(field: ResponseTemplateField, body: str) -> dict[str, bool]:
    """Where each parameter says for itself whether it is a string (DeepSeek's `string="true"`)."""
    pattern = field.content_args.get("tag_pattern", "")
    if "(?P<string>" not in pattern:
        return {}
    found = regex.finditer(pattern, body, flags=regex.DOTALL)
    return {match["key"]: match["string"] == "true" for match in found if match["string"] is not None}


def _as_said(value: Any, is_string: bool) -> Any:
    if is_string:
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _diagnose(
    field: ResponseTemplateField, body: str, captures: Mapping[str, str], schemas: Mapping[str, Any], error: Exception
) -> list[Call] | NoCall:
    """Why `process_field` refused. A JSON call of a known tool that only lacks its arguments is a call without any."""
    if field.content != "json":
        return NoCall(status=Status.MALFORMED, detail=str(error).splitlines()[0], name=captures.get("name"))
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as reason:
        return NoCall(status=Status.INVALID_JSON, detail=str(reason), name=captures.get("name"))
    calls = _calls(field, value, body, captures, schemas)
    if isinstance(calls, NoCall):
        return calls
    items = cast(list[Any], value) if isinstance(value, list) else [value]
    for call, item in zip(calls, items, strict=True):
        function = item.get("function", item)
        if call.name not in schemas and _first(function, _ARGUMENTS) is None:
            return NoCall(status=Status.MALFORMED, detail=f"{call.name!r} has no arguments and is no known tool", name=call.name)
    return calls


def typed(value: Any, schema: Any) -> Any:
    """`value` as the schema types it; what does not fit stays the model's own string."""
    if not isinstance(value, str):
        return value
    types = _types(schema)
    text = value.strip()
    if "null" in types and text in {"null", "None"}:
        return None
    if not types or "string" in types:
        return value
    for name in types:
        fits, result = _as(name, text)
        if fits:
            return result
    return value


def _as(name: str, text: str) -> tuple[bool, Any]:
    if name == "boolean":
        return text.lower() in _TRUE | _FALSE, text.lower() in _TRUE
    try:
        decoded = json.loads(text)
    except (ValueError, RecursionError):
        return False, None
    is_number = isinstance(decoded, int | float) and not isinstance(decoded, bool) and decoded == decoded and abs(decoded) != float("inf")
    if name == "integer" and is_number and decoded == int(decoded):
        return True, int(decoded)
    if name == "number" and is_number:
        return True, decoded
    return (name == "object" and isinstance(decoded, dict)) or (name == "array" and isinstance(decoded, list)), decoded


def _types(schema: Any) -> tuple[str, ...]:
    if not isinstance(schema, Mapping):
        return ()
    declared = schema.get("type")
    found = [declared] if isinstance(declared, str) else [name for name in declared or () if isinstance(name, str)]
    for union in ("anyOf", "oneOf", "allOf"):
        for choice in schema.get(union) or ():
            found.extend(_types(choice))
    if not found and "enum" in schema:
        names = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "NoneType": "null"}
        found = [names.get(type(choice).__name__, "string") for choice in schema["enum"]]
    if not found and "properties" in schema:
        found = ["object"]
    return tuple(found + (["null"] if schema.get("nullable") else []))
