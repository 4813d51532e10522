"""MiniMax-M2, M2.5, M2.7: `]~b]ai`, thinking that the prompt opens, calls as `<invoke name=…>` inside
`<minimax:tool_call>`."""

from __future__ import annotations

from tokentrue.renderers.families.base import Clues, Family, keep_reasoning
from tokentrue.renderers.families.shapes import calls_as_invocations, response


def recognise(clues: Clues) -> Family | None:
    if not clues.has("]~b]ai", "minimax:tool_call"):
        return None
    return Family(
        name="minimax-m2",
        response_template=response(calls_as_invocations("minimax:tool_call"), anchors=("]~b]ai\n",)),
        template_kwargs=keep_reasoning(clues),
    )
