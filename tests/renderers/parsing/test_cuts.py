"""Any cut of the token stream gives the same message, and the deltas add up to it: calls of every format, whole and
damaged."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

import tokentrue as tt
from tests import parts
from tests.renderers.parsing.test_early import JSON_FORMATS
from tests.renderers.parsing.test_parsing import TOOLS, add_up, as_streamed

INVOKE = '</think><minimax:tool_call>\n<invoke name="get_weather">\n'
FORMATS = {
    **JSON_FORMATS,
    "glm-like": ("</think><tool_call>get_weather", "</tool_call><|observation|>"),
    "minimax-like": (INVOKE, "</invoke>\n</minimax:tool_call>[e~["),
}
PAIRS = {
    "glm-like": "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>",
    "minimax-like": '<parameter name="{}">{}</parameter>\n',
}
ARGUMENTS = [
    '{"city":  "Zürich, 😀", "days": 3}', "{}", '{"a": [1, {"b": null}], "c": "x\\n\\"\\u00e9"}', '{"a": NaN}', "[1]", "null", "tru",
    '"{\\"city\\": \\"P\\"}"', '{"a": 1e5, "b": -0.5, "c": true }', '{"city": Paris}', '{"city": "a\nb"}', '{"n": 01}', '{"a":1}}',
    '{"days": 1}, "name": "now"', '{"a":1}, "id": "zz", "x": [', '{"name": "q", "arguments": {}}', '{"a":1}, "x": {"y": [2]}',
]  # fmt: skip
VALUES = [
    ("city", "Paris"),
    ("days", "3"),
    ("tags", '["a"]'),
    ("note", "null"),
    ("city", "</x>\n"),
    ("where", '{"x": 1}'),
]
HEADS = ['{"id": "i7", "name": "now", ', '{"name": "", ', '{"x": {"name": 2}, "name": "now",', '[{"name": "now", ', "{"]
LOOSE = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>", "</function>", " ", "\n", "😀", "word", '"', "{", "}", ",", ":",
    '"name"', '"arguments"', "<arg_key>", "</arg_value>", "</parameter>", "</invoke>", "<|call|>", "<|end_message|>", "\\",
]  # fmt: skip


@cache
def renderer(name: str) -> Any:
    return tt.load_renderer(str(parts.own_dir(name)))


def write_call(name: str, rng: random.Random) -> str:
    opens, closes = FORMATS[name]
    if name in PAIRS:
        pairs = [PAIRS[name].format(*rng.choice(VALUES)) for _ in range(rng.randrange(4))]
        return opens + "".join(pairs) + rng.choice(("", "", "junk", "</function>")) + closes
    text = opens + rng.choice(ARGUMENTS) + closes
    return text.replace('{"name": "get_weather", ', rng.choice(HEADS)) if rng.random() < 0.2 else text


def write_turn(name: str, rng: random.Random) -> list[int]:
    """One call or two, in a third of the cases with tokens taken out or put in."""
    r = renderer(name)
    calls = [write_call(name, rng) for _ in range(rng.choice((1, 1, 2)))]
    ids = r.encode_sampled(rng.choice(("", "Hi. ", "<think>a</think>")) + "".join(calls))
    for _ in range(rng.choice((0, 0, 1, 2))):
        place = rng.randrange(len(ids) + 1)
        if rng.random() < 0.5:
            del ids[place : place + rng.randrange(1, 3)]
        else:
            ids[place:place] = r.encode_sampled(rng.choice(LOOSE))
    return ids


@pytest.mark.parametrize("name", FORMATS)
def test_any_cut_gives_the_same_message(name: str) -> None:
    rng, r = random.Random(name), renderer(name)
    for _ in range(60):
        ids = write_turn(name, rng)
        given: dict[str, Any] = {"tools": rng.choice((None, TOOLS)), "early": rng.random() < 0.7}
        found = []
        for longest in (1, 8, len(ids) + 1):
            parser, deltas, place = r.parser(**given), [], 0
            while place < len(ids):
                size = longest if longest > 8 else rng.randint(1, longest)
                deltas += parser.feed(ids[place : place + size])
                place += size
            rest, parsed = parser.finish()
            assert add_up(deltas + rest) == as_streamed(parsed.message)
            found.append(repr(parsed))  # as text: NaN equals itself
        assert len(set(found)) == 1
        if not given["early"]:
            assert found[0] == repr(r.parse(ids, tools=given["tools"]))


def test_the_end_of_a_block_is_no_content() -> None:
    """The block's closing tag belongs to its last call, although the call alone may end before it."""
    r = renderer("minimax-like")
    ids = r.encode_sampled(f"{INVOKE}</invoke>\n</minimax:tool_call>[e~[")
    parser = r.parser(prompt_ids=r.encode_sampled("]~b]ai\n<think>\n"), tools=TOOLS)
    deltas = [delta for id_ in ids for delta in parser.feed([id_])]
    assert "".join(delta.content for delta in deltas) == ""
    assert parser.finish()[1].message["content"] is None
