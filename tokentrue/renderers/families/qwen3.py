"""Qwen3, Qwen3-2507, Qwen3-Next, QwQ: ChatML, `<think>`, Hermes calls in JSON. Qwen2.5 is the same without thinking."""

from __future__ import annotations

from tokentrue.renderers.families.base import Clues, Family
from tokentrue.renderers.families.shapes import HERMES, chatml


def recognise(clues: Clues) -> Family | None:
    if not clues.has("<|im_start|>", "<|im_end|>", "<tool_call>") or clues.has("<function="):
        return None
    thinks = clues.has("<think>") or clues.has("</think>") or "<think>" in clues.tokens
    return Family(
        name="qwen3" if thinks else "qwen2.5",
        response_template=chatml({"tool_calls": HERMES}) if thinks else chatml({"tool_calls": HERMES}, reasoning=None),
    )
