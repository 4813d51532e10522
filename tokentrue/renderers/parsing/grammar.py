"""Parsing data of one renderer: a compiled response template (`transformers.utils.chat_parsing`: declarative fields
with open and close markers) and the tokens of its markers.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import regex
from transformers.utils.chat_parsing import response_templates

from tokentrue.errors import TemplateError
from tokentrue.json_types import is_object
from tokentrue.renderers.codec import TokenBytes, TokenTexts
from tokentrue.renderers.families import PLAIN, Family
from tokentrue.renderers.parsing.calls import CallFormat, ForeignField, find_call_format
from tokentrue.types import Ids

ESCAPE = "\ufdd0"  # a Unicode noncharacter: legal in UTF-8, never assigned
BREAK = ESCAPE + "\ufdd2"  # inserted into a look-alike
ESCAPED_ESCAPE = ESCAPE + "\ufdd1"  # the model wrote ESCAPE itself


def unshield(text: str) -> str:
    return text.replace(BREAK, "").replace(ESCAPED_ESCAPE, ESCAPE) if ESCAPE in text else text


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkerSet:
    """The markers that are added tokens: a pattern for whole markers, and all their proper prefixes."""

    texts: tuple[str, ...]
    whole: re.Pattern[str]
    beginnings: frozenset[str]
    longest_beginning: int


def compile_markers(texts: tuple[str, ...]) -> MarkerSet:
    ordered = sorted(set(texts), key=len, reverse=True)
    return MarkerSet(
        texts=texts,
        whole=re.compile("|".join(map(re.escape, ordered)) or "(?!)"),
        beginnings=frozenset(text[:size] for text in ordered for size in range(1, len(text))),
        longest_beginning=max(map(len, ordered), default=1) - 1,
    )


class MarkerShield:
    """Breaks look-alikes of markers in the text of ordinary tokens. Holds back a suffix that may still become one."""

    def __init__(self, markers: MarkerSet) -> None:
        self._markers = markers
        self._held = ""

    def add(self, text: str) -> str:
        markers = self._markers
        text = markers.whole.sub(_break, self._held + text.replace(ESCAPE, ESCAPED_ESCAPE))
        sizes = range(min(markers.longest_beginning, len(text)), 0, -1)
        keep = next((size for size in sizes if text[-size:] in markers.beginnings), 0)
        settled = len(text) - keep
        self._held = text[settled:]
        return text[:settled]

    def flush(self) -> str:
        """Returns the held text; call it when no more ordinary text follows."""
        held, self._held = self._held, ""
        return held


def _break(match: re.Match[str]) -> str:
    return match[0][0] + BREAK + match[0][1:]


class ShieldedOffsets:
    """Maps character offsets of the shielded text to those of the true text."""

    def __init__(self) -> None:
        self._offsets: list[int] = []
        self._extra: list[int] = [0]
        self._length = 0

    def add(self, text: str) -> None:
        place = text.find(ESCAPE)
        while place >= 0:
            self._offsets.append(self._length + place)
            self._extra.append(self._extra[-1] + (2 if text[place : place + 2] == BREAK else 1))
            place = text.find(ESCAPE, place + 2)
        self._length += len(text)

    def true_offset(self, offset: int) -> int:
        return offset - self._extra[bisect_right(self._offsets, offset - 1)]


CALLS, BROKEN = "tool_calls", "broken_calls"
TEXT_FIELDS = {"content": "content", "final": "content", "preamble": "content"} | dict.fromkeys(
    ("reasoning_content", "reasoning", "thinking"), "reasoning_content"
)
"""Text fields of a response template, and the message fields they become."""

ForeignTemplate: TypeAlias = Any
"""A response template compiled by `transformers`."""

_load_template: Callable[[Any], ForeignTemplate] = cast("Any", response_templates).load_response_template

Pattern: TypeAlias = Any
"""A compiled pattern of the `regex` module, which has partial matches and no types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delimiter:
    """Opens or closes `field`. `is_final`: a match at the end of the text cannot grow with more text."""

    opens: bool
    field: str
    pattern: Pattern
    is_final: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TextLayout:
    """How segments form a text field: whether its ends are trimmed, and the separator."""

    strip: bool = True
    join: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """`delimiters`: by open region (None: none). `generation_ids` open an assistant turn, for callers without a
    prompt.
    """

    fields: Mapping[str, ForeignField]
    implicit: str | None  # the field of text outside all markers
    anchor: Pattern  # where the assistant's turn begins in a prompt
    delimiters: Mapping[str | None, tuple[Delimiter, ...]]
    layouts: Mapping[str, TextLayout]
    call_format: CallFormat | None  # of a call that can be read incrementally
    pieces: TokenBytes
    texts: TokenTexts
    markers: MarkerSet
    stop_ids: frozenset[int]
    closing_stop_ids: frozenset[int]  # stop tokens that the response template itself names
    generation_ids: Ids
    call_ids: Literal["openai", "short"]

    def ends_with_turn(self, field: str) -> bool:
        closes = self.fields[field].close_re
        return closes is None or closes.fullmatch("") is not None


