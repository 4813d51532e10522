"""DeepSeek: R1 and V3 (calls as fenced JSON), V3.1 (plain JSON), V3.2 and V4 (`｜DSML｜` tags that say which values are
strings)."""

from __future__ import annotations

from tokentrue.renderers.families.base import Clues, Family, keep_reasoning
from tokentrue.renderers.families.shapes import Fields, calls_as_invocations, calls_between_tokens, response

_ANCHOR = ("<｜Assistant｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁end｜>")
_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_FENCE = r"\s*function<｜tool▁sep｜>(?P<name>[^\n`<]+)\n\s*```json\n"
_FENCED = calls_between_tokens(section=_SECTION, call=_CALL, head=_FENCE, tail=r"\n?```\s*")
_BARE = calls_between_tokens(section=_SECTION, call=_CALL, head=r"\s*(?P<name>[^\n`<]+)<｜tool▁sep｜>")


def recognise(clues: Clues) -> Family | None:
    if not clues.has("<｜Assistant｜>"):
        return None
    name, calls = _calls(clues)
    return Family(name=name, response_template=response(calls, anchors=_ANCHOR), template_kwargs=keep_reasoning(clues))


def _calls(clues: Clues) -> tuple[str, Fields]:
    if clues.has("｜DSML｜"):
        block = "tool_calls" if clues.has("tool_calls>") else "function_calls"
        return ("deepseek-v4" if block == "tool_calls" else "deepseek-v3.2"), _calls_in_block(block)
    if clues.has("tool▁call▁begin", "```json"):
        return "deepseek-v3", _FENCED
    return ("deepseek-v3.1", _BARE) if clues.has("tool▁call▁begin") else ("deepseek", {})


def _calls_in_block(block: str) -> Fields:
    return calls_as_invocations(block, tag="｜DSML｜", attribute=r'(?: string="(?P<string>true|false)")?')
