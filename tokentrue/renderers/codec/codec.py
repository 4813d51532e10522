"""Text <-> ids for one tokenizer, in two ways: as the engine would, and so that content can never become a special or
added token.

Invariants: on text whose content holds no added-token literal both ways give the same ids; `encode_after` gives the ids
that encoding a whole text gives for its part after an added token; recorded ids are only ever decoded for reading,
never encoded again.

How content is kept harmless: `ContentShield` marks literals in it before rendering. The rendered text is split at the
literals that are left (tokenizers do that first anyway), marks are dropped, and what lies between is encoded by the
same model without its added tokens.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from tokentrue.errors import TokenizerError
from tokentrue.ids import TokenIds
from tokentrue.renderers.codec.encoded_texts import LIMIT_BYTES, EncodedTexts
from tokentrue.renderers.codec.literals import EDGE, LiteralFinder, LiteralSpan
from tokentrue.renderers.codec.token_bytes import TokenBytes
from tokentrue.types import Ids

if TYPE_CHECKING:
    from tokenizers import AddedToken, Encoding, Tokenizer

_BLANKS = " \t\r\n▁"


class Codec:
    """`tokenizer` is a `tokenizers.Tokenizer`; its added tokens are taken from it, whatever their `special` flag
    says."""

    def __init__(self, tokenizer: Tokenizer, cache_bytes: int = LIMIT_BYTES) -> None:
        self.backend = tokenizer
        self.added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
        self.texts: dict[int, str] = {index: token.content for index, token in self.added.items()}
        self.literals: dict[str, int] = {text: index for index, text in self.texts.items() if text}
        self._guarded = {
            text for text in self.literals if text.strip(_BLANKS)
        }  # runs of blanks are text, not structure
        self._all = LiteralFinder(lambda: self._list_tokens(self.literals))
        self._blanks = LiteralFinder(lambda: self._list_tokens(self.literals.keys() - self._guarded))
        self._guard = LiteralFinder(lambda: self._list_tokens(self._guarded))
        self._bare = _copy_without_added_tokens(tokenizer)
        self.encoded = EncodedTexts(cache_bytes)

    def _list_tokens(self, texts: Container[str]) -> list[AddedToken]:
        return [token for token in self.added.values() if token.content and token.content in texts]

    # literals in text

    def find_guarded(self, text: str) -> list[LiteralSpan]:
        """The literals that content must not have as tokens."""
        return self._guard.find(text)

    def may_touch_literal(self, text: str) -> bool:
        """False for text that can neither hold such a literal nor be part of one: most strings, found by one search."""
        return self._guard.may_touch(text)

    def split(self, text: str, mark: str = "") -> Iterator[tuple[str, str, int]]:
        """Plain text, the literal after it and where that ends; the last literal is empty. A literal right after a mark
        is content."""
        done = 0
        for start, end, literal in self._all.find(text):
            if mark and len(literal) == 1 and text[max(start - 1, 0)] == mark:
                continue
            yield text[done:start], literal, end
            done = end
        yield text[done:], "", len(text)

    def ends_like_literal(self, text: str) -> bool:
        """Whether it ends with the beginning of a literal, blanks aside."""
        if not self._guard.may_start_in(text[-self._longest - 64 :]):
            return False
        bare = text.rstrip()
        return any(bare[-size:] in self._beginnings for size in range(1, min(len(bare), self._longest) + 1))

    def starts_like_literal(self, text: str) -> bool:
        """Whether it begins with the end of a literal, blanks aside."""
        if not self._guard.may_end_in(text[: self._longest + 64]):
            return False
        bare = text.lstrip()
        return any(bare[:size] in self._endings for size in range(1, min(len(bare), self._longest) + 1))

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._guarded), default=0)

    @cached_property
    def _beginnings(self) -> frozenset[str]:
        return frozenset(text[:n] for text in self._guarded for n in range(1, len(text)))

    @cached_property
    def _endings(self) -> frozenset[str]:
        return frozenset(text[n:] for text in self._guarded for n in range(1, len(text)))

    @cached_property
    def absorbs_blanks(self) -> set[str]:
        """The literals to which the blanks after them belong."""
        return {token.content for token in self.added.values() if token.rstrip}

    # text -> ids

    def encode(self, text: str) -> TokenIds:
        """As the engine would: every literal in the text becomes its token."""
        return self.encoded.encode(self.backend, text)

    def encode_with_offsets(self, text: str) -> Encoding:
        return self.backend.encode(text, add_special_tokens=False)

    def encode_after(self, text: str, *, literal: str) -> TokenIds:
        """What a whole text has after `literal`, as the engine would."""
        return self.encode(self._lead + self._strip_after(text, literal))[1:]

    def encode_shielded(self, text: str, mark: str) -> TokenIds:
        """A whole text rendered from shielded content: only unbroken literals become tokens."""
        return self._encode_pieces(text, mark, at_start=True)

    def encode_shielded_after(self, text: str, mark: str, *, literal: str) -> TokenIds:
        return self._encode_pieces(self._strip_after(text, literal), mark, at_start=False)

    @cached_property
    def _lead(self) -> str:
        """A literal to put before text that does not stand at the start of a text."""
        return next((text for text in self._guarded if text not in self.absorbs_blanks), "")

    def _strip_after(self, text: str, literal: str) -> str:
        return text.lstrip() if literal in self.absorbs_blanks else text

    def _encode_pieces(self, text: str, mark: str, *, at_start: bool) -> TokenIds:
        ids: list[int] = []
        for plain, literal, _ in self.split(text, mark):
            if plain:
                ids.extend(self._encode_plain(plain.replace(mark, ""), at_start=at_start))
            if literal:
                ids.append(self.literals[literal])
            at_start = False
        return TokenIds(ids)

    def _encode_plain(self, text: str, *, at_start: bool) -> list[int]:
        """Text in which no literal counts, except those that are runs of blanks."""
        ids: list[int] = []
        done = 0
        for start, end, literal in self._blanks.find(text):
            ids.extend(self._encode_bare(text[done:start], at_start=at_start and done == 0))
            ids.append(self.literals[literal])
            done = end
        ids.extend(self._encode_bare(text[done:], at_start=at_start and done == 0))
        return ids

    def _encode_bare(self, text: str, *, at_start: bool) -> TokenIds:
        if at_start:
            return self.encoded.encode(self._bare, text)
        return self.encoded.encode(self._bare, EDGE + text)[1:]

    # ids -> text

    @cached_property
    def spelling(self) -> TokenBytes:
        return TokenBytes(self.backend)

    def decode(self, ids: Ids) -> str:
        try:
            return self.backend.decode(list(ids), skip_special_tokens=False)
        except (OverflowError, TypeError):
            raise TokenizerError(f"token ids must be integers from 0, got {ids!r:.60}") from None


def _copy_without_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """The same model, normalizer and pre-tokenizer (shared, not copied); its only added token is the edge."""
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Bare

    bare = Bare(tokenizer.model)
    if tokenizer.normalizer is not None:
        bare.normalizer = tokenizer.normalizer
    if tokenizer.pre_tokenizer is not None:
        bare.pre_tokenizer = tokenizer.pre_tokenizer
    cast("Any", bare).add_special_tokens([AddedToken(EDGE, normalized=False)])
    if bare.token_to_id(EDGE) is None:
        raise TokenizerError("tokenizer: cannot be used without its added tokens")
    return bare
