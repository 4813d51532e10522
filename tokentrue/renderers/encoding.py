"""Text <-> ids for one tokenizer, in two ways: as the engine would, and so that content can never become a special or added token.

Invariants: on text whose content holds no added-token literal both ways give the same ids; `encode_after` gives the ids that encoding a
whole text gives for its part after an added token; recorded ids are only ever decoded for reading, never encoded again.

How content is kept harmless: before rendering, `Shield` breaks every added-token literal in it with a mark that occurs nowhere else; after
rendering, what still reads as a literal is the template's own. The text is split there (tokenizers do that first anyway), marks are
dropped, and what lies between is encoded by the same model without its added tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tokentrue.errors import MessageError, TokenizerError
from tokentrue.types import Ids

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

_MARKS = tuple(chr(code) for code in range(0xFDD0, 0xFDEF))  # noncharacters: never assigned, valid in UTF-8
_EDGE = "\ufdef"  # an added token of the bare tokenizer only: text after it is not at the start of a text
_BLANKS = " \t\r\n▁"


class Codec:
    """`tokenizer` is a `tokenizers.Tokenizer`; its added tokens are taken from it, whatever their `special` flag says."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._whole = self.backend = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.literals: dict[str, int] = {token.content: index for index, token in added.items() if token.content}
        self.texts: dict[int, str] = {index: token.content for index, token in added.items()}
        self._strips = {token.content: (token.lstrip, token.rstrip) for token in added.values() if token.lstrip or token.rstrip}
        guarded = [text for text in self.literals if text.strip(_BLANKS)]  # runs of blanks are text, not structure
        self._guarded = guarded
        self._soft = _any_of(text for text in self.literals if not text.strip(_BLANKS))
        self.heads = tuple({text[:n] for text in guarded for n in range(1, len(text))})
        self.tails = tuple({text[n:] for text in guarded for n in range(1, len(text))})
        self._lead = next((text for text in guarded if text not in self._strips), "")
        self._bare = _without_added_tokens(tokenizer)
        self.patterns = lru_cache(maxsize=8)(self._patterns)

    def _patterns(self, mark: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
        """Guarded literals in content, and the template's own literals in a rendered text; a one-character literal cannot be broken inside."""
        single = f"(?<!{mark})" if mark else ""
        return _any_of(self._guarded, single), _any_of(self.literals, single)

    # text -> ids

    def encode(self, text: str) -> list[int]:
        """As the engine would: every literal in the text becomes its token."""
        return self._whole.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def encoding(self, text: str) -> Encoding:
        """Ids with their places in the text."""
        return self._whole.encode(text, add_special_tokens=False)

    def encode_after(self, text: str, *, literal: str) -> list[int]:
        """What a whole text has after `literal`, as the engine would."""
        return self.encode(self._lead + self._stripped_after(text, literal))[1:]

    def encode_shielded(self, text: str, mark: str) -> list[int]:
        """A whole text rendered from shielded content: only unbroken literals become tokens."""
        return self._encode_pieces(text, mark, at_start=True)

    def encode_shielded_after(self, text: str, mark: str, *, literal: str) -> list[int]:
        return self._encode_pieces(self._stripped_after(text, literal), mark, at_start=False)

    def _stripped_after(self, text: str, literal: str) -> str:
        return text.lstrip() if self._strips.get(literal, (False, False))[1] else text

    def _encode_pieces(self, text: str, mark: str, *, at_start: bool) -> list[int]:
        ids: list[int] = []
        for plain, literal in self.pieces(text, mark):
            if plain:
                ids += self._encode_plain(plain.replace(mark, ""), mark, at_start=at_start)
            if literal:
                ids.append(self.literals[literal])
            at_start = False
        return ids

    def pieces(self, text: str, mark: str = "") -> Iterator[tuple[str, str]]:
        """Pairs of plain text and the literal that ends it; the last literal is empty."""
        start, eat = 0, False
        for match in self.patterns(mark)[1].finditer(text):
            literal = match.group()
            left, right = self._strips.get(literal, (False, False))
            plain = text[start : match.start()]
            plain = plain.lstrip() if eat else plain
            yield plain.rstrip() if left else plain, literal
            start, eat = match.end(), right
        yield text[start:].lstrip() if eat else text[start:], ""

    def _encode_plain(self, text: str, mark: str, *, at_start: bool) -> list[int]:
        if not self.patterns("")[0].search(text):
            return self.encode(text) if at_start else self.encode(self._lead + text)[1:]
        ids: list[int] = []
        start = 0
        for match in self._soft.finditer(text):
            ids += self._encode_bare(text[start : match.start()], at_start=at_start and start == 0)
            ids.append(self.literals[match.group()])
            start = match.end()
        return ids + self._encode_bare(text[start:], at_start=at_start and start == 0)

    def _encode_bare(self, text: str, *, at_start: bool) -> list[int]:
        if at_start:
            return self._bare.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return self._bare.encode_batch_fast([_EDGE + text], add_special_tokens=False)[0].ids[1:]

    # ids -> text

    def decode(self, ids: Ids) -> str:
        return self._whole.decode(list(ids), skip_special_tokens=False)


class Shield:
    """Breaks literals in the strings of one call. `mark` is a character that none of `values` contains."""

    def __init__(self, codec: Codec, values: Any) -> None:
        self._codec = codec
        self._guard = codec.patterns(_MARKS[0])[0]
        self.mark = _MARKS[0]
        self.used = False
        if _holds(values, _MARKS):
            self.mark = next((mark for mark in _MARKS if not _holds(values, (mark,))), "")
            if not self.mark:
                raise MessageError("content holds all of U+FDD0 to U+FDEE, none is left to mark literals with", field="messages")
            self._guard = codec.patterns(self.mark)[0]

    def shielded(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(key): self.shielded(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.shielded(item) for item in value]
        return value

    def text(self, text: str) -> str:
        """The same text with marks inside literals, and at an end that the template's own text could complete to one."""
        out, codec = text, self._codec
        while self._guard.search(out):
            out = self._guard.sub(self._broken, out)
        bare = out.rstrip()
        if bare.endswith(codec.heads):
            out = bare + self.mark + out[len(bare) :]
        bare = out.lstrip()
        if bare.startswith(codec.tails):
            out = out[: len(out) - len(bare)] + self.mark + bare
        self.used = self.used or out is not text
        return out

    def _broken(self, match: re.Match[str]) -> str:
        literal = match.group()
        return self.mark.join(literal) if len(literal) > 1 else self.mark + literal


def _any_of(literals: Iterable[str], single: str = "") -> re.Pattern[str]:
    """Leftmost, then longest: the rule by which tokenizers look for added tokens. `single` is put before one-character literals."""
    trie: dict[str, Any] = {}
    words = set(literals)
    for text in words:
        node = trie
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    alone = {text for text in words if len(text) == 1}
    branches = [f"{_branch(char, node)}" for char, node in sorted(trie.items()) if not (char in alone and len(node) == 1)]
    branches += [single + re.escape(char) for char in sorted(alone)]
    return re.compile("|".join(branches) or "(?!)")


def _branch(char: str, node: dict[str, Any]) -> str:
    """One trie node as a pattern that tries longer words first: thousands of literals cost no more than their common beginnings."""
    inner = [_branch(next_char, child) for next_char, child in sorted(node.items()) if next_char]
    if not inner:
        return re.escape(char)
    group = inner[0] if len(inner) == 1 and "" not in node else f"(?:{'|'.join(inner)})"
    return re.escape(char) + (group + "?" if "" in node else group)


def _without_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """The same model, normalizer and pre-tokenizer (shared, not copied); its only added token is the edge."""
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Bare

    bare = Bare(tokenizer.model)
    if tokenizer.normalizer is not None:
        bare.normalizer = tokenizer.normalizer
    if tokenizer.pre_tokenizer is not None:
        bare.pre_tokenizer = tokenizer.pre_tokenizer
    bare.add_special_tokens([AddedToken(_EDGE, normalized=False)])
    if bare.token_to_id(_EDGE) is None:
        raise TokenizerError("tokenizer: cannot be used without its added tokens")
    return bare


def _holds(value: Any, marks: tuple[str, ...]) -> bool:
    if isinstance(value, str):
        return not value.isascii() and any(mark in value for mark in marks)
    if isinstance(value, Mapping):
        return any(_holds(key, marks) or _holds(item, marks) for key, item in value.items())
    return isinstance(value, list) and any(_holds(item, marks) for item in value)
