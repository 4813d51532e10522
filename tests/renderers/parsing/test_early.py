"""A call is shown while it is written. What was shown is what is recorded, and a call that breaks off can never be
taken for a call."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

import tokentrue as tt
from tests import parts
from tests.renderers.parsing.test_parsing import TOOLS, add_up, as_streamed
from tokentrue.renderers.families import Clues, Family, registry
from tokentrue.renderers.parsing.grammar import compile_grammar
from tokentrue.renderers.parsing.parser import Parser
from tokentrue.types import Delta, Status

ARGUMENTS = '{"city":  "Zürich, Switzerland", "days": 3}'
KIMI = "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
JSON_FORMATS = {  # own tokenizer, what opens the call, what closes it
    "qwen3-like": ('<tool_call>\n{"name": "get_weather", "arguments": ', "}\n</tool_call><|im_end|>"),
    "k2v3-like": ('</think>\n<tool_call>\n{"name": "get_weather", "arguments": ', "}\n</tool_call><|im_end|>"),
    "kimi-like": (f"</think>{KIMI}", "<|tool_call_end|><|tool_calls_section_end|><|im_end|>"),
    "deepseek-like": (
        "</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>",
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
    ),
    "harmony-like": ("<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>", "<|call|>"),
    "inkling-like": ('<|content_invoke_tool_json|>{"name": "get_weather", "args": ', "}<|end_message|>"),
}


@cache
def renderer(name: str) -> Any:
    return tt.load_renderer(str(parts.own_dir(name)))


def streamed(parser: Any, ids: list[int]) -> tuple[list[Delta], Any]:
    """Token by token, as an engine samples."""
    deltas = [delta for id_ in ids for delta in parser.feed([id_])]
    rest, parsed = parser.finish()
    assert add_up(deltas + rest) == as_streamed(parsed.message)
    return deltas, parsed


def pieces_of(deltas: list[Delta]) -> list[str]:
    return [delta.arguments for delta in deltas if delta.call is not None and delta.arguments]


@pytest.mark.parametrize("name", JSON_FORMATS)
def test_arguments_in_json_go_out_as_they_are_sampled(name: str) -> None:
    r = renderer(name)
    opens, closes = JSON_FORMATS[name]
    ids = r.encode_sampled(opens + ARGUMENTS + closes)
    deltas, parsed = streamed(r.parser(tools=TOOLS), ids)
    pieces = pieces_of(deltas)
    assert "".join(pieces) in (ARGUMENTS, ARGUMENTS[:-1])  # the last brace may wait for the very end of the turn
    assert len(pieces) >= len(r.encode_sampled(ARGUMENTS)) - 2, "one piece per token, but for a character of two tokens"
    assert parsed == r.parse(ids, tools=TOOLS)
    assert parsed.message["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": ARGUMENTS}
    assert parsed.attempts[0].status is Status.OK


@pytest.mark.parametrize("name", JSON_FORMATS)
def test_the_last_brace_waits_until_the_call_has_been_read(name: str) -> None:
    r = renderer(name)
    parser = r.parser(tools=TOOLS)
    shown = add_up(
        [delta for id_ in r.encode_sampled(JSON_FORMATS[name][0] + ARGUMENTS) for delta in parser.feed([id_])]
    )
    assert shown["tool_calls"][0]["function"]["arguments"] == ARGUMENTS[:-1]


BROKEN = {
    '{"name": "get_weather", "arguments": {"city": "Paris"}': (Status.INVALID_JSON, '{"city": "Paris"'),
    '{"name": "get_weather", "arguments": {"city": Paris}}': (Status.INVALID_JSON, '{"city": '),
    '{"name": "get_weather", "arguments": {"city": "a\nb"}}': (Status.INVALID_JSON, '{"city": "a'),
    '{"name": "get_weather", "arguments": {"city": "Paris"}}}': (Status.INVALID_JSON, '{"city": "Paris"'),
    '{"name": "get_weather", "arguments": {"days": 1}, "name": "now"}': (Status.MALFORMED, '{"days": 1'),
    '{"name": "get_weather", "arguments": {"days": 1}, "arguments": {}}': (Status.MALFORMED, '{"days": 1'),
}


@pytest.mark.parametrize("body", BROKEN)
def test_a_call_that_breaks_off_after_it_was_shown_stays_the_call_that_was_shown(body: str) -> None:
    """Its text is not shown a second time; a turn that was never streamed has the text instead."""
    r, (status, shown) = renderer("qwen3-like"), BROKEN[body]
    text = f"<tool_call>\n{body}\n</tool_call>"
    ids = r.encode_sampled(f"Look. {text}<|im_end|>")
    _, parsed = streamed(r.parser(tools=TOOLS), ids)
    assert parsed.message["content"] == "Look."
    assert [call["function"] for call in parsed.message["tool_calls"]] == [{"name": "get_weather", "arguments": shown}]
    with pytest.raises(ValueError):
        json.loads(shown)
    whole = r.parse(ids, tools=TOOLS)
    assert whole.attempts == parsed.attempts and whole.attempts[0].status is status
    assert whole.message == {"role": "assistant", "content": f"Look. {text}"}


@pytest.mark.parametrize("name", JSON_FORMATS)
def test_a_call_cut_off_by_the_length_limit(name: str) -> None:
    r = renderer(name)
    ids = r.encode_sampled(JSON_FORMATS[name][0] + '{"city": "Zür')
    _, parsed = streamed(r.parser(tools=TOOLS), ids)
    assert parsed.attempts[0].status is Status.UNCLOSED
    assert parsed.message["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Zür'}
    assert parsed.message["content"] is None
    assert "tool_calls" not in r.parse(ids, tools=TOOLS).message


def test_nothing_is_shown_of_a_call_before_its_name_and_first_brace() -> None:
    r = renderer("qwen3-like")
    for body in (
        '{"name": "get_wea',
        '{"name": "get_weather", "arguments":',
        '{"arguments": {"city": "Paris"}',
        '{"name": "", "arguments": {',
    ):
        _, parsed = streamed(r.parser(tools=TOOLS), r.encode_sampled(f"<tool_call>{body}"))
        assert "tool_calls" not in parsed.message and parsed.message["content"] == f"<tool_call>{body}"


@pytest.mark.parametrize(
    "body",
    [
        '{"arguments": {"city": "Paris"}, "name": "get_weather"}',  # the name comes last
        '{"name": "get_weather", "parameters": {"city": "Paris"}}',  # another key than the format's
        '{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}',  # encoded twice
        '{"name": "get_weather"}',
    ],
)
def test_a_call_written_in_another_way_comes_when_it_is_whole(body: str) -> None:
    r = renderer("qwen3-like")
    ids = r.encode_sampled(f"<tool_call>{body}</tool_call><|im_end|>")
    deltas, parsed = streamed(r.parser(tools=TOOLS), ids)
    assert len(pieces_of(deltas)) == 1
    assert parsed == r.parse(ids, tools=TOOLS) and parsed.attempts[0].status is Status.OK


def test_an_id_counts_where_it_stands_before_the_arguments() -> None:
    r = renderer("qwen3-like")
    for body, own in [
        ('{"id": "abc", "name": "now", "arguments": {}}', True),
        ('{"name": "now", "arguments": {}, "id": "abc"}', False),
    ]:
        ids = r.encode_sampled(f"<tool_call>{body}</tool_call><|im_end|>")
        _, parsed = streamed(r.parser(tools=TOOLS), ids)
        assert parsed == r.parse(ids, tools=TOOLS)
        assert (parsed.message["tool_calls"][0]["id"] == "abc") is own


def test_an_argument_named_id_is_no_call_id() -> None:
    r = renderer("harmony-like")
    ids = r.encode_sampled('<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"id": "42"}<|call|>')
    _, parsed = streamed(r.parser(tools=TOOLS), ids)
    assert parsed == r.parse(ids, tools=TOOLS)
    assert parsed.message["tool_calls"][0]["id"] != "42"


def test_untyped_parameters_go_out_one_by_one() -> None:
    """Each value needs its type, so a parameter is shown when it is whole."""
    r = renderer("glm-like")
    pairs = [("city", "Paris"), ("days", "3"), ("exact", "true")]
    text = "".join(f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in pairs)
    prompt = r.encode_sampled("<|assistant|><think>")
    ids = r.encode_sampled(f"</think><tool_call>get_weather{text}</tool_call><|observation|>")
    deltas, parsed = streamed(r.parser(prompt_ids=prompt, tools=TOOLS), ids)
    assert pieces_of(deltas) == ['{"city": "Paris"', ', "days": 3', ', "exact": true', "}"]
    assert parsed == r.parse(ids, prompt_ids=prompt, tools=TOOLS)


def test_a_parameter_written_twice_is_malformed() -> None:
    r = renderer("glm-like")
    pair = "<arg_key>city</arg_key><arg_value>Paris</arg_value>"
    prompt = r.encode_sampled("<|assistant|><think>")
    ids = r.encode_sampled(f"</think><tool_call>get_weather{pair}{pair}</tool_call><|observation|>")
    _, parsed = streamed(r.parser(prompt_ids=prompt, tools=TOOLS), ids)
    assert parsed.attempts == r.parse(ids, prompt_ids=prompt, tools=TOOLS).attempts
    assert (parsed.attempts[0].status, parsed.attempts[0].detail) == (
        Status.MALFORMED,
        "parameter 'city' is written twice",
    )
    assert parsed.message["tool_calls"][0]["function"]["arguments"] == '{"city": "Paris"'


def of_family(family: Family | None) -> Any:
    """A family whose own tokenizer is not among the fixtures: its markers are plain text on ours."""
    assert family is not None
    r = renderer("qwen3-like")
    return r, compile_grammar(r.codec.spelling, family, stop_token_ids=r.stop_token_ids)


OTHERS = {
    "llama": (
        registry.recognise_llama, "<|start_header_id|><|end_header_id|>", '{"name": "get_weather", "parameters": ', "}<|im_end|>", True,
    ),
    "mistral, one by one": (registry.recognise_mistral, "[TOOL_CALLS][/INST][ARGS]", "[TOOL_CALLS]get_weather[ARGS]", "<|im_end|>", True),
    "mistral, a list": (
        registry.recognise_mistral, "[TOOL_CALLS][/INST]", '[TOOL_CALLS][{"name": "get_weather", "arguments": ', "}]<|im_end|>", False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_families(name: str) -> None:
    """A list of calls has each call's id behind its arguments, so it is shown when it is whole."""
    recognise, template, opens, closes, early = OTHERS[name]
    r, grammar = of_family(recognise(Clues(template=template, tokens=frozenset())))
    deltas, parsed = streamed(Parser(grammar, tools=TOOLS, early=True), r.encode_sampled(opens + ARGUMENTS + closes))
    assert parsed.message["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": ARGUMENTS}
    assert (len(pieces_of(deltas)) > 5) is early


def test_qwen3_coder() -> None:
    template = "<|im_start|><tool_call><function=<parameter="
    r, grammar = of_family(registry.recognise_coder(Clues(template=template, tokens=frozenset())))
    text = (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis <b>\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call><|im_end|>"
    )
    deltas, parsed = streamed(Parser(grammar, tools=TOOLS, early=True), r.encode_sampled(text))
    assert pieces_of(deltas) == ['{"city": "Paris <b>"', ', "days": 3', "}"]
    assert parsed.message["tool_calls"][0]["function"]["arguments"] == '{"city": "Paris <b>", "days": 3}'
