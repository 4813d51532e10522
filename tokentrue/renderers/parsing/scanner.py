"""Splits sampled ids into the regions of a response template, incrementally. Half a character, a possible look-alike of
a marker and a partial match of a delimiter are held back until more text decides. A region that is not a readable call
is no error here: its body is passed on unchanged."""

import codecs
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple

import regex

from tokentrue.renderers.parsing.grammar import TEXT_FIELDS, Delimiter, Grammar
from tokentrue.types import Ids

_UTF8 = codecs.getincrementaldecoder("utf-8")
BREAK = "\ufdd0"  # a Unicode noncharacter, which no pattern names


class Settled(NamedTuple):
    """Text that later tokens cannot change. `safe` is what patterns search: the same text, but a look-alike of a marker
    in ordinary tokens has BREAK for its second character."""

    text: str
    safe: str


class TokenSource:
    """Holds back incomplete characters, and text that may become the look-alike of a marker."""

    def __init__(self, grammar: Grammar) -> None:
        self._pieces, self._markers = grammar.pieces, grammar.markers
        self._decoder = _UTF8("surrogateescape")
        self._held = ""
        self._text: list[str] = []
        self._ids: list[int] = []
        self._ends: list[int] = []  # end of each token in bytes; computed lazily

    def add(self, token_ids: Ids) -> Settled:
        self._ids.extend(token_ids)
        if self._markers.ids.isdisjoint(token_ids):
            return self._add_bytes(self._pieces.join(token_ids))
        settled: list[Settled] = []
        start = 0
        for place, token_id in enumerate(token_ids):
            if token_id in self._markers.ids:
                settled += [self._add_bytes(self._pieces.join(token_ids[start:place])), self.flush()]
                marker = self._pieces[token_id].decode("utf-8")
                self._text.append(marker)
                settled.append(Settled(marker, marker))
                start = place + 1
        settled.append(self._add_bytes(self._pieces.join(token_ids[start:])))
        return Settled(*map("".join, zip(*settled, strict=True)))

    def flush(self) -> Settled:
        """What was held back, when no more ordinary text follows."""
        text, safe = self._add_bytes(b"", final=True)
        self._decoder.reset()
        held, self._held = self._held, ""
        return Settled(text + held, safe + held)

    @property
    def raw(self) -> str:
        """Its bytes are those of the ids."""
        self._text = ["".join(self._text)]
        return self._text[0]

    def find_tokens(self, start: int, end: int) -> tuple[int, int]:
        """Tokens `[first, last)` with bytes of the characters `[start, end)`."""
        known = len(self._ends)
        sizes = map(len, self._pieces.split(self._ids[known:]))
        self._ends += list(accumulate(sizes, initial=self._ends[-1] if known else 0))[1:]
        first = len(self.raw[:start].encode("utf-8", "surrogateescape"))
        last = first + len(self.raw[start:end].encode("utf-8", "surrogateescape"))
        return bisect_right(self._ends, first), min(bisect_left(self._ends, last) + 1, len(self._ends))

    def _add_bytes(self, data: bytes, *, final: bool = False) -> Settled:
        text = self._decoder.decode(data, final)
        self._text.append(text)
        text = self._held + text
        markers = self._markers
        if markers.firsts.isdisjoint(text):
            return Settled(text, text)
        safe = markers.whole.sub(_break, text)
        sizes = range(min(markers.longest_beginning, len(safe)), 0, -1)
        settled = len(safe) - next((size for size in sizes if safe[-size:] in markers.beginnings), 0)
        self._held = text[settled:]
        return Settled(text[:settled], safe[:settled])


def _break(match: re.Match[str]) -> str:
    return match[0][0] + BREAK + match[0][2:]


_LOOKBEHIND = 128  # characters kept before the scanned place, for patterns that look behind
_TRIM_AT = 1024


class RegionOpened(NamedTuple):
    field: str
    captures: Mapping[str, str]


class RegionText(NamedTuple):
    field: str
    text: str


class RegionEnded(NamedTuple):
    """`[start, end)`: characters of the sampled text, with the markers unless the region is text. `closed`: by its own
    marker, or by the end of the turn if the region may run to it."""

    field: str
    start: int
    end: int
    closed: bool


ScanEvent = RegionOpened | RegionText | RegionEnded


