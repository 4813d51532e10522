"""Structural tag for a required tool call: free text (the model may think), then at least one call in its format."""

import json

from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.renderers.codec import Codec
from tokentrue.renderers.families import CallForm, Family
from tokentrue.types import Refusal, Tools


def make_call_tag(family: Family, codec: Codec, tools: Tools, *, name: str | None) -> JsonMapping | Refusal:
    form = family.call_form
    if form is None:
        return Refusal(why="no_call_form", detail=f"calls of {family.name} models cannot be enforced: no text and JSON")
    special = [token for token in codec.added.values() if token.special]
    if any(token.content in form.opening + form.end for token in special):
        return Refusal(
            why="special_markers", detail="the call markers are special tokens here, which engines keep out of grammars"
        )
    functions: list[JsonMapping] = [tool.get("function", tool) for tool in tools]
    chosen = [function for function in functions if name is None or function.get("name") == name]
    if not chosen:
        return Refusal(why="unknown_tool", detail=f"no tool is named {name!r}")
    calls = {
        "type": "triggered_tags",
        "triggers": [form.opening],
        "tags": [_make_tag(form, function) for function in chosen],
        "at_least_one": True,
        "stop_after_first": name is not None,
    }
    before = {"type": "any_text", "excludes": [form.opening]}
    return {"type": "structural_tag", "format": {"type": "sequence", "elements": [before, calls]}}


def _make_tag(form: CallForm, function: JsonMapping) -> JsonObject:
    schema = function.get("parameters") or function.get("input_schema") or {"type": "object"}
    name: str = function["name"]
    quoted = json.dumps(name, ensure_ascii=False)
    begin = form.begin.replace('"NAME"', quoted) if '"NAME"' in form.begin else form.begin.replace("NAME", name)
    return {
        "type": "tag",
        "begin": form.opening + begin,
        "content": {"type": "json_schema", "json_schema": schema},
        "end": form.end,
    }
