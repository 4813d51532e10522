"""Messages to tokens and back for one tokenizer and template; see protocols.Renderer.

Recorded ids are never encoded or changed; `extend` returns what the template writes after them, or a Refusal."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import msgspec

from tokentrue.errors import MessageError, TokenTrueError
from tokentrue.ids import EMPTY, TokenIds
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.protocols import TurnParser
from tokentrue.records import record
from tokentrue.renderers.codec import Codec
from tokentrue.renderers.extending.extender import Extender, History
from tokentrue.renderers.extending.stops import Stops
from tokentrue.renderers.families import CallForm, Family
from tokentrue.renderers.messages import normalise_messages, normalise_tools
from tokentrue.renderers.parsing.grammar import Grammar, compile_grammar
from tokentrue.renderers.parsing.parser import Parser, parse_turn
from tokentrue.renderers.seeing.images import PROVEN, SEEN_ROLES, ImageInputs
from tokentrue.renderers.structure import Structure, find_structure
from tokentrue.renderers.template import InputFormat, Template
from tokentrue.types import Extension, Ids, Messages, Parsed, Refusal, Rendered, TemplateKwargs, Tools
from tokentrue.vision.families import Vision

Injection = Literal["safe", "engine"]


@record
class Case:
    """`outcome`: "proven", "history" (the added ids depend on earlier turns), "refused", "unsupported" (cannot be
    rendered) or "wrong"."""

    shape: str
    role: str
    outcome: str
    why: str = ""
    detail: str = ""


@record
class Proof:
    """`roles`: "proven", "history" (the added ids depend on earlier turns) or "refused"; `why`: the refused shapes.
    `stops`: token strings per kind of turn; `boundary`: the text between a stop and the next turn's content;
    `rewrites`: the template changes earlier turns once such a message follows."""

    roles: Mapping[str, str] = field(default_factory=dict[str, str])
    why: Mapping[str, str] = field(default_factory=dict[str, str])
    stops: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    boundary: Mapping[str, str] = field(default_factory=dict[str, str])
    rewrites: Mapping[str, bool] = field(default_factory=dict[str, bool])
    cases: tuple[Case, ...] = ()
    images: Mapping[str, str] = field(default_factory=dict[str, str])
    """By role: "proven", or why they are refused."""
    tools: Literal["rendered", "ignored", ""] = ""  # whether the template shows a request's tools to the model
    warnings: tuple[str, ...] = ()
    inputs: InputFormat = field(default_factory=InputFormat)
    template_hash: str = ""
    tokenizer_hash: str = ""

    @property
    def ok(self) -> bool:
        """Nothing is wrong, and user and tool messages can follow the model's turn."""
        settled = all(self.roles.get(role) in {"proven", "history"} for role in ("user", "tool"))
        return settled and not any(case.outcome == "wrong" for case in self.cases)

    def to_json(self) -> JsonObject:
        return {"ok": self.ok, **msgspec.to_builtins(self)}


UNPROVEN = Proof(images={role: PROVEN for role in SEEN_ROLES})
"""Placeholder while a renderer is being proven."""


