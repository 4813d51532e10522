"""Every known loss is recognised and named; everything else is an edit."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tokentrue.conversation.match_keys import find_changes, format_changes, message_key

CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "f", "arguments": '{"a": 1.0, "b": "\\u00fc", "c": [1, {"d": null}]}'},
}
SERVED: dict[str, Any] = {
    "role": "assistant",
    "content": "It is 4.",
    "reasoning_content": "add them",
    "tool_calls": [CALL],
}
PLAIN = {k: v for k, v in SERVED.items() if k != "reasoning_content"}
SILENT = {**SERVED, "content": None}
PADDED = {"role": "assistant", "content": "  It is 4. \n"}


def without(message: dict[str, Any], *fields: str) -> dict[str, Any]:
    return {k: v for k, v in message.items() if k not in fields}


def with_call(**changes: Any) -> dict[str, Any]:
    return {**SERVED, "tool_calls": [{**CALL, **changes}]}


def with_arguments(arguments: Any, name: str = "f") -> dict[str, Any]:
    return with_call(function={"name": name, "arguments": arguments})


ACCENTED: dict[str, Any] = {"role": "assistant", "content": "caf\u00e9 \ufb01n", "reasoning_content": "\u00c5"}
TEXT = {"type": "text", "text": SERVED["content"]}


def with_thinking(message: dict[str, Any], thinking: Any) -> dict[str, Any]:
    """The text as a part, after a thinking part."""
    part = {"type": "thinking", "thinking": thinking, "signature": "s"}
    return {**message, "content": [part, {"type": "text", "text": message["content"]}]}


MALFORMED = with_arguments('{"a": ')
# As smolagents 1.26 writes a turn with calls: the text, then `str` of the calls.
WRITTEN = (
    "Calling tools:\n[{'id': 'call_1', 'type': 'function', 'function': {'name': 'f', 'arguments': "
    "{'a': 1.0, 'b': 'ü', 'c': [1, {'d': None}]}}}]"
)
LOSSES: list[tuple[str, dict[str, Any], dict[str, Any], set[str]]] = [
    ("malformed arguments as {}", MALFORMED, with_arguments("{}"), {"arguments"}),
    ("malformed arguments as an object", MALFORMED, with_arguments({}), {"arguments"}),
    ("calls as text", SERVED, {"role": "assistant", "content": f"It is 4.\n{WRITTEN}"},
        {"calls_as_text", "arguments", "reasoning_dropped", "whitespace"}),
    ("calls as text alone", SILENT, {"role": "assistant", "content": [{"type": "text", "text": WRITTEN}]},
        {"calls_as_text", "arguments", "reasoning_dropped", "empty_content"}),
    ("text that looks like it", {"role": "assistant", "content": WRITTEN}, {"role": "assistant", "content": WRITTEN}, set()),
    ("same", SERVED, json.loads(json.dumps(SERVED)), set()),
    ("reasoning gone", SERVED, without(SERVED, "reasoning_content"), {"reasoning_dropped"}),
    ("reasoning null", SERVED, {**SERVED, "reasoning_content": None}, {"reasoning_dropped"}),
    ("inlined", SERVED, {**PLAIN, "content": "<think>\nadd them\n</think>\n\nIt is 4."}, {"reasoning_inlined"}),
    ("inlined, bare", SERVED, {**PLAIN, "content": "<think>add them</think>It is 4."}, {"reasoning_inlined"}),
    ("an empty block", SERVED, {**PLAIN, "content": "<think>\n\n</think>\n\nIt is 4."}, {"reasoning_dropped", "whitespace"}),
    ("field renamed", SERVED, {**PLAIN, "reasoning": "add them"}, set()),
    ("as a thinking part", SERVED, {**PLAIN, "content": [
        {"type": "thinking", "thinking": "add them", "signature": "s"}, {"type": "text", "text": "It is 4."}]}, {"parts"}),
    ("ids", SERVED, with_call(id="toolu_9"), {"call_ids"}),
    ("key order and spaces", SERVED, with_arguments('{"c":[1,{"d":null}],"b":"ü","a":1.0}'), {"arguments"}),
    ("numbers", SERVED, with_arguments('{"a": 1, "b": "ü", "c": [1.0, {"d": null}]}'), {"arguments"}),
    ("an object", SERVED, with_arguments({"a": 1.0, "b": "ü", "c": [1, {"d": None}]}), {"arguments"}),
    ("parts", SERVED, {**SERVED, "content": [{"type": "text", "text": "It is "}, {"type": "text", "text": "4."}]}, {"parts"}),
    ("null to empty", SILENT, {**SILENT, "content": ""}, {"empty_content"}),
    ("null to missing", SILENT, without(SILENT, "content"), set()),
    ("null to no parts", SILENT, {**SILENT, "content": []}, {"parts"}),
    ("trimmed", PADDED, {**PADDED, "content": "It is 4."}, {"whitespace"}),
    ("left-trimmed", PADDED, {**PADDED, "content": "It is 4. \n"}, {"whitespace"}),
    ("extra fields", SERVED, {**SERVED, "annotations": [1], "refusal": None}, {"extra_fields"}),
    ("thinking in both places", SERVED, with_thinking(SERVED, SERVED["reasoning_content"]), {"parts"}),
    ("thinking in both fields", SERVED, {**SERVED, "reasoning": SERVED["reasoning_content"]}, set()),
    ("thinking in a list", SERVED, with_thinking(PLAIN, [{"type": "text", "text": "add them"}]), {"parts"}),
    ("empty thinking", SERVED, with_thinking(SERVED, ""), {"parts"}),
    ("null extras", SERVED, {**SERVED, "refusal": None, "audio": None, "function_call": None}, set()),
    ("several", SERVED, {**without(with_call(id="x"), "reasoning_content"), "content": [{"type": "text", "text": " It is 4."}], "x": 1},
     {"reasoning_dropped", "call_ids", "parts", "whitespace", "extra_fields"}),
]  # fmt: skip

EDITS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("malformed arguments mended", MALFORMED, with_arguments('{"a": 1}')),
    ("malformed arguments written otherwise", MALFORMED, with_arguments('{"a": 1')),
    ("arguments emptied", SERVED, with_arguments("{}")),
    ("calls as text, edited", SERVED, {"role": "assistant", "content": f"It is 4.\n{WRITTEN}".replace("1.0", "2.0")}),
    ("calls as text, another tool", SERVED, {"role": "assistant", "content": WRITTEN.replace("'f'", "'g'")}),
    ("calls as text, text after them", SERVED, {"role": "assistant", "content": f"It is 4.\n{WRITTEN} ok"}),
    ("calls as text, text gone", SERVED, {"role": "assistant", "content": WRITTEN}),
    ("calls as text, in a line", SERVED, {"role": "assistant", "content": f"It is 4. {WRITTEN}"}),
    ("calls as text beside calls", SERVED, {**SERVED, "content": f"It is 4.\n{WRITTEN}"}),
    ("calls as text that run", SERVED, {"role": "assistant", "content": "It is 4.\nCalling tools:\n[print(1)]"}),
    ("text served, calls sent", {"role": "assistant", "content": f"It is 4.\n{WRITTEN}"}, SERVED),
    ("calls as text, deep", SERVED, {"role": "assistant", "content": "It is 4.\nCalling tools:\n" + "[" * 9000}),
    ("one character", SERVED, {**SERVED, "content": "It is 5."}),
    ("inner whitespace", SERVED, {**SERVED, "content": "It  is 4."}),
    ("case", SERVED, {**SERVED, "content": "it is 4."}),
    ("a word more", SERVED, {**SERVED, "content": "It is 4. Yes"}),
    ("content gone", SERVED, {**SERVED, "content": None}),
    ("reasoning edited", SERVED, {**SERVED, "reasoning_content": "add it"}),
    ("reasoning cut", SERVED, {**SERVED, "reasoning_content": "add"}),
    ("reasoning invented", PADDED, {**PADDED, "reasoning_content": "why"}),
    (
        "inlined otherwise",
        SERVED,
        {**without(SERVED, "reasoning_content"), "content": "<think>\nadd it\n</think>\n\nIt is 4."},
    ),
    ("call gone", SERVED, without(SERVED, "tool_calls")),
    ("call twice", SERVED, {**SERVED, "tool_calls": [CALL, CALL]}),
    ("another name", SERVED, with_arguments(CALL["function"]["arguments"], name="g")),
    ("a value", SERVED, with_arguments('{"a": 2, "b": "ü", "c": [1, {"d": null}]}')),
    ("true is not one", SERVED, with_arguments('{"a": true, "b": "ü", "c": [1, {"d": null}]}')),
    ("a string is not a number", SERVED, with_arguments('{"a": "1.0", "b": "ü", "c": [1, {"d": null}]}')),
    ("null is not missing", SERVED, with_arguments('{"a": 1.0, "b": "ü", "c": [1, {}]}')),
    ("list order", SERVED, with_arguments('{"a": 1.0, "b": "ü", "c": [{"d": null}, 1]}')),
    ("unnormalised unicode", SERVED, with_arguments('{"a": 1.0, "b": "u\\u0308", "c": [1, {"d": null}]}')),
    ("decomposed text", ACCENTED, {**ACCENTED, "content": "cafe\u0301 \ufb01n"}),
    ("an accent more", ACCENTED, {**ACCENTED, "content": "caf\u00e9\u0301 \ufb01n"}),
    ("a ligature taken apart", ACCENTED, {**ACCENTED, "content": "caf\u00e9 fin"}),
    ("decomposed reasoning", ACCENTED, {**ACCENTED, "reasoning_content": "A\u030a"}),
    ("thinking added", SERVED, with_thinking(SERVED, "and lie")),
    ("other thinking in a part", without(SERVED, "reasoning_content"), with_thinking(PADDED, "why")),
    ("thinking added in a second field", SERVED, {**SERVED, "reasoning": "and lie"}),
    ("thinking under another name", SERVED, {**SERVED, "content": [{"type": "reasoning", "reasoning": "lie"}, TEXT]}),
    ("thinking in a list", SERVED, with_thinking(SERVED, [{"type": "text", "text": "lie"}])),
    ("reasoning that is no text", SERVED, {**SERVED, "reasoning_content": {"text": "lie"}}),
    ("broken JSON", SERVED, with_arguments('{"a": 1.0, "b": "ü", "c": [1, {"d": null}]')),
]


@pytest.mark.parametrize(
    ("served", "replayed", "losses"), [case[1:] for case in LOSSES], ids=[case[0] for case in LOSSES]
)
def test_a_known_loss_is_named(served: dict[str, Any], replayed: dict[str, Any], losses: set[str]) -> None:
    found = find_changes(served, replayed)
    assert found is not None and set(found) == losses
    assert message_key(served) == message_key(replayed), "the key must not tell them apart"


@pytest.mark.parametrize(("served", "replayed"), [case[1:] for case in EDITS], ids=[case[0] for case in EDITS])
def test_anything_else_is_an_edit(served: dict[str, Any], replayed: dict[str, Any]) -> None:
    assert find_changes(served, replayed) is None


def test_empty_arguments_and_an_empty_object_are_one() -> None:
    for a in ("", "{}", " { } ", None, {}):
        for b in ("", "{}", " { } ", None, {}):
            assert find_changes(with_arguments(a), with_arguments(b)) is not None
    assert find_changes(with_arguments("{}"), with_arguments("[]")) is None


def test_text_that_is_no_utf8_is_compared_too() -> None:
    cut = {"role": "assistant", "content": "caf\udcc3"}
    assert find_changes(cut, dict(cut)) == ()
    assert find_changes(cut, {**cut, "content": "caf"}) is None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"role": "user", "content": "4"}, {"role": "user", "content": " 4"}),
        ({"role": "user", "content": "4"}, {"role": "system", "content": "4"}),
        ({"role": "user", "content": "4"}, {"role": "user", "content": "4", "name": "bob"}),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]},
            {"role": "user", "content": ""},
        ),
    ],
)
def test_given_messages_differ_by_anything_that_is_rendered(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert message_key(one) != message_key(other)


def test_given_messages_agree_in_any_spelling() -> None:
    spellings: list[dict[str, Any]] = [
        {"role": "user", "content": "ab"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "a"},
                {"type": "input_text", "text": "b", "cache_control": {"type": "x"}},
            ],
        },
        {"role": "user", "content": "ab", "unknown": 1},
    ]
    assert len({message_key(message) for message in spellings}) == 1
    assert message_key({"role": "developer", "content": "x"}) == message_key({"role": "system", "content": "x"})


def test_labels() -> None:
    assert format_changes(()) == "exact"
    assert format_changes(("a", "b"), ambiguous=True) == "a+b+ambiguous"
