"""Text <-> ids for one tokenizer, in two ways: as the engine would, and so that content can never become a special or added token.

Invariants: on text whose content holds no added-token literal both ways give the same ids; `encode_after` gives the ids that encoding a
whole text gives for its part after an added token; recorded ids are only ever decoded for reading, never encoded again.

How content is kept harmless: before rendering, `Shield` breaks every added-token literal in it with a mark that occurs nowhere else; after
rendering, what still reads as a literal is the template's own. The text is split there (tokenizers do that first anyway), marks are
dropped, and what lies between is encoded by the same model without its added tokens.
"""

from __future__ import annotations

import re
import secrets
from array import array
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tokentrue.errors import MessageError, TokenizerError
from tokentrue.renderers.ascii_words import AsciiWords, words_of
from tokentrue.types import Ids

if TYPE_CHECKING:
    from tokenizers import AddedToken, Encoding, Tokenizer

    from tokentrue.renderers.parsing_bytes import TokenBytes

_MARKS = tuple(chr(code) for code in range(0xFDD0, 0xFDEF))  # noncharacters: never assigned, valid in UTF-8
# text behind it is not at the start of a text
_EDGE = f"\ufdef{secrets.token_hex(8)}\ufdef"  # an added token of the bare tokenizer only, of this process: no text can hold it on purpose
_BLANKS = " \t\r\n▁"
_SHORT, _SHORT_KEPT = 64, 10_000  # keys, roles, names: strings that come again in every call


