"""DeepSeek: R1 and V3 (calls as fenced JSON), V3.1 (plain JSON), V3.2 and V4 (`｜DSML｜` tags that say which values are strings)."""

from __future__ import annotations

from tokentrue.renderers.families.base import Clues, Family, keeping
from tokentrue.renderers.families.shapes import Fields, bracketed, invocations, response

_ANCHOR = ("<｜Assistant｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁end｜>")
_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_FENCED = bracketed(section=_SECTION, call=_CALL, head=r"\s*function<｜tool▁sep｜>(?P<name>[^\n`<]+)\n\s*```json\n", tail=r"\n?```\s*")
_BARE = bracketed(section=_SECTION, call=_CALL, head=r"\s*(?P<name>[^\n`<]+)<｜tool▁sep｜>")


def recognise(clues: Clues) -> Family | None:
    if not clues.has("<｜Assistant｜>"):
        return None
    name, calls = _calls(clues)
    return Family(name=name, response_template=response(calls, anchors=_ANCHOR), template_kwargs=keeping(clues))


def _calls(clues: Clues) -> tuple[str, Fields]:
    if clues.has("｜DSML｜"):
        block = "tool_calls" if clues.has("tool_calls>") else "function_calls"
        return ("deepseek-v4" if block == "tool_calls" else "deepseek-v3.2"), _tagged(block)
    if clues.has("tool▁call▁begin", "```json"):
        return "deepseek-v3", _FENCED
    return ("deepseek-v3.1", _BARE) if clues.has("tool▁call▁begin") else ("deepseek", {})


def _tagged(block: str) -> Fields:
    return invocations(block, tag="｜DSML｜", attribute=r'(?: string="(?P<string>true|false)")?')
