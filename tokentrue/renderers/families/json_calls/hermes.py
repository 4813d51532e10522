"""Hermes-2-Pro and Hermes-3: ChatML on another vocabulary, and the call format that bears their name; no thinking."""

from __future__ import annotations

from tokentrue.renderers.families.base import Clues, Family
from tokentrue.renderers.families.shapes import CHATML, HERMES, HERMES_FORM, response


def recognise(clues: Clues) -> Family | None:
    if not clues.has("<|im_start|>", "<tool_call>", "You are a function calling AI model"):
        return None
    return Family(
        name="hermes", response_template=response(HERMES, anchors=CHATML, reasoning=None), call_form=HERMES_FORM
    )
