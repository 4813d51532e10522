"""Fields of response templates that several families share: reasoning tags and the formats of tool calls.

A call format has two fields: `tool_calls`, written as the family writes it, and where that needs a captured name
`broken_calls`, the same block with anything else inside, so that a failed attempt is seen as one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from tokentrue.json_types import JsonMapping
from tokentrue.renderers.families.base import CallForm

Field: TypeAlias = JsonMapping
Fields: TypeAlias = Mapping[str, Field]

NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
"""A call whose name is captured by the opening pattern and whose body is the arguments."""

INSIDE = {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.arguments}"}}
"""A call whose body is a JSON object with its name and arguments."""

THINK: Field = {"open": "<think>", "close": "</think>"}

HERMES: Fields = {
    "tool_calls": {
        "open": "<tool_call>",
        "close": "</tool_call>",
        "content": "json",
        "repeats": True,
        "transform": INSIDE,
    },
}
"""`<tool_call>⏎{"name": …, "arguments": {…}}⏎</tool_call>`"""

HERMES_FORM = CallForm(opening="<tool_call>", begin='\n{"name": "NAME", "arguments": ', end="}\n</tool_call>")

_BLOCK: Field = {"open": "<tool_call>", "close": "</tool_call>", "repeats": True}

FUNCTION_XML: Fields = {
    "tool_calls": {
        "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        "close": "</tool_call>",
        "content": "xml-inline",
        "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
        "repeats": True,
        "transform": NAMED,
    },
    "broken_calls": _BLOCK,
}
"""`<tool_call>⏎<function=NAME>⏎<parameter=KEY>⏎VALUE⏎</parameter>⏎</function>⏎</tool_call>`"""

ARG_PAIRS: Fields = {
    "tool_calls": {
        "open_pattern": r"<tool_call>\s*(?P<name>[^\s<>{]+)\s*(?=<arg_key>|</tool_call>)",
        "close": "</tool_call>",
        "content": "xml-inline",
        "content_args": {"tag_pattern": r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"},
        "repeats": True,
        "transform": NAMED,
    },
    "broken_calls": _BLOCK,
}
"""`<tool_call>NAME⏎<arg_key>KEY</arg_key>⏎<arg_value>VALUE</arg_value>⏎</tool_call>`, with or without the line
breaks"""


def calls_as_invocations(block: str, *, tag: str = "", attribute: str = "") -> Fields:
    """`<BLOCK>⏎<invoke name="NAME">⏎<parameter name="KEY">VALUE</parameter>⏎</invoke>⏎</BLOCK>`: several calls share
    one block.

    `tag` stands before each tag's word (DeepSeek's `｜DSML｜`), `attribute` is a pattern for further attributes of a
    parameter.
    """
    opens, closes = f"<{tag}{block}>", f"</{tag}{block}>"
    return {
        "tool_calls": {
            "open_pattern": rf'(?:{opens}\s*|(?<=</{tag}invoke>)\s*)<{tag}invoke name="(?P<name>[^"]*)">',
            "close_pattern": rf"</{tag}invoke>(?:\s*{closes})?",
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": rf'<{tag}parameter name="(?P<key>[^"]*)"{attribute}>(?P<value>.*?)</{tag}parameter>'
            },
            "repeats": True,
            "transform": NAMED,
        },
        "broken_calls": {"open": opens, "close": closes, "repeats": True},
    }


def calls_between_tokens(
    *, section: tuple[str, str], call: tuple[str, str], head: str, tail: str = "", transform: JsonMapping = NAMED
) -> Fields:
    """Calls in JSON between two marker tokens, all of them between two section tokens that belong to the first and the
    last call.

    Patterns: `head` reads what stands between the call's opening token and its arguments and captures the name, `tail`
    what follows them.
    """
    begin, end = rf"(?:{section[0]}\s*)?{call[0]}", rf"{call[1]}(?:\s*{section[1]})?"
    return {
        "tool_calls": {
            "open_pattern": begin + head,
            "close_pattern": tail + end,
            "content": "json",
            "repeats": True,
            "transform": transform,
        },
        "broken_calls": {"open_pattern": begin, "close_pattern": end, "repeats": True},
    }


def response(calls: Fields, *, anchors: Sequence[str], reasoning: Field | None = THINK) -> Field:
    """A response template: reasoning (if any) and calls inside content, the turn opened by one of `anchors`."""
    fields: dict[str, Field] = {"content": {}}
    if reasoning is not None:
        fields["reasoning_content"] = reasoning
    return {"start_anchor": list(anchors), "fields": fields | dict(calls)}


CHATML = ("<|im_start|>assistant\n",)
