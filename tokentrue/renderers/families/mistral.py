"""Mistral: `[TOOL_CALLS]` and a JSON list of calls (Nemo, Large), or `[TOOL_CALLS]NAME[ARGS]{…}` per call (Small 3.2,
Devstral)."""

from __future__ import annotations

from tokentrue.renderers.families.base import Clues, Family
from tokentrue.renderers.families.shapes import NAMED, Fields, response

_LIST: Fields = {
    "tool_calls": {
        "open": "[TOOL_CALLS]",
        "content": "json",
        "repeats": True,
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
        "transform_each": True,
    }
}
_EACH: Fields = {
    "tool_calls": {
        "open_pattern": r"\[TOOL_CALLS\]\s*(?P<name>[^\s\[\]{}]+)(?:\[CALL_ID\](?P<call_id>[^\[]*))?\[ARGS\]",
        "close_pattern": r"(?=\[TOOL_CALLS\])|\Z",
        "content": "json",
        "repeats": True,
        "transform": NAMED,
    },
    "broken_calls": {"open": "[TOOL_CALLS]", "close_pattern": r"(?=\[TOOL_CALLS\])|\Z", "repeats": True},
}
_THINK = {"open": "[THINK]", "close": "[/THINK]"}


def recognise(clues: Clues) -> Family | None:
    if not clues.has("[TOOL_CALLS]", "[/INST]"):
        return None
    calls = _EACH if clues.has("[ARGS]") else _LIST
    reasoning = _THINK if clues.has("[THINK]") else None
    template = response(calls, anchors=("[/INST]", "[/TOOL_RESULTS]"), reasoning=reasoning)
    return Family(name="mistral", response_template=template, call_ids="short")
