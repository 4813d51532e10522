"""A whole turn split at its marker tokens, without a look at its text.

Only where ids alone decide: every delimiter of the grammar is one added token that cannot overlap with another (`tokens_of`), every other
token is whole characters, and every call was closed. All else is the scanner's (`Regions`), which gives the same where both can be asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from transformers.utils.chat_parsing.response_templates import ResponseTemplate

from tokentrue.renderers.parsing_regions import TEXT_FIELDS
from tokentrue.renderers.parsing_source import next_odd
from tokentrue.types import Ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """An added token: its text, the field that it opens and those that it closes."""

    text: str
    opens: str | None
    closes: frozenset[str]


class Segment(NamedTuple):
    """The body of a field; tokens `[start, end)` are its own, its markers included."""

    field: str
    body: str
    start: int
    end: int


def tokens_of(template: ResponseTemplate, added: Mapping[int, str]) -> Mapping[int, Marker] | None:
    """The added tokens that the template names (`added`) as markers; None where ids alone do not decide."""
    opens: dict[str, str] = {}
    closes: dict[str, set[str]] = {}
    for name, field in template.fields.items():
        if name == template.implicit:
            if field.close_re is not None or name not in TEXT_FIELDS:
                return None
            continue
        if field.open_literals is None or (field.close_re is not None and field.close_literals is None):
            return None
        for literal in field.open_literals:
            if opens.setdefault(literal, name) != name:
                return None
        for literal in field.close_literals or ():
            closes.setdefault(literal, set()).add(name)
    texts, delimiters = set(added.values()), opens.keys() | closes.keys()
    if len(texts) < len(added) or not delimiters <= texts or any(_overlap(one, text) for one in delimiters for text in texts):
        return None
    return {id_: Marker(text=text, opens=opens.get(text), closes=frozenset(closes.get(text, ()))) for id_, text in added.items()}


def _overlap(one: str, other: str) -> bool:
    """Whether the two can share characters of a text without being the same."""
    if one != other and (one in other or other in one):
        return True
    return any(one.startswith(other[-size:]) or one.endswith(other[:size]) for size in range(1, min(len(one), len(other))))


def segments_of(
    markers: Mapping[int, Marker], token_ids: Ids, texts: list[str | None], *, implicit: str | None, opened: tuple[str | None, bool]
) -> list[Segment] | None:
    """What is in the regions, in order; None where the scanner must be asked.

    `texts` of the ids have None for markers, which is filled in, and for half characters. `opened`: see `Regions`.
    """
    field, begun = opened
    found: list[Segment] = []
    since = start = place = 0
    last = len(texts)
    while (place := next_odd(texts, place)) < last:
        marker = markers.get(token_ids[place])
        if marker is None:
            return None
        is_close = field in marker.closes
        opens = marker.opens if field == implicit else None
        if is_close or opens is not None:
            body = "".join(texts[since:place])  # type: ignore[arg-type]  # up to the first None
            if field is not None and (body or begun):
                found.append(Segment(field, body, start, place + 1))
            field, begun, start, since = (implicit, False, place, place + 1) if opens is None else (opens, True, place, place + 1)
        texts[place] = marker.text
        place += 1
    body = "".join(texts[since:last])  # type: ignore[arg-type]  # there is no None left
    if field in TEXT_FIELDS:
        if body or begun:
            found.append(Segment(field, body, start, last))
    elif field is not None:
        return None
    return found
