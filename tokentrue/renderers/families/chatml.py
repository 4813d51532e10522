"""Models with ChatML turns: Hermes, Qwen and their kin, which differ in how they think and how they write a call."""

from __future__ import annotations

from tokentrue.renderers.families.base import Clues, Family, keep_reasoning
from tokentrue.renderers.families.shapes import CHATML, FUNCTION_XML, HERMES, HERMES_FORM, THINK, response


def recognise_coder(clues: Clues) -> Family | None:
    """Qwen3-Coder, Qwen3.5, Qwen3.6, Nemotron-3: calls as `<function=NAME>` with untyped parameters."""
    if not clues.has("<|im_start|>", "<tool_call>", "<function=", "<parameter="):
        return None
    thinks = clues.has("<think>")
    name = "nemotron-3" if clues.has("truncate_history_thinking") else "qwen3.5" if thinks else "qwen3-coder"
    return Family(
        name=name,
        response_template=response(FUNCTION_XML, anchors=CHATML, reasoning=THINK if thinks else None),
        template_kwargs=keep_reasoning(clues),
    )


def recognise_k2v3(clues: Clues) -> Family | None:
    """K2V3: Hermes calls, and thinking that the prompt opens at one of three efforts."""
    if not clues.has("<|im_start|>", "<tool_call>", "think_fast", "think_faster"):
        return None
    efforts = ("think", "think_fast", "think_faster")
    reasoning = {"open": [f"<{effort}>" for effort in efforts], "close": [f"</{effort}>" for effort in efforts]}
    template = response(HERMES, anchors=CHATML, reasoning=reasoning)
    return Family(name="k2v3", response_template=template, call_form=HERMES_FORM)


def recognise_hermes(clues: Clues) -> Family | None:
    """Hermes-2-Pro and Hermes-3: another vocabulary, and the call format that bears their name; no thinking."""
    if not clues.has("<|im_start|>", "<tool_call>", "You are a function calling AI model"):
        return None
    template = response(HERMES, anchors=CHATML, reasoning=None)
    return Family(name="hermes", response_template=template, call_form=HERMES_FORM)


def recognise_qwen3(clues: Clues) -> Family | None:
    """Qwen3, Qwen3-2507, Qwen3-Next, QwQ: `<think>`, Hermes calls in JSON. Qwen2.5 is the same without thinking."""
    if not clues.has("<|im_start|>", "<|im_end|>", "<tool_call>"):
        return None
    thinks = clues.has("think>") or "<think>" in clues.tokens
    return Family(
        name="qwen3" if thinks else "qwen2.5",
        response_template=response(HERMES, anchors=CHATML, reasoning=THINK if thinks else None),
        template_kwargs=keep_reasoning(clues),
        call_form=HERMES_FORM,
    )
