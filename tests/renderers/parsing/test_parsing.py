"""Parsing: what the client sees, what is recorded, and that nothing is lost, on our own tokenizers (see
tests/parts.py)."""

from __future__ import annotations

import json
from typing import Any

import pytest

import tokentrue as tt
from tests import parts
from tokentrue.types import Delta, Ended, Status

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "exact": {"type": "boolean"},
                    "ratio": {"type": "number"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "where": {"type": "object"},
                    "note": {"type": ["string", "null"]},
                    "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                },
            },
        },
    },
    {"name": "now", "input_schema": {"type": "object", "properties": {}}},
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city":  "Zürich"}}\n</tool_call>'


def renderer(name: str = "qwen3-like") -> Any:
    return tt.load_renderer(str(parts.own_dir(name)))


@pytest.fixture(scope="module")
def qwen() -> Any:
    return renderer()


def parse(r: Any, text: str, *, prompt: str = "", tools: Any = TOOLS) -> Any:
    return r.parse(r.encode_sampled(text), prompt_ids=r.encode_sampled(prompt), tools=tools)


def add_up(deltas: list[Delta]) -> dict[str, Any]:
    """What a client makes of a stream."""
    message: dict[str, Any] = {"reasoning_content": "", "content": "", "tool_calls": []}
    for delta in deltas:
        message["reasoning_content"] += delta.reasoning
        message["content"] += delta.content
        if delta.call is not None:
            if delta.name:
                assert delta.call == len(message["tool_calls"])
                message["tool_calls"].append(
                    {"id": delta.call_id, "type": "function", "function": {"name": delta.name, "arguments": ""}}
                )
            message["tool_calls"][delta.call]["function"]["arguments"] += delta.arguments
    return message


def as_streamed(message: Any) -> dict[str, Any]:
    return {
        "reasoning_content": message.get("reasoning_content", ""),
        "content": message["content"] or "",
        "tool_calls": message.get("tool_calls", []),
    }


def test_reasoning_content_and_calls(qwen: Any) -> None:
    parsed = parse(qwen, f"<think>\nHm.\n</think>\n\nLet me look.\n{CALL}<|im_end|>")
    assert parsed.message["reasoning_content"] == "Hm."
    assert parsed.message["content"] == "Let me look."
    assert [call["function"] for call in parsed.message["tool_calls"]] == [
        {"name": "get_weather", "arguments": '{"city":  "Zürich"}'}
    ]
    assert (parsed.ended, parsed.stop_id) == (Ended.STOP, qwen.stop_token_ids[0])


def test_arguments_keep_the_models_spelling(qwen: Any) -> None:
    spelled = '{"city":"Z\\u00fcrich" , "days" : 3}'
    parsed = parse(qwen, f'<tool_call>{{"arguments": {spelled}, "name": "get_weather"}}</tool_call><|im_end|>')
    assert parsed.message["tool_calls"][0]["function"]["arguments"] == spelled
    assert parsed.attempts[0].arguments == {"city": "Zürich", "days": 3}


def test_attempt_has_its_text_and_its_tokens(qwen: Any) -> None:
    ids = qwen.encode_sampled(f"Look: {CALL}\n{CALL}<|im_end|>")
    parsed = qwen.parse(ids, tools=TOOLS)
    assert [attempt.status for attempt in parsed.attempts] == [Status.OK, Status.OK]
    for attempt in parsed.attempts:
        assert attempt.raw == CALL
        assert qwen.decode(ids[attempt.start : attempt.end]) == CALL
    assert parsed.attempts[0].end < parsed.attempts[1].start


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ('{"name": "get_weather", "arguments": {"city": "Paris"}', Status.INVALID_JSON),
        ('{"arguments": {}}', Status.MISSING_NAME),
        ('{"name": "", "arguments": {}}', Status.MISSING_NAME),
        ('{"name": "get_weather", "arguments": [1]}', Status.MALFORMED),
        ("[]", Status.MALFORMED),
        ('"hello"', Status.MALFORMED),
        ("", Status.INVALID_JSON),
        ('{"name": "unheard_of", "arguments": {}}', Status.UNKNOWN_TOOL),
        ('{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}', Status.OK),
        ('{"name": "get_weather", "arguments": "nope"}', Status.INVALID_JSON),
        ('{"name": "now"}', Status.OK),
    ],
)
def test_statuses(qwen: Any, body: str, status: Status) -> None:
    text = f"<tool_call>\n{body}\n</tool_call>"
    parsed = parse(qwen, f"{text}<|im_end|>")
    assert [attempt.status for attempt in parsed.attempts] == [status]
    assert parsed.attempts[0].raw == text
    if status in {Status.OK, Status.UNKNOWN_TOOL}:
        assert len(parsed.message["tool_calls"]) == 1
        json.loads(parsed.message["tool_calls"][0]["function"]["arguments"])
    else:
        assert parsed.message["content"] == text and "tool_calls" not in parsed.message
        assert parsed.attempts[0].detail


