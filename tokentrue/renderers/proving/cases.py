"""The conversations of a proof: shapes that end in the assistant's turn, and what is appended to them, by role.

`zlastz` is the last word of the turn, `zn0z` the first new content.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tokentrue.json_types import JsonObject
from tokentrue.types import Message, Tool

ROLES = ("user", "tool", "tools", "system", "assistant")
TOOLS: tuple[Tool, ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name}.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "a place"}},
                "required": ["city"],
            },
        },
    }
    for name in ("weather", "clock")
)


def _user(word: str) -> Message:
    return {"role": "user", "content": f"Ask {word}"}


def _turn(word: str, **more: Any) -> Message:
    return {"role": "assistant", "content": f"Say {word}", **more}


def _calls(*words: str, text: str = "", first: int = 0, **more: Any) -> Message:
    calls = [
        {
            "id": f"callid{first + index:03d}",
            "type": "function",
            "function": {"name": name, "arguments": {"city": word}},
        }
        for index, (name, word) in enumerate(zip(("weather", "clock"), words, strict=False))
    ]
    return {"role": "assistant", "content": text, "tool_calls": calls, **more}


def _result(word: str, index: int = 0) -> Message:
    name = ("weather", "clock")[index % 2]
    return {"role": "tool", "tool_call_id": f"callid{index:03d}", "name": name, "content": f"Got {word}"}


SYSTEM: Message = {"role": "system", "content": "Be brief."}
THOUGHT: JsonObject = {"reasoning_content": "Think zthoughtz"}
SHAPES: dict[str, tuple[Message, ...]] = {
    "text": (_user("za"), _turn("zlastz")),
    "system, text": (SYSTEM, _user("za"), _turn("zlastz")),
    "reasoned text": (_user("za"), _turn("zlastz", **THOUGHT)),
    "long text": (SYSTEM, _user("za"), _turn("zb"), _user("zc"), _turn("zlastz")),
    "text after a call": (_user("za"), _calls("zb"), _result("zc"), _turn("zlastz")),
    "call": (_user("za"), _calls("zlastz")),
    "system, call": (SYSTEM, _user("za"), _calls("zlastz")),
    "text and call": (_user("za"), _calls("zlastz", text="Say zb")),
    "reasoned call": (_user("za"), _calls("zlastz", **THOUGHT)),
    "chain of calls": (_user("za"), _calls("zb"), _result("zc"), _calls("zlastz")),
    "long chain": (
        SYSTEM,
        _user("za"),
        _calls("zb"),
        _result("zc"),
        _calls("zd"),
        _result("ze"),
        _turn("zf"),
        _user("zg"),
        _calls("zlastz"),
    ),
    "two calls": (_user("za"), _calls("zb", "zlastz")),
    "chain of two calls": (
        _user("za"),
        _calls("zb", "zc", first=2),
        _result("zd", 2),
        _result("ze", 3),
        _calls("zf", "zlastz"),
    ),
}
ANSWER: Message = {"role": "user", "content": "New zn0z"}
LATE_SYSTEM: Message = {"role": "system", "content": "New zn0z"}
ADDED: dict[str, dict[str, tuple[Message, ...]]] = {
    "user": {shape: (ANSWER,) for shape in ("text", "system, text", "reasoned text", "long text", "text after a call")},
    "tool": {
        shape: (_result("zn0z"),)
        for shape in ("call", "system, call", "text and call", "reasoned call", "chain of calls", "long chain")
    },
    "tools": {shape: (_result("zn0z"), _result("zn1z", 1)) for shape in ("two calls", "chain of two calls")},
    "system": {
        "text": (LATE_SYSTEM,),
        "long text": (LATE_SYSTEM, {"role": "user", "content": "New zn1z"}),
        "call": (_result("zn0z"), {"role": "system", "content": "New zn1z"}),
    },
    "assistant": {
        "text": ({"role": "assistant", "content": "New zn0z"}, {"role": "user", "content": "New zn1z"}),
        "call": (
            _result("zn0z"),
            {"role": "assistant", "content": "New zn1z"},
            {"role": "user", "content": "New zn2z"},
        ),
    },
}

MAX_WORDS = 8


def list_questions(words: Sequence[str]) -> Iterator[tuple[tuple[Message, ...], tuple[Message, ...]]]:
    """Conversations of two shapes, without and with each word in the earlier messages, and what follows them."""
    for text in ("za", *(text for word in words[:MAX_WORDS] for text in (word, f"za {word} zb"))):
        ask, say, got = ({"role": role, "content": text} for role in ("user", "assistant", "tool"))
        yield (ask, say, _user("zc"), _turn("zlastz")), (ANSWER,)
        result = {**got, "tool_call_id": "callid000", "name": "weather"}
        yield (ask, _calls("zb", text=text), result, _calls("zlastz")), (_result("zn0z"),)