class Codec:
    """`tokenizer` is a `tokenizers.Tokenizer`; its added tokens are taken from it, whatever their `special` flag says."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.backend = tokenizer
        self._added = tokenizer.get_added_tokens_decoder()
        self.texts: dict[int, str] = {index: token.content for index, token in self._added.items()}
        self.literals: dict[str, int] = {text: index for index, text in self.texts.items() if text}
        self._guarded = {text for text in self.literals if text.strip(_BLANKS)}  # runs of blanks are text, not structure
        self._find_all = _Finder(lambda: self._tokens(self.literals))
        self._find_soft = _Finder(lambda: self._tokens(self.literals.keys() - self._guarded))
        self.guard = _Finder(lambda: self._tokens(self._guarded))
        self._byte_level = "ByteLevel" in type(tokenizer.decoder).__name__
        self._sizes = _Sizes(self)
        self._bare = _without_added_tokens(tokenizer)
        self._words: AsciiWords | None = words_of(tokenizer)
        self._short: dict[str, bool] = {}

    def _tokens(self, texts: Container[str]) -> list[AddedToken]:
        return [token for token in self._added.values() if token.content and token.content in texts]

    @cached_property
    def longest(self) -> int:
        return max(map(len, self._guarded), default=0)

    @cached_property
    def eats(self) -> set[str]:
        """The blanks behind such a token belong to it."""
        return {token.content for token in self._added.values() if token.rstrip}

    @cached_property
    def spelling(self) -> TokenBytes:
        from tokentrue.renderers.parsing_bytes import TokenBytes

        return TokenBytes(self.backend)

    @cached_property
    def _lead(self) -> str:
        return next((text for text in self._guarded if text not in self.eats), "")

    @cached_property
    def heads(self) -> frozenset[str]:
        return frozenset(text[:n] for text in self._guarded for n in range(1, len(text)))

    @cached_property
    def tails(self) -> frozenset[str]:
        return frozenset(text[n:] for text in self._guarded for n in range(1, len(text)))

    def clean(self, value: Any) -> bool:
        """Whether `Shield` would leave every string in it as it is, so that nothing needs to be shielded."""
        if isinstance(value, str):
            if len(value) > _SHORT:
                return self._is_clean(value)
            known = self._short.get(value)
            if known is None:
                if len(self._short) >= _SHORT_KEPT:
                    self._short.clear()
                known = self._short[value] = self._is_clean(value)
            return known
        if isinstance(value, dict):
            return all(self.clean(key) and self.clean(item) for key, item in value.items())
        return not isinstance(value, list) or all(map(self.clean, value))

    def _is_clean(self, text: str) -> bool:
        return not (_holds(text, _MARKS) or self.guard(text) or self.may_go_on(text) or self.may_have_begun(text))

    def may_go_on(self, text: str) -> bool:
        """Whether it ends with the beginning of a literal, blanks aside."""
        if not self.guard.may_start(text[-self.longest - 64 :]):
            return False
        bare = text.rstrip()
        return any(bare[-size:] in self.heads for size in range(1, min(len(bare), self.longest) + 1))

    def may_have_begun(self, text: str) -> bool:
        """Whether it begins with the end of a literal, blanks aside."""
        if not self.guard.may_end(text[: self.longest + 64]):
            return False
        bare = text.lstrip()
        return any(bare[:size] in self.tails for size in range(1, min(len(bare), self.longest) + 1))

    @cached_property
    def has_plain_literals(self) -> bool:
        """Whether every literal is found as it is written, wherever it stands, and none is made of blanks or edged with them."""
        edged = any(text != text.strip(_BLANKS) for text in self.literals)
        return bool(self._lead) and not edged and not self._find_all.is_odd

    # text -> ids

    def encode(self, text: str) -> list[int]:
        """As the engine would: every literal in the text becomes its token."""
        if self._words is not None and text.isascii():
            ids: list[int] = []
            for plain, literal, _ in self.pieces(text):
                if plain:
                    found = self._words.encode(plain)
                    if found is None:
                        break
                    ids += found
                if literal:
                    ids.append(self.literals[literal])
            else:
                return ids
        return self.backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def quick_ids(self, text: str) -> array[int] | None:
        """Of text without literals, behind one; None where there is no fast way."""
        return self._words.encode(text) if self._words is not None and text.isascii() else None

    def encoding(self, text: str) -> Encoding:
        """Ids with their places in the text."""
        return self.backend.encode(text, add_special_tokens=False)

    def encode_after(self, text: str, *, literal: str) -> list[int]:
        """What a whole text has after `literal`, as the engine would."""
        return self.encode(self._lead + self._stripped_after(text, literal))[1:]

    def encode_shielded(self, text: str, mark: str) -> list[int]:
        """A whole text rendered from shielded content: only unbroken literals become tokens."""
        return self._encode_pieces(text, mark, at_start=True)

    def encode_shielded_after(self, text: str, mark: str, *, literal: str) -> list[int]:
        return self._encode_pieces(self._stripped_after(text, literal), mark, at_start=False)

    def _stripped_after(self, text: str, literal: str) -> str:
        return text.lstrip() if literal in self.eats else text

    def _encode_pieces(self, text: str, mark: str, *, at_start: bool) -> list[int]:
        ids: list[int] = []
        for plain, literal, _ in self.pieces(text, mark):
            if plain:
                ids += self._encode_plain(plain.replace(mark, ""), at_start=at_start)
            if literal:
                ids.append(self.literals[literal])
            at_start = False
        return ids

    def pieces(self, text: str, mark: str = "") -> Iterator[tuple[str, str, int]]:
        """Plain text, the literal behind it and where that ends; the last literal is empty. A literal right behind a mark is content."""
        done = 0
        for start, end, literal in self._find_all(text):
            if mark and len(literal) == 1 and text[max(start - 1, 0)] == mark:
                continue
            yield text[done:start], literal, end
            done = end
        yield text[done:], "", len(text)

    def _encode_plain(self, text: str, *, at_start: bool) -> list[int]:
        if not self.guard.finds(text):
            return self.encode(text) if at_start else self.encode(self._lead + text)[1:]
        ids: list[int] = []
        done = 0
        for start, end, literal in self._find_soft(text):
            ids += self._encode_bare(text[done:start], at_start=at_start and done == 0)
            ids.append(self.literals[literal])
            done = end
        return ids + self._encode_bare(text[done:], at_start=at_start and done == 0)

    def _encode_bare(self, text: str, *, at_start: bool) -> list[int]:
        if (found := self.quick_ids(text)) is not None:
            return found.tolist()
        if at_start:
            return self._bare.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return self._bare.encode_batch_fast([_EDGE + text], add_special_tokens=False)[0].ids[1:]

    # ids -> text

    def sizes(self, ids: Ids) -> list[int] | None:
        """How many bytes each token stands for; None where the vocabulary does not say."""
        return list(map(self._sizes.__getitem__, ids)) if self._byte_level else None

    def decode(self, ids: Ids) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=False)


class Shield:
    """Breaks literals in the strings of one call. `mark` is a character that none of `values` contains."""

    def __init__(self, codec: Codec, values: Any) -> None:
        self._codec = codec
        self.mark = _MARKS[0]
        self.used = False
        if _holds(values, _MARKS):
            self.mark = next((mark for mark in _MARKS if not _holds(values, (mark,))), "")
            if not self.mark:
                raise MessageError("content holds all of U+FDD0 to U+FDEE, none is left to mark literals with", field="messages")

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
        out, codec, mark = text, self._codec, self.mark
        while found := [hit for hit in codec.guard(out) if not (hit[1] - hit[0] == 1 and out[max(hit[0] - 1, 0)] == mark)]:
            pieces, done = [], 0
            for start, end, literal in found:
                pieces += [out[done:start], out[start:end].replace(literal, mark.join(literal) if len(literal) > 1 else mark + literal)]
                done = end
            out = "".join([*pieces, out[done:]])
        if codec.may_go_on(out):
            bare = out.rstrip()
            out = bare + mark + out[len(bare) :]
        if codec.may_have_begun(out):
            bare = out.lstrip()
            out = out[: len(out) - len(bare)] + mark + bare
        self.used = self.used or out is not text
        return out


class _Sizes(dict[int, int]):
    """Ids to the bytes they stand for, in a byte-level vocabulary; filled when first asked for."""

    def __init__(self, codec: Codec) -> None:
        super().__init__()
        self._codec = codec

    def __missing__(self, index: int) -> int:
        text = self._codec.texts.get(index)  # else one character per byte
        size = self[index] = len(self._codec.backend.id_to_token(index) or "") if text is None else len(text.encode())
        return size


class _Finder:
    """Where added tokens stand in a text, by the tokenizers library's own rules: leftmost, then longest, with the blanks they eat."""

    def __init__(self, tokens: Callable[[], list[AddedToken]]) -> None:
        self._given = tokens

    @cached_property
    def _tokens(self) -> list[AddedToken]:
        return self._given()

    @cached_property
    def _words(self) -> set[str]:
        return {token.content for token in self._tokens}

    @cached_property
    def _firsts(self) -> str:
        return "".join(sorted({word[0] for word in self._words}))

    @cached_property
    def _lasts(self) -> str:
        return "".join(sorted({word[-1] for word in self._words}))

    @cached_property
    def is_odd(self) -> bool:
        return any(token.lstrip or token.rstrip or token.single_word for token in self._tokens)

    def finds(self, text: str) -> bool:
        return bool(self(text))

    def may_start(self, text: str) -> bool:
        firsts = self._firsts
        return firsts in text if len(firsts) == 1 else any(first in text for first in firsts)

    def may_end(self, text: str) -> bool:
        lasts = self._lasts
        return lasts in text if len(lasts) == 1 else any(last in text for last in lasts)

    def __call__(self, text: str) -> list[tuple[int, int, str]]:
        if not self.may_start(text):
            return []
        if self.is_odd:
            found = self._library.encode(text, add_special_tokens=False)
            return [(start, end, word) for word, (start, end) in zip(found.tokens, found.offsets, strict=True) if word in self._words]
        return [(match.start(), match.end(), match.group()) for match in self._pattern.finditer(text)]

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return _any_of(self._words)

    @cached_property
    def _library(self) -> Tokenizer:
        """A tokenizer that knows these tokens and nothing else; slower than a pattern, but it knows all the rules."""
        from tokenizers import AddedToken as Token
        from tokenizers import Tokenizer as Bare
        from tokenizers.models import WordLevel

        search = Bare(WordLevel({_EDGE: 0}, unk_token=_EDGE))
        flags = [(t.content, {"lstrip": t.lstrip, "rstrip": t.rstrip, "single_word": t.single_word}) for t in self._tokens]
        search.add_tokens([Token(content, normalized=False, **given) for content, given in flags])
        return search


def _any_of(words: Iterable[str]) -> re.Pattern[str]:
    """A pattern built from their trie: thousands of literals cost no more than their common beginnings."""
    trie: dict[str, Any] = {}
    for word in words:
        node = trie
        for char in word:
            node = node.setdefault(char, {})
        node[""] = {}
    return re.compile("|".join(_branch(char, node) for char, node in sorted(trie.items())) or "(?!)")


def _branch(char: str, node: dict[str, Any]) -> str:
    """One node, longer words first."""
    inner = [_branch(following, child) for following, child in sorted(node.items()) if following]
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
