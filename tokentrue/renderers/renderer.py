"""Messages to tokens and back for one tokenizer and template; see protocols.Renderer.

Recorded ids are never encoded or changed; `extend` returns what the template writes after them, or a Refusal.
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal, TypeAlias

from tokentrue.errors import MessageError, TokenTrueError
from tokentrue.ids import EMPTY, TokenIds
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.protocols import TurnParser
from tokentrue.renderers.call_tag import make_call_tag
from tokentrue.renderers.codec import Codec
from tokentrue.renderers.extending.extender import Extender, History
from tokentrue.renderers.extending.history_use import HistoryUse
from tokentrue.renderers.extending.spans import compute_spans
from tokentrue.renderers.extending.stops import Stops
from tokentrue.renderers.families import Family
from tokentrue.renderers.messages import fill_in_tool_names, normalise_messages, normalise_tools
from tokentrue.renderers.parsing.grammar import Grammar, compile_grammar
from tokentrue.renderers.parsing.parser import Parser, parse_turn
from tokentrue.renderers.proof import Proof
from tokentrue.renderers.structure import Structure, find_structure
from tokentrue.renderers.template import InputFormat, Template
from tokentrue.types import Extension, Ids, Message, Messages, Parsed, Refusal, Rendered, TemplateKwargs, Tools

Injection: TypeAlias = Literal["safe", "engine"]


class Renderer:
    """Built by `load_renderer`. `family`: what the template does not say (parsing, default kwargs); `proof`: what
    holds.
    """

    def __init__(
        self,
        *,
        template: Template,
        codec: Codec,
        inputs: InputFormat,
        stops: Stops,
        tokenizer_hash: str,
        template_kwargs: JsonMapping,
        history: History,
        injection: Injection,
        family: Family,
        proof: Proof,
        max_plans: int,
    ) -> None:
        self.template, self.codec, self.inputs, self.stops = template, codec, inputs, stops
        self.template_kwargs, self.family = dict(template_kwargs), family
        self.history: History = history
        self.injection: Injection = injection
        self.template_hash, self.tokenizer_hash, self.proof = template.hash, tokenizer_hash, proof
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(codec.literals[text] for text in stops.all))
        self._safe = injection == "safe"
        self._extender = Extender(
            template,
            codec,
            inputs,
            stops,
            history=history,
            safe=self._safe,
            short_plans=proof.short_plans,
            max_plans=max_plans,
        )

    # messages -> ids

    def render(
        self, messages: Messages, tools: Tools | None = None, *, template_kwargs: TemplateKwargs | None = None
    ) -> Rendered:
        if not messages:
            raise MessageError("is empty; give at least one message", field="messages")
        given, kwargs = self._normalise(messages), self._merge(template_kwargs)
        given_tools = normalise_tools(tools, self.inputs)
        text, mark = self._extender.splicer.render_text(given, given_tools, kwargs)
        ids = self.codec.encode_shielded(text, mark) if mark else self.codec.encode(text)
        around = self._extender.splicer.mark_text(given, given_tools, kwargs)
        roles = [message["role"] for message in given]
        return Rendered(token_ids=ids, spans=compute_spans(self.codec, text, mark, ids, around, roles))

    def extend(
        self,
        prefix_ids: Ids,
        messages: Messages,
        new: Messages,
        tools: Tools | None = None,
        *,
        template_kwargs: TemplateKwargs | None = None,
        use_plans: bool = True,
    ) -> Extension | Refusal:
        """`use_plans=False` renders the real history, for comparison."""
        kwargs = self._merge(template_kwargs)
        return self._extender.extend(TokenIds(prefix_ids), messages, new, tools, kwargs, use_plans=use_plans)

    @property
    def history_use(self) -> HistoryUse:
        return self._extender.keeper.use

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
        """Encodes text as a model's output, markers as tokens; for scripted engines."""
        return self.codec.encode_after(text, literal="").tolist()

    def _normalise(self, messages: Messages) -> list[JsonObject]:
        given = normalise_messages(messages, self.inputs)
        return fill_in_tool_names(given) if self._safe else given

    def _merge(self, template_kwargs: TemplateKwargs | None) -> JsonObject:
        merged = {**self.template_kwargs, **(template_kwargs or {})}
        if merged.pop("add_generation_prompt", True) is not True or not merged.keys().isdisjoint(("messages", "tools")):
            raise MessageError(
                "cannot set messages, tools or add_generation_prompt: the request says them", field="template_kwargs"
            )
        return merged

    # ids -> messages

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
        return compile_grammar(
            self.codec.spelling, self.family, stop_token_ids=self.stop_token_ids, generation_ids=opening
        )

    # for other packages

    def call_tag(self, tools: Tools, *, name: str | None = None) -> JsonMapping | Refusal:
        """Structural tag that makes an engine sample at least one call of these tools (only of `name`, if given)."""
        return make_call_tag(self.family, self.codec, tools, name=name)

    @cached_property
    def structure(self) -> Structure:
        """Structure ids and turn openers, for `tokentrue.compare`."""

        def render_text(messages: list[Message], generate: bool) -> str:
            given = fill_in_tool_names(normalise_messages(messages, self.inputs))
            return self.template.render(given, None, self.template_kwargs, generate=generate, inputs=self.inputs)

        return find_structure(self.codec, self.stop_token_ids, render_text)
