"""Fields of response templates that several families share: reasoning tags and the formats of tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Field = Mapping[str, Any]

NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
"""A call whose name is captured by the opening pattern and whose body is the arguments."""

THINK: Field = {"open": "<think>", "close": "</think>"}

HERMES: Field = {
    "open": "<tool_call>",
    "close": "</tool_call>",
    "content": "json",
    "repeats": True,
    "transform": {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.arguments}"}},
}
"""`<tool_call>⏎{"name": …, "arguments": {…}}⏎</tool_call>`"""

BLOCK: Field = {"open": "<tool_call>", "close": "</tool_call>", "repeats": True}
"""A `<tool_call>` block that is not written as its family writes one."""

FUNCTION_XML: Field = {
    "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
    "close": "</tool_call>",
    "content": "xml-inline",
    "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
    "repeats": True,
    "transform": NAMED,
}
"""`<tool_call>⏎<function=NAME>⏎<parameter=KEY>⏎VALUE⏎</parameter>⏎</function>⏎</tool_call>`"""


def chatml(calls: Mapping[str, Field], *, reasoning: Field | None = THINK, anchors: Sequence[str] = ("<|im_start|>assistant\n",)) -> Field:
    """A response template: reasoning (if any) and calls inside content, the turn opened by one of `anchors`."""
    fields: dict[str, Field] = {"content": {}}
    if reasoning is not None:
        fields["reasoning_content"] = reasoning
    return {"start_anchor": list(anchors), "fields": fields | dict(calls)}
