"""Sampled ids to an OpenAI message, while they are being sampled.

ids → bytes → text (never half a character) → regions (never half a marker) → reasoning, content and tool calls.

Invariants, each with its test: feeding in any chunks gives what feeding the whole gives; the deltas add up to the message; `raw` is every
byte the model wrote; a call that cannot be read reaches the client as the text it is, and is recorded as an attempt with its reason.
A stream shows a call while it is written (`early`), and cannot take it back: a call that breaks off after it was begun is in the streamed
message too, with arguments that are no JSON. In all else, and wherever no call breaks off, `early` changes nothing but the deltas.
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
from tokentrue.renderers.parsing_bytes import Ordinary, Quiet, TokenBytes
from tokentrue.renderers.parsing_early import JsonShape, TagShape, shape_of
from tokentrue.renderers.parsing_message import Message
from tokentrue.renderers.parsing_regions import (
    CALLS,
    TEXT_FIELDS,
    Closed,
    Ended,
    Opened,
    Part,
    Places,
    Regions,
    Text,
    Watch,
    unshield,
    watches_of,
)
from tokentrue.renderers.parsing_source import Source
from tokentrue.types import Delta, Ids, Parsed, Tools
from tokentrue.types import Ended as TurnEnded

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from tokentrue.renderers.renderer import Renderer

_ANCHOR_WINDOWS = (6, 48, 1024)  # an opener is a few tokens long
_OPENINGS_KEPT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What parsing needs to know about one renderer, compiled once."""

    template: ResponseTemplate
    watches: Mapping[str | None, Watch]
    texts: frozenset[str]  # fields that are shown as they come
    shape: JsonShape | TagShape | None  # of a call that can be shown while it is written
    pieces: TokenBytes
    ordinary: Ordinary
    stop_ids: frozenset[int]
    stops_that_close: frozenset[int]  # stop tokens that the response template itself names
    markers: tuple[str, ...]  # added tokens that the response template names: ids decide about these
    marker_ids: frozenset[int]
    generation_ids: tuple[int, ...]  # what the template writes to open an assistant turn, for callers that give no prompt
    call_ids: str
    openings: dict[tuple[int, ...], str]  # the end of a prompt to what it opens


def turn_parser(renderer: Renderer, *, prompt_ids: Ids = (), tools: Tools | None = None, early: bool = True) -> Parser:
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
    return Parser(grammar, prompt_ids=prompt_ids, tools=tools, early=early)


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
    markers, ordinary = tuple(found.values()), Ordinary(pieces, frozenset(found))
    return Grammar(
        template=template,
        watches=watches_of(template, ordinary, markers=markers, stop_ids=frozenset(stop_token_ids)),
        texts=frozenset(name for name in template.fields if name in TEXT_FIELDS),
        shape=shape_of(template.fields.get(CALLS)),
        pieces=pieces,
        ordinary=ordinary,
        stop_ids=frozenset(stop_token_ids),
        stops_that_close=frozenset(stop_token_ids) & frozenset(found),
        markers=markers,
        marker_ids=frozenset(found),
        generation_ids=tuple(generation_ids),
        call_ids=family.call_ids if family else "openai",
        openings={},
    )


def parse(grammar: Grammar, sampled_ids: Ids, *, prompt_ids: Ids = (), tools: Tools | None = None) -> Parsed:
    return Parser(grammar, prompt_ids=prompt_ids, tools=tools).whole(sampled_ids)


