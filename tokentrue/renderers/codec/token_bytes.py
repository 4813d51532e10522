"""What each token id spells, in bytes.

`tokenizer.decode` cannot say: it replaces what is not UTF-8, strips spaces at the front and cleans up. Here one id
gives its own bytes, whatever stands beside it, so that the bytes of a sequence are the bytes of its ids in a row and
half a character is a fact, not a `�`.
Two spellings cover every tokenizer of the families: byte-level BPE (the GPT-2 alphabet) and SentencePiece (`▁`,
`<0xE2>`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from tokentrue.errors import TokenizerError
from tokentrue.types import Ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _gpt2_alphabet() -> dict[str, int]:
    """The printable stand-in of every byte in a byte-level vocabulary."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(moved)}


_ALPHABET = _gpt2_alphabet()


class _Pieces(dict[int, bytes]):
    """Id to its bytes; each is worked out when first asked for."""

    def __init__(self, spell: Callable[[int], bytes]) -> None:
        super().__init__()
        self._spell = spell

    def __missing__(self, token_id: int) -> bytes:
        piece = self[token_id] = self._spell(token_id)
        return piece


class TokenBytes:
    """`piece(id)` for one `tokenizers.Tokenizer`; pieces are computed when first asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pieces = _Pieces(self._spell)
        self.added: dict[int, str] = {id_: token.content for id_, token in tokenizer.get_added_tokens_decoder().items()}
        self._byte_level = _is_byte_level(tokenizer)

    def piece(self, token_id: int) -> bytes:
        return self._pieces[token_id]

    def split(self, token_ids: Ids) -> list[bytes]:
        """The piece of each id."""
        return list(map(self._pieces.__getitem__, token_ids))

    def join(self, token_ids: Ids) -> bytes:
        return b"".join(self.split(token_ids))

    def text(self, token_ids: Ids) -> str:
        """The text of `token_ids`; bytes that are not UTF-8 are lone surrogates, so `.encode("utf-8",
        "surrogateescape")` undoes it."""
        return self.join(token_ids).decode("utf-8", "surrogateescape")

    def _spell(self, token_id: int) -> bytes:
        added = self.added.get(token_id)
        if added is not None:  # SentencePiece keeps runs of spaces among the added tokens
            return (" " * len(added) if not self._byte_level and not added.strip("▁") else added).encode("utf-8")
        try:
            token = self._tokenizer.id_to_token(token_id)
        except (OverflowError, TypeError):  # negative, or no integer
            token = None
        if token is None:
            raise TokenizerError(
                f"token id {token_id!r} is not in the tokenizer's vocabulary of {self._tokenizer.get_vocab_size()}"
            )
        if self._byte_level:
            return (
                bytes(_ALPHABET[char] for char in token)
                if all(char in _ALPHABET for char in token)
                else token.encode("utf-8")
            )
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode("utf-8")


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    decoder = tokenizer.decoder
    return decoder is not None and '"ByteLevel"' in decoder.__getstate__().decode()


class TokenTexts(dict[int, str | None]):
    """Id to its text where that is whole characters and no marker, else None; each is worked out when first asked
    for."""

    def __init__(self, pieces: TokenBytes, marker_ids: frozenset[int]) -> None:
        super().__init__()
        self._pieces, self._marker_ids = pieces, marker_ids

    def __missing__(self, token_id: int) -> str | None:
        try:
            text = None if token_id in self._marker_ids else self._pieces.piece(token_id).decode("utf-8")
        except UnicodeDecodeError:
            text = None
        self[token_id] = text
        return text

    def is_marker(self, token_id: int) -> bool:
        return token_id in self._marker_ids
