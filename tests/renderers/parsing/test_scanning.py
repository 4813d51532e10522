"""Whole and streamed parsing agree on turns with markers taken out, doubled, moved or put in; reasoning tokens are
counted."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

import tokentrue as tt
from tests import parts
from tests.renderers.parsing.test_parsing import TOOLS

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city":  "Oslo"}}\n</tool_call>'
TURNS = [
    f"<think>\nLook at it.\n</think>\n\nReading on.\n{CALL}<|im_end|>",
    f"<think>\n\n</think>\n\n{CALL}\n{CALL}<|im_end|>",
    "Plain text, é and 中.\n\n\n  More.  <|im_end|>",
    "reasoning that the prompt opened\n</think>\n\nDone.<|im_end|>",
    f"<think>one</think>a<think>two</think> b {CALL} c<|im_end|>",
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n<tool_call>{"arguments": {"a": 1}, "name": "odd", "id": "x"}</tool_call>',
    "<think>cut off in the middle of <tool_call> a thought",
    '<tool_call>{"name": "now", "arg</tool_call> <|im_start|> </tool_call></think><|im_end|>',
    "text<tool_call>never closed",
    "\ufdd0 <think \ufdd0> half < /think>  <think>\ufdd0</think><|im_end|>",
]
OPEN = "<|im_start|>assistant\n"
PROMPTS = [OPEN, OPEN + "<think>\n", OPEN + "<think>\n\n</think>\n\n", "x<tool_call>", ""]
LOOSE = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_start|>", "<|im_end|>", "<thi", "nk>", "😀", "\udcff", "word", " ", "\n",
]  # fmt: skip


@cache
def qwen() -> Any:
    return tt.load_renderer(str(parts.own_dir("qwen3-like")))


def mutate(rng: random.Random) -> list[int]:
    """A turn with a few tokens taken out, doubled, moved, or put in: markers, parts of markers, half characters."""
    r = qwen()
    ids = r.encode_sampled(rng.choice(TURNS))
    for _ in range(rng.choice((0, 0, 1, 1, 2, 5))):
        place = rng.randrange(len(ids) + 1)
        if rng.random() < 0.4:
            del ids[place : place + rng.randrange(3)]
        elif rng.random() < 0.3:
            ids[place:place] = ids[rng.randrange(len(ids)) :][:4] if ids else []
        else:
            loose = rng.choice(LOOSE)
            ids[place:place] = [rng.randrange(1, 256)] if loose == "\udcff" else r.encode_sampled(loose)
    return ids


def test_token_by_token_gives_what_the_whole_gives() -> None:
    rng = random.Random(1)
    for _ in range(600):
        ids, given = (
            mutate(rng),
            {"prompt_ids": qwen().encode_sampled(rng.choice(PROMPTS)), "tools": rng.choice((None, TOOLS))},
        )
        parser = qwen().parser(**given, early=False)
        deltas = [delta for id_ in ids for delta in parser.feed([id_])]
        rest, parsed = parser.finish()
        assert parsed == qwen().parse(ids, **given)
        shown = "".join(delta.content for delta in (*deltas, *rest))
        assert shown == (parsed.message["content"] or "")


def test_tools_that_are_none_are_no_tools() -> None:
    assert qwen().parse(qwen().encode_sampled("Hi.<|im_end|>"), tools=[print, "x"]).message["content"] == "Hi."


@pytest.mark.parametrize(
    ("prompt", "text", "counted"),
    [
        (OPEN, "<think>\nadd them\n</think>\n\nIt is 4.<|im_end|>", "\nadd them\n"),
        (OPEN + "<think>\n", "add them\n</think>\n\nIt is 4.<|im_end|>", "add them\n"),
        (OPEN, "It is 4.<|im_end|>", ""),
        (OPEN, "<think>cut off", "cut off"),
        (OPEN, "<think></think>Yes.<|im_end|>", ""),
        (OPEN, "<think>one</think>a<think>two é😀</think>b<|im_end|>", "onetwo é😀"),
    ],
)
def test_reasoning_tokens_are_those_between_the_markers(prompt: str, text: str, counted: str) -> None:
    r = qwen()
    parsed = r.parse(r.encode_sampled(text), prompt_ids=r.encode_sampled(prompt))
    pieces = ["one", "two é😀"] if counted == "onetwo é😀" else [counted]
    assert parsed.reasoning_tokens == sum(len(r.encode_sampled(piece)) for piece in pieces if piece)


def test_a_closing_marker_outside_reasoning_is_visible_text() -> None:
    """What is served is what was written: text before a stray `</think>` is not taken for reasoning."""
    r = qwen()
    parsed = r.parse(r.encode_sampled("The answer is 41. </think>No, 42.<|im_end|>"), prompt_ids=r.encode_sampled(OPEN))
    assert (
        parsed.message["content"] == "The answer is 41. </think>No, 42." and "reasoning_content" not in parsed.message
    )
