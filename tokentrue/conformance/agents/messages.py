"""A conversation without a dialect, and what harnesses lose of it on its way back. A gateway that matches by what it
served sees through all of these losses.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import field, replace
from typing import Any

from tokentrue.json_types import JsonObject
from tokentrue.records import record


@record
class Call:
    """`partial`: of a custom tool's input more may have been written than served. `custom`: it is sent back as such an
    input."""

    id: str
    name: str
    arguments: str
    partial: bool = False
    custom: bool = False


@record
class Message:
    """`answers`: the call id of a tool result. Only what was `served` may come back with losses. `images`: PNG files,
    which follow the text."""

    role: str
    text: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    answers: str = ""
    served: bool = False
    inline: bool = False  # the reasoning was sent as <think> text
    images: tuple[bytes, ...] = ()


@record
class Tool:
    name: str
    description: str
    parameters: JsonObject = field(hash=False)

    def function(self) -> JsonObject:
        return {"name": self.name, "description": self.description, "parameters": self.parameters}


@record
class Losses:
    """Of the conversation; `Wire` has those of how it is written. `arguments` writes a call's JSON another way,
    `whitespace` a text."""

    reasoning: bool = False
    ids: bool = False
    arguments: Callable[[str], str] = str
    whitespace: Callable[[str], str] = str


def lose(messages: Sequence[Message], losses: Losses, rng: random.Random) -> list[Message]:
    """The conversation as a lossy harness sends it back. The client's own messages stay as they are."""
    renamed: dict[str, str] = {}

    def lose_call(call: Call) -> Call:
        if losses.ids:
            renamed[call.id] = f"call_{rng.getrandbits(40):x}"
        return replace(call, id=renamed.get(call.id, call.id), arguments=losses.arguments(call.arguments))

    def lose_one(message: Message) -> Message:
        if message.served:
            text, reasoning = losses.whitespace(message.text), "" if losses.reasoning else message.reasoning
            return replace(message, text=text, reasoning=reasoning, calls=tuple(map(lose_call, message.calls)))
        return replace(message, answers=renamed.get(message.answers, message.answers))

    return list(map(lose_one, messages))


def sort_keys(arguments: str) -> str:
    return json.dumps(json.loads(arguments), sort_keys=True, ensure_ascii=False)


def load_finite(text: str) -> Any:
    """JSON whose numbers fit a double; anything else is a ValueError."""
    value = json.loads(text)
    if "Infinity" in json.dumps(value) or "NaN" in json.dumps(value):
        raise ValueError("not finite")
    return value


def object_from(arguments: str) -> JsonObject:
    """What is no JSON object travels as the one that the gateway serves for it."""
    try:
        value = load_finite(arguments or "{}")
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"_raw_arguments": arguments}


def arguments_from(given: JsonObject) -> str:
    raw = given.get("_raw_arguments") if len(given) == 1 else None
    return raw if isinstance(raw, str) else json.dumps(given, ensure_ascii=False)
