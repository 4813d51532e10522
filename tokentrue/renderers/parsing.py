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
from tokentrue.renderers.parsing_tokens import Marker, segments_of, tokens_of
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
    shown_early: frozenset[str]  # the same, and calls where they can be shown while they are written
    layouts: Mapping[str, tuple[bool, str | None]]  # text of the message: whether its ends are trimmed, and what joins its segments
    shape: JsonShape | TagShape | None  # of a call that can be shown while it is written
    pieces: TokenBytes
    ordinary: Ordinary
    stop_ids: frozenset[int]
    stops_that_close: frozenset[int]  # stop tokens that the response template itself names
    markers: tuple[str, ...]  # added tokens that the response template names: ids decide about these
    tokens: Mapping[int, Marker] | None  # where ids alone decide about the parts of a turn
    passing: Mapping[int, Marker]  # of these the ones that do not end a turn
    generation_ids: tuple[int, ...]  # what the template writes to open an assistant turn, for callers that give no prompt
    call_ids: str
    openings: dict[tuple[int, ...], Regions]  # the end of a prompt to a scanner that has seen what it opens

    def parser(self, *, prompt_ids: Ids, tools: Tools | None, early: bool) -> Parser:
        return Parser(self, prompt_ids=prompt_ids, tools=tools, early=early)


def grammar_of(renderer: Renderer) -> Grammar:
    return grammar_for(
        renderer.codec.backend,
        renderer.family,
        stop_token_ids=renderer.stop_token_ids,
        generation_ids=_generation_ids(renderer),
    )


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
    tokens = tokens_of(template, found)
    texts, shape = frozenset(name for name in template.fields if name in TEXT_FIELDS), shape_of(template.fields.get(CALLS))
    return Grammar(
        template=template,
        watches=watches_of(template, ordinary, markers=markers, stop_ids=frozenset(stop_token_ids)),
        texts=texts,
        shown_early=texts if shape is None else texts | {CALLS},
        layouts=_layouts(template),
        shape=shape,
        pieces=pieces,
        ordinary=ordinary,
        stop_ids=frozenset(stop_token_ids),
        stops_that_close=frozenset(stop_token_ids) & frozenset(found),
        markers=markers,
        tokens=tokens,
        passing={id_: marker for id_, marker in (tokens or {}).items() if id_ not in stop_token_ids},
        generation_ids=tuple(generation_ids),
        call_ids=family.call_ids if family else "openai",
        openings={},
    )


def _layouts(template: ResponseTemplate) -> dict[str, tuple[bool, str | None]]:
    """The first field of a name says whether it is trimmed, the first that joins says how."""
    layouts: dict[str, tuple[bool, str | None]] = {}
    for field, declared in template.fields.items():
        if name := TEXT_FIELDS.get(field):
            strip, join = layouts.get(name, (declared.content_args.get("strip", True), None))
            layouts[name] = strip, join or declared.join
    return layouts


def parse(grammar: Grammar, sampled_ids: Ids, *, prompt_ids: Ids = (), tools: Tools | None = None) -> Parsed:
    return Parser(grammar, prompt_ids=prompt_ids, tools=tools).whole(sampled_ids)


