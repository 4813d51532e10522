"""A fast way to encode ASCII text that gives the tokenizer's own ids: split into words as its pre-tokenizer does, look each word up.

Why ASCII only: there the classes of the pre-tokenizer's pattern (letters, digits, blanks) are the same in every regular-expression engine
and every version of Unicode, so that a translated pattern splits alike; normalizers that compose characters do nothing. Each word's ids
come from the tokenizer's own model, once. Where a tokenizer is built otherwise there is no fast way, and `words_of` says so.
"""

from __future__ import annotations

import json
import re
from array import array
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_KEPT = 200_000
_CLASSES = {
    "L": "A-Za-z", "Lu": "A-Z", "Ll": "a-z", "Lt": "", "Lm": "", "Lo": "", "M": "", "Mn": "", "Han": "", "N": "0-9", "Nd": "0-9",
    "P": r"!-#%-*,-/:;?@\[-\]_{}", "S": "$+<->^`|~",
}  # fmt: skip
_NEVER = "\U0010fffe"  # stands for a class that no ASCII character is in
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class AsciiWords:
    def __init__(self, tokenizer: Tokenizer, pattern: re.Pattern[str]) -> None:
        self._split = pattern.findall
        self._ids = _Learned(tokenizer).__getitem__

    def encode(self, text: str) -> array[int] | None:
        """None where the pattern does not account for every character: then the tokenizer itself must be asked."""
        words = self._split(text)
        if "".join(words) != text:
            return None
        return array("i", b"".join(map(self._ids, words)))


class _Learned(dict[str, bytes]):
    """Words to their ids, as the bytes of an array: to find them lying together is most of the work. A word that is new is asked of the
    tokenizer's model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenize = tokenizer.model.tokenize

    def __missing__(self, word: str) -> bytes:
        if len(self) >= _KEPT:
            self.clear()
        ids = self[word] = array("i", [token.id for token in self._tokenize(word.translate(_BYTE_LEVEL))]).tobytes()
        return ids


def words_of(tokenizer: Tokenizer) -> AsciiWords | None:
    """None where the tokenizer is not a byte-level BPE with one split pattern that can be translated."""
    pattern = _pattern_of(tokenizer)
    if pattern is None or "BPE" not in type(tokenizer.model).__name__:
        return None
    try:
        translated = re.compile(_translated(pattern), re.ASCII)
    except (re.error, ValueError):
        return None
    return AsciiWords(tokenizer, translated) if not translated.groups else None


def _pattern_of(tokenizer: Tokenizer) -> str | None:
    """The split pattern of the two pre-tokenizers that byte-level models use; None for any other."""
    if tokenizer.normalizer is not None and type(tokenizer.normalizer).__name__ not in {"NFC", "NFKC", "NFD", "NFKD"}:
        return None
    if tokenizer.pre_tokenizer is None:
        return None
    stated: dict[str, Any] = json.loads(tokenizer.pre_tokenizer.__getstate__())
    steps = stated["pretokenizers"] if stated["type"] == "Sequence" else [stated]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return _GPT2 if steps[0]["use_regex"] and not steps[0]["add_prefix_space"] else None
    if [step["type"] for step in steps] != ["Split", "ByteLevel"] or steps[1]["use_regex"] or steps[1]["add_prefix_space"]:
        return None
    split = steps[0]
    return split["pattern"].get("Regex") if split["behavior"] == "Isolated" and not split["invert"] else None


def _translated(pattern: str) -> str:
    """The pattern with every Unicode class replaced by its ASCII part; raises ValueError on what it does not know."""
    pattern = re.sub(r"&&\[\^\\p\{Han\}\]", "", pattern)
    if "&&" in pattern or r"\P" in pattern or "[:" in pattern:
        raise ValueError(pattern)
    out, inside, at = [], False, 0
    while at < len(pattern):
        found = re.compile(r"\\p\{(\w+)\}").match(pattern, at)
        if found:
            chars = _CLASSES[found[1]] if found[1] in _CLASSES else _unknown(pattern)
            out.append(chars or _NEVER if inside else f"[{chars or _NEVER}]")
            at = found.end()
        elif pattern[at] == "\\":
            out.append(pattern[at : at + 2])
            at += 2
        else:
            if pattern[at] in "[]":
                if inside and pattern[at] == "[":
                    raise ValueError(pattern)
                inside = pattern[at] == "["
            out.append(pattern[at])
            at += 1
    return "".join(out)


def _unknown(pattern: str) -> str:
    raise ValueError(pattern)


def _byte_level() -> dict[int, str]:
    """How byte-level models spell the ASCII bytes that are not printable."""
    printable = set(range(33, 127))
    return {byte: chr(256 + place) for place, byte in enumerate(byte for byte in range(128) if byte not in printable)}


_BYTE_LEVEL = _byte_level()
