"""K2V3: ChatML, Hermes calls, and thinking that the prompt opens at one of three efforts."""

from __future__ import annotations

from tokentrue.renderers.families.base import Clues, Family
from tokentrue.renderers.families.shapes import CHATML, HERMES, HERMES_FORM, response

_REASONING = {
    "open": ["<think>", "<think_fast>", "<think_faster>"],
    "close": ["</think>", "</think_fast>", "</think_faster>"],
}


def recognise(clues: Clues) -> Family | None:
    if not clues.has("<|im_start|>", "<tool_call>", "think_fast", "think_faster"):
        return None
    return Family(
        name="k2v3", response_template=response(HERMES, anchors=CHATML, reasoning=_REASONING), call_form=HERMES_FORM
    )
