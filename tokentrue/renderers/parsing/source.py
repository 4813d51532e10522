"""Sampled ids in, text out: what the scanner may see of it, what it truly is, and which tokens spell which part."""

from __future__ import annotations

import codecs
from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import cast

from tokentrue.renderers.codec.token_bytes import TokenBytes, TokenTexts
from tokentrue.renderers.parsing.grammar import Grammar
from tokentrue.renderers.parsing.markers import MarkerShield
from tokentrue.types import Ids


class TokenSource:
    """`add` gives shielded text; `slice` and `find_tokens` answer for the true text.

    Half a character is held back until its last byte comes; the text of ordinary tokens is held back while it may
    become the look-alike of a marker.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._pieces, self._texts = grammar.pieces, grammar.texts
        self._shield = MarkerShield(grammar.markers)
        self._decoder = _new_decoder()
        self._has_half = False  # the decoder holds part of a character
        self._text: list[str] = []
        self._ids: list[int] = []
        self._cut_at: int | None = None
        self._spelling = TokenSpelling(grammar.pieces, grammar.texts)

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
        """What is still held back: the turn is over, but for its stop token."""
        self._cut_at = len(self._ids)
        return self._release()

    @property
    def raw(self) -> str:
        """The true text so far; its bytes are the bytes of the ids."""
        self._text = ["".join(self._text)]
        return self._text[0]

    def slice(self, start: int, end: int) -> str:
        """Characters `[start, end)` of the true text."""
        return self.raw[start:end]

    def find_tokens(self, start: int, end: int) -> tuple[int, int]:
        """The tokens `[first, last)` that spell characters `[start, end)`."""
        self._spelling.follow(self._ids, cut_at=self._cut_at)
        return self._spelling.find_tokens(start, end)

    def _add_text(self, text: str) -> str:
        if not text:
            return ""
        self._text.append(text)
        return self._shield.add(text)

    def _add_odd(self, token_id: int) -> str:
        """A marker, or a token that holds part of a character."""
        piece = self._pieces.piece(token_id)
        if self._texts.is_marker(token_id):
            released = self._release()
            self._text.append(piece.decode("utf-8"))
            return released + self._text[-1]
        text = self._add_text(self._decoder.decode(piece))
        self._has_half = bool(self._decoder.getstate()[0])
        return text

    def _release(self) -> str:
        """The bytes of a character that stays incomplete, and what can no longer become the look-alike of a marker."""
        shown = ""
        if self._has_half:
            shown = self._add_text(self._decoder.decode(b"", final=True))
            self._decoder.reset()
            self._has_half = False
        return shown + self._shield.flush()


class TokenSpelling:
    """Where each token ends in the true text, in characters. Reads the ids when it is asked, each of them once."""

    def __init__(self, pieces: TokenBytes, texts: TokenTexts) -> None:
        self._pieces, self._texts = pieces, texts
        self._decoder = _new_decoder()
        self._ends: list[int] = []  # of each token
        self._reach: list[int] = []  # the end of the last character that a token has a byte of
        self._open: list[int] = []  # the token of each byte of a character that is not whole yet
        self._length = 0

    def follow(self, ids: Ids, *, cut_at: int | None) -> None:
        """`cut_at`: the token before which the turn was over; a half character does not go on there."""
        start = place = len(self._ends)
        texts = [*map(self._texts.__getitem__, ids[start:]), None]
        while place < len(ids):
            if texts[place - start] is None or self._open:
                self._add_odd(ids[place], place, cut=place == cut_at)
                ends, place = [self._length], place + 1
            else:
                end = texts.index(None, place - start)
                whole = cast("list[str]", texts[place - start : end])
                ends, place = list(accumulate(map(len, whole), initial=self._length))[1:], start + end
            self._ends += ends
            self._reach += ends
            self._length = ends[-1]
        if cut_at == len(ids):
            self._release()

    def find_tokens(self, start: int, end: int) -> tuple[int, int]:
        return bisect_right(self._reach, start), min(bisect_left(self._ends, end) + 1, len(self._ends))

    def _add_odd(self, token_id: int, place: int, *, cut: bool) -> None:
        piece, is_marker = self._pieces.piece(token_id), self._texts.is_marker(token_id)
        if cut or is_marker:
            self._release()
        if is_marker:
            self._length += len(piece.decode("utf-8"))
            return
        self._settle(self._decoder.decode(piece))
        held = len(self._decoder.getstate()[0])
        self._open = [*self._open, *[place] * len(piece)][-held:] if held else []

    def _release(self) -> None:
        """The bytes of a character that stays incomplete belong to the tokens that wrote them."""
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


_UTF8 = codecs.getincrementaldecoder("utf-8")


def _new_decoder() -> codecs.IncrementalDecoder:
    return _UTF8("surrogateescape")
