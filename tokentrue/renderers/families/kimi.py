"""Kimi-K2, K2.5, K2.6: calls between section tokens, each with the id `functions.NAME:INDEX` that its result must
repeat."""

from __future__ import annotations

from tokentrue.renderers.families.base import Clues, Family, keep_reasoning
from tokentrue.renderers.families.shapes import calls_between_tokens, response

_ID = r"(?P<id>(?:functions\.)?(?P<name>[^\s<:]+)(?::\d+)?)"
_CALLS = calls_between_tokens(
    section=(r"<\|tool_calls_section_begin\|>", r"<\|tool_calls_section_end\|>"),
    call=(r"<\|tool_call_begin\|>", r"<\|tool_call_end\|>"),
    head=rf"\s*{_ID}\s*<\|tool_call_argument_begin\|>",
    transform={"type": "function", "id": "{id}", "function": {"name": "{name}", "arguments": "{content}"}},
)


def recognise(clues: Clues) -> Family | None:
    if not clues.has("<|im_assistant|>", "<|im_middle|>", "<|tool_call_begin|>"):
        return None
    return Family(
        name="kimi-k2",
        response_template=response(_CALLS, anchors=("<|im_assistant|>assistant<|im_middle|>",)),
        template_kwargs=keep_reasoning(clues),
    )