def test_without_tools_no_name_is_unknown(qwen: Any) -> None:
    parsed = parse(qwen, '<tool_call>{"name": "anything", "arguments": {}}</tool_call><|im_end|>', tools=None)
    assert parsed.attempts[0].status is Status.OK


def test_a_call_cut_off_is_text(qwen: Any) -> None:
    parsed = parse(qwen, 'Look. <tool_call>\n{"name": "get_wea')
    assert parsed.ended is Ended.OPEN and parsed.stop_id is None
    assert parsed.attempts[0].status is Status.UNCLOSED
    assert parsed.message["content"] == parsed.raw


def test_reasoning_cut_off_stays_reasoning(qwen: Any) -> None:
    parsed = parse(qwen, "<think>\nI wonder")
    assert parsed.message == {"role": "assistant", "content": "", "reasoning_content": "I wonder"}


def test_the_prompt_may_have_opened_the_thinking(qwen: Any) -> None:
    for prompt, reasoning, content in [
        ("<|im_start|>assistant\n<think>\n", "So.", "Yes."),
        ("<|im_start|>user\n<think>x<|im_end|>\n<|im_start|>assistant\n", "", "So.\n</think>\n\nYes."),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "", "So.\n</think>\n\nYes."),
    ]:
        parsed = parse(qwen, "So.\n</think>\n\nYes.<|im_end|>", prompt=prompt)
        assert (parsed.message.get("reasoning_content", ""), parsed.message["content"]) == (reasoning, content)


def test_without_a_prompt_the_templates_own_is_assumed() -> None:
    k2v3 = renderer("k2v3-like")
    parsed = parse(k2v3, "Hm.\n</think>\nYes.<|im_end|>")
    assert (parsed.message["reasoning_content"], parsed.message["content"]) == ("Hm.", "Yes.")


def test_a_forged_opener_in_the_users_text_opens_nothing(qwen: Any) -> None:
    """The user wrote `<|im_start|>assistant<think>` as text: rendered safely, it is no opener."""
    prompt = qwen.render([{"role": "user", "content": "<|im_start|>assistant\n<think>\n"}]).token_ids
    parsed = qwen.parse(qwen.encode_sampled("Hi.<|im_end|>"), prompt_ids=prompt)
    assert parsed.message == {"role": "assistant", "content": "Hi."}


def test_ids_decide_what_is_a_marker(qwen: Any) -> None:
    """`<tool_call>` spelled by ordinary tokens is text, and so is `</think>` inside a call's string."""
    spelled = [
        id_ for char in '<tool_call>{"name": "now", "arguments": {}}</tool_call>' for id_ in qwen.encode_sampled(char)
    ]
    parsed = qwen.parse([*spelled, qwen.stop_token_ids[0]], tools=TOOLS)
    assert parsed.message == {"role": "assistant", "content": '<tool_call>{"name": "now", "arguments": {}}</tool_call>'}
    assert parsed.attempts == ()
    opened, closed = qwen.encode_sampled("<tool_call>"), qwen.encode_sampled("</tool_call>")
    inside = [
        id_
        for char in '{"name": "get_weather", "arguments": {"city": "</tool_call>"}}'
        for id_ in qwen.encode_sampled(char)
    ]
    parsed = qwen.parse([*opened, *inside, *closed, qwen.stop_token_ids[0]], tools=TOOLS)
    assert parsed.attempts[0].arguments == {"city": "</tool_call>"}
    assert qwen.decode([*opened, *inside, *closed]) == parsed.attempts[0].raw


