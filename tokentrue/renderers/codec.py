"""Text <-> ids for one tokenizer: either as the engine encodes, or so that content can never become an added token.
Both give the same ids where content contains no added-token literal. `shield` marks literals in content before
rendering; the rendered text is split at the unmarked ones, and the text between is encoded without added tokens."""

import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from tokentrue.errors import MessageError, TokenizerError
from tokentrue.ids import TokenIds
from tokentrue.json_types import JsonValue, is_object
from tokentrue.types import Ids

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer


EDGE = f"\ufdef{secrets.token_hex(8)}\ufdef"
"""Added token of the helper tokenizers only; random per process, so no input can contain it deliberately."""


class LiteralSpan(NamedTuple):
    """`text[start:end]` is the added token `literal` plus the blanks it absorbs."""

    start: int
    end: int
    literal: str


class LiteralFinder:
    """Finds added tokens in text. The tables are lazy: some tokenizers have thousands of literals."""

    def __init__(self, tokens: "Iterable[AddedToken]") -> None:
        self._tokens = {token.content: token for token in tokens if token.content}

    def is_harmless(self, text: str) -> bool:
        """False if content of this text needs a shield."""
        return not self.may_touch(text) or not (
            any(mark in text for mark in MARKS)
            or self.find(text)
            or self.may_begin_at_end(text)
            or self.may_end_at_start(text)
        )

    def find(self, text: str) -> list[LiteralSpan]:
        if not any(start in text for start in self._starts):
            return []
        found = self._library.encode_batch([text], add_special_tokens=False)[0]  # `encode` would hold the GIL
        spans = zip(found.tokens, found.offsets, strict=True)
        return [LiteralSpan(start, end, literal) for literal, (start, end) in spans if literal in self._tokens]

    def may_touch(self, text: str) -> bool:
        """False only if no literal can overlap: the text is ASCII without any first or last character of one."""
        return not text.isascii() or self._edges.search(text) is not None

    def may_begin_at_end(self, text: str) -> bool:
        """True if more text could make the end of this one a literal."""
        bare = text.rstrip()
        return any(bare[-size:] in self._beginnings for size in range(1, min(len(bare), self._longest) + 1))

    def may_end_at_start(self, text: str) -> bool:
        bare = text.lstrip()
        return any(bare[:size] in self._endings for size in range(1, min(len(bare), self._longest) + 1))

    @cached_property
    def _starts(self) -> set[str]:
        return {literal[:4] for literal in self._tokens}

    @cached_property
    def _edges(self) -> re.Pattern[str]:
        edges = re.escape("".join(literal[0] + literal[-1] for literal in self._tokens))
        return re.compile(f"[{edges}]" if edges else "(?!)")

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._tokens), default=0)

    @cached_property
    def _beginnings(self) -> frozenset[str]:
        return frozenset(text[:size] for text in self._tokens for size in range(1, len(text)))

    @cached_property
    def _endings(self) -> frozenset[str]:
        return frozenset(text[size:] for text in self._tokens for size in range(1, len(text)))

    @cached_property
    def _library(self) -> "Tokenizer":
        """Some literals absorb blanks or match only whole words: a tokenizer with only these finds them."""
        from tokenizers import AddedToken, Tokenizer
        from tokenizers.models import WordLevel

        def copy(token: "AddedToken") -> "AddedToken":
            blanks, alone = {"lstrip": token.lstrip, "rstrip": token.rstrip}, token.single_word
            return AddedToken(token.content, single_word=alone, normalized=False, **blanks)

        search: Any = Tokenizer(WordLevel({EDGE: 0}, unk_token=EDGE))
        search.add_tokens([*map(copy, self._tokens.values())])
        return search


LIMIT_BYTES = 64 << 20


