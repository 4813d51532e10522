"""The types of a call's arguments: what the tool's JSON schema says, for formats that write every value as text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from tokentrue.json_types import JsonMapping, is_array, is_object
from tokentrue.types import Tools

Schemas = Mapping[str, JsonMapping]
"""Tool name to the schemas of its parameters."""

_TRUE, _FALSE = {"true", "1"}, {"false", "0"}
_PYTHON_TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "NoneType": "null"}


def list_parameter_schemas(tools: Tools | None) -> dict[str, JsonMapping]:
    """Tools may be wrapped (`{"type": "function", "function": …}`) or bare."""
    found: dict[str, JsonMapping] = {}
    for tool in cast("tuple[Any, ...]", tuple(tools or ())):
        function = _as_object(_as_object(tool).get("function", tool))
        name = function.get("name")
        if isinstance(name, str):
            parameters = _as_object(function.get("parameters") or function.get("input_schema"))
            found[name] = _as_object(parameters.get("properties"))
    return found


def type_match(match: Any, schema: Any) -> Any:
    """The value of one matched parameter: as it says itself (DeepSeek's `string="true"`), else as the schema types
    it."""
    declared, value = match.groupdict().get("string"), match["value"]
    if declared is None:
        return type_value(value, schema)
    if declared == "true":
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def type_value(value: Any, schema: Any) -> Any:
    """`value` as the schema types it; what does not fit stays the model's own string."""
    if not isinstance(value, str):
        return value
    types = _list_types(schema)
    text = value.strip()
    if "null" in types and text in {"null", "None"}:
        return None
    if not types or "string" in types:
        return value
    for name in types:
        fits, result = _convert(name, text)
        if fits:
            return result
    return value


def _convert(name: str, text: str) -> tuple[bool, Any]:
    if name == "boolean":
        return text.lower() in _TRUE | _FALSE, text.lower() in _TRUE
    try:
        decoded: Any = json.loads(text)
    except (ValueError, RecursionError):
        return False, None
    is_number = (
        isinstance(decoded, int | float)
        and not isinstance(decoded, bool)
        and decoded == decoded
        and abs(decoded) != float("inf")
    )
    if name == "integer" and is_number and decoded == int(decoded):
        return True, int(decoded)
    if name == "number" and is_number:
        return True, decoded
    fits = (name == "object" and is_object(decoded)) or (name == "array" and is_array(decoded))
    return fits, decoded


def _list_types(schema: Any) -> tuple[str, ...]:
    given = _as_object(schema)
    declared: Any = given.get("type")
    found: list[str] = (
        [declared] if isinstance(declared, str) else [name for name in declared or () if isinstance(name, str)]
    )
    for union in ("anyOf", "oneOf", "allOf"):
        for choice in given.get(union) or ():
            found.extend(_list_types(choice))
    if not found and "enum" in given:
        found = [_PYTHON_TYPES.get(type(choice).__name__, "string") for choice in given["enum"]]
    if not found and "properties" in given:
        found = ["object"]
    return tuple(found + (["null"] if given.get("nullable") else []))


def _as_object(value: Any) -> JsonMapping:
    return value if is_object(value) else {}
