"""Any other template: what its own text shows of `<think>` and of Hermes calls, behind the openers in common use."""

from __future__ import annotations

from tokentrue.renderers.families.base import Clues, Family, keep_reasoning
from tokentrue.renderers.families.shapes import HERMES, THINK, response

_OPENERS = (
    "<|im_start|>assistant\n",
    "<|start_of_role|>assistant<|end_of_role|>",
    "<|assistant|>",
    "<|Assistant|>",
    "<SPECIAL_11>Assistant\n",
    "<|turn>model\n",
)


def recognise(clues: Clues) -> Family | None:
    if not clues.has("messages"):
        return None
    return Family(
        name="generic",
        response_template=response(
            HERMES if clues.has("<tool_call>") else {},
            anchors=_OPENERS,
            reasoning=THINK if clues.has("<think>", "</think>") else None,
        ),
        template_kwargs=keep_reasoning(clues),
    )
