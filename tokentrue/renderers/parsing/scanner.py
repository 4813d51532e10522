"""Splits sampled ids into the regions of a response template, incrementally.

Half a character, a possible look-alike of a marker and a partial match of a delimiter are held back until more text
decides. A region that is not a readable call is no error here: its body is passed on unchanged.
"""

from __future__ import annotations

import codecs
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias, cast

from tokentrue.renderers.parsing.grammar import TEXT_FIELDS, Delimiter, Grammar, MarkerShield
from tokentrue.types import Ids

_UTF8 = codecs.getincrementaldecoder("utf-8")


class TokenSource:
    """`add` returns shielded text; `slice` and `find_tokens` refer to the true text.

    Holds back incomplete characters, and ordinary text that may become the look-alike of a marker.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._pieces, self._texts = grammar.pieces, grammar.texts
        self._shield = MarkerShield(grammar.markers)
        self._decoder = _UTF8("surrogateescape")
        self._has_half = False  # the decoder holds part of a character
        self._text: list[str] = []
        self._ids: list[int] = []
        self._ends: list[int] = []  # end of each token in bytes; computed lazily

    def add(self, token_ids: Ids) -> str:
        self._ids.extend(token_ids)
        out: list[str] = []
        texts = [*map(self._texts.__getitem__, token_ids), None]
        place = 0
        while place < len(token_ids):
            if texts[place] is None or self._has_half:
                out.append(self._add_odd(token_ids[place]))
                place += 1
            else:
                end = texts.index(None, place)
                out.append(self._add_text("".join(cast("list[str]", texts[place:end]))))
                place = end
        return "".join(out)

    def flush(self) -> str:
        """Returns the held text at the end of the turn, before its stop token."""
        return self._release()

    @property
    def raw(self) -> str:
        """The true text so far; its bytes are those of the ids."""
        self._text = ["".join(self._text)]
        return self._text[0]

    def slice(self, start: int, end: int) -> str:
        return self.raw[start:end]

    def find_tokens(self, start: int, end: int) -> tuple[int, int]:
        """Tokens `[first, last)` with bytes of the characters `[start, end)`."""
        known = len(self._ends)
        sizes = map(len, self._pieces.split(self._ids[known:]))
        self._ends += list(accumulate(sizes, initial=self._ends[-1] if known else 0))[1:]
        first = len(self.raw[:start].encode("utf-8", "surrogateescape"))
        last = first + len(self.raw[start:end].encode("utf-8", "surrogateescape"))
        return bisect_right(self._ends, first), min(bisect_left(self._ends, last) + 1, len(self._ends))

    def _add_text(self, text: str) -> str:
        if not text:
            return ""
        self._text.append(text)
        return self._shield.add(text)

    def _add_odd(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if self._texts.is_marker(token_id):
            released = self._release()
            self._text.append(piece.decode("utf-8"))
            return released + self._text[-1]
        text = self._add_text(self._decoder.decode(piece))
        self._has_half = bool(self._decoder.getstate()[0])
        return text

    def _release(self) -> str:
        """Releases the bytes of a character that stays incomplete, and text that can no longer become a look-alike."""
        shown = ""
        if self._has_half:
            shown = self._add_text(self._decoder.decode(b"", final=True))
            self._decoder.reset()
            self._has_half = False
        return shown + self._shield.flush()


_LOOKBEHIND = 128  # characters kept before the scanned place, for patterns that look behind
_TRIM_AT = 1024


class RegionOpened(NamedTuple):
    field: str
    captures: Mapping[str, str]


class RegionText(NamedTuple):
    field: str
    text: str


class TextEnded(NamedTuple):
    """A text region has ended; more text of its field is another segment. `[start, end)`: its body without markers."""

    field: str
    start: int
    end: int


class RegionClosed(NamedTuple):
    """A region other than text has ended. `[start, end)` are characters of the sampled text, markers included.

    `closed`: by its own marker, or by the end of the turn if the region may run to it.
    """

    field: str
    start: int
    end: int
    closed: bool


ScanEvent: TypeAlias = RegionOpened | RegionText | TextEnded | RegionClosed
Match: TypeAlias = Any


class RegionScanner:
    """`prefix` is the part of this turn in the prompt (an opened `<think>`). It emits no events except those of a call
    that it leaves open. Offsets in events count characters of the text that was fed.
    """

    def __init__(self, grammar: Grammar, *, prefix: str) -> None:
        self._grammar = grammar
        self._events: list[ScanEvent] = []
        self._buffer, self._pos = prefix, 0
        self._base = -len(prefix)  # the offset of the buffer's first character
        self._field: str | None = grammar.implicit
        self._has_begun = False  # the open region has a marker or text
        self._opened_at = self._body_at = self._base
        if prefix:
            self._advance(at_end=False)
            places = [place for place, event in enumerate(self._events) if isinstance(event, RegionOpened)]
            self._events = self._events[places[-1] :] if self._field not in {None, *TEXT_FIELDS} and places else []

    @property
    def is_inside(self) -> bool:
        return self._field is not None and self._field != self._grammar.implicit

    def feed(self, text: str) -> list[ScanEvent]:
        if self._pos > _TRIM_AT:
            cut = self._pos - _LOOKBEHIND
            self._buffer, self._base, self._pos = self._buffer[cut:], self._base + cut, self._pos - cut
        self._buffer += text
        self._advance(at_end=False)
        return self._take_events()

    def finish(self, *, stopped: bool) -> list[ScanEvent]:
        """`stopped`: the turn ended at a stop token, not at a cut-off."""
        self._advance(at_end=True)
        self._append(self._buffer[self._pos :])
        self._pos = len(self._buffer)
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
            self._append(self._buffer[self._pos : start])
            self._pos = end
            had_begun = self._has_begun
            self._close(self._base + start, closed=True)
            if delimiter.opens:
                self._open(delimiter.field, match)
            elif start == end and not had_begun:  # an empty close of an empty region would match here for ever
                break
        if hold > self._pos and not at_end:
            self._append(self._buffer[self._pos : hold])
            self._pos = hold

    def _find(self, *, at_end: bool) -> tuple[tuple[Delimiter, Match] | None, int]:
        """Returns the earliest certain delimiter (the longest of those), and where the first incomplete one begins."""
        buffer, pos = self._buffer, self._pos
        edge = hold = len(buffer)
        best: tuple[Delimiter, Match] | None = None
        best_key: tuple[int, int, bool, str] | None = None
        for delimiter in self._grammar.delimiters[self._field]:
            match: Match = delimiter.pattern.search(buffer, pos, partial=not at_end)
            if match is None:
                continue
            start, end = match.span()
            if not at_end and (match.partial or (end == edge and start == end) or self._can_grow(delimiter, start)):
                hold = min(hold, start)
                continue
            key = (start, start - end, not delimiter.opens, delimiter.field)
            if best_key is None or key < best_key:
                best_key, best = key, (delimiter, match)
        if best is not None and best[1].start() >= hold:
            best = None
        return best, hold

    def _can_grow(self, delimiter: Delimiter, start: int) -> bool:
        """True if more text may extend the match at `start`: the text after it may belong to an optional end
        (`</invoke>`, a line break, and perhaps the block's `</tool_calls>`).
        """
        if delimiter.is_final:
            return False
        return delimiter.pattern.fullmatch(self._buffer, start, partial=True) is not None

    def _append(self, text: str) -> None:
        if not text or self._field is None:
            return
        self._has_begun = True
        self._events.append(RegionText(field=self._field, text=text))

    def _open(self, field: str, match: Match) -> None:
        self._field, self._has_begun = field, True
        self._opened_at, self._body_at = self._base + match.start(), self._base + match.end()
        if field not in TEXT_FIELDS:
            captures = {name: value for name, value in match.groupdict().items() if value is not None}
            self._events.append(RegionOpened(field=field, captures=captures))

    def _close(self, body_end: int, *, closed: bool) -> None:
        if self._field in TEXT_FIELDS and self._has_begun:
            self._events.append(TextEnded(field=self._field, start=max(self._body_at, 0), end=max(body_end, 0)))
        elif self._field is not None and self._has_begun:
            self._events.append(
                RegionClosed(
                    field=self._field,
                    start=max(self._opened_at, 0),
                    end=max(self._base + self._pos, 0),
                    closed=closed,
                )
            )
        self._field, self._has_begun = self._grammar.implicit, False
        self._opened_at = self._body_at = self._base + self._pos
