"""Text as the fuzz compares and spells it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tokentrue.conformance.standin.vocabulary import Vocabulary


def spell(vocabulary: Vocabulary, text: str) -> list[int]:
    """Marker literals stay plain text: encoded in two halves, so that no marker token is found."""
    out: list[int] = []
    for at in range(0, len(text), 3):
        out += vocabulary.encode(text[at : at + 3])
    return out


def normal(vocabulary: Vocabulary, text: str) -> str:
    """Text as this tokenizer gives it back: some compose accents."""
    normalizer = _normalizer(vocabulary.folder)
    return text if normalizer is None else normalizer.normalize_str(text)


@cache
def _normalizer(folder: Path) -> Any:
    return Tokenizer.from_file(str(folder / "tokenizer.json")).normalizer
