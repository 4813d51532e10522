"""The cache of encoded texts changes nothing but the time: with it and without it the same texts give the same ids,
within its bytes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.marks import examples
from tokentrue.environments import SMALL_MODEL
from tokentrue.renderers.codec import Codec, EncodedTexts

TEXT = st.text(max_size=12) | st.sampled_from(["<|im_end|>", "a <|im_start|> b", "  x", "def f():\n    return 1\n"])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(SMALL_MODEL / "tokenizer.json"))


@settings(max_examples=examples(60), deadline=None)
@given(texts=st.lists(TEXT, min_size=1, max_size=20), limit=st.sampled_from([0, 400, 1200, 1 << 20]))
def test_ids_are_the_same_with_and_without_the_cache(tokenizer: Tokenizer, texts: list[str], limit: int) -> None:
    cached, plain = Codec(tokenizer), Codec(tokenizer)
    cached.encoded.limit_bytes, plain.encoded.limit_bytes = limit, 0
    for text in [*texts, *texts]:
        assert cached.encode(text) == plain.encode(text)
        for mark in ("", "\ufdd0"):
            assert cached.encode(text, mark) == plain.encode(text, mark)
            assert cached.encode_after(text, mark, literal="") == plain.encode_after(text, mark, literal="")
        assert cached.encoded.used_bytes <= limit
    assert plain.encoded.used_bytes == 0


def test_a_literal_as_structure_and_as_content_are_two_texts(tokenizer: Tokenizer) -> None:
    codec = Codec(tokenizer)
    literal = next(iter(codec.literals))
    broken = "\ufdd0".join(literal)
    assert codec.encode(literal) == [codec.literals[literal]] != codec.encode(broken, "\ufdd0")


def test_a_text_is_encoded_once(tokenizer: Tokenizer) -> None:
    texts, calls = EncodedTexts(), list[str]()

    class Counted:
        def encode_batch_fast(self, batch: list[str], add_special_tokens: bool) -> object:
            calls.extend(batch)
            return tokenizer.encode_batch_fast(batch, add_special_tokens=add_special_tokens)

    counted = Counted()
    ids = [texts.encode(counted, "one two") for _ in range(3)]  # type: ignore[arg-type]
    assert ids == [tokenizer.encode("one two", add_special_tokens=False).ids] * 3 and calls == ["one two"]


def test_threads_share_it(tokenizer: Tokenizer) -> None:
    texts = EncodedTexts(limit_bytes=3000)
    words = [f"word {number} " * 5 for number in range(40)]
    wanted = {word: tokenizer.encode(word, add_special_tokens=False).ids for word in words}
    with ThreadPoolExecutor(4) as pool:
        for word, ids in zip(words * 20, pool.map(lambda word: texts.encode(tokenizer, word), words * 20), strict=True):
            assert ids == wanted[word]
    assert 0 < texts.used_bytes <= 3000