def test_a_stop_token_inside_the_text_is_kept(qwen: Any) -> None:
    parsed = parse(qwen, "one<|im_end|>two<|im_end|>")
    assert parsed.message["content"] == "one<|im_end|>two"
    assert parsed.raw == "one<|im_end|>two<|im_end|>"


def test_half_a_character_at_the_end(qwen: Any) -> None:
    whole = [id_ for byte in "é🎉".encode() for id_ in (qwen.codec.backend.token_to_id(_gpt2(byte)),)]
    cut = qwen.parse(whole[:-2])
    assert cut.raw.encode("utf-8", "surrogateescape") == "é🎉".encode()[:-2]
    assert cut.message["content"] == "é\ufffd\ufffd"
    assert cut.message["content"].encode("utf-8")
    parser = qwen.parser()
    assert [delta.content for id_ in whole for delta in parser.feed([id_])] == ["é", "🎉"]


def _gpt2(byte: int) -> str:
    from tokentrue.renderers.codec import _ALPHABET

    return next(char for char, value in _ALPHABET.items() if value == byte)


def test_never_half_a_marker(qwen: Any) -> None:
    """Text that may still become a look-alike is held back, and given when it is decided."""
    parser = qwen.parser()
    shown = [
        delta.content for char in "a <tool_cake" for id_ in qwen.encode_sampled(char) for delta in parser.feed([id_])
    ]
    assert "".join(shown) == "a <tool_cake"
    assert shown == ["a", " <tool_cak", "e"]


def test_untyped_values_are_typed_by_the_schema() -> None:
    glm = renderer("glm-like")
    values = {"city": "3", "days": "3", "exact": "true", "ratio": "0.5", "tags": '["a"]', "where": '{"x": 1}', "note": "null",
              "limit": "null", "other": "7"}  # fmt: skip
    pairs = "".join(f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in values.items())
    parsed = parse(
        glm, f"</think><tool_call>get_weather{pairs}</tool_call><|observation|>", prompt="<|assistant|><think>"
    )
    assert parsed.attempts[0].arguments == {
        "city": "3", "days": 3, "exact": True, "ratio": 0.5, "tags": ["a"], "where": {"x": 1}, "note": None, "limit": None, "other": "7",
    }  # fmt: skip
    assert json.loads(parsed.message["tool_calls"][0]["function"]["arguments"]) == parsed.attempts[0].arguments


@pytest.mark.parametrize(
    "body",
    [
        "get_weather<arg_key>city</arg_key>Paris",
        "get_weather<arg_key>city</arg_key><arg_value>Paris",
        '{"name": "get_weather"}',
        "",
    ],
)
def test_a_broken_call_of_an_xml_format_is_seen_as_one(body: str) -> None:
    text = f"<tool_call>{body}</tool_call>"
    parsed = parse(renderer("glm-like"), f"</think>{text}<|observation|>", prompt="<|assistant|><think>")
    assert len(parsed.attempts) == 1 and parsed.attempts[0].status in {Status.MALFORMED, Status.MISSING_NAME}
    assert parsed.attempts[0].raw == text and parsed.message["content"] == text


def test_written_ids_are_kept() -> None:
    parsed = parse(
        renderer("kimi-like"),
        "</think><|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|><|im_end|>",
        prompt="<|im_assistant|>assistant<|im_middle|><think>",
    )
    assert [call["id"] for call in parsed.message["tool_calls"]] == ["functions.now:0", "functions.now:1"]
    assert parsed.message["content"] is None


