"""GLM-4.5, 4.6, 4.7 and 5: `<|assistant|>`, `<think>`, calls as pairs of `<arg_key>` and `<arg_value>`."""

from __future__ import annotations

from tokentrue.renderers.families.base import Clues, Family, keep_reasoning
from tokentrue.renderers.families.shapes import ARG_PAIRS, response


def recognise(clues: Clues) -> Family | None:
    if not clues.has("<tool_call>", "<arg_key>", "<arg_value>"):
        return None
    anchors = (
        ("<|assistant|>",)
        if clues.has("<|assistant|>")
        else ("<assistant>", "<|im_start|>assistant\n", "<role>ASSISTANT</role>")
    )
    return Family(
        name="glm", response_template=response(ARG_PAIRS, anchors=anchors), template_kwargs=keep_reasoning(clues)
    )
