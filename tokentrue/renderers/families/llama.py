"""Llama-3.x: a call is the whole turn, a bare JSON object with `name` and `parameters`, perhaps after
`<|python_tag|>`."""

from __future__ import annotations

from tokentrue.renderers.families.base import Clues, Family

_TEMPLATE = {
    "start_anchor": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "fields": {
        "content": {},
        "tool_calls": {
            "open_pattern": r'(?:\A\s*|<\|python_tag\|>\s*)(?=\{\s*"(?:name|type)"\s*:)',
            "content": "json",
            "repeats": True,
            "transform": {
                "type": "function",
                "function": {"name": "{content.name}", "arguments": "{content.parameters}"},
            },
        },
    },
}


def recognise(clues: Clues) -> Family | None:
    if not clues.has("<|start_header_id|>", "<|end_header_id|>"):
        return None
    return Family(name="llama-3", response_template=_TEMPLATE)