class Parser:
    """`protocols.TurnParser` for one sampled turn. `early`: calls are shown while they are written."""

    def __init__(self, grammar: Grammar, *, prompt_ids: Ids = (), tools: Tools | None = None, early: bool = False) -> None:
        self._grammar = grammar
        self._source = _source(grammar)
        prompt_ids = prompt_ids or grammar.generation_ids
        self._message = Message(grammar, tools, prompt_ids=prompt_ids)
        shown = grammar.texts | {CALLS} if early and grammar.shape is not None else grammar.texts
        self._regions = Regions(grammar.template, grammar.watches, prefix=opened_by(grammar, prompt_ids), shown=shown)
        self._places = Places()
        self._length = 0
        self._held_stop: int | None = None
        self._quiet: Quiet | None = None
        self._shows: str | None = None  # the field that quiet text belongs to, where that is shown as it comes
        self._rest()

    def feed(self, token_ids: Ids) -> list[Delta]:
        if not token_ids:
            return []
        if self._quiet is not None:
            text = self._quiet[token_ids[0]] if len(token_ids) == 1 else _quiet_text(self._quiet, token_ids)
            if text is not None:
                return self._pass_by(token_ids, text)
        if self._held_stop is not None:
            token_ids = (self._held_stop, *token_ids)
            self._held_stop = None
        if token_ids[-1] in self._grammar.stop_ids:
            self._held_stop = token_ids[-1]
            token_ids = token_ids[:-1]
        deltas = self._shown(self._source.take(token_ids))
        self._rest()
        return deltas

    def _rest(self) -> None:
        """Sees whether quiet tokens may pass by now: nothing is held back that they could decide."""
        at_rest = self._source.at_rest and self._held_stop is None
        self._quiet, self._shows = self._regions.at_rest() if at_rest else (None, None)

    def _pass_by(self, token_ids: Ids, text: str) -> list[Delta]:
        self._source.keep(token_ids, text)
        self._length += len(text)
        self._regions.pass_by(text)
        return [] if self._shows is None else self._more(self._shows, text)

    def whole(self, token_ids: Ids) -> Parsed:
        """All of the turn at once: what `feed` and `finish` give, in one pass, because nothing more can come."""
        stop = token_ids[-1] if token_ids and token_ids[-1] in self._grammar.stop_ids else None
        if stop in self._grammar.stops_that_close:
            self.feed(token_ids)
            return self.finish()[1]
        text = self._source.take(token_ids if stop is None else token_ids[:-1]) + self._source.rest()
        self._places.note(text, 0)
        self._length = len(text)
        self._deltas(self._regions.end(stopped=stop is not None, text=text))
        if stop is not None:
            self._source.take((stop,))
        return self._parsed(stop)

    def finish(self) -> tuple[list[Delta], Parsed]:
        stop = self._held_stop
        deltas = self._shown(self._source.rest())
        if stop is not None:
            shown = self._source.take((stop,))
            if stop in self._grammar.stops_that_close and self._regions.inside:
                deltas += self._shown(shown)
        deltas += self._deltas(self._regions.end(stopped=stop is not None))
        return deltas, self._parsed(stop)

    def _parsed(self, stop: int | None) -> Parsed:
        return Parsed(
            message=self._message.whole(),
            attempts=tuple(self._message.attempts),
            ended=TurnEnded.OPEN if stop is None else TurnEnded.STOP,
            stop_id=stop,
            raw=self._source.raw,
        )

    def _shown(self, text: str) -> list[Delta]:
        if not text:
            return []
        self._places.note(text, self._length)
        self._length += len(text)
        return self._deltas(self._regions.more(text))

    def _deltas(self, found: list[Part]) -> list[Delta]:
        deltas: list[Delta] = []
        for part in found:
            if isinstance(part, Text):
                deltas += self._more(part.field, unshield(part.text))
            elif isinstance(part, Opened):
                self._message.open_call({name: unshield(value) for name, value in part.captures.items()})
            elif isinstance(part, Ended):
                self._message.end_segment(TEXT_FIELDS[part.field])
            else:
                deltas += self._closed(part)
        return deltas

    def _more(self, field: str, text: str) -> list[Delta]:
        return self._message.more_of_call(text) if field == CALLS else self._message.add_text(TEXT_FIELDS[field], text)

    def _closed(self, region: Closed) -> list[Delta]:
        start, end = self._places.true(region.start), self._places.true(region.end)
        return self._message.add_region(region, raw=self._source.slice(start, end), span=self._source.tokens(start, end))


def _quiet_text(quiet: Quiet, token_ids: Ids) -> str | None:
    texts: list[str] = []
    for token_id in token_ids:
        text = quiet[token_id]
        if text is None:
            return None
        texts.append(text)
    return "".join(texts)


def _source(grammar: Grammar) -> Source:
    return Source(grammar.pieces, grammar.ordinary, grammar.markers)


def opened_by(grammar: Grammar, prompt_ids: Ids) -> str:
    """What the prompt has already written of the assistant's turn: the (shielded) text after its last opener.

    Only the end of the prompt is read. A prompt whose opener is not found there has opened nothing.
    """
    if len(grammar.template.fields) == 1:
        return ""
    length = len(prompt_ids)
    for window in _ANCHOR_WINDOWS:
        found = _after_opener(grammar, tuple(prompt_ids[max(length - window, 0) :]))
        if found is not None or window >= length:
            return found or ""
    return ""


def _after_opener(grammar: Grammar, tail: tuple[int, ...]) -> str | None:
    short = len(tail) <= _ANCHOR_WINDOWS[0]  # turns mostly open in the same few ways
    if short and tail in grammar.openings:
        return grammar.openings[tail]
    source = _source(grammar)
    text = source.take(tail) + source.rest()
    place = None
    for match in grammar.template.start_anchor_re.finditer(text):
        place = match.end()
    found = None if place is None else text[place:]
    if short and found is not None:
        if len(grammar.openings) >= _OPENINGS_KEPT:
            grammar.openings.clear()
        grammar.openings[tail] = found
    return found


def _jsonlike(declared: Any) -> Any:
    """Plain dicts and lists, as the loader wants them."""
    if isinstance(declared, Mapping):
        return {key: _jsonlike(value) for key, value in declared.items()}
    return [_jsonlike(item) for item in declared] if isinstance(declared, list | tuple) else declared
