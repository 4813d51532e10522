"""Qwen3, Qwen3-2507, Qwen3-Next, QwQ: ChatML, `<think>`, Hermes calls in JSON. Qwen2.5 is the same without thinking."""

from __future__ import annotations

from tokentrue.renderers.families.base import Clues, Family, keep_reasoning
from tokentrue.renderers.families.shapes import CHATML, HERMES, HERMES_FORM, THINK, response


def recognise(clues: Clues) -> Family | None:
    if not clues.has("<|im_start|>", "<|im_end|>", "<tool_call>"):
        return None
    thinks = clues.has("think>") or "<think>" in clues.tokens
    return Family(
        name="qwen3" if thinks else "qwen2.5",
        response_template=response(HERMES, anchors=CHATML, reasoning=THINK if thinks else None),
        template_kwargs=keep_reasoning(clues),
        call_form=HERMES_FORM,
    )
