"""Which tokens end an assistant turn: those that the model's files declare and those that its template writes.

They tell the engine when to stop, and where an open turn must be closed. A recorded turn is cut at its recorded stop
id.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokentrue.errors import TemplateError
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.renderers.codec import Codec
from tokentrue.renderers.template import InputFormat, Template, make_content

SENTINEL = "qzSampledqz"
FOLLOWER = "qzFollowerqz"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stops:
    """Stop literals per kind of turn; `declared` come from generation_config.json and the tokenizer's eos."""

    text: tuple[str, ...] = ()
    call: tuple[str, ...] = ()
    declared: tuple[str, ...] = ()
    opener: bool = False  # the stop is the next turn's opener (GLM): the template itself closes nothing

    @property
    def all(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.text, *self.call, *self.declared)))


def read_declared_stops(directory: Path | None, codec: Codec, eos_token: str | None) -> tuple[str, ...]:
    ids: list[int] = []
    path = directory / "generation_config.json" if directory is not None else None
    if path is not None and path.is_file():
        value = json.loads(path.read_text()).get("eos_token_id")
        ids = [value] if isinstance(value, int) else list(value or [])
    texts = [codec.texts[index] for index in ids if index in codec.texts]
    if eos_token and eos_token in codec.literals:
        texts.append(eos_token)
    return tuple(dict.fromkeys(texts))


def derive_stops(
    template: Template, codec: Codec, inputs: InputFormat, kwargs: JsonMapping, declared: tuple[str, ...]
) -> Stops:
    """A text turn ends with the last token of the template's closing; else with the one written only if nothing follows
    (harmony's <|return|>); else with the next turn's opener (GLM). A turn of calls ends with the same token if that
    follows the calls; else with the last token there (harmony's <|call|>), or with an opener if text turns do.
    """

    def literals(text: str) -> list[str]:
        return [literal for _, literal, _ in codec.split(text) if literal]

    alone, followed = _render_after(
        template, inputs, kwargs, {"role": "assistant", "content": make_content(SENTINEL, inputs)}, "user"
    )
    closing, opening = literals(_common_prefix(alone, followed)) or literals(alone), literals(followed)
    text = (
        next((literal for literal in reversed(closing) if literal in declared), closing[-1])
        if closing
        else next(iter(opening), "")
    )
    alone, followed = _render_after(template, inputs, kwargs, make_call_turn(inputs), "tool")
    after_calls = literals(_common_prefix(alone, followed)) or literals(alone)
    if not text or not (alone or followed):
        call = after_calls[-1] if after_calls else text
    elif text in after_calls:
        call = text
    elif not closing:
        call = next((literal for literal in literals(followed)[len(after_calls) :]), text)
    else:
        call = after_calls[-1] if after_calls else next(iter(literals(followed)), text)
    return Stops(
        text=(text,) if text else (), call=(call,) if call else (), declared=declared, opener=bool(text) and not closing
    )


def _render_after(
    template: Template, inputs: InputFormat, kwargs: JsonMapping, turn: JsonObject, role: str
) -> tuple[str, str]:
    context = [{"role": "user", "content": make_content("Hello.", inputs)}, turn]
    tools = [make_tool(inputs)] if turn.get("tool_calls") else None
    follower = {"role": role, "content": make_content(FOLLOWER, inputs)}
    if role == "tool":
        follower |= {"tool_call_id": "abcdefghi", "name": "qzlook"}

    def render_after_turn(messages: list[JsonObject], *, generate: bool) -> str:
        try:
            text = template.render(messages, tools, kwargs, generate=generate, inputs=inputs)
        except TemplateError:
            return ""
        return text.rpartition(SENTINEL)[2] if SENTINEL in text else ""

    alone, followed = (
        render_after_turn(context, generate=False),
        render_after_turn([*context, follower], generate=True).partition(FOLLOWER)[0],
    )
    if alone and alone == render_after_turn(
        context, generate=True
    ):  # the flag is ignored: what both renders share belongs to the turn
        alone = _common_prefix(alone, followed) or alone
    return alone, followed


def _common_prefix(left: str, right: str) -> str:
    size = next(
        (index for index, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )
    return left[:size]


def make_tool(inputs: InputFormat, name: str = "qzlook") -> JsonObject:
    parameters = {"type": "object", "properties": {"q": {"type": "string", "description": "what"}}, "required": ["q"]}
    function = {"name": name, "description": "Looks.", "parameters": parameters}
    return function if inputs.bare_tools else {"type": "function", "function": function}


def make_call_turn(inputs: InputFormat, word: str = SENTINEL) -> JsonObject:
    arguments: Any = {"q": word} if inputs.arguments == "object" else json.dumps({"q": word})
    call = {"type": "function", "id": "abcdefghi", "function": {"name": "qzlook", "arguments": arguments}}
    return {"role": "assistant", "content": make_content("", inputs), "tool_calls": [call]}