def compile_grammar(pieces: TokenBytes, family: Family, *, stop_token_ids: Ids, generation_ids: Ids = ()) -> Grammar:
    declared = family.response_template or PLAIN
    try:
        template = _load_template(_to_json_types(declared))
    except (ValueError, TypeError, KeyError) as error:
        raise TemplateError(f"response_template: not a valid response template: {error}") from error
    named = str(declared)
    found = {id_: text for id_, text in pieces.added.items() if text.strip() and _is_named(text, named)}
    return Grammar(
        fields=template.fields,
        implicit=template.implicit,
        anchor=template.start_anchor_re,
        delimiters=_list_delimiters(template),
        layouts=_list_layouts(template),
        call_format=find_call_format(template.fields.get(CALLS)),
        pieces=pieces,
        texts=TokenTexts(pieces, frozenset(found)),
        markers=compile_markers(tuple(found.values())),
        stop_ids=frozenset(stop_token_ids),
        closing_stop_ids=frozenset(stop_token_ids) & frozenset(found),
        generation_ids=generation_ids,
        call_ids=family.call_ids,
    )


def _is_named(text: str, declared: str) -> bool:
    return text in declared or repr(regex.escape(text))[1:-1] in declared


def _list_delimiters(template: ForeignTemplate) -> dict[str | None, tuple[Delimiter, ...]]:
    """Outside explicit regions: every opening, and the implicit field's closing. Inside a region: only its closing."""
    outside = [_read_opening(field) for field in template.fields.values() if field.open_re is not None]
    implicit = template.fields.get(template.implicit or "")
    if implicit is not None and implicit.close_re is not None:
        outside.append(_read_closing(implicit))
    found: dict[str | None, tuple[Delimiter, ...]] = {None: tuple(outside)}
    for name, field in template.fields.items():
        inside = (_read_closing(field),) if field.close_re is not None else ()
        found[name] = tuple(outside) if name == template.implicit else inside
    return found


def _read_opening(field: ForeignField) -> Delimiter:
    is_final = field.open_literals is not None and not field.open_literal_can_extend
    return Delimiter(opens=True, field=field.name, pattern=field.open_re, is_final=is_final)


def _read_closing(field: ForeignField) -> Delimiter:
    is_final = field.close_literals is not None and not field.close_literal_can_extend
    return Delimiter(opens=False, field=field.name, pattern=field.close_re, is_final=is_final)


def _list_layouts(template: ForeignTemplate) -> dict[str, TextLayout]:
    layouts: dict[str, TextLayout] = {}
    for field, declared in template.fields.items():
        if name := TEXT_FIELDS.get(field):
            known = layouts.get(name)
            strip = known.strip if known is not None else bool(declared.content_args.get("strip", True))
            layouts[name] = TextLayout(strip=strip, join=(known and known.join) or declared.join)
    return layouts


def _to_json_types(declared: Any) -> Any:
    if is_object(declared):
        return {key: _to_json_types(value) for key, value in declared.items()}
    return (
        [_to_json_types(item) for item in cast("list[Any]", declared)]
        if isinstance(declared, list | tuple)
        else declared
    )
