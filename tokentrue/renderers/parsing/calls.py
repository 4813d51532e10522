"""Reads the body of a tool-call region: a list of calls, or the reason why it is none.

A call keeps the model's own spelling of its arguments where the format is JSON (spacing, key order, escapes), so that
nothing is re-serialised. Where the format is untyped (XML-like), each value is typed by the tool's own JSON schema and
stays a string otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import regex
from transformers.utils.chat_parsing import content_parsers

from tokentrue.renderers.json_types import is_object
from tokentrue.renderers.parsing.argument_types import Schemas, read_declared, type_value
from tokentrue.renderers.parsing.json_call import CallFailure, ParsedCall, read_json_call
from tokentrue.renderers.parsing.partial_calls import CallFormat, ForeignField, JsonCallFormat
from tokentrue.types import Status

_process_field: Callable[[str, ForeignField, dict[str, str]], Any] = cast("Any", content_parsers).process_field
_NAMES, _ARGUMENTS = ("name", "function_name", "tool_name"), ("arguments", "parameters", "args", "input")
_TRAILERS = regex.compile(r"\s*(?:</function>|</invoke>|</tool>)?\s*")


def read_calls(
    field: ForeignField,
    body: str,
    captures: Mapping[str, str],
    schemas: Schemas,
    *,
    call_format: CallFormat | None = None,
) -> list[ParsedCall] | CallFailure:
    """`call_format`: of this field, where it has one."""
    if isinstance(call_format, JsonCallFormat) and (found := read_json_call(call_format, body, captures)) is not None:
        return found if isinstance(found, CallFailure) else [found]
    try:
        value = _process_field(body, field, dict(captures))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return _diagnose(field, body, captures, schemas, error)
    calls = _read_items(field, value, body, captures, schemas)
    if isinstance(calls, CallFailure):
        return calls
    if field.content == "xml-inline" and (wrong := _find_left_over(field, body) or _find_duplicate(field, body)):
        return CallFailure(status=Status.MALFORMED, detail=wrong, name=calls[0].name)
    return calls


def _find_duplicate(field: ForeignField, body: str) -> str:
    if field.content_args.get("merge_duplicates"):
        return ""
    keys: list[str] = [
        match["key"] for match in regex.finditer(field.content_args["tag_pattern"], body, flags=regex.DOTALL)
    ]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    return f"parameter {twice!r} is written twice" if twice is not None else ""


def _find_left_over(field: ForeignField, body: str) -> str:
    rest = regex.sub(field.content_args["tag_pattern"], "", body, flags=regex.DOTALL)
    return "" if _TRAILERS.fullmatch(rest) else f"text outside the parameters: {rest.strip()[:60]!r}"


def _read_items(
    field: ForeignField, value: Any, body: str, captures: Mapping[str, str], schemas: Schemas
) -> list[ParsedCall] | CallFailure:
    items = cast("list[Any]", value) if isinstance(value, list) else [value]
    written = _list_written_ids(field, body, captures, len(items))
    calls: list[ParsedCall] = []
    for place, item in enumerate(items):
        call = _read_item(field, item, body if len(items) == 1 else "", schemas, place)
        if isinstance(call, CallFailure):
            return call
        calls.append(call if call.call_id else replace(call, call_id=written[place]))
    return calls or CallFailure(status=Status.MALFORMED, detail="an empty list of calls")


def _list_written_ids(field: ForeignField, body: str, captures: Mapping[str, str], count: int) -> list[str]:
    """Ids that the model wrote itself: captured by the opening pattern, or an `id` in the JSON."""
    captured = captures.get("id") or captures.get("call_id") or ""
    if (
        captured or field.content != "json" or not _is_json(body) or "name" in captures
    ):  # else the body is the arguments
        return [captured] * count
    value = json.loads(body)
    items = cast("list[Any]", value) if isinstance(value, list) else [value]
    found = [item.get("id") if is_object(item) else None for item in items]
    return [id_ if isinstance(id_, str) else "" for id_ in found] if len(found) == count else [""] * count


def _read_item(field: ForeignField, item: Any, body: str, schemas: Schemas, place: int) -> ParsedCall | CallFailure:
    function: Any = item.get("function", item) if is_object(item) else None
    if not is_object(function):
        return CallFailure(status=Status.MALFORMED, detail=f"call {place} is not an object")
    name: Any = _get_first(function, _NAMES)
    if not isinstance(name, str) or not name.strip():
        return CallFailure(status=Status.MISSING_NAME, detail=f"call {place} has no name")
    name, values, spelled = name.strip(), _get_first(function, _ARGUMENTS), ""
    if isinstance(values, str):  # arguments encoded twice
        spelled = values or "{}"
        try:
            values = json.loads(spelled)
        except ValueError as error:
            return CallFailure(status=Status.INVALID_JSON, detail=f"arguments: {error}", name=name)
    if values is None:
        values = dict[str, Any]()
    if not is_object(values):
        return CallFailure(
            status=Status.MALFORMED, detail=f"arguments are {type(values).__name__}, not an object", name=name
        )
    given = values
    if field.content == "json":
        spelled = spelled or _find_spelling(body, given)
    else:
        given = _type_arguments(field, body, given, schemas.get(name, {}))
    written: Any = item.get("id") if is_object(item) else None
    text = spelled or json.dumps(given, ensure_ascii=False)
    return ParsedCall(name=name, arguments=text, values=dict(given), call_id=str(written) if written else "")


def _type_arguments(
    field: ForeignField, body: str, values: Mapping[str, Any], schemas: Mapping[str, Any]
) -> dict[str, Any]:
    declared = _read_declared_types(field, body)
    return {
        key: read_declared(value, is_string=declared[key]) if key in declared else type_value(value, schemas.get(key))
        for key, value in values.items()
    }


def _read_declared_types(field: ForeignField, body: str) -> dict[str, bool]:
    """Where each parameter says for itself whether it is a string (DeepSeek's `string="true"`)."""
    pattern: str = field.content_args.get("tag_pattern", "")
    if "(?P<string>" not in pattern:
        return {}
    found = regex.finditer(pattern, body, flags=regex.DOTALL)
    return {match["key"]: match["string"] == "true" for match in found if match["string"] is not None}


def _get_first(mapping: Mapping[str, Any], keys: Sequence[str]) -> Any:
    return next((mapping[key] for key in keys if key in mapping), None)


def _find_spelling(body: str, values: Mapping[str, Any]) -> str:
    """The model's own text of the arguments inside `body`, or "" where they cannot be told apart."""
    start = body.find("{")
    if start < 0:
        return ""
    for begin in (
        start,
        *(match.end() for match in regex.finditer(r'"(?:arguments|parameters|args|input)"\s*:\s*', body)),
    ):
        try:
            found, end = json.JSONDecoder(strict=False).raw_decode(body, begin)
        except (ValueError, RecursionError):
            continue
        if found == values and isinstance(found, dict) and _is_json(body[begin:end]):
            return body[begin:end]
    return ""


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _diagnose(
    field: ForeignField, body: str, captures: Mapping[str, str], schemas: Schemas, error: Exception
) -> list[ParsedCall] | CallFailure:
    """Why `process_field` refused. A JSON call of a known tool that only lacks its arguments is a call without any."""
    if field.content != "json":
        return CallFailure(status=Status.MALFORMED, detail=str(error).splitlines()[0], name=captures.get("name"))
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as reason:
        return CallFailure(status=Status.INVALID_JSON, detail=str(reason), name=captures.get("name"))
    calls = _read_items(field, value, body, captures, schemas)
    if isinstance(calls, CallFailure):
        return calls
    items = cast("list[Any]", value) if isinstance(value, list) else [value]
    for call, item in zip(calls, items, strict=True):
        function = item.get("function", item)
        if call.name not in schemas and _get_first(function, _ARGUMENTS) is None:
            return CallFailure(
                status=Status.MALFORMED, detail=f"{call.name!r} has no arguments and is no known tool", name=call.name
            )
    return calls
