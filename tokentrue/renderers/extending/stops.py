"""Which tokens end an assistant turn: those that the model's files declare and those that its template writes."""

import json
from itertools import takewhile
from pathlib import Path

from tokentrue.errors import TemplateError
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.records import record
from tokentrue.renderers.codec import Codec
from tokentrue.renderers.template import InputFormat, Template, make_call_talk, make_content

SENTINEL = "qzSampledqz"
FOLLOWER = "qzFollowerqz"


@record
class Stops:
    """Literals per kind of turn; `declared` come from generation_config.json and the tokenizer's eos."""

    text: tuple[str, ...] = ()
    call: tuple[str, ...] = ()
    declared: tuple[str, ...] = ()
    opener: bool = False  # the stop is the next turn's opener (GLM): the template itself closes nothing

    def after(self, turn: JsonMapping) -> tuple[str, ...]:
        return self.call if turn.get("tool_calls") else self.text

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
    follows the calls; else with the last token there (harmony's <|call|>), or with an opener if text turns do."""

    def literals(text: str) -> list[str]:
        return [literal for _, literal, _ in codec.split(text) if literal]

    alone, followed = _render_after(template, inputs, kwargs, calls=False)
    closing = literals(_common_prefix(alone, followed)) or literals(alone)
    own = [literal for literal in closing if literal in declared] or closing or literals(followed)[:1]
    text = own[-1] if own else ""
    alone, followed = _render_after(template, inputs, kwargs, calls=True)
    after_calls = literals(_common_prefix(alone, followed)) or literals(alone)
    if text in after_calls:
        call = text
    elif text and not closing:
        call = next(iter(literals(followed)[len(after_calls) :]), text)
    else:
        call = after_calls[-1] if after_calls else next(iter(literals(followed)), text) if text else ""
    opener = bool(text) and not closing
    return Stops(text=(text,) if text else (), call=(call,) if call else (), declared=declared, opener=opener)


def _render_after(template: Template, inputs: InputFormat, kwargs: JsonMapping, *, calls: bool) -> tuple[str, str]:
    """What follows a turn of text or calls alone, and before the content of the message after it."""
    talk, tools = make_call_talk(inputs, SENTINEL, FOLLOWER, "abcdefghi")
    if not calls:
        turn: JsonObject = {"role": "assistant", "content": make_content(SENTINEL, inputs)}
        talk, tools = [talk[0], turn, {"role": "user", "content": make_content(FOLLOWER, inputs)}], None

    def render_after_turn(messages: list[JsonObject], *, generate: bool) -> str:
        try:
            text = template.render(messages, tools, kwargs, generate=generate, inputs=inputs)
        except TemplateError:
            return ""
        return text.rpartition(SENTINEL)[2] if SENTINEL in text else ""

    alone = render_after_turn(talk[:2], generate=False)
    followed = render_after_turn(talk, generate=True).partition(FOLLOWER)[0]
    if alone and alone == render_after_turn(talk[:2], generate=True):
        # the flag is ignored: what both renders share belongs to the turn
        alone = _common_prefix(alone, followed) or alone
    return alone, followed


def _common_prefix(left: str, right: str) -> str:
    return "".join(char for char, _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))
