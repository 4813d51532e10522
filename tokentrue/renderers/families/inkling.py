"""Inkling: every part of a turn is a block of its own kind (thinking, text, a call in JSON) that ends with
`<|end_message|>`."""

from __future__ import annotations

from tokentrue.renderers.families.base import Clues, Family

_OPENER = r"(?:<\|message_model\|>)?"
_END = {"close": "<|end_message|>", "repeats": True}
_TEMPLATE = {
    "start_anchor": "<|message_model|>",
    "fields": {
        "content": {},
        "final": {"open_pattern": _OPENER + r"<\|content_text\|>", **_END, "join": "\n"},
        "reasoning_content": {"open_pattern": _OPENER + r"<\|content_thinking\|>", **_END, "join": "\n"},
        "tool_calls": {
            "open_pattern": _OPENER + r"[^<\s]*<\|content_invoke_tool_json\|>",
            **_END,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.args}"}},
        },
    },
}


def recognise(clues: Clues) -> Family | None:
    if not clues.has("<|message_model|>", "<|content_invoke_tool_json|>"):
        return None
    return Family(name="inkling", response_template=_TEMPLATE)
