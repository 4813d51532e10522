"""What only the fuzz sends: custom and namespaced tools of Responses, results without ids in Google's dialect, and
other JSON for the same arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokentrue.conformance.agents import dialects, messages
from tokentrue.conformance.agents.messages import Call, load_finite

Json = dict[str, Any]
CUSTOM_SCHEMA = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire(dialects.Wire):
    bare: bool = False  # Google: results without ids
    native: bool = True  # Responses: custom and namespaced tools as such, not as plain functions


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool(messages.Tool):
    """`custom` tools take one free text in Responses; `namespace` tools are shown to the model as namespace__name."""

    parameters: Json = field(default_factory=lambda: CUSTOM_SCHEMA, hash=False)
    custom: bool = False
    namespace: str = ""


# Responses.
def custom_input(call: Call, tools: Mapping[str, Tool]) -> str | None:
    """The input of a call that is sent as a custom tool's; None for a function's."""
    tool = tools.get(call.name)
    if tool is None or not tool.custom:
        return None
    try:
        given = json.loads(call.arguments or "{}")
    except ValueError:
        return None
    is_input = isinstance(given, dict) and set(given) == {"input"} and isinstance(given["input"], str)
    return given["input"] if is_input else None


def make_native(body: Json, tools: Sequence[Tool]) -> Json:
    """A body of Responses with custom and namespaced tools as such."""
    by_name = {tool.name: tool for tool in tools}
    items = [native_call(item, by_name) if item["type"] == "function_call" else item for item in body["input"]]
    return {**body, "input": items, **({"tools": [native_tool(tool) for tool in tools]} if tools else {})}


def native_call(item: Json, tools: Mapping[str, Tool]) -> Json:
    call = Call(id=item["call_id"], name=item["name"], arguments=item["arguments"])
    if (given := custom_input(call, tools)) is not None:
        return {"type": "custom_tool_call", "call_id": call.id, "name": call.name, "input": given}
    tool = tools.get(call.name)
    if tool is not None and tool.namespace:
        return {**item, "name": call.name.removeprefix(tool.namespace + "__"), "namespace": tool.namespace}
    return item


def native_tool(tool: Tool) -> Json:
    if tool.custom:
        return {"type": "custom", "name": tool.name, "description": tool.description, "format": {"type": "text"}}
    if tool.namespace:
        inner = {"type": "function", **tool.function(), "name": tool.name.removeprefix(tool.namespace + "__")}
        return {"type": "namespace", "name": tool.namespace, "description": "", "tools": [inner]}
    return {"type": "function", **tool.function()}


def make_plain(dialect: str, whole: Json) -> Json:
    """An answer with every call as a function's."""
    if dialect != dialects.RESPONSES:
        return whole
    return {**whole, "output": [plain_item(item) for item in whole["output"]]}


def plain_item(item: Json) -> Json:
    if item["type"] == "custom_tool_call":
        return {**item, "arguments": json.dumps({"input": item["input"]}, ensure_ascii=False)}
    return {**item, "name": f"{item['namespace']}__{item['name']}"} if item.get("namespace") else item


def read_node(dialect: str, whole: Json) -> str:
    """The gateway's own name of the turn, which the answer's id carries."""
    if dialect == dialects.GOOGLE:
        return whole.get("responseId", "")
    found = re.search(r"[0-9a-f]{32}", whole["id"])
    return found.group() if found else whole["id"]


# Google.
def drop_result_ids(body: Json) -> Json:
    """Results without ids, a content each, where their order says which call each one answers."""
    out: list[Json] = []
    calls: list[tuple[str, str]] = []
    is_bare = False
    contents = body["contents"]
    for index, content in enumerate(contents):
        if content["role"] == "model":
            made = [part["functionCall"] for part in content["parts"] if "functionCall" in part]
            calls = [(call["name"], call["id"]) for call in made]
            is_bare = is_in_order(calls, contents[index + 1 :])
        results = [part["functionResponse"] for part in content["parts"] if "functionResponse" in part]
        if not results or not is_bare:
            out.append(content)
            continue
        bare = [{name: value for name, value in result.items() if name != "id"} for result in results]
        out += [{"role": "user", "parts": [{"functionResponse": result}]} for result in bare]
    return {**body, "contents": out}


def is_in_order(calls: Sequence[tuple[str, str]], after: Sequence[Json]) -> bool:
    """Whether the results that follow a turn answer the calls of each function from the first on."""
    answered: list[str] = []
    for content in after:
        if content["role"] == "model":
            break
        answered += [part["functionResponse"]["id"] for part in content["parts"] if "functionResponse" in part]
    ids = [name for _, name in calls]
    if len(set(ids)) < len(ids) or not set(answered) <= set(ids):
        return False
    for function in {function for function, _ in calls}:
        own = [name for other, name in calls if other == function]
        given = [answer for answer in answered if answer in own]
        if given != own[: len(given)]:
            return False
    return True


# The same arguments in other JSON.
def rewrite(**how: Any) -> Any:
    def write(arguments: str) -> str:
        value = load_object(arguments)
        return arguments if value is None else json.dumps(value, **how)

    return write


def load_object(arguments: str) -> Json | None:
    try:
        value = load_finite(arguments)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def write_reversed(arguments: str) -> str:
    value = load_object(arguments)
    return arguments if value is None else json.dumps(dict(reversed(value.items())), ensure_ascii=False)


def write_floats(arguments: str) -> str:
    value = None if "." in arguments else load_object(arguments)
    if value is None:
        return arguments
    whole = {key for key, item in value.items() if isinstance(item, int) and not isinstance(item, bool)}
    return json.dumps({key: float(item) if key in whole else item for key, item in value.items()}, ensure_ascii=False)


def write_compact(arguments: str) -> str:
    value = load_object(arguments)
    if value is None:
        return arguments
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")) if value else ""


ARGUMENTS = (
    rewrite(sort_keys=True, ensure_ascii=False), write_reversed, write_compact, rewrite(ensure_ascii=True),
    rewrite(ensure_ascii=False, indent=2), write_floats,
)  # fmt: skip


def pad(text: str) -> str:
    return f"\n{text} " if text.strip() else text
