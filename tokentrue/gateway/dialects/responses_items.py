"""The output items of OpenAI Responses, as answers and as events show them; both are built here, so that they agree."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from tokentrue.gateway.dialects.base import Seal

Json = dict[str, Any]
_INPUT_OPENS = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_DECODABLE = re.compile(  # whole characters and escapes; of a surrogate pair both halves
    r'(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*'
)


def reasoning_item(node: str, text: str, seal: Seal, *, status: str) -> Json:
    parts = [{"type": "reasoning_text", "text": text}]
    return {
        "type": "reasoning",
        "id": f"rs_{node}",
        "summary": [],
        "content": parts,
        "encrypted_content": seal.wrap(text),
        "status": status,
    }


def text_part(text: str, logprobs: Sequence[Json] = ()) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def message_item(suffix: str, text: str, logprobs: Sequence[Json] = (), *, status: str) -> Json:
    return {"type": "message", "id": f"msg_{suffix}", "role": "assistant", "status": status, "content": [text_part(text, logprobs)]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """How a call of a tool leaves the house."""

    name: str
    namespace: str | None = None
    custom: bool = False


def shown_name(namespace: str | None, name: str) -> str:
    """What the model sees."""
    return f"{namespace}__{name}" if namespace else name


def call_item(made: Mapping[str, Any], suffix: str, served: Mapping[str, Served], *, status: str) -> Json:
    arguments = made["function"]["arguments"]
    tool = served.get(made["function"]["name"]) or Served(name=made["function"]["name"])
    item: Json = {"call_id": made["id"], "name": tool.name}
    if tool.namespace:
        item["namespace"] = tool.namespace
    if tool.custom:
        return {"type": "custom_tool_call", "id": f"ctc_{suffix}", **item, "input": custom_input(arguments)}
    return {"type": "function_call", "id": f"fc_{suffix}", **item, "arguments": arguments, "status": status}


def custom_input(arguments: str) -> str:
    """The one string of a custom tool's call; a model that wrote something else is shown as it wrote it."""
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    return value["input"] if isinstance(value, dict) and isinstance(value.get("input"), str) else arguments


class CustomInput:
    """`custom_input` of a call that is still being written: what more of the string is certain."""

    def __init__(self) -> None:
        self._text = ""
        self._place: int | None = None  # in `_text`, of what is not decoded yet; None before the string has begun

    def feed(self, arguments: str) -> str:
        self._text += arguments
        if self._place is None:
            opened = _INPUT_OPENS.match(self._text)
            if opened is None:
                return ""
            self._place = opened.end()
        found = _DECODABLE.match(self._text, self._place)
        assert found is not None
        self._place = found.end()
        return orjson.loads(f'"{found[0]}"') if found[0] else ""