class EncodedTexts:
    """Thread-safe cache of ids by tokenizer and text."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[int, str], TokenIds] = OrderedDict()

    def encode(self, tokenizer: "Tokenizer", text: str) -> TokenIds:
        """A whole text, without BOS/EOS. `tokenizer` must outlive this object."""
        key = (id(tokenizer), text)
        with self._lock:
            known = self._entries.get(key)
            if known is not None:
                self._entries.move_to_end(key)
        if known is not None:
            return known
        try:
            ids = TokenIds(tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        except TypeError:  # lone surrogates cannot be passed on as UTF-8
            raise TokenizerError("the text holds a lone surrogate, which no tokenizer can encode") from None
        size = _entry_bytes(key, ids)
        with self._lock:
            if size <= self.limit_bytes and key not in self._entries:
                while self.used_bytes + size > self.limit_bytes:
                    self.used_bytes -= _entry_bytes(*self._entries.popitem(last=False))
                self._entries[key] = ids
                self.used_bytes += size
        return ids


def _entry_bytes(key: tuple[int, str], ids: TokenIds) -> int:
    """About 300 for the Python objects of an entry, at most 4 per character and 4 per id."""
    return 300 + 4 * len(key[1]) + 4 * len(ids)


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _gpt2_alphabet() -> dict[str, int]:
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(moved)}


_ALPHABET = _gpt2_alphabet()


class TokenBytes(dict[int, bytes]):
    """From id to its bytes, lazily."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self.added: dict[int, str] = {id_: token.content for id_, token in tokenizer.get_added_tokens_decoder().items()}
        decoder = tokenizer.decoder
        self._byte_level = decoder is not None and '"ByteLevel"' in decoder.__getstate__().decode()
        self._lengths = np.full(0, -1, np.int64)  # by id; -1: not known yet

    def __missing__(self, token_id: int) -> bytes:
        piece = self[token_id] = self._spell(token_id)
        return piece

    def split(self, token_ids: Ids) -> list[bytes]:
        return list(map(self.__getitem__, token_ids))

    def join(self, token_ids: Ids) -> bytes:
        return b"".join(self.split(token_ids))

    def lengths(self, token_ids: TokenIds) -> np.ndarray:
        ids = np.asarray(token_ids)
        known, most = self._lengths, int(ids.max(initial=-1)) + 1
        if most > len(known):
            known = self._lengths = np.concatenate([known, np.full(most - len(known), -1)])
        found = known[ids]
        if found.min(initial=0) < 0:
            for unknown in np.unique(ids[found < 0]).tolist():
                known[unknown] = len(self[unknown])
            found = known[ids]
        return found

    def _spell(self, token_id: int) -> bytes:
        added = self.added.get(token_id)
        if added is not None:  # SentencePiece keeps runs of spaces among the added tokens
            return (" " * len(added) if not self._byte_level and not added.strip("▁") else added).encode("utf-8")
        try:
            token = self._tokenizer.id_to_token(token_id)
        except (OverflowError, TypeError):  # negative, or no integer
            token = None
        if token is None:
            size = self._tokenizer.get_vocab_size()
            raise TokenizerError(f"token id {token_id!r} is not in the tokenizer's vocabulary of {size}")
        if self._byte_level:
            try:
                return bytes(map(_ALPHABET.__getitem__, token))
            except KeyError:
                return token.encode("utf-8")
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode("utf-8")


BLANKS = " \t\r\n▁"


class Codec:
    """Encoder and decoder of one tokenizer. All its added tokens count, whatever their `special` flag. Texts are cached
    from one literal that `template` names to the next: conversations share their system prompt and tools."""

    def __init__(self, tokenizer: "Tokenizer", cache_bytes: int = LIMIT_BYTES, *, template: str = "") -> None:
        self.backend = tokenizer
        self._template = template
        self.added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
        self.texts: dict[int, str] = {index: token.content for index, token in self.added.items()}
        self.literals: dict[str, int] = {text: index for index, text in self.texts.items() if text}
        tokens = self.added.values()
        self._all = LiteralFinder(tokens)
        self._blanks = LiteralFinder(token for token in tokens if not token.content.strip(BLANKS))
        self.guarded = LiteralFinder(token for token in tokens if token.content.strip(BLANKS))
        """The literals that content must not encode to tokens. Runs of blanks are text, not structure."""
        self._bare = _copy_without_added_tokens(tokenizer)
        self.encoded = EncodedTexts(cache_bytes)

    def split(self, text: str, mark: str = "") -> Iterator[tuple[str, str, int]]:
        """Yields (plain text, next literal or "" at the end, its end). A literal right after `mark` is content."""
        done = 0
        for start, end, literal in self._all.find(text):
            if mark and len(literal) == 1 and text[max(start - 1, 0)] == mark:
                continue
            yield text[done:start], literal, end
            done = end
        yield text[done:], "", len(text)

    @cached_property
    def absorbs_blanks(self) -> set[str]:
        return {token.content for token in self.added.values() if token.rstrip}

    def encode(self, text: str, mark: str = "") -> TokenIds:
        """Without `mark` as the engine does: every literal becomes its token; else only those that `shield` has not
        marked."""
        return self._encode_pieces(text, mark, at_start=True) if mark else self._encode_as_engine(text)

    def encode_after(self, text: str, mark: str = "", *, literal: str) -> TokenIds:
        """Ids that `text` has after `literal` in a whole text."""
        text = text.lstrip() if literal in self.absorbs_blanks else text
        return self._encode_pieces(text, mark, at_start=False) if mark else self.encode(self._lead + text)[1:]

    @cached_property
    def _lead(self) -> str:
        """To put before text that is not at the start of a text."""
        guarded = (text for text in self.literals if text.strip(BLANKS))
        return next((text for text in guarded if text not in self.absorbs_blanks), "")

    def _encode_as_engine(self, text: str) -> TokenIds:
        cuts = [0, *(found.start() for found in self._cuts.finditer(text) if found.start()), len(text)]
        return TokenIds.concat(self.encoded.encode(self.backend, text[start:end]) for start, end in pairwise(cuts))

    @cached_property
    def _cuts(self) -> re.Pattern[str]:
        """Finds the template's literals before which a text can be cut: the tokenizer, too, splits a text at them
        before it normalises or encodes, and encodes what lies between apart."""
        backend: Any = self.backend
        if backend.truncation is not None or backend.padding is not None:
            return re.compile("(?!)")
        every, longer = self._all, "\0".join(self.literals)
        literals = [
            text
            for text, index in self.literals.items()
            if text in self._template
            # It is found in text as it is written, wherever it occurs, and takes no blanks from before it.
            and not ((token := self.added[index]).normalized or token.lstrip or token.single_word)
            and not (text[0].isspace() or text[0] == "_" or text[0].isalnum())
            # No other token begins before it and ends in it.
            and longer.count(text) == 1
            and not every.may_end_at_start(text)
        ]
        return re.compile("|".join(map(re.escape, literals)) or "(?!)")

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
        """Encodes text whose literals do not count, except runs of blanks."""
        ids: list[int] = []
        done = 0
        for start, end, literal in (*self._blanks.find(text), LiteralSpan(len(text), len(text), "")):
            if at_start and done == 0:
                ids.extend(self.encoded.encode(self._bare, text[done:start]))
            else:
                ids.extend(self.encoded.encode(self._bare, EDGE + text[done:start])[1:])
            if literal:
                ids.append(self.literals[literal])
            done = end
        return ids

    @cached_property
    def spelling(self) -> TokenBytes:
        return TokenBytes(self.backend)

    def decode(self, ids: Ids) -> str:
        try:
            return self.backend.decode(list(ids), skip_special_tokens=False)
        except (OverflowError, TypeError):
            raise TokenizerError(f"token ids must be integers from 0, got {ids!r:.60}") from None