class RegionScanner:
    """`prefix` is the part of this turn in the prompt (an opened `<think>`). It emits no events except those of a call
    that it leaves open. Offsets count characters of the text that was fed."""

    def __init__(self, grammar: Grammar, *, prefix: Settled) -> None:
        self._grammar = grammar
        self._events: list[ScanEvent] = []
        self._text: str = prefix.text
        self._safe: str = prefix.safe
        self._pos = 0
        self._base = -len(prefix.text)  # the offset of the buffers' first character
        self._field: str | None = grammar.implicit
        self._has_begun = False  # the open region has a marker or text
        self._opened_at = self._body_at = self._base
        if prefix.text:
            self._advance(at_end=False)
            places = [place for place, event in enumerate(self._events) if isinstance(event, RegionOpened)]
            self._events = self._events[places[-1] :] if self._field not in {None, *TEXT_FIELDS} and places else []

    @property
    def is_inside(self) -> bool:
        return self._field is not None and self._field != self._grammar.implicit

    def feed(self, settled: Settled) -> list[ScanEvent]:
        text, safe = settled
        starts = self._grammar.regions[self._field].starts
        is_plain = self._pos == len(self._safe) and safe.isascii() and starts.isdisjoint(safe)
        self._text += text
        self._safe += safe
        if is_plain:
            self._emit(len(self._safe))
        else:
            self._advance(at_end=False)
        if self._pos > _TRIM_AT:
            cut = self._pos - _LOOKBEHIND
            self._text, self._safe = self._text[cut:], self._safe[cut:]
            self._base, self._pos = self._base + cut, _LOOKBEHIND
        return self._take_events()

    def finish(self, *, stopped: bool) -> list[ScanEvent]:
        """`stopped`: at a stop token, not at a cut-off."""
        self._advance(at_end=True)
        self._emit(len(self._safe))
        runs_on = self._field is not None and self._grammar.ends_with_turn(self._field)
        self._close(self._base + self._pos, closed=stopped and runs_on)
        return self._take_events()

    def _take_events(self) -> list[ScanEvent]:
        events, self._events = self._events, []
        return events

    def _advance(self, *, at_end: bool) -> None:
        while True:
            found, hold = self._find(at_end=at_end)
            if found is None:
                break
            delimiter, match = found
            start, end = match.span()
            self._emit(start)
            self._pos = end
            had_begun = self._has_begun
            self._close(self._base + start, closed=True)
            if delimiter.opens:
                self._open(delimiter.field, match)
            elif start == end and not had_begun:  # an empty close of an empty region would match here for ever
                break
        if hold > self._pos and not at_end:
            self._emit(hold)

    def _find(self, *, at_end: bool) -> tuple[tuple[Delimiter, regex.Match[str]] | None, int]:
        """The earliest certain delimiter (the longest of those), and where the first incomplete one begins."""
        edge = hold = len(self._safe)
        best: tuple[Delimiter, regex.Match[str]] | None = None
        best_key: tuple[int, int, bool, str] | None = None
        for delimiter in self._grammar.regions[self._field].delimiters:
            match = delimiter.pattern.search(self._safe, self._pos, partial=not at_end)
            if match is None:
                continue
            start, end = match.span()
            if not at_end and (match.partial or (end == edge and start == end) or self._can_grow(delimiter, start)):
                hold = min(hold, start)
                continue
            key = (start, start - end, not delimiter.opens, delimiter.field)
            if best_key is None or key < best_key:
                best_key, best = key, (delimiter, match)
        return (None if best is None or best[1].start() >= hold else best), hold

    def _can_grow(self, delimiter: Delimiter, start: int) -> bool:
        """True if more text may extend the match at `start`: what follows it may belong to an optional end
        (`</invoke>`, a line break, perhaps `</tool_calls>`)."""
        return not delimiter.is_final and delimiter.pattern.fullmatch(self._safe, start, partial=True) is not None

    def _emit(self, end: int) -> None:
        if end > self._pos and self._field is not None:
            self._has_begun = True
            self._events.append(RegionText(self._field, self._text[self._pos : end]))
        self._pos = end

    def _open(self, field: str, match: regex.Match[str]) -> None:
        self._field, self._has_begun = field, True
        self._opened_at, self._body_at = self._base + match.start(), self._base + match.end()
        if field not in TEXT_FIELDS:
            names = [name for name, value in match.groupdict().items() if value is not None]
            captures = {name: self._text[slice(*match.span(name))] for name in names}
            self._events.append(RegionOpened(field, captures))

    def _close(self, body_end: int, *, closed: bool) -> None:
        end = self._base + self._pos
        if self._field is not None and self._has_begun:
            is_text = self._field in TEXT_FIELDS
            span = (self._body_at, body_end) if is_text else (self._opened_at, end)
            self._events.append(RegionEnded(self._field, max(span[0], 0), max(span[1], 0), closed))
        self._field, self._has_begun = self._grammar.implicit, False
        self._opened_at = self._body_at = end
