"""Ids decide what is a marker: a marker that is an added token counts only as that token; the same characters spelled
by ordinary tokens are text.

The scanner sees text, so `MarkerShield` breaks such look-alikes with `BREAK`, which `unshield` takes out again.
`ShieldedOffsets` converts places in the shielded text to places in the true text.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass

ESCAPE = "\ufdd0"  # a Unicode noncharacter: legal in UTF-8, never assigned
BREAK = ESCAPE + "\ufdd2"  # stands inside a look-alike
ESCAPED_ESCAPE = ESCAPE + "\ufdd1"  # the model wrote ESCAPE itself


def unshield(text: str) -> str:
    return text.replace(BREAK, "").replace(ESCAPED_ESCAPE, ESCAPE) if ESCAPE in text else text


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkerSet:
    """The markers that are added tokens: a pattern for a whole one, and all their proper beginnings."""

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
    """Breaks look-alikes of markers in the text of ordinary tokens. Holds back an end that may still become one."""

    def __init__(self, markers: MarkerSet) -> None:
        self._markers = markers
        self._held = ""

    def add(self, text: str) -> str:
        """The shielded text that is settled now."""
        markers = self._markers
        text = markers.whole.sub(_break, self._held + text.replace(ESCAPE, ESCAPED_ESCAPE))
        sizes = range(min(markers.longest_beginning, len(text)), 0, -1)
        keep = next((size for size in sizes if text[-size:] in markers.beginnings), 0)
        settled = len(text) - keep
        self._held = text[settled:]
        return text[:settled]

    def flush(self) -> str:
        """The held text: no more ordinary text follows it."""
        held, self._held = self._held, ""
        return held


def _break(match: re.Match[str]) -> str:
    return match[0][0] + BREAK + match[0][1:]


class ShieldedOffsets:
    """Character offsets of the shielded text to offsets of the true text."""

    def __init__(self) -> None:
        self._offsets: list[int] = []
        self._extra: list[int] = [0]
        self._length = 0

    def add(self, text: str) -> None:
        """Records the next piece of shielded text."""
        place = text.find(ESCAPE)
        while place >= 0:
            self._offsets.append(self._length + place)
            self._extra.append(self._extra[-1] + (2 if text[place : place + 2] == BREAK else 1))
            place = text.find(ESCAPE, place + 2)
        self._length += len(text)

    def true_offset(self, offset: int) -> int:
        return offset - self._extra[bisect_right(self._offsets, offset - 1)]