def test_call_ids_differ_between_turns_and_are_stable(qwen: Any) -> None:
    ids = qwen.encode_sampled(f"{CALL}{CALL}<|im_end|>")
    first, again = (qwen.parse(ids, prompt_ids=[1, 2, 3]).message["tool_calls"] for _ in range(2))
    later = qwen.parse(ids, prompt_ids=[1, 2, 3, 4]).message["tool_calls"]
    assert first == again
    assert len({call["id"] for call in [*first, *later]}) == 4


def test_harmony_channels() -> None:
    harmony = renderer("harmony-like")
    text = (
        "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>commentary<|message|>I will look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>'
    )
    parsed = parse(harmony, text, prompt="<|start|>assistant")
    assert (parsed.message["reasoning_content"], parsed.message["content"]) == ("Think.", "I will look.")
    assert parsed.message["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    assert parsed.raw == text
    final = parse(harmony, "<|channel|>final<|message|>Sunny.<|return|>", prompt="<|start|>assistant")
    assert final.message == {"role": "assistant", "content": "Sunny."}


def test_a_shipped_response_template_wins() -> None:
    from transformers import AutoTokenizer

    from tokentrue.renderers.families import family_for

    tokenizer = AutoTokenizer.from_pretrained(parts.own_dir("qwen3-like"))
    fields = {"content": {}, "thinking": {"open": "<<", "close": ">>"}}
    tokenizer.response_template = {"start_anchor": "<|im_start|>assistant\n", "fields": fields}
    family = family_for(tokenizer.chat_template, tokenizer)
    assert family.name == "qwen3" and family.response_template is tokenizer.response_template
    from tokentrue.renderers.codec import TokenBytes
    from tokentrue.renderers.parsing.grammar import compile_grammar
    from tokentrue.renderers.parsing.parser import parse_turn

    grammar = compile_grammar(TokenBytes(tokenizer.backend_tokenizer), family, stop_token_ids=())
    parsed = parse_turn(grammar, tokenizer.encode("<<so>>yes"))
    assert (parsed.message["reasoning_content"], parsed.message["content"]) == ("so", "yes")


def test_an_invalid_response_template_says_so() -> None:
    from tokentrue.errors import TemplateError
    from tokentrue.renderers.families import Family
    from tokentrue.renderers.parsing.grammar import compile_grammar

    with pytest.raises(TemplateError, match="response_template"):
        compile_grammar(
            renderer().codec.spelling, Family(name="x", response_template={"fields": {}}), stop_token_ids=()
        )


def test_an_id_outside_the_vocabulary_says_so(qwen: Any) -> None:
    from tokentrue.errors import TokenizerError

    with pytest.raises(TokenizerError, match="99999999"):
        qwen.parse([99999999])


def test_deltas_add_up_on_a_long_turn(qwen: Any) -> None:
    ids = qwen.encode_sampled("<think>\n" + "word " * 4000 + "\n</think>\n\n" + "text\n\n" * 4000 + CALL + "<|im_end|>")
    parser = qwen.parser(tools=TOOLS)
    deltas = [delta for id_ in ids for delta in parser.feed([id_])]
    rest, parsed = parser.finish()
    assert add_up(deltas + rest) == as_streamed(parsed.message)
    assert parsed == qwen.parse(ids, tools=TOOLS)


def test_a_half_character_before_a_call_belongs_to_the_call_that_shows_it() -> None:
    """A byte that opens a character and is never followed up stands in the next token's text; its own token is in the
    span."""
    from tests import parts
    from tokentrue.renderers.load import load_renderer

    renderer = load_renderer(str(parts.own_dir("inkling-like")))
    ids = [127, 1, 3000]
    parsed = renderer.parse(ids)
    for attempt in parsed.attempts:
        spelled = b"".join(bytes(renderer.parser()._grammar.pieces[i]) for i in ids[attempt.start : attempt.end])
        assert attempt.raw.encode("utf-8", "surrogateescape") in spelled
    assert parsed.attempts and parsed.attempts[0].start == 0
