"""Qwen3-Coder, Qwen3.5, Qwen3.6, Nemotron-3 and their kin: ChatML, `<think>`, calls as `<function=NAME>` with untyped
parameters."""

from __future__ import annotations

from tokentrue.renderers.families.base import Clues, Family, keep_reasoning
from tokentrue.renderers.families.shapes import CHATML, FUNCTION_XML, THINK, response


def recognise(clues: Clues) -> Family | None:
    if not clues.has("<|im_start|>", "<tool_call>", "<function=", "<parameter="):
        return None
    thinks = clues.has("<think>")
    name = "nemotron-3" if clues.has("truncate_history_thinking") else "qwen3.5" if thinks else "qwen3-coder"
    return Family(
        name=name,
        response_template=response(FUNCTION_XML, anchors=CHATML, reasoning=THINK if thinks else None),
        template_kwargs=keep_reasoning(clues),
    )
