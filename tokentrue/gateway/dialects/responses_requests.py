"""OpenAI Responses: the items and tools of a request.

A custom (free-form) tool is shown to the model as a function with one string, and served back as a custom tool call;
the tools of a namespace are shown under both names, and served back with their namespace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, cast

import msgspec
import orjson

from tokentrue.conversion import convert
from tokentrue.errors import MessageError
from tokentrue.gateway.dialects.base import FunctionTool, assistant_message, call_entry, echo, join_text
from tokentrue.gateway.dialects.responses_items import ServedTool, custom_input, model_name
from tokentrue.gateway.dialects.signing import ReasoningSigner
from tokentrue.json_types import JsonObject
from tokentrue.types import Message

FindArguments = Callable[[str], Sequence[str]]
"""The recorded arguments of the calls that were served under an id."""

TEXT_PARTS = ("input_text", "output_text", "text", "refusal")
REASONING_PARTS = ("reasoning_text", "summary_text", "text")
CALLS = ("function_call", "custom_tool_call")
OUTPUTS = ("function_call_output", "custom_tool_call_output")
TURN = "turn"  # on a part of an assistant message: the node of this session that served it


class CallItem(msgspec.Struct):
    """A call, of a function (`arguments`) or of a custom tool (`input`)."""

    name: str
    call_id: str
    arguments: str = ""
    input: str = ""
    namespace: Any = None


class OutputOfCall(msgspec.Struct):
    call_id: str
    output: Any


# Items.
def message_from_item(
    item: JsonObject, path: str, signer: ReasoningSigner, find_arguments: FindArguments
) -> Message | None:
    """A message, or a part of an assistant message; None for reasoning of which nothing is left."""
    kind = item.get("type") or ("message" if "role" in item else None)
    if kind == "reasoning":
        text = reasoning_text(item, path, signer)
        return assistant_message((), [text], ()) if text else None
    if kind in CALLS:
        return assistant_message((), (), [call_from_item(convert(item, CallItem, path), kind, find_arguments)])
    if kind == "message":
        return text_message(item, path)
    if kind in OUTPUTS:
        result = convert(item, OutputOfCall, path)
        text = join_text(result.output, TEXT_PARTS, f"{path}.output", glue="\n")
        if text is None:
            raise MessageError("must be text", field=f"{path}.output")
        return {"role": "tool", "tool_call_id": result.call_id, "content": text}
    raise MessageError(f"item of type {echo(kind)} is not supported", field=f"{path}.type")


def text_message(item: JsonObject, path: str) -> Message:
    role = item.get("role")
    if role not in ("user", "system", "developer", "assistant"):
        raise MessageError(f"role {echo(role)} is not supported", field=f"{path}.role")
    text = join_text(item.get("content"), TEXT_PARTS, f"{path}.content", glue="" if role == "assistant" else "\n")
    if text is None:
        raise MessageError("must be a string or a list of parts", field=f"{path}.content")
    return {"role": "system" if role == "developer" else role, "content": text}


def reasoning_text(item: JsonObject, path: str, signer: ReasoningSigner) -> str:
    sealed = item.get("encrypted_content")
    if item.get("content"):
        return join_text(item["content"], REASONING_PARTS, f"{path}.content", glue="") or ""
    if isinstance(sealed, str):
        return signer.unwrap(sealed) or ""
    return join_text(item.get("summary"), REASONING_PARTS, f"{path}.summary", glue="") or ""


def call_from_item(item: CallItem, kind: str, find_arguments: FindArguments) -> JsonObject:
    is_function = kind == "function_call"
    arguments = item.arguments if is_function else arguments_from_input(item.input, find_arguments(item.call_id))
    namespace = item.namespace if isinstance(item.namespace, str) else None
    return call_entry(item.call_id, model_name(namespace, item.name), arguments)


def arguments_from_input(said: str, recorded: Sequence[str]) -> str:
    """The inverse of `custom_input`. Arguments that broke off, or that hold more than the input, are served as the
    input alone: the call's id finds them in the record."""
    found = (arguments for arguments in recorded if custom_input(arguments) == said)
    return next(found, None) or orjson.dumps({"input": said}).decode()


def is_same_turn(parts: Sequence[Message], part: Message) -> bool:
    """False where `part` and the parts before it were served by two nodes. A part without a name belongs to those
    before it."""
    before = [one[TURN] for one in parts if TURN in one]
    return not before or part.get(TURN, before[-1]) == before[-1]


# Tools.
def tools_from_responses(tools: list[JsonObject] | None) -> tuple[tuple[JsonObject, ...] | None, dict[str, ServedTool]]:
    """As functions, and how a call of each is to be served. A tool in a namespace is shown to the model as
    `namespace__name`."""
    out: list[JsonObject] = []
    served: dict[str, ServedTool] = {}
    for where, namespace, tool in flatten_namespaces(tools or ()):
        kind = tool.get("type")
        if kind not in ("function", "custom"):
            message = f"tool type {echo(kind)} is not supported; use 'function', 'custom' or 'namespace'"
            raise MessageError(message, field=f"{where}.type")
        given = convert(tool, FunctionTool, where)
        shown, described, parameters = (
            model_name(namespace, given.name),
            given.description or "",
            given.parameters or {},
        )
        if kind == "custom":
            described += describe_grammar(tool, where)
            parameters = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
        how = ServedTool(name=given.name, namespace=namespace, custom=kind == "custom")
        if served.setdefault(shown, how) != how:
            raise MessageError(f"another tool is shown to the model as {echo(shown)}, too", field=where)
        function = {"name": shown, "description": described, "parameters": parameters}
        out.append({"type": "function", "function": function})
    return (tuple(out) or None), served


def flatten_namespaces(tools: Sequence[JsonObject]) -> Iterator[tuple[str, str | None, JsonObject]]:
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.get("type") != "namespace":
            yield where, None, tool
            continue
        name, inner_tools = tool.get("name"), tool.get("tools")
        if not isinstance(name, str) or not isinstance(inner_tools, list):
            raise MessageError("a namespace needs a name and a list of tools", field=where)
        for place, inner in enumerate(cast("list[Any]", inner_tools)):
            yield f"{where}.tools[{place}]", name, cast("JsonObject", inner) if isinstance(inner, dict) else {}


class CustomFormat(msgspec.Struct):
    type: Literal["text", "grammar"]
    syntax: Any = None
    definition: Any = None


def describe_grammar(tool: JsonObject, where: str) -> str:
    format_ = convert(tool.get("format") or {"type": "text"}, CustomFormat, f"{where}.format")
    if format_.type == "text":
        return ""
    return f"\n\nThe input follows this {format_.syntax} grammar:\n{format_.definition}"


def choice_from_responses(choice: str | JsonObject | None) -> str | JsonObject | None:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") not in ("function", "custom"):
        raise MessageError(f"type {echo(choice.get('type'))} is not supported", field="tool_choice.type")
    return {"type": "function", "function": {"name": choice.get("name")}}
