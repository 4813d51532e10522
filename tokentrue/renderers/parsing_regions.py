"""Splits a sampled text into the regions of a response template, while it is being sampled.

The grammar and the scanner are transformers' (`transformers.utils.chat_parsing`: declarative fields with open and close markers, partial
matches held back). Added here: where each region lies, its captures, whether it was closed, memory that does not grow with the text, and
no interpretation: a body that cannot be read as a call must reach the client as text instead of raising in the middle of a stream.

Also here is the rule that ids decide what is a marker. A marker that is an added token counts only as that token; the same
characters spelled by ordinary tokens are text. The scanner sees text, so such look-alikes are broken by `MARK`, which is taken out again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import regex
from transformers.utils.chat_parsing.response_parser import ResponseParser
from transformers.utils.chat_parsing.response_templates import ResponseTemplate, ResponseTemplateField

from tokentrue.renderers.parsing_bytes import Ordinary, Quiet

CALLS, BROKEN = "tool_calls", "broken_calls"
TEXT_FIELDS = {"content": "content", "final": "content", "preamble": "content"} | dict.fromkeys(
    ("reasoning_content", "reasoning", "thinking"), "reasoning_content"
)

ESC = "\ufdd0"  # a Unicode noncharacter: legal in UTF-8, never assigned
MARK = ESC + "\ufdd2"  # breaks a look-alike
LITERAL = ESC + "\ufdd1"  # the model wrote ESC itself
_LOOKBACK = 128
_TRIM_AT = 1024
_ASSERTIONS = regex.compile(r"\(\?<[=!][^()]*\)|\\[AbBG]|(?<![\[\\])\^")
_ODD = "é中٣\U0001f600\ue000\udc80" + ESC  # letters, a digit, a symbol, private, half a character


class Text(NamedTuple):
    """More text of a field that is shown as it comes."""

    field: str
    text: str


class Opened(NamedTuple):
    """A call begins. Its body follows as `Text`, and again as a whole when it has ended."""

    captures: Mapping[str, str]


class Ended(NamedTuple):
    """A text field pauses: what follows in it is another segment."""

    field: str


class Closed(NamedTuple):
    """A region has ended. `start` and `end` count characters of the sampled text, markers included.

    `closed`: by its own marker. A region that runs to the end of the turn has none, and is closed by the end.
    """

    field: str
    body: str
    captures: Mapping[str, str]
    start: int
    end: int
    closed: bool


Part: TypeAlias = Text | Opened | Ended | Closed


def unshield(text: str) -> str:
    return text.replace(MARK, "").replace(LITERAL, ESC) if ESC in text else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """What one set of markers looks like, made once: their first characters, the whole of them, their proper beginnings."""

    start: Any
    whole: Any
    heads: frozenset[str]
    longest: int


@cache
def marks_of(markers: tuple[str, ...]) -> Marks:
    ordered = sorted(set(markers), key=len, reverse=True)
    firsts = "|".join(regex.escape(first) for first in sorted({marker[0] for marker in ordered}))
    return Marks(
        start=regex.compile(firsts or "(?!)"),
        whole=regex.compile("|".join(map(regex.escape, ordered)) or "(?!)"),
        heads=frozenset(marker[:size] for marker in ordered for size in range(1, len(marker))),
        longest=max(map(len, ordered), default=1) - 1,
    )


class Shield:
    """Text of ordinary tokens, with look-alikes of added-token markers broken. Holds back what may still become one."""

    def __init__(self, markers: tuple[str, ...]) -> None:
        self._marks = marks_of(markers)
        self.held = ""

    def ordinary(self, text: str) -> str:
        if ESC in text:
            text = text.replace(ESC, LITERAL)
        marks = self._marks
        if not self.held and marks.start.search(text) is None:  # nothing in it can begin a marker
            return text
        text = marks.whole.sub(lambda match: match[0][0] + MARK + match[0][1:], self.held + text)
        keep = next((size for size in range(min(marks.longest, len(text)), 0, -1) if text[-size:] in marks.heads), 0)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        held, self.held = self.held, ""
        return held


class Places:
    """Character offsets of the shielded stream to offsets of the true text."""

    def __init__(self) -> None:
        self._offsets: list[int] = []
        self._extra: list[int] = [0]

    def note(self, text: str, at: int) -> None:
        """`text` begins at shielded offset `at`."""
        place = text.find(ESC)
        while place >= 0:
            self._offsets.append(at + place)
            self._extra.append(self._extra[-1] + (2 if text[place : place + 2] == MARK else 1))
            place = text.find(ESC, place + 2)

    def true(self, offset: int) -> int:
        return offset - self._extra[bisect_right(self._offsets, offset - 1)]


Delimiter: TypeAlias = tuple[str, ResponseTemplateField, Any, bool]
"""Whether it opens or closes, its field, the search for it, and whether it is sure when it stands at the end of the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What can end a region or open the next one, and the tokens that cannot begin it, nor the look-alike of a marker."""

    delimiters: list[Delimiter]
    quiet: Quiet


def watches_of(
    template: ResponseTemplate, ordinary: Ordinary, *, markers: tuple[str, ...], stop_ids: frozenset[int]
) -> dict[str | None, Watch]:
    """The watch of every region, and of the text between regions."""
    between = [_delimiter("open", field) for field in template.fields.values() if field.open_re is not None]
    implicit = template.fields.get(template.implicit or "")
    if implicit is not None and implicit.close_re is not None:
        between.append(_delimiter("close", implicit))
    listed: dict[str | None, list[Delimiter]] = {None: between}
    for name, field in template.fields.items():
        inside = [_delimiter("close", field)] if field.close_re is not None else []
        listed[name] = between if name == template.implicit else inside
    look_alikes = ESC + "".join(marker[0] for marker in markers)
    return {name: Watch(delimiters=found, quiet=Quiet(ordinary, _loud(found, look_alikes), stop_ids)) for name, found in listed.items()}


def _delimiter(kind: str, field: ResponseTemplateField) -> Delimiter:
    if kind == "open":
        return kind, field, field.open_re.search, field.open_literals is not None and not field.open_literal_can_extend
    return kind, field, field.close_re.search, field.close_literals is not None and not field.close_literal_can_extend


def _loud(delimiters: list[Delimiter], look_alikes: str) -> Any:
    """Finds a character that may begin something watched for."""
    begins = [_beginnings(field.open_re if kind == "open" else field.close_re) for kind, field, _, _ in delimiters]
    if any(begin is None for begin in begins):
        return regex.compile("")
    return regex.compile(f"[{''.join(filter(None, begins))}{regex.escape(look_alikes)}]")


def _beginnings(pattern: Any) -> str | None:
    """The characters that a match can begin with, as the inside of a character class; None where it may be any.

    The engine itself is asked, about each character that a pattern could tell from others. Assertions about what stands before are left
    out first: without them a pattern matches more, never less.
    """
    free = regex.compile(_ASSERTIONS.sub("", pattern.pattern), pattern.flags)
    if any(free.match(char, partial=True) for char in _ODD):
        return None
    named = {char for char in pattern.pattern if not char.isascii()}
    found = [regex.escape(char) for char in (*map(chr, range(128)), *sorted(named)) if free.match(char, partial=True)]
    return "".join(found) + (r"\s" if free.match("\u2003", partial=True) else "")


class Regions(ResponseParser):
    """The scanner. `prefix` is what the prompt already wrote of this turn (an opened `<think>`); it sets the state, and adds no text.

    Prompts end in few ways: a scanner that has seen such an end is kept, and each turn gets a `twin` of it.
    """

    def __init__(self, template: ResponseTemplate, watches: Mapping[str | None, Watch], *, prefix: str) -> None:
        self._watches = watches
        self._shows: frozenset[str] = frozenset()
        self._found: list[Part] = []
        self._parts: list[str] = []
        self._base = self._origin = 0
        self._opened_at = 0
        self._match: Any = None
        self._stopped = False
        super().__init__(template, prefix="")
        if prefix:
            self._buffer = prefix
            self._process([], eos=False)
        self._origin = len(prefix)

    def twin(self, *, shown: frozenset[str]) -> Regions:
        """One more in this state, which is where a turn begins. `shown`: the fields whose text is wanted as it comes."""
        twin = Regions.__new__(Regions)
        twin.__dict__.update(self.__dict__)
        twin._shows, twin._found, twin._parts = shown, [], self._parts.copy()
        return twin

    @property
    def opened(self) -> tuple[str | None, bool] | None:
        """The field that text goes to and whether it has begun; None where more than that is known of the turn."""
        if self._pos < len(self._buffer) or (self._current is not None and self._current not in TEXT_FIELDS):
            return None
        return self._current, self._opened

    def at_rest(self) -> tuple[Quiet | None, str | None]:
        """The tokens that change nothing here (None while something is held back), and the field that shows them."""
        if self._pos < len(self._buffer):
            return None, None
        return self._watches[self._current].quiet, self._current if self._current in self._shows else None

    def pass_by(self, text: str) -> None:
        """`text` of quiet tokens."""
        if self._pos > _TRIM_AT:
            self._trim()
        self._buffer += text
        self._pos += len(text)
        if self._current not in TEXT_FIELDS:
            self._parts.append(text)
        elif text:
            self._opened = True

    def _trim(self) -> None:
        cut = self._pos - _LOOKBACK
        self._buffer, self._base, self._pos = self._buffer[cut:], self._base + cut, self._pos - cut

    def more(self, text: str) -> list[Part]:
        if self._pos > _TRIM_AT:
            self._trim()
        self._buffer += text
        self._process([], eos=False)
        return self._taken()

    def mark(self, text: str, *, opens: str | None, closes: frozenset[str]) -> list[Part]:
        """What `more` gives for the text of one marker token while nothing is held back, where ids alone decide (`parsing_tokens`)."""
        if self._pos > _TRIM_AT:
            self._trim()
        at, is_close = self._base + self._pos, self._current in closes
        opening = opens if self._current == self._implicit_name else None
        self._buffer += text
        self._pos = len(self._buffer)
        if is_close or opening is not None:
            self._match = text
            self._close_current([])
            self._match = None
        else:
            self._accumulate([], text)
        if opening is not None:
            self._open(opening, {}, at)
        return self._taken()

    def end(self, *, stopped: bool, text: str = "") -> list[Part]:
        """`text` is the last of it. `stopped`: the turn ended at a stop token, not at a cut-off."""
        self._stopped = stopped
        self._buffer += text
        if self._pos == len(self._buffer) and self._current in TEXT_FIELDS:  # nothing is left that could be a marker
            self._close_current([])
        else:
            self._process([], eos=True)
        return self._taken()

    @property
    def inside(self) -> bool:
        """In a region that has a marker of its own."""
        return self._current is not None and self._current != self._implicit_name

    def _taken(self) -> list[Part]:
        found, self._found = self._found, []
        return found

    # What follows replaces the parent's hooks; `tests/renderers/parsing` holds them to the parent's own results.

    def _watchlist(self) -> Any:
        return self._watches[self._current].delimiters

    def _scan(self, watch: Any, eos: bool) -> tuple[tuple[str, ResponseTemplateField, Any] | None, int]:
        """The parent's own rule: the earliest delimiter that is sure, the longest of those; `hold` is where one that is not sure begins."""
        buffer, pos = self._buffer, self._pos
        edge = hold = len(buffer)
        best: tuple[str, ResponseTemplateField, Any] | None = None
        best_key: tuple[int, int, str, str] | None = None
        delimiters: list[Delimiter] = watch
        for kind, field, search, is_sure in delimiters:
            match = search(buffer, pos, partial=not eos)
            if match is None:
                continue
            start, end = match.span()
            if not eos and (match.partial or (end == edge and (start == end or not is_sure))):
                hold = min(hold, start)
                continue
            key = (start, start - end, "" if kind == "open" else kind, field.name)
            if best_key is None or key < best_key:
                best_key, best = key, (kind, field, match)
        if best is not None and best[2].start() >= hold:
            best = None
        self._match = best[2] if best is not None else None
        return best, hold

    def _accumulate(self, events: list[dict[str, Any]], text: str) -> None:
        if not text or self._current is None:
            return
        self._opened = True
        if self._current in self._shows:
            self._found.append(Text(field=self._current, text=text))
        if self._current not in TEXT_FIELDS:
            self._parts.append(text)

    def _open_explicit(self, events: list[dict[str, Any]], field: ResponseTemplateField, m: Any) -> None:
        self._open(field.name, {name: value for name, value in m.groupdict().items() if value is not None}, self._base + m.start())

    def _open(self, field: str, captures: dict[str, str], at: int) -> None:
        self._current, self._captures = field, captures
        self._parts = []
        self._opened = True
        self._opened_at = at
        if field == CALLS and CALLS in self._shows:
            self._found.append(Opened(captures=captures))

    def _close_current(self, events: list[dict[str, Any]]) -> None:
        if self._current in TEXT_FIELDS:
            if self._opened:
                self._found.append(Ended(self._current))
        elif self._current is not None and self._opened:
            closes = self._spec.fields[self._current].close_re
            to_the_end = closes is None or closes.fullmatch("") is not None
            self._found.append(
                Closed(
                    field=self._current,
                    body="".join(self._parts),
                    captures=dict(self._captures),
                    start=max(self._opened_at - self._origin, 0),
                    end=max(self._base + self._pos - self._origin, 0),
                    closed=self._match is not None or (to_the_end and self._stopped),
                )
            )
        self._parts = []
        self._reset_to_implicit()
