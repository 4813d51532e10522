"""The fast way splits as the tokenizer's own pre-tokenizer does: every string of four characters over all classes of characters."""

from __future__ import annotations

from itertools import product

import pytest

from tests.renderers.talk import OWN, loaded

CHARS = "aSdtA1'. /\n\r\t\x0b\x0c\x1c\x00_$<"
TEXTS = [
    "It's 12345 o'clock, they'LL say;  \n\n\tdef f(x):\n    return x['a'] + \"b\"  # done\r\n",
    "HTTPServer camelCase snake_case 3.14159 1e-9 0xFF $100 50% a/b\\c <tag attr='v'>&amp;</tag>",
    "   leading, trailing   \n \n  x\t\ty\x0bz\x0c\x1c\x00end'",
]


@pytest.mark.parametrize("name", ["qwen3-like", "real:qwen3", "real:glm-4.6", "real:kimi-k2", "real:gpt-oss", "real:mistral-nemo"])
def test_splits_like_the_pre_tokenizer(name: str) -> None:
    codec = loaded(name).codec
    words, tokenizer = codec._words, codec.backend
    assert words is not None and tokenizer.pre_tokenizer is not None
    back = {ord(char): chr(byte) for byte, char in _spelling().items()}
    size = 3 if name.startswith("real:") else 4
    for letters in product(CHARS, repeat=size):
        text = "".join(letters)
        expected = [piece.translate(back) for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        assert words._split(text) == expected, repr(text)


@pytest.mark.parametrize("name", [*OWN, "real:qwen3", "real:glm-4.6", "real:kimi-k2", "real:gpt-oss", "real:mistral-nemo"])
def test_gives_the_tokenizers_own_ids(name: str) -> None:
    codec = loaded(name).codec
    for text in (*TEXTS, *(a + b for a in TEXTS for b in TEXTS)):
        assert codec.encode(text) == codec.backend.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", ["real:deepseek-v3.1", "real:gemma-3"])
def test_other_tokenizers_have_no_fast_way(name: str) -> None:
    codec = loaded(name).codec
    assert codec._words is None
    assert codec.encode(TEXTS[0]) == codec.backend.encode(TEXTS[0], add_special_tokens=False).ids


def _spelling() -> dict[int, str]:
    from tokentrue.renderers.ascii_words import _BYTE_LEVEL

    return _BYTE_LEVEL
