"""What harnesses do to a conversation on its way back: losses that must be recognised, and edits that must not."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Sequence
from dataclasses import replace

from tests.fuzz.native import ARGUMENTS, Tool, Wire, pad
from tokentrue.conformance.agents.messages import Losses, Message

AT = {"type": "object", "properties": {"at": {"type": "string"}}}
FLAG = {"type": "object", "properties": {"flag": {"type": "boolean", "default": True}}}
TOOLS = (
    Tool(
        name="look",
        description="Look at a place.",
        parameters={**AT, "properties": {"at": {"type": "string"}, "depth": {}}},
    ),
    Tool(name="delete_file", description='Deletes. "Really" <b>.', parameters=AT),
    Tool(name="patch", description="Apply a patch.", custom=True),
    Tool(name="fs__stat", description="", parameters=AT, namespace="fs"),
    Tool(name="wait", description="Wait; ждать 待つ.", parameters=FLAG),
)


def random_losses(rng: random.Random) -> Losses:
    if rng.random() < 0.4:
        return Losses()
    return Losses(
        reasoning=rng.random() < 0.5,
        ids=rng.random() < 0.3,
        arguments=rng.choice(ARGUMENTS) if rng.random() < 0.4 else str,
        whitespace=rng.choice((str.strip, pad)) if rng.random() < 0.3 else str,
    )


def random_wire(rng: random.Random) -> Wire:
    return Wire(
        inline=rng.random() < 0.15,
        parts=rng.random() < 0.25,
        empty=rng.choice(("null", "empty", "missing")),
        extra=rng.random() < 0.2,
        native=rng.random() < 0.8,
        bare=rng.random() < 0.5,
    )


def edit(messages: Sequence[Message], rng: random.Random) -> tuple[str, list[Message]]:
    """One real change somewhere in the history; the name of the change, "" where none was possible."""
    out = list(messages)
    if rng.random() < 0.3:
        places = [i for i, message in enumerate(out[:-1]) if message.role in {"user", "tool", "system"}]
        if not places:
            return "", out
        at = rng.choice(places)
        other = rng.choice(other_forms(out[at].text) or [""])
        out[at] = replace(out[at], text=other if other and rng.random() < 0.5 else out[at].text + " [reminder]")
        return f"edited the {out[at].role} message {at}", out
    places = [i for i, message in enumerate(out) if message.role == "assistant"]
    if not places:
        return "", out
    at = rng.choice(places)
    what, changed = edit_assistant(out[at], rng)
    out[at] = replace(changed, served=False) if what else out[at]
    return (f"{what} in message {at}" if what else ""), without_dangling_results(out)


def other_forms(text: str) -> list[str]:
    """The same to the eye, or nearly so: composed, taken apart, ligatures as letters."""
    forms = dict.fromkeys(unicodedata.normalize(form, text) for form in ("NFC", "NFD", "NFKC"))
    return [form for form in forms if form.strip() != text.strip()]


def edit_assistant(message: Message, rng: random.Random) -> tuple[str, Message]:
    ways: list[tuple[str, Message]] = [("appended a word", replace(message, text=message.text + " indeed"))]
    if message.text.strip():
        ways.append(("removed the text", replace(message, text="")))
        if "</think>" in message.text:
            ways.append(
                ("removed what stands before </think>", replace(message, text=message.text.split("</think>", 1)[1]))
            )
        if len(message.text.split()) > 2:
            ways.append(("removed the first word", replace(message, text=message.text.split(None, 1)[1])))
    ways += [
        ("wrote the text in another normal form", replace(message, text=text)) for text in other_forms(message.text)
    ]
    if message.reasoning.strip():
        ways.append(("changed the reasoning", replace(message, reasoning=message.reasoning + " not")))
    else:
        ways.append(("added reasoning", replace(message, reasoning="because")))
    if message.calls:
        first = message.calls[0]
        ways.append(("removed a call", replace(message, calls=message.calls[1:])))
        ways.append(
            ("renamed a call", replace(message, calls=(replace(first, name=first.name + "2"), *message.calls[1:])))
        )
        ways.append(
            (
                "changed arguments",
                replace(message, calls=(replace(first, arguments='{"at": "elsewhere"}'), *message.calls[1:])),
            )
        )
    if len(message.calls) > 1:
        ways.append(("swapped calls", replace(message, calls=tuple(reversed(message.calls)))))
    return rng.choice(ways)


def without_dangling_results(messages: Sequence[Message]) -> list[Message]:
    """Two assistant messages in a row would be one turn in Responses: something stands between them."""
    made: set[str] = set()
    out: list[Message] = []
    for message in messages:
        if message.role == "assistant" and out and out[-1].role == "assistant":
            out.append(Message(role="user", text="[removed]"))
        made.update(call.id for call in message.calls)
        if message.role != "tool" or message.answers in made:
            out.append(message)
    return out
