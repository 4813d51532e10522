"""gpt-oss (harmony): every message names its channel. Analysis is reasoning, final and commentary are content, a recipient makes a call."""

from __future__ import annotations

from tokentrue.renderers.families.base import Clues, Family
from tokentrue.renderers.families.shapes import NAMED

_OPENER = r"(?:<\|start\|>assistant)?"
_TO = r"to=(?:functions\.)?(?P<name>[^\s<]+)"
_KIND = r"[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>"
_CHANNEL = r"<\|channel\|>(?:commentary|analysis)"
_ENDS = ["<|end|>", "<|return|>", "<|call|>"]

_TEMPLATE = {
    "start_anchor": "<|start|>assistant",
    "fields": {
        "content": {},
        "final": {
            "open_pattern": rf"{_OPENER}\s*<\|channel\|>final{_KIND}",
            "close": _ENDS,
            "repeats": True,
            "join": "\n",
        },
        "preamble": {
            "open_pattern": rf"{_OPENER}\s*<\|channel\|>commentary\s*<\|message\|>",
            "close": _ENDS,
            "repeats": True,
            "join": "\n",
        },
        "reasoning_content": {
            "open_pattern": rf"{_OPENER}\s*<\|channel\|>analysis\s*<\|message\|>",
            "close": _ENDS,
            "repeats": True,
            "join": "\n",
        },
        "tool_calls": {
            # the recipient stands before the channel (as templates write it) or behind it (as the model does)
            "open_pattern": rf"{_OPENER}\s*(?:{_TO}\s*{_CHANNEL}{_KIND}|{_CHANNEL}\s+{_TO}{_KIND})",
            "close": _ENDS,
            "content": "json",
            "repeats": True,
            "transform": NAMED,
        },
    },
}


def recognise(clues: Clues) -> Family | None:
    if not clues.has("<|start|>", "<|channel|>", "<|message|>"):
        return None
    return Family(name="harmony", response_template=_TEMPLATE)
