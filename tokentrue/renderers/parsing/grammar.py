"""Parsing data of one renderer: a compiled response template (`transformers.utils.chat_parsing`) and the tokens of its
markers."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import regex
from transformers.utils.chat_parsing import response_templates

from tokentrue.errors import TemplateError
from tokentrue.records import record
from tokentrue.renderers.codec import TokenBytes
from tokentrue.renderers.families import PLAIN, Family
from tokentrue.renderers.parsing.calls import CallFormat, ForeignField, find_call_format
from tokentrue.types import Ids


@record
class MarkerSet:
    """The added tokens that a response template names: a pattern for whole look-alikes of them in ordinary text, and
    their proper prefixes. A marker of one character has no look-alike."""

    ids: frozenset[int]
    whole: re.Pattern[str]
    beginnings: frozenset[str]
    longest_beginning: int
    firsts: frozenset[str]


def compile_markers(found: Mapping[int, str]) -> MarkerSet:
    ordered = sorted({text for text in found.values() if len(text) > 1}, key=len, reverse=True)
    return MarkerSet(
        ids=frozenset(found),
        whole=re.compile("|".join(map(re.escape, ordered)) or "(?!)"),
        beginnings=frozenset(text[:size] for text in ordered for size in range(1, len(text))),
        longest_beginning=max(map(len, ordered), default=1) - 1,
        firsts=frozenset(text[0] for text in ordered),
    )


CALLS, BROKEN = "tool_calls", "broken_calls"
TEXT_FIELDS = {"content": "content", "final": "content", "preamble": "content"} | dict.fromkeys(
    ("reasoning_content", "reasoning", "thinking"), "reasoning_content"
)
"""Text fields of a response template, and the message fields they become."""

ForeignTemplate = Any
"""A response template compiled by `transformers`."""


@record
class Delimiter:
    """`is_final`: a match at the end of the text cannot grow with more text."""

    opens: bool
    field: str
    pattern: regex.Pattern[str]
    is_final: bool


@record
class Region:
    """`delimiters`: what can end the region or open another. `starts`: the ASCII characters that one can begin with."""

    delimiters: tuple[Delimiter, ...]
    starts: frozenset[str]


@record
class TextLayout:
    """Whether a field's ends are trimmed, and what joins its segments."""

    strip: bool = True
    join: str | None = None


@record
class Grammar:
    """`regions`: by open field (None: none). `generation_ids` open an assistant turn, for callers without a prompt."""

    fields: Mapping[str, ForeignField]
    implicit: str | None  # the field of text outside all markers
    anchor: regex.Pattern[str]  # where the assistant's turn begins in a prompt
    regions: Mapping[str | None, Region]
    layouts: Mapping[str, TextLayout]
    call_format: CallFormat | None  # of a call that can be read incrementally
    pieces: TokenBytes
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
        plain = json.loads(json.dumps(declared, default=dict))
        template = cast("Any", response_templates).load_response_template(plain)
    except (ValueError, TypeError, KeyError) as error:
        raise TemplateError(f"response_template: not a valid response template: {error}") from error
    named = str(declared)
    found = {
        id_: text
        for id_, text in pieces.added.items()
        if text.strip() and (text in named or repr(regex.escape(text))[1:-1] in named)
    }
    return Grammar(
        fields=template.fields,
        implicit=template.implicit,
        anchor=template.start_anchor_re,
        regions=_list_regions(template),
        layouts=_list_layouts(template),
        call_format=find_call_format(template.fields.get(CALLS)),
        pieces=pieces,
        markers=compile_markers(found),
        stop_ids=frozenset(stop_token_ids),
        closing_stop_ids=frozenset(stop_token_ids) & found.keys(),
        generation_ids=generation_ids,
        call_ids=family.call_ids,
    )


_ASCII = frozenset(map(chr, range(128)))
_READS_BACK = re.compile(r"\(\?<[=!]|\\[AbBGKmM]|(?<!\[)\^")


def _list_regions(template: ForeignTemplate) -> dict[str | None, Region]:
    """Outside explicit regions: every opening, and the implicit field's closing. Inside a region: only its closing."""
    fields: Mapping[str, ForeignField] = template.fields
    outside = [_read_delimiter(field, opens=True) for field in fields.values() if field.open_re is not None]
    implicit = fields.get(template.implicit or "")
    if implicit is not None and implicit.close_re is not None:
        outside.append(_read_delimiter(implicit, opens=False))
    found: dict[str | None, Region] = {None: _make_region(outside)}
    for name, field in fields.items():
        inside = [_read_delimiter(field, opens=False)] if field.close_re is not None else []
        found[name] = found[None] if name == template.implicit else _make_region(inside)
    return found


def _make_region(delimiters: Sequence[Delimiter]) -> Region:
    patterns = [delimiter.pattern for delimiter in delimiters]
    if any(_READS_BACK.search(pattern.pattern) for pattern in patterns):  # a character alone does not tell
        return Region(delimiters=tuple(delimiters), starts=_ASCII)
    starts = (char for char in _ASCII if any(pattern.match(char, partial=True) for pattern in patterns))
    return Region(delimiters=tuple(delimiters), starts=frozenset(starts))


def _read_delimiter(field: ForeignField, *, opens: bool) -> Delimiter:
    side = "open" if opens else "close"
    literals, can_extend = getattr(field, f"{side}_literals"), getattr(field, f"{side}_literal_can_extend")
    is_final = literals is not None and not can_extend
    return Delimiter(opens=opens, field=field.name, pattern=getattr(field, f"{side}_re"), is_final=is_final)


def _list_layouts(template: ForeignTemplate) -> dict[str, TextLayout]:
    layouts: dict[str, TextLayout] = {}
    for field, declared in template.fields.items():
        if name := TEXT_FIELDS.get(field):
            known = layouts.get(name)
            strip = known.strip if known is not None else bool(declared.content_args.get("strip", True))
            layouts[name] = TextLayout(strip=strip, join=(known and known.join) or declared.join)
    return layouts
