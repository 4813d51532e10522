"""What harnesses lose of a conversation on its way back. A gateway that matches by what it served sees through all of it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tokentrue.conformance.agents.messages import Call, Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Of the conversation itself; `Wire` has those of how it is written. `arguments` writes a call's JSON another way,
    `whitespace` a text."""

    reasoning: bool = False
    ids: bool = False
    arguments: Callable[[str], str] = str
    whitespace: Callable[[str], str] = str


def lose(messages: Sequence[Message], losses: Losses, rng: random.Random) -> list[Message]:
    """The same conversation as a lossy harness sends it back. The client's own messages stay as they are."""
    renamed: dict[str, str] = {}
    out: list[Message] = []
    for message in messages:
        if message.role == "tool" and message.answers in renamed:
            message = replace(message, answers=renamed[message.answers])
        elif message.served:
            message = lose_one(message, losses, renamed, rng)
        out.append(message)
    return out


def lose_one(message: Message, losses: Losses, renamed: dict[str, str], rng: random.Random) -> Message:
    calls: list[Call] = []
    for call in message.calls:
        if losses.ids:
            renamed[call.id] = f"call_{rng.getrandbits(40):x}"
        calls.append(replace(call, id=renamed.get(call.id, call.id), arguments=losses.arguments(call.arguments)))
    text, reasoning = losses.whitespace(message.text), "" if losses.reasoning else message.reasoning
    return replace(message, text=text, reasoning=reasoning, calls=tuple(calls))


def sort_keys(arguments: str) -> str:
    return json.dumps(json.loads(arguments), sort_keys=True, ensure_ascii=False)
