"""Splitting a whole turn at its marker tokens gives what scanning its text gives, and is left alone where ids do not decide."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from transformers.utils.chat_parsing.response_templates import load_response_template

import tokentrue as tt
from tests import parts
from tests.renderers.parsing.test_parsing import TOOLS
from tokentrue.renderers.parsing import Grammar, Parser
from tokentrue.renderers.parsing_tokens import segments_of, tokens_of

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
PROMPTS = [
    "<|im_start|>assistant\n",
    "<|im_start|>assistant\n<think>\n",
    "<|im_start|>assistant\n<think>\n\n</think>\n\n",
    "x<tool_call>",
    "",
]
LOOSE = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<|im_start|>",
    "<|im_end|>",
    "<thi",
    "nk>",
    "😀",
    " ",
    "\n",
    "\udcff",
    "word",
]


@cache
def qwen() -> Any:
    return tt.load_renderer(str(parts.own_dir("qwen3-like")))


def mutated(rng: random.Random) -> list[int]:
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


def differences(grammar: Grammar, cases: int, seed: int = 0) -> tuple[int, int]:
    """How many turns the two ways parse differently, and how many were split at tokens."""
    rng = random.Random(seed)
    wrong = split = 0
    scanning = replace(grammar, tokens=None)
    prompts = [qwen().encode_sampled(prompt) for prompt in PROMPTS]
    for _ in range(cases):
        ids, given = mutated(rng), {"prompt_ids": rng.choice(prompts), "tools": rng.choice((None, TOOLS))}
        texts = list(map(grammar.ordinary.__getitem__, ids))
        opened = Parser(grammar, **given)._opening.opened
        assert grammar.tokens is not None
        split += opened is not None and segments_of(grammar.tokens, ids, texts, implicit="content", opened=opened) is not None
        wrong += Parser(grammar, **given).whole(ids) != Parser(scanning, **given).whole(ids)
    return wrong, split


def test_the_two_ways_agree() -> None:
    wrong, split = differences(qwen()._grammar, 4000)
    assert wrong == 0 and 2000 < split < 3950


def streamed(grammar: Grammar, ids: list[int], **given: Any) -> Any:
    parser = Parser(grammar, early=True, **given)
    return [parser.feed([id_]) for id_ in ids], parser.finish()


def test_the_two_ways_agree_token_by_token() -> None:
    """Deltas and all."""
    grammar, rng = qwen()._grammar, random.Random(1)
    scanning = replace(grammar, tokens=None, passing={})
    for _ in range(1000):
        ids, given = mutated(rng), {"prompt_ids": qwen().encode_sampled(rng.choice(PROMPTS)), "tools": TOOLS}
        assert streamed(grammar, ids, **given) == streamed(scanning, ids, **given)


@pytest.mark.parametrize("breaks", ["opens", "closes"])
def test_a_wrong_marker_is_seen(breaks: str) -> None:
    grammar = qwen()._grammar
    closer = next(id_ for id_, marker in grammar.tokens.items() if marker.text == "</think>")
    worse = {"opens": None, "closes": frozenset({"content"})}[breaks]
    changed = {
        id_: replace(marker, **{breaks: worse}) if breaks == "opens" or id_ == closer else marker for id_, marker in grammar.tokens.items()
    }
    assert differences(replace(grammar, tokens=changed), 300)[0] > 30
    ids = qwen().encode_sampled(TURNS[0])
    assert streamed(replace(grammar, passing=changed), ids) != streamed(grammar, ids)


def test_a_whole_turn_needs_no_scanner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Parser, "_scanned", None)
    ids = qwen().encode_sampled(TURNS[0])
    ready = qwen().parser(prompt_ids=qwen().encode_sampled(PROMPTS[0]), tools=TOOLS, early=False)
    assert ready.whole(ids) == qwen().parse(ids, prompt_ids=qwen().encode_sampled(PROMPTS[0]), tools=TOOLS)


def test_tools_that_are_none_are_no_tools() -> None:
    assert qwen().parse(qwen().encode_sampled("Hi.<|im_end|>"), tools=[print, "x"]).message["content"] == "Hi."


@pytest.mark.parametrize(
    ("fields", "added"),
    [
        ({"content": {}, "reasoning": {"open": "<a>", "close": "</a>"}}, {1: "<a>"}),  # its end is no token
        ({"content": {}, "reasoning": {"open_pattern": "<a>", "close": "</a>"}}, {1: "<a>", 2: "</a>"}),
        ({"content": {}, "reasoning": {"open": "<a>", "close_pattern": "</a>"}}, {1: "<a>", 2: "</a>"}),
        ({"content": {"close": "</a>"}, "reasoning": {"open": "<a>"}}, {1: "<a>", 2: "</a>"}),
        ({"content": {}, "reasoning": {"open": "aba", "close": "</a>"}}, {1: "aba", 2: "</a>"}),  # overlaps with itself
        ({"content": {}, "reasoning": {"open": "<a>", "close": "</a>"}}, {1: "<a>", 2: "</a>", 3: "x<a>"}),
        ({"content": {}, "reasoning": {"open": "<a>", "close": "</a>"}}, {1: "<a>", 2: "</a>", 3: "<a>"}),
        ({"content": {}, "reasoning": {"open": "<a>", "close": "</a>"}, "tool_calls": {"open": "<a>"}}, {1: "<a>", 2: "</a>"}),
    ],
)
def test_where_ids_do_not_decide(fields: dict[str, Any], added: dict[int, str]) -> None:
    assert tokens_of(load_response_template({"start_anchor": "x", "fields": fields}), added) is None


def test_where_ids_decide() -> None:
    fields = {"content": {}, "reasoning": {"open": "<a>", "close": "</a>"}}
    tokens = tokens_of(load_response_template({"start_anchor": "x", "fields": fields}), {1: "<a>", 2: "</a>", 3: "<|x|>"})
    assert tokens is not None and (tokens[1].opens, tokens[2].closes, tokens[3].opens) == ("reasoning", {"reasoning"}, None)
