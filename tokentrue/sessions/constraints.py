"""Validates `tool_choice` and `response_format` (as in Chat Completions), which the engine must enforce."""

from __future__ import annotations

from typing import cast

from tokentrue.errors import MessageError
from tokentrue.json_types import JsonObject
from tokentrue.plain_json import echo


def constraints_from(
    choice: str | JsonObject | None, format_: JsonObject | None, tools: tuple[JsonObject, ...] | None
) -> tuple[JsonObject, tuple[JsonObject, ...] | None]:
    """Entries for `Sampling.extra` that the engine enforces, and the prompt's tools (none for "none")."""
    extra: JsonObject = {}
    if choice == "none":
        tools = None
    elif choice not in (None, "auto"):
        if isinstance(choice, str) and choice != "required":
            raise MessageError(
                f"must be 'auto', 'none', 'required' or a named function, not {echo(choice)}", field="tool_choice"
            )
        if not tools:
            raise MessageError("needs tools", field="tool_choice")
        extra["tool_choice"] = named_choice(choice, tools) if isinstance(choice, dict) else choice
    if format_ is not None and format_.get("type") != "text":
        if format_.get("type") not in ("json_object", "json_schema"):
            raise MessageError(f"type {echo(format_.get('type'))} is not supported", field="response_format.type")
        declared = cast("JsonObject", format_["json_schema"]) if isinstance(format_.get("json_schema"), dict) else {}
        if format_["type"] == "json_schema" and not isinstance(declared.get("schema"), dict):
            raise MessageError("must have a JSON schema", field="response_format.json_schema.schema")
        if "tool_choice" in extra:
            raise MessageError(
                "cannot be enforced together with tool_choice; send one of them", field="response_format"
            )
        extra["response_format"] = format_
    return extra, tools


def named_choice(choice: JsonObject, tools: tuple[JsonObject, ...]) -> JsonObject:
    function = cast("JsonObject", choice["function"]) if isinstance(choice.get("function"), dict) else {}
    name = function.get("name")
    if choice.get("type") != "function" or not isinstance(name, str):
        raise MessageError("must be 'auto', 'none', 'required' or a named function", field="tool_choice")
    if all(tool["function"]["name"] != name for tool in tools):
        raise MessageError(f"names {echo(name)}, which is not among the tools", field="tool_choice.function.name")
    return {"type": "function", "function": {"name": name}}
