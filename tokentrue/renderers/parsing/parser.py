"""Sampled ids to an OpenAI message, while they are being sampled. A whole turn is parsed by the same code: fed at once,
then finished.

ids → bytes → text (never half a character) → regions (never half a marker) → reasoning, content and tool calls.

Invariants, each with its test: feeding in any chunks gives what feeding the whole gives; the deltas add up to the
message; `raw` is every byte the model wrote; a call that cannot be read reaches the client as the text it is, and is
recorded as an attempt with its reason. A stream shows a call while it is written (`early`), and cannot take it back: a
call that breaks off after it was begun stays a call, with exactly the arguments that were shown, which are no JSON.
Wherever no call breaks off, `early` changes nothing but the deltas. Bytes that are not UTF-8 are lone surrogates in
`raw` and `Attempt.raw` (`errors="surrogateescape"` gives them back), `�` in the message.
"""

from __future__ import annotations

from tokentrue.renderers.parsing.grammar import TEXT_FIELDS, Grammar
from tokentrue.renderers.parsing.markers import ShieldedOffsets, unshield
from tokentrue.renderers.parsing.message import MessageBuilder
from tokentrue.renderers.parsing.scanner import (
    RegionClosed,
    RegionOpened,
    RegionScanner,
    RegionText,
    ScanEvent,
    TextEnded,
)
from tokentrue.renderers.parsing.source import TokenSource
from tokentrue.types import Delta, Ended, Ids, Parsed, Tools

_ANCHOR_WINDOWS = (
    8,
    48,
    1024,
)  # tokens of the prompt's end that are searched for the opening of the turn, which is a few tokens long


def parse_turn(grammar: Grammar, sampled_ids: Ids, *, prompt_ids: Ids = (), tools: Tools | None = None) -> Parsed:
    parser = Parser(grammar, prompt_ids=prompt_ids, tools=tools)
    parser.feed(sampled_ids)
    return parser.finish()[1]


class Parser:
    """`protocols.TurnParser` for one sampled turn. `early`: calls are shown while they are written."""

    def __init__(
        self, grammar: Grammar, *, prompt_ids: Ids = (), tools: Tools | None = None, early: bool = False
    ) -> None:
        self._grammar = grammar
        prompt_ids = prompt_ids if len(prompt_ids) else grammar.generation_ids
        self._message = MessageBuilder(grammar, tools, prompt_ids=prompt_ids, early=early)
        self._scanner = RegionScanner(grammar, prefix=_find_opening(grammar, prompt_ids))
        self._source = TokenSource(grammar)
        self._offsets = ShieldedOffsets()
        self._held_stop: int | None = (
            None  # the last id where that is a stop token: it ends the turn only if nothing follows
        )
        self._reasoning_tokens = 0

    def feed(self, token_ids: Ids) -> list[Delta]:
        if not len(token_ids):
            return []
        ids = [*([] if self._held_stop is None else [self._held_stop]), *token_ids]
        self._held_stop = ids.pop() if ids[-1] in self._grammar.stop_ids else None
        return self._scan(self._source.add(ids))

    def finish(self) -> tuple[list[Delta], Parsed]:
        stop = self._held_stop
        deltas = self._scan(self._source.flush())
        if stop is not None:
            text = self._source.add((stop,))
            if stop in self._grammar.closing_stop_ids and self._scanner.is_inside:
                deltas += self._scan(text)
        deltas += self._apply(self._scanner.finish(stopped=stop is not None))
        parsed = Parsed(
            message=self._message.build(),
            attempts=tuple(self._message.attempts),
            ended=Ended.OPEN if stop is None else Ended.STOP,
            stop_id=stop,
            raw=self._source.raw,
            reasoning_tokens=self._reasoning_tokens,
        )
        return deltas, parsed

    def _scan(self, text: str) -> list[Delta]:
        if not text:
            return []
        self._offsets.add(text)
        return self._apply(self._scanner.feed(text))

    def _apply(self, events: list[ScanEvent]) -> list[Delta]:
        deltas: list[Delta] = []
        for event in events:
            if isinstance(event, RegionText):
                text = unshield(event.text)
                name = TEXT_FIELDS.get(event.field)
                deltas += self._message.add_body(text) if name is None else self._message.add_text(name, text)
            elif isinstance(event, RegionOpened):
                captures = {name: unshield(value) for name, value in event.captures.items()}
                self._message.open_region(event.field, captures)
            elif isinstance(event, TextEnded):
                self._end_text(event)
            else:
                deltas += self._close(event)
        return deltas

    def _end_text(self, event: TextEnded) -> None:
        name = TEXT_FIELDS[event.field]
        self._message.end_segment(name)
        start, end = self._offsets.true_offset(event.start), self._offsets.true_offset(event.end)
        if name == "reasoning_content" and end > start:
            first, last = self._source.find_tokens(start, end)
            self._reasoning_tokens += last - first

    def _close(self, event: RegionClosed) -> list[Delta]:
        start, end = self._offsets.true_offset(event.start), self._offsets.true_offset(event.end)
        return self._message.close_region(
            event.field,
            closed=event.closed,
            raw=self._source.slice(start, end),
            span=self._source.find_tokens(start, end),
        )


def _find_opening(grammar: Grammar, prompt_ids: Ids) -> str:
    """What the prompt wrote of the assistant's turn: the (shielded) text after the turn's last opening. Only the
    prompt's end is read."""
    if len(grammar.fields) == 1:
        return ""
    for window in _ANCHOR_WINDOWS:
        source = TokenSource(grammar)
        text = source.add(prompt_ids[-window:]) + source.flush()
        place: int | None = None
        for match in grammar.anchor.finditer(text):
            place = match.end()
        if place is not None:
            return text[place:]
        if window >= len(prompt_ids):
            break
    return ""
