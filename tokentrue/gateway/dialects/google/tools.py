"""Google tools, their choice and response schemas, in the terms of Chat Completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from tokentrue.errors import MessageError
from tokentrue.gateway.dialects.base import echo, object_of
from tokentrue.gateway.dialects.google.contents import camel_keys, known_fields
from tokentrue.gateway.dialects.tools import check_function
from tokentrue.json_types import JsonObject

DECLARATION_FIELDS = (
    "name",
    "description",
    "parameters",
    "parametersJsonSchema",
    "response",
    "responseJsonSchema",
    "behavior",
)
NUMBERS = (
    "minItems",
    "maxItems",
    "minLength",
    "maxLength",
    "minProperties",
    "maxProperties",
)  # int64, which JSON may spell as strings
SCHEMAS = ("items",)
SCHEMA_LISTS = ("anyOf", "prefixItems")
SCHEMA_MAPS = ("properties", "defs", "$defs")
IGNORED = ("propertyOrdering", "nullable")


def tools_from_google(tools: Sequence[JsonObject] | None) -> tuple[JsonObject, ...] | None:
    out: list[JsonObject] = []
    for index, tool in enumerate(tools or ()):
        where = f"tools[{index}]"
        fields = camel_keys(tool, where)
        for name in fields:
            if name != "functionDeclarations":
                raise MessageError("runs on its vendor's servers and is not supported", field=f"{where}.{name}")
        declared: Any = fields.get("functionDeclarations") or []
        if not isinstance(declared, list):
            raise MessageError("must be a list", field=f"{where}.functionDeclarations")
        for place, declaration in enumerate(cast("list[Any]", declared)):
            out.append(tool_from_declaration(declaration, f"{where}.functionDeclarations[{place}]"))
    return tuple(out) or None


def tool_from_declaration(value: Any, where: str) -> JsonObject:
    fields = known_fields(value, DECLARATION_FIELDS, where)
    schema = schema_of(fields, "parameters", "parametersJsonSchema", where)
    function = {
        "name": fields.get("name"),
        "description": fields.get("description") or "",
        "parameters": schema or EMPTY_SCHEMA,
    }
    check_function(function, where)
    return {"type": "function", "function": function}


EMPTY_SCHEMA: JsonObject = {"type": "object", "properties": {}}


def schema_of(fields: JsonObject, openapi: str, json_schema: str, where: str) -> JsonObject | None:
    """The JSON schema under one of two names: Google's subset of OpenAPI, or JSON schema itself."""
    given = [name for name in (openapi, json_schema) if fields.get(name) is not None]
    if not given:
        return None
    if len(given) == 2:
        raise MessageError(f"send {openapi} or {json_schema}, not both", field=f"{where}.{json_schema}")
    schema = object_of(fields[given[0]], f"{where}.{given[0]}")
    return schema if given[0] == json_schema else json_schema_from_openapi(schema, f"{where}.{openapi}", 0)


def json_schema_from_openapi(value: Any, where: str, depth: int) -> JsonObject:
    """Types in lower case, `nullable` as a second type, counts as numbers."""
    if depth > 100:
        raise MessageError("is nested more than 100 levels deep", field=where[:200])
    schema = camel_keys(object_of(value, where), where)
    out: JsonObject = {}
    for name, item in schema.items():
        at = f"{where}.{name}"
        if name == "type":
            out["type"] = [str(item).lower(), "null"] if schema.get("nullable") is True else str(item).lower()
        elif name in SCHEMAS:
            out[name] = json_schema_from_openapi(item, at, depth + 1)
        elif name in SCHEMA_LISTS and isinstance(item, list):
            out[name] = [json_schema_from_openapi(one, at, depth + 1) for one in cast("list[Any]", item)]
        elif name in SCHEMA_MAPS:
            out[name] = {
                key: json_schema_from_openapi(one, f"{at}.{key}", depth + 1) for key, one in object_of(item, at).items()
            }
        elif name in NUMBERS and isinstance(item, str) and item.isdigit():
            out[name] = int(item)
        elif name not in IGNORED:
            out[name] = item
    return out


def choice_from_google(config: JsonObject | None, tools: Sequence[JsonObject] | None) -> str | JsonObject | None:
    """`toolConfig.functionCallingConfig` as a tool_choice."""
    if config is None:
        return None
    fields = known_fields(config, ("functionCallingConfig", "retrievalConfig"), "toolConfig")
    where = "toolConfig.functionCallingConfig"
    calling = known_fields(fields.get("functionCallingConfig") or {}, ("mode", "allowedFunctionNames"), where)
    mode = str(calling.get("mode") or "AUTO").upper()
    words: Mapping[str, str] = {"AUTO": "auto", "MODE_UNSPECIFIED": "auto", "NONE": "none", "ANY": "required"}
    if mode not in words:
        raise MessageError(f"{echo(mode)} cannot be enforced; use AUTO, ANY or NONE", field=f"{where}.mode")
    allowed: Any = calling.get("allowedFunctionNames") or []
    names = [tool["function"]["name"] for tool in tools or ()]
    if not allowed or set(allowed) == set(names):
        return words[mode]
    if mode != "ANY" or len(allowed) != 1:
        raise MessageError("name one function under mode ANY, or all of them", field=f"{where}.allowedFunctionNames")
    return {"type": "function", "function": {"name": allowed[0]}}
