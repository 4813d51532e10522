"""The cache of encoded texts changes nothing but the time: with it and without it the same texts give the same ids,
within its bytes."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from tests.marks import examples, slow_except
from tests.parts import REAL, tokenizer_dir
from tokentrue.environments import SMALL_MODEL
from tokentrue.renderers.codec import Codec, EncodedTexts

TEXT = st.text(max_size=12) | st.sampled_from(["<|im_end|>", "a <|im_start|> b", "  x", "def f():\n    return 1\n"])


WORDS = (
    "a",
    "Hello",
    " ",
    "  ",
    "\n",
    "\t",
    "é",
    "e\u0301",
    "▁",
    "_",
    "<",
    "|",
    ">",
    "[",
    "日本",
    "ﬁ",
    "x y",
    "\n\n",
    "23",
    "'s",
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(SMALL_MODEL / "tokenizer.json"))


def read_tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def check_cuts(tokenizer: Tokenizer, *, texts: int, seed: int) -> int:
    """Texts of whole and half literals, blanks and words have the tokenizer's own ids; returns how often one was cut."""
    literals = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.content]
    codec, draw, cuts = Codec(tokenizer, template="\n".join(literals)), random.Random(seed), 0

    def draw_piece() -> str:
        literal = draw.choice(literals)
        return draw.choice((literal, literal[: draw.randint(0, len(literal))], draw.choice(WORDS), draw.choice(WORDS)))

    for _ in range(texts):
        text = "".join(draw_piece() for _ in range(draw.randint(0, 12)))
        assert codec.encode(text) == tokenizer.encode(text, add_special_tokens=False).ids, text
        cuts += len(codec._cuts.findall(text))  # pyright: ignore[reportPrivateUsage]
    return cuts


@pytest.mark.parametrize("name", slow_except(["qwen3", "llama-2", "mistral-nemo"], REAL))
def test_a_text_encoded_in_pieces_has_the_ids_of_the_whole(name: str) -> None:
    assert check_cuts(read_tokenizer(tokenizer_dir(name)), texts=examples(300), seed=1) > 0


ODD = (
    AddedToken("<cut>", normalized=False),
    AddedToken("<left>", lstrip=True, normalized=False),
    AddedToken("<right>", rstrip=True, normalized=False),
    AddedToken("<norm>", normalized=True),
    AddedToken("word", single_word=True, normalized=False),
    AddedToken("next", normalized=False),
    AddedToken("<end>", normalized=False),
    AddedToken("ab<en", normalized=False),
    AddedToken("x<cut>y", normalized=False),
    AddedToken(" <blank>", normalized=False),
    AddedToken("nn", normalized=False),
)


@pytest.mark.parametrize("name", ["llama-2", "qwen3"])
def test_no_text_is_cut_at_a_token_that_depends_on_what_is_around_it(name: str) -> None:
    tokenizer = read_tokenizer(tokenizer_dir(name))
    tokenizer.add_tokens(list(ODD))
    literals = "\n".join(token.content for token in ODD)
    codec, draw = Codec(tokenizer, template=literals), random.Random(2)
    for _ in range(examples(20_000)):
        text = "".join(
            draw.choice((draw.choice(ODD).content, draw.choice((*WORDS, "d>", "x", "y"))))
            for _ in range(draw.randint(0, 8))
        )
        assert codec.encode(text) == tokenizer.encode(text, add_special_tokens=False).ids, text


def test_conversations_share_their_system_prompt(tokenizer: Tokenizer) -> None:
    codec, system = Codec(tokenizer, template="<|im_start|> <|im_end|>"), "<|im_start|>system\nHelp.<|im_end|>\n"
    first = codec.encode(system + "<|im_start|>user\nOne.<|im_end|>\n")
    used = codec.encoded.used_bytes
    second = codec.encode(system + "<|im_start|>user\nTwo.<|im_end|>\n")
    added = codec.encoded.used_bytes - used
    assert 0 < added < 600 and first != second  # one entry, of 300 bytes and 4 for each character and id


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
