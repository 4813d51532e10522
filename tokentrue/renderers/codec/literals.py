"""Where added tokens stand in a text, by the tokenizers library's own rules: leftmost, then longest, with the blanks
they absorb."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from tokentrue.json_types import JsonObject

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

EDGE = f"\ufdef{secrets.token_hex(8)}\ufdef"
"""An added token of helper tokenizers only, different in every process: no text can hold it on purpose."""


class LiteralSpan(NamedTuple):
    """`text[start:end]` is an added token, `literal`, with the blanks it absorbs."""

    start: int
    end: int
    literal: str


class LiteralFinder:
    """Finds a set of added tokens; the set is made when first needed, because some tokenizers have thousands."""

    def __init__(self, make_tokens: Callable[[], list[AddedToken]]) -> None:
        self._make_tokens = make_tokens

    def find(self, text: str) -> list[LiteralSpan]:
        if not self.may_start_in(text):
            return []
        if not self._has_rules:
            return [LiteralSpan(match.start(), match.end(), match.group()) for match in self._pattern.finditer(text)]
        found = self._library.encode(text, add_special_tokens=False)
        spans = zip(found.tokens, found.offsets, strict=True)
        return [LiteralSpan(start, end, literal) for literal, (start, end) in spans if literal in self._literals]

    def may_start_in(self, text: str) -> bool:
        """Whether the text has the first character of one."""
        return any(first in text for first in self._firsts)

    def may_end_in(self, text: str) -> bool:
        return any(last in text for last in self._lasts)

    def may_touch(self, text: str) -> bool:
        """False where no literal can stand in the text, end in it or begin in it: ASCII without any first or last
        character of one."""
        return not text.isascii() or self._edges.search(text) is not None

    @cached_property
    def _edges(self) -> re.Pattern[str]:
        return re.compile(
            "[" + re.escape("".join(sorted({*self._firsts, *self._lasts}))) + "]" if self._literals else "(?!)"
        )

    @cached_property
    def _tokens(self) -> list[AddedToken]:
        return self._make_tokens()

    @cached_property
    def _literals(self) -> set[str]:
        return {token.content for token in self._tokens}

    @cached_property
    def _firsts(self) -> list[str]:
        return sorted({literal[0] for literal in self._literals})

    @cached_property
    def _lasts(self) -> list[str]:
        return sorted({literal[-1] for literal in self._literals})

    @cached_property
    def _has_rules(self) -> bool:
        """Some absorb blanks or count only as a whole word: then a pattern does not do."""
        return any(token.lstrip or token.rstrip or token.single_word for token in self._tokens)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return _compile_any_of(self._literals)

    @cached_property
    def _library(self) -> Tokenizer:
        """A tokenizer that knows these tokens and nothing else; slower than a pattern, but it knows all the rules."""
        from tokenizers import AddedToken, Tokenizer
        from tokenizers.models import WordLevel

        search: Any = Tokenizer(WordLevel({EDGE: 0}, unk_token=EDGE))
        search.add_tokens(
            [
                AddedToken(
                    token.content,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    single_word=token.single_word,
                    normalized=False,
                )
                for token in self._tokens
            ]
        )
        return search


def _compile_any_of(words: Iterable[str]) -> re.Pattern[str]:
    """A pattern built from their trie: thousands of literals cost no more than their common beginnings."""
    trie: JsonObject = {}
    for word in words:
        node = trie
        for char in word:
            node = node.setdefault(char, {})
        node[""] = {}
    return re.compile("|".join(_write_branch(char, node) for char, node in sorted(trie.items())) or "(?!)")


def _write_branch(char: str, node: JsonObject) -> str:
    """One node, longer words first."""
    inner = [_write_branch(following, child) for following, child in sorted(node.items()) if following]
    if not inner:
        return re.escape(char)
    group = inner[0] if len(inner) == 1 and "" not in node else f"(?:{'|'.join(inner)})"
    return re.escape(char) + (group + "?" if "" in node else group)