class Parser:
    """`protocols.TurnParser` for one sampled turn. `early`: calls are shown while they are written."""

    def __init__(self, grammar: Grammar, *, prompt_ids: Ids = (), tools: Tools | None = None, early: bool = False) -> None:
        self._grammar = grammar
        prompt_ids = prompt_ids or grammar.generation_ids
        self._message = Message(grammar, tools, prompt_ids=prompt_ids)
        self._opening = opening_of(grammar, prompt_ids)
        self._regions = self._opening.twin(shown=grammar.shown_early if early else grammar.texts)
        self._source = _source(grammar)
        self._places = Places()
        self._length = 0
        self._held_stop: int | None = None
        self._quiet: Quiet | None = None
        self._shows: str | None = None  # the field that quiet text belongs to, where that is shown as it comes
        self._rest()
        if not early and tools:
            self._message.make_ready()

    def feed(self, token_ids: Ids) -> list[Delta]:
        if not token_ids:
            return []
        if self._quiet is not None:
            text = self._quiet[token_ids[0]] if len(token_ids) == 1 else _quiet_text(self._quiet, token_ids)
            if text is not None:
                return self._pass_by(token_ids, text)
            if len(token_ids) == 1 and (marker := self._grammar.passing.get(token_ids[0])) is not None:
                return self._pass_marker(token_ids, marker)
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

    def _pass_marker(self, token_ids: Ids, marker: Marker) -> list[Delta]:
        self._source.keep(token_ids, marker.text)
        self._length += len(marker.text)
        deltas = self._deltas(self._regions.mark(marker.text, opens=marker.opens, closes=marker.closes))
        self._rest()
        return deltas

    def whole(self, token_ids: Ids) -> Parsed:
        """All of the turn at once: what `feed` and `finish` give, in one pass, because nothing more can come."""
        stop = token_ids[-1] if token_ids and token_ids[-1] in self._grammar.stop_ids else None
        if stop in self._grammar.stops_that_close:
            self.feed(token_ids)
            return self.finish()[1]
        if self._grammar.tokens is not None and (raw := self._split(self._grammar.tokens, token_ids, stop)) is not None:
            return self._parsed(stop, raw)
        return self._parsed(stop, self._scanned(token_ids, stop))

    def _split(self, markers: Mapping[int, Marker], token_ids: Ids, stop: int | None) -> str | None:
        """The turn's text after its parts were added to the message; None where ids alone do not tell them."""
        texts = list(map(self._grammar.ordinary.__getitem__, token_ids))
        last = texts.pop() if stop is not None else ""
        opened = self._opening.opened
        if last is None or opened is None:
            return None
        segments = segments_of(markers, token_ids, texts, implicit=self._grammar.template.implicit, opened=opened)
        if segments is None:
            return None
        message = self._message
        for field, body, start, end in segments:
            if name := TEXT_FIELDS.get(field):
                message.add_segment(name, body)
            else:
                raw = "".join(texts[start:end])  # type: ignore[arg-type]  # there is no None left in it
                message.add_region(field, body, captures={}, closed=True, raw=raw, span=(start, end))
        return "".join(texts) + last  # type: ignore[arg-type]

    def _scanned(self, token_ids: Ids, stop: int | None) -> str:
        """The turn's text after its parts were added to the message."""
        text = self._source.take(token_ids if stop is None else token_ids[:-1]) + self._source.rest()
        self._places.note(text, 0)
        self._length = len(text)
        self._deltas(self._regions.end(stopped=stop is not None, text=text))
        if stop is not None:
            self._source.take((stop,))
        return self._source.raw

    def finish(self) -> tuple[list[Delta], Parsed]:
        stop = self._held_stop
        deltas = self._shown(self._source.rest())
        if stop is not None:
            shown = self._source.take((stop,))
            if stop in self._grammar.stops_that_close and self._regions.inside:
                deltas += self._shown(shown)
        deltas += self._deltas(self._regions.end(stopped=stop is not None))
        return deltas, self._parsed(stop, self._source.raw)

    def _parsed(self, stop: int | None, raw: str) -> Parsed:
        return Parsed(
            message=self._message.whole(),
            attempts=tuple(self._message.attempts),
            ended=TurnEnded.OPEN if stop is None else TurnEnded.STOP,
            stop_id=stop,
            raw=raw,
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
        return self._message.add_region(
            region.field,
            unshield(region.body),
            captures={name: unshield(value) for name, value in region.captures.items()},
            closed=region.closed,
            raw=self._source.slice(start, end),
            span=self._source.tokens(start, end),
        )


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


def opening_of(grammar: Grammar, prompt_ids: Ids) -> Regions:
    """A scanner that has seen what the prompt wrote of the assistant's turn: the (shielded) text after its last opener.

    Only the end of the prompt is read. A prompt whose opener is not found there has opened nothing.
    """
    tail = tuple(prompt_ids[-_ANCHOR_WINDOWS[0] :])  # turns mostly open in the same few ways
    known = grammar.openings.get(tail)
    if known is not None:
        return known
    text = _after_opener(grammar, tail)
    opening = Regions(grammar.template, grammar.watches, prefix=_opened_by(grammar, prompt_ids) if text is None else text)
    if text is not None:
        if len(grammar.openings) >= _OPENINGS_KEPT:
            grammar.openings.clear()
        grammar.openings[tail] = opening
    return opening


def _opened_by(grammar: Grammar, prompt_ids: Ids) -> str:
    for window in _ANCHOR_WINDOWS[1:]:
        found = _after_opener(grammar, prompt_ids[-window:])
        if found is not None or window >= len(prompt_ids):
            return found or ""
    return ""


def _after_opener(grammar: Grammar, tail: Ids) -> str | None:
    if len(grammar.template.fields) == 1:
        return ""
    source = _source(grammar)
    text = source.take(tail) + source.rest()
    place = None
    for match in grammar.template.start_anchor_re.finditer(text):
        place = match.end()
    return None if place is None else text[place:]


def _jsonlike(declared: Any) -> Any:
    """Plain dicts and lists, as the loader wants them."""
    if isinstance(declared, Mapping):
        return {key: _jsonlike(value) for key, value in declared.items()}
    return [_jsonlike(item) for item in declared] if isinstance(declared, list | tuple) else declared
