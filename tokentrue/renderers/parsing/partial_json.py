"""Incremental JSON: how much of a text is a valid prefix of one value. Strict: accepts only what any JSON reader
does.
"""

from __future__ import annotations

import re

import regex

_SPACE = " \t\r\n"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_WORD = regex.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_HEX = frozenset("0123456789abcdefABCDEF")
_VALUE, _VALUE_OR_END, _KEY, _KEY_OR_END, _COLON, _NEXT = range(6)


class JsonValueReader:
    """Reads one JSON value up to its end, or up to the first invalid character (`is_broken`)."""

    __slots__ = ("_escape", "_in_key", "_in_string", "_stack", "_want", "_word", "is_broken", "is_done")

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._want = _VALUE
        self._in_string = self._in_key = False
        self._escape = 0  # 1 after a backslash, then as many as hexadecimal digits are missing, plus one
        self._word = ""
        self.is_done = self.is_broken = False

    def feed(self, text: str, place: int) -> int:
        """Returns the index up to which `text` belongs to the value."""
        end = len(text)
        while place < end and not (self.is_done or self.is_broken):
            if self._in_string:
                place = self._string(text, place)
            elif self._word:
                place = self._in_word(text, place)
            elif text[place] in _SPACE:
                place += 1
            else:
                place += self._structure(text[place])
        return place

    def _string(self, text: str, place: int) -> int:
        if self._escape:
            return place + self._escaped(text[place])
        found = _PLAIN.match(text, place)
        assert found is not None
        place = found.end()
        if place == len(text):
            return place
        if text[place] == '"':
            self._in_string = False
            if self._in_key:
                self._in_key, self._want = False, _COLON
            else:
                self._after_value()
        elif text[place] == "\\":
            self._escape = 1
        else:
            self.is_broken = True
        return place + (not self.is_broken)

    def _escaped(self, char: str) -> int:
        if self._escape > 1:
            self.is_broken = char not in _HEX
            self._escape = self._escape - 1 if self._escape > 2 else 0
        else:
            self.is_broken = char not in '"\\/bfnrtu'
            self._escape = 5 if char == "u" else 0
        return not self.is_broken

    def _in_word(self, text: str, place: int) -> int:
        longer = self._word + text[place]
        if _WORD.fullmatch(longer, partial=True):
            self._word = longer
            return place + 1
        if _WORD.fullmatch(self._word) and not text[place].isalnum():
            self._word = ""
            self._after_value()
        else:
            self.is_broken = True
        return place

    def _structure(self, char: str) -> int:
        want = self._want
        if want in (_VALUE, _VALUE_OR_END):
            if char == "]" and want == _VALUE_OR_END:
                self._end("[")
            else:
                self._begin(char)
        elif want in (_KEY, _KEY_OR_END):
            if char == '"':
                self._in_string = self._in_key = True
            elif char == "}" and want == _KEY_OR_END:
                self._end("{")
            else:
                self.is_broken = True
        elif want == _COLON:
            self.is_broken, self._want = char != ":", _VALUE
        elif char == ",":
            self._want = _KEY if self._stack[-1] == "{" else _VALUE
        elif char in "}]":
            self._end("{" if char == "}" else "[")
        else:
            self.is_broken = True
        return not self.is_broken

    def _begin(self, char: str) -> None:
        if char in "{[":
            self._stack.append(char)
            self._want = _KEY_OR_END if char == "{" else _VALUE_OR_END
        elif char == '"':
            self._in_string = True
        elif _WORD.fullmatch(char, partial=True):
            self._word = char
        else:
            self.is_broken = True

    def _end(self, opened: str) -> None:
        if self._stack[-1] != opened:
            self.is_broken = True
            return
        self._stack.pop()
        self._after_value()

    def _after_value(self) -> None:
        if self._stack:
            self._want = _NEXT
        else:
            self.is_done = True