@dataclass(kw_only=True, eq=False)
class Renderer:
    """Built by `load_renderer`. `family`: what the template does not say (parsing, default kwargs); `proof`: what
    holds."""

    template: Template
    codec: Codec
    inputs: InputFormat
    stops: Stops
    tokenizer_hash: str
    template_kwargs: JsonMapping
    history: History
    injection: Injection
    family: Family
    vision: Vision | str  # or why the model takes no images
    placeholder_ids: tuple[int, ...]  # stand for images and their like; never to be sampled
    proof: Proof
    max_plans: int

    def __post_init__(self) -> None:
        self.template_hash = self.template.hash
        self.stop_token_ids = tuple(dict.fromkeys(self.codec.literals[text] for text in self.stops.all))
        self._safe = self.injection == "safe"
        self._images = ImageInputs(vision=self.vision, roles=self.proof.images)
        self._extender = Extender(
            self.template,
            self.codec,
            self.inputs,
            self.stops,
            self._images,
            history=self.history,
            safe=self._safe,
            max_plans=self.max_plans,
        )

    def render(
        self, messages: Messages, tools: Tools | None = None, *, template_kwargs: TemplateKwargs | None = None
    ) -> Rendered:
        if not messages:
            raise MessageError("is empty; give at least one message", field="messages")
        given = normalise_messages(messages, self.inputs, named=self._safe)
        kwargs = self._merge(template_kwargs)
        images = self._images.find(messages, safe=self._safe)
        given_tools = normalise_tools(tools, self.inputs)
        shielded, shielded_tools, mark = self._extender.shield(given, given_tools)
        text = self.template.render(shielded, shielded_tools, kwargs, inputs=self.inputs)
        around = self._extender.splicer.mark_text(given, given_tools, kwargs)
        return self._extender.encode(text, mark, images, around, given)

    def render_plain(self, messages: Messages, tools: Tools | None = None, *, generate: bool = True) -> str:
        """The template's text as engines render it: content is not shielded."""
        given, given_tools = normalise_messages(messages, self.inputs, named=True), normalise_tools(tools, self.inputs)
        return self.template.render(given, given_tools, self.template_kwargs, generate=generate, inputs=self.inputs)

    def extend(
        self,
        prefix_ids: Ids,
        messages: Messages,
        new: Messages,
        tools: Tools | None = None,
        *,
        template_kwargs: TemplateKwargs | None = None,
    ) -> Extension | Refusal:
        return self._extender.extend(TokenIds(prefix_ids), messages, new, tools, self._merge(template_kwargs))

    def rewrites(
        self,
        messages: Messages,
        new: Messages,
        tools: Tools | None = None,
        *,
        template_kwargs: TemplateKwargs | None = None,
    ) -> bool:
        """True if the template itself changes the history once `new` follows (for example strips reasoning)."""
        return self._extender.rewrites(messages, new, tools, self._merge(template_kwargs))

    def encode_sampled(self, text: str) -> list[int]:
        """As a model's output, markers as tokens; for scripted engines."""
        return self.codec.encode_after(text, literal="").tolist()

    def _merge(self, template_kwargs: TemplateKwargs | None) -> JsonObject:
        merged = {**self.template_kwargs, **(template_kwargs or {})}
        if merged.pop("add_generation_prompt", True) is not True or not merged.keys().isdisjoint(("messages", "tools")):
            raise MessageError(
                "cannot set messages, tools or add_generation_prompt: the request says them", field="template_kwargs"
            )
        return merged

    def parse(self, sampled_ids: Ids, *, prompt_ids: Ids = EMPTY, tools: Tools | None = None) -> Parsed:
        return parse_turn(self._grammar, sampled_ids, prompt_ids=prompt_ids, tools=tools)

    def parser(self, *, prompt_ids: Ids = EMPTY, tools: Tools | None = None, early: bool = True) -> TurnParser:
        return Parser(self._grammar, prompt_ids=prompt_ids, tools=tools, early=early)

    def decode(self, token_ids: Ids) -> str:
        return self.codec.decode(token_ids)

    @cached_property
    def _grammar(self) -> Grammar:
        try:
            opening = self.render([{"role": "user", "content": "x"}]).token_ids
        except TokenTrueError:  # the template needs more than one user turn: the opening is unknown
            opening = EMPTY
        stops = self.stop_token_ids
        return compile_grammar(self.codec.spelling, self.family, stop_token_ids=stops, generation_ids=opening)

    def call_tag(self, tools: Tools, *, name: str | None = None) -> JsonMapping | Refusal:
        """Structural tag that makes an engine sample at least one call of these tools (only of `name`, if given)."""
        return make_call_tag(self.family, self.codec, tools, name=name)

    @cached_property
    def structure(self) -> Structure:
        """Structure ids and turn openers, for `tokentrue.compare`."""
        return find_structure(self.codec, self.stop_token_ids, self.render_plain)


def make_call_tag(family: Family, codec: Codec, tools: Tools, *, name: str | None) -> JsonMapping | Refusal:
    """Free text (the model may think), then at least one call in its format."""
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
