"""Sampled ids to an OpenAI message, while they are being sampled.

ids → bytes → text (never half a character) → regions (never half a marker) → reasoning, content and tool calls.

Invariants, each with its test: feeding in any chunks gives what parsing the whole gives; the deltas add up to the message; `raw` is every
byte the model wrote; a call that cannot be read reaches the client as the text it is, and is recorded as an attempt with its reason.
Bytes that are not UTF-8 are lone surrogates in `raw` and `Attempt.raw` (`errors="surrogateescape"` gives them back), `�` in the message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import regex
from transformers.utils.chat_parsing.response_templates import ResponseTemplate, load_response_template

from tokentrue.errors import TemplateError, TokenTrueError
from tokentrue.renderers.families import PLAIN, Family
from tokentrue.renderers.parsing_bytes import TokenBytes
from tokentrue.renderers.parsing_message import TEXT_FIELDS, Message
from tokentrue.renderers.parsing_regions import Closed, Places, Regions, Text, Watch, unshield, watches_of
from tokentrue.renderers.parsing_source import Ordinary, Source
from tokentrue.types import Delta, Ended, Ids, Parsed, Tools

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from tokentrue.renderers.renderer import Renderer

_ANCHOR_WINDOW = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What parsing needs to know about one renderer, compiled once."""

    template: ResponseTemplate
    watches: Mapping[str | None, Watch]
    texts: frozenset[str]  # fields that are shown as they come
    pieces: TokenBytes
    ordinary: Ordinary
    stop_ids: frozenset[int]
    stops_that_close: frozenset[int]  # stop tokens that the response template itself names
    markers: tuple[str, ...]  # added tokens that the response template names: ids decide about these
    marker_ids: frozenset[int]
    generation_ids: tuple[int, ...]  # what the template writes to open an assistant turn, for callers that give no prompt
    call_ids: str


def turn_parser(renderer: Renderer, *, prompt_ids: Ids = (), tools: Tools | None = None) -> Parser:
    """A parser for one turn of this renderer; its grammar is compiled on first use and kept with it."""
    grammar = renderer.__dict__.get("_grammar")
    if grammar is None:
        grammar = grammar_for(
            renderer.codec.backend,
            renderer.family,
            stop_token_ids=renderer.stop_token_ids,
            generation_ids=_generation_ids(renderer),
        )
        renderer.__dict__["_grammar"] = grammar
    return Parser(grammar, prompt_ids=prompt_ids, tools=tools)


def _generation_ids(renderer: Renderer) -> Ids:
    try:
        return renderer.render([{"role": "user", "content": "x"}]).token_ids
    except TokenTrueError:  # a template that wants more than one user turn opens nothing that we could know of
        return ()


def grammar_for(tokenizer: Tokenizer, family: Family | None, *, stop_token_ids: Ids, generation_ids: Ids = ()) -> Grammar:
    declared = (family and family.response_template) or PLAIN
    try:
        template = load_response_template(_jsonlike(declared))
    except (ValueError, TypeError, KeyError) as error:
        raise TemplateError(f"response_template: not a valid response template: {error}") from error
    pieces = TokenBytes(tokenizer)
    named = str(declared)
    found = {id_: text for id_, text in pieces.added.items() if text.strip() and (text in named or repr(regex.escape(text))[1:-1] in named)}
    return Grammar(
        template=template,
        watches=watches_of(template),
        texts=frozenset(name for name in template.fields if name in TEXT_FIELDS),
        pieces=pieces,
        ordinary=Ordinary(pieces, frozenset(found)),
        stop_ids=frozenset(stop_token_ids),
        stops_that_close=frozenset(stop_token_ids) & frozenset(found),
        markers=tuple(found.values()),
        marker_ids=frozenset(found),
        generation_ids=tuple(generation_ids),
        call_ids=family.call_ids if family else "openai",
    )


def parse(grammar: Grammar, sampled_ids: Ids, *, prompt_ids: Ids = (), tools: Tools | None = None) -> Parsed:
    parser = Parser(grammar, prompt_ids=prompt_ids, tools=tools)
    parser.feed(sampled_ids)
    return parser.finish()[1]


class Parser:
    """`protocols.TurnParser` for one sampled turn."""

    def __init__(self, grammar: Grammar, *, prompt_ids: Ids = (), tools: Tools | None = None) -> None:
        self._grammar = grammar
        self._source = _source(grammar)
        prompt_ids = prompt_ids or grammar.generation_ids
        self._message = Message(grammar, tools, prompt_ids=prompt_ids)
        self._regions = Regions(grammar.template, grammar.watches, prefix=opened_by(grammar, prompt_ids), texts=grammar.texts)
        self._places = Places()
        self._length = 0
        self._held_stop: int | None = None

    def feed(self, token_ids: Ids) -> list[Delta]:
        if not token_ids:
            return []
        if self._held_stop is not None:
            token_ids = (self._held_stop, *token_ids)
            self._held_stop = None
        if token_ids[-1] in self._grammar.stop_ids:
            self._held_stop = token_ids[-1]
            token_ids = token_ids[:-1]
        return self._shown(self._source.take(token_ids))

    def finish(self) -> tuple[list[Delta], Parsed]:
        stop = self._held_stop
        deltas = self._shown(self._source.rest())
        if stop is not None:
            shown = self._source.take((stop,))
            if stop in self._grammar.stops_that_close and self._regions.inside:
                deltas += self._shown(shown)
        deltas += self._deltas(self._regions.end(stopped=stop is not None))
        return deltas, Parsed(
            message=self._message.whole(),
            attempts=tuple(self._message.attempts),
            ended=Ended.OPEN if stop is None else Ended.STOP,
            stop_id=stop,
            raw=self._source.raw,
        )

    def _shown(self, text: str) -> list[Delta]:
        if not text:
            return []
        self._places.note(text, self._length)
        self._length += len(text)
        return self._deltas(self._regions.more(text))

    def _deltas(self, found: list[Text | Closed]) -> list[Delta]:
        deltas: list[Delta] = []
        for part in found:
            if isinstance(part, Text):
                deltas += self._message.add_text(TEXT_FIELDS[part.field], unshield(part.text))
            elif part.field in TEXT_FIELDS:
                self._message.end_segment(TEXT_FIELDS[part.field])
            else:
                start, end = self._places.true(part.start), self._places.true(part.end)
                deltas += self._message.add_region(part, raw=self._source.slice(start, end), span=self._source.tokens(start, end))
        return deltas


def _source(grammar: Grammar) -> Source:
    return Source(grammar.pieces, grammar.ordinary, grammar.markers)


def opened_by(grammar: Grammar, prompt_ids: Ids) -> str:
    """What the prompt has already written of the assistant's turn: the (shielded) text after its last opener.

    Only the end of the prompt is read. A prompt whose opener is not found there has opened nothing.
    """
    if len(grammar.template.fields) == 1:
        return ""
    window = 12  # an opener is a few tokens long
    while True:
        source = _source(grammar)
        text = source.take(prompt_ids[max(len(prompt_ids) - window, 0) :]) + source.rest()
        place = None
        for match in grammar.template.start_anchor_re.finditer(text):
            place = match.end()
        if place is not None:
            return text[place:]
        if window >= min(len(prompt_ids), _ANCHOR_WINDOW):
            return ""
        window *= 4


def _jsonlike(declared: Any) -> Any:
    """Plain dicts and lists, as the loader wants them."""
    if isinstance(declared, Mapping):
        return {key: _jsonlike(value) for key, value in declared.items()}
    return [_jsonlike(item) for item in declared] if isinstance(declared, list | tuple) else declared