def _copy_without_added_tokens(tokenizer: "Tokenizer") -> "Tokenizer":
    """Shares model, normalizer and pre-tokenizer; the only added token is EDGE."""
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Bare

    bare: Any = Bare(tokenizer.model)
    if tokenizer.normalizer is not None:
        bare.normalizer = tokenizer.normalizer
    if tokenizer.pre_tokenizer is not None:
        bare.pre_tokenizer = tokenizer.pre_tokenizer
    bare.add_special_tokens([AddedToken(EDGE, normalized=False)])
    return bare


MARKS = tuple(chr(code) for code in range(0xFDD0, 0xFDEF))  # noncharacters: never assigned, valid in UTF-8


def strings_in(value: JsonValue) -> Iterator[str]:
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            yield item
        elif is_object(item):
            waiting += item
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item


class Shielded(NamedTuple):
    """`shielded`: with the first of MARKS in what could become structure; `value` itself if nothing could. `held`: the
    MARKS in its strings."""

    value: Any
    shielded: Any
    held: str = ""


def shield_each(codec: Codec, values: Sequence[Shielded]) -> tuple[list[Any], str]:
    """The shielded values, and the mark in them, which none of them had; "" if none needed it."""
    held = "".join(each.held for each in values)
    mark = next((mark for mark in MARKS if mark not in held), "")
    if not mark:
        detail = "content holds all of U+FDD0 to U+FDEE, none is left to mark literals with"
        raise MessageError(detail, field="messages")
    if all(each.shielded is each.value for each in values):
        return [each.value for each in values], ""
    if mark == MARKS[0]:
        return [each.shielded for each in values], mark
    return [_shield(codec, each.value, mark) for each in values], mark


def shield(codec: Codec, value: JsonValue) -> Shielded:
    if all(map(codec.guarded.is_harmless, strings_in(value))):
        return Shielded(value, value)
    held = "".join(mark for mark in MARKS if any(mark in text for text in strings_in(value)))
    return Shielded(value, _shield(codec, value, MARKS[0]), held)


def _shield(codec: Codec, value: JsonValue, mark: str) -> JsonValue:
    def shield_item(item: JsonValue) -> JsonValue:
        if isinstance(item, str):
            return item if codec.guarded.is_harmless(item) else _shield_text(item, codec.guarded, mark)
        if is_object(item):
            return {shield_item(key): shield_item(each) for key, each in item.items()}
        return [shield_item(each) for each in cast("list[JsonValue]", item)] if isinstance(item, list) else item

    return shield_item(value)


def _shield_text(text: str, literals: LiteralFinder, mark: str) -> str:
    """Puts marks inside literals, and at an end that the template's text could complete to a literal."""
    while found := [
        hit for hit in literals.find(text) if not (hit.end - hit.start == 1 and text[max(hit.start - 1, 0)] == mark)
    ]:
        pieces: list[str] = []
        done = 0
        for start, end, literal in found:
            broken = mark.join(literal) if len(literal) > 1 else mark + literal
            pieces += [text[done:start], text[start:end].replace(literal, broken)]
            done = end
        text = "".join([*pieces, text[done:]])
    if literals.may_begin_at_end(text):
        bare = text.rstrip()
        text = bare + mark + text[len(bare) :]
    if literals.may_end_at_start(text):
        bare = text.lstrip()
        text = text[: len(text) - len(bare)] + mark + bare
    return text
