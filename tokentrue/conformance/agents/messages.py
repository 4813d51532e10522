"""A conversation without a dialect: what agents send and what they are served."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from tokentrue.json_types import JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """`partial`: a custom tool's input was served, and the model may have written more. `custom`: it is sent back as
    such an input."""

    id: str
    name: str
    arguments: str
    partial: bool = False
    custom: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """`answers` is the call id of a tool result. Only what was `served` by the gateway may come back with losses.
    `images` are PNG files, which follow the text."""

    role: str
    text: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    answers: str = ""
    served: bool = False
    inline: bool = False  # the reasoning was sent as <think> text
    images: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    name: str
    description: str
    parameters: JsonObject = field(hash=False)

    def function(self) -> JsonObject:
        return {"name": self.name, "description": self.description, "parameters": self.parameters}


def visible_text(message: Message, *, inline: bool) -> str:
    """`inline`: reasoning is written as <think> text."""
    thought = f"<think>\n{message.reasoning}\n</think>\n\n" if inline and message.reasoning else ""
    return thought + message.text


def load_finite(text: str) -> Any:
    """JSON whose numbers fit a double; anything else is a ValueError."""
    value = json.loads(text)
    if "Infinity" in json.dumps(value) or "NaN" in json.dumps(value):
        raise ValueError("not finite")
    return value


def object_from(arguments: str) -> JsonObject:
    """Arguments that are not a JSON object travel as the one that the gateway serves for them."""
    try:
        value = load_finite(arguments or "{}")
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"_raw_arguments": arguments}


def arguments_from(given: JsonObject) -> str:
    raw = given.get("_raw_arguments") if len(given) == 1 else None
    return raw if isinstance(raw, str) else json.dumps(given, ensure_ascii=False)
