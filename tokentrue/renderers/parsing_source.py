"""Sampled ids in, text out: what the scanner may see of it, what it truly is, and which tokens spell which part.

Ids whose bytes are whole characters are taken in runs. Only a token that holds part of a character, or that is a marker, is looked at by
itself. Which token spells which character is worked out when it is asked for: a turn without a call never asks.
"""

from __future__ import annotations

import codecs
from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import Any

from tokentrue.renderers.parsing_bytes import Ordinary, TokenBytes
from tokentrue.renderers.parsing_regions import Shield
from tokentrue.types import Ids


class Source:
    """`take` gives shielded text; `slice` and `tokens` answer for the true one."""

    def __init__(self, pieces: TokenBytes, ordinary: Ordinary, markers: tuple[str, ...]) -> None:
        self._pieces, self._ordinary = pieces, ordinary
        self._shield = Shield(markers)
        self._decoder: Any = None  # made when a token holds part of a character
        self._undecided = False
        self._text: list[str] = []
        self._ids: list[int] = []
        self._cut_at: int | None = None
        self._spelling: Spelling | None = None

    def take(self, token_ids: Ids) -> str:
        self._ids.extend(token_ids)
        texts = list(map(self._ordinary.__getitem__, token_ids))
        if not self._undecided and None not in texts:
            return self._plain("".join(texts))  # type: ignore[arg-type]  # there is no None in it
        out: list[str] = []
        place = 0
        while place < len(texts):
            odd = place if self._undecided else next_odd(texts, place)
            out.append(self._plain("".join(texts[place:odd])))  # type: ignore[arg-type]  # up to the first None
            if odd < len(texts):
                out.append(self._odd(token_ids[odd]))
            place = odd + 1
        return "".join(out)

    def keep(self, token_ids: Ids, text: str) -> None:
        """Tokens of which nothing need be held back: `text` is theirs."""
        self._ids.extend(token_ids)
        self._text.append(text)

    @property
    def at_rest(self) -> bool:
        """Nothing is held back."""
        return not self._undecided and not self._shield.held

    def rest(self) -> str:
        """What is still held back: the turn is over, but for its stop token."""
        self._cut_at = len(self._ids)
        return self._cut_off()

    @property
    def raw(self) -> str:
        """The true text so far; its bytes are the bytes of the ids."""
        if len(self._text) != 1:
            self._text = ["".join(self._text)]
        return self._text[0]

    def slice(self, start: int, end: int) -> str:
        """Characters `[start, end)` of the true text."""
        return self.raw[start:end]

    def tokens(self, start: int, end: int) -> tuple[int, int]:
        """The tokens `[first, last)` that spell characters `[start, end)`."""
        if self._decoder is None:  # every token is whole characters
            ends = list(accumulate(map(self._ordinary.sizes.__getitem__, self._ids)))
            return bisect_right(ends, start), min(bisect_left(ends, end) + 1, len(ends))
        if self._spelling is None:
            self._spelling = Spelling(self._pieces, self._ordinary)
        self._spelling.follow(self._ids, cut_at=self._cut_at)
        return self._spelling.tokens(start, end)

    def _plain(self, text: str) -> str:
        if not text:
            return ""
        self._text.append(text)
        return self._shield.ordinary(text)

    def _odd(self, token_id: int) -> str:
        piece = self._pieces.piece(token_id)
        if self._ordinary.is_marker(token_id):
            cut_off = self._cut_off()
            self._text.append(piece.decode("utf-8"))
            return cut_off + self._text[-1]
        if self._decoder is None:
            self._decoder = _decoder()
        text = self._plain(self._decoder.decode(piece))
        self._undecided = bool(self._decoder.getstate()[0])
        return text

    def _cut_off(self) -> str:
        """The bytes of a character that never became whole, and what may no longer become a marker."""
        shown = ""
        if self._undecided:
            shown = self._plain(self._decoder.decode(b"", final=True))
            self._decoder.reset()
            self._undecided = False
        return shown + self._shield.flush()


class Spelling:
    """Where each token ends in the true text, in characters; follows the ids at its own pace."""

    def __init__(self, pieces: TokenBytes, ordinary: Ordinary) -> None:
        self._pieces, self._ordinary = pieces, ordinary
        self._decoder = _decoder()
        self._ends: list[int] = []  # of each token
        self._reach: list[int] = []  # the end of the last character that a token has a byte of
        self._open: list[int] = []  # the token of each byte of a character that is not whole yet
        self._length = 0

    def follow(self, ids: Ids, *, cut_at: int | None) -> None:
        ordinary, ends, reach, length = self._ordinary, self._ends, self._reach, self._length
        for place in range(len(ends), len(ids)):
            text = ordinary[ids[place]]
            if text is not None and not self._open:
                length += len(text)
            else:
                self._length = length
                self._odd(ids[place], place, cut=place == cut_at)
                length = self._length
            ends.append(length)
            reach.append(length)
        self._length = length
        if cut_at == len(ids):
            self._cut_off()

    def _odd(self, token_id: int, place: int, *, cut: bool) -> None:
        piece, is_marker = self._pieces.piece(token_id), self._ordinary.is_marker(token_id)
        if cut or is_marker:
            self._cut_off()
        if is_marker:
            self._length += len(piece.decode("utf-8"))
            return
        self._settle(self._decoder.decode(piece))
        undecided = len(self._decoder.getstate()[0])
        self._open = [*self._open, *[place] * len(piece)][-undecided:] if undecided else []

    def tokens(self, start: int, end: int) -> tuple[int, int]:
        return bisect_right(self._reach, start), min(bisect_left(self._ends, end) + 1, len(self._ends))

    def _cut_off(self) -> None:
        """The bytes of a character that never became whole belong to the tokens that wrote them."""
        if not self._open:
            return
        self._settle(self._decoder.decode(b"", final=True))
        self._ends[-1] = self._length
        self._decoder.reset()
        self._open = []

    def _settle(self, text: str) -> None:
        """The tokens before `text` that hold bytes of its first character reach into it."""
        if self._open and text:
            broken = "\udc80" <= text[0] <= "\udcff"  # then every open byte stands for itself
            for place, token in enumerate(self._open):
                self._reach[token] = self._length + (place + 1 if broken else 1)
        self._length += len(text)


def next_odd(texts: list[str | None], start: int) -> int:
    """The first None from `start` on, or the end."""
    try:
        return texts.index(None, start)
    except ValueError:
        return len(texts)


def _decoder() -> Any:
    return codecs.getincrementaldecoder("utf-8")("surrogateescape")
