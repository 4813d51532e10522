"""What a dialect takes, what it refuses by name, and that nothing is silently dropped. Pure functions, no server."""

from __future__ import annotations

import json
from typing import Any, get_type_hints

import pytest

from tests.gateway.inside import read_conversation
from tokentrue.errors import InputError
from tokentrue.gateway.dialects import base
from tokentrue.gateway.dialects.anthropic import Anthropic
from tokentrue.gateway.dialects.base import Dialect, encode
from tokentrue.gateway.dialects.openai_chat import ChatBody, OpenAIChat
from tokentrue.gateway.dialects.openai_responses import OpenAIResponses
from tokentrue.gateway.dialects.signing import ReasoningSigner
from tokentrue.sessions import client

CHAT, RESPONSES, ANTHROPIC = (
    OpenAIChat(ReasoningSigner(b"secret")),
    OpenAIResponses(ReasoningSigner(b"x")),
    Anthropic(ReasoningSigner(b"x")),
)
HEAD = {"model": "m", "max_tokens": 9}
SAID = {"role": "user", "content": "hi"}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {}}}


def asked(dialect: Dialect, head: dict[str, Any], items: list[Any]) -> tuple[Any, list[Any]]:
    """The head and the messages of a request, as the gateway parses them."""
    body = {**(HEAD if dialect is ANTHROPIC else {"model": "m"}), **head, dialect.items_key: items}
    decoded = dialect.decode(json.dumps(body).encode())
    return decoded.head, list(read_conversation(dialect, decoded))


REFUSED: list[tuple[Dialect, dict[str, Any], list[Any], str]] = [
    (CHAT, {"frobnicate": 1}, [SAID], "frobnicate"),
    (CHAT, {"logit_bias": {"1": 5}}, [SAID], "logit_bias"),
    (CHAT, {"functions": []}, [SAID], "functions"),
    (CHAT, {"audio": {}}, [SAID], "audio"),
    (CHAT, {"modalities": ["audio"]}, [SAID], "modalities"),
    (CHAT, {"temperature": "hot"}, [SAID], "temperature"),
    (CHAT, {"temperature": -1}, [SAID], "temperature"),
    (CHAT, {"top_p": 0}, [SAID], "top_p"),
    (CHAT, {"n": 0}, [SAID], "n must be"),
    (CHAT, {"max_tokens": 1, "max_completion_tokens": 2}, [SAID], "max_completion_tokens"),
    (CHAT, {"max_tokens": 0}, [SAID], "max_tokens"),
    (CHAT, {"top_logprobs": 2}, [SAID], "top_logprobs"),
    (CHAT, {"tools": [{"type": "web_search"}]}, [SAID], r"tools\[0\].type"),
    (CHAT, {"tools": [{"type": "function", "function": {}}]}, [SAID], r"tools\[0\].function.name"),
    (CHAT, {"tool_choice": "sometimes"}, [SAID], "tool_choice"),
    (CHAT, {"tool_choice": "required"}, [SAID], "tool_choice: needs tools"),
    (CHAT, {"response_format": {"type": "xml"}}, [SAID], "response_format.type"),
    (CHAT, {"response_format": {"type": "json_schema"}}, [SAID], "response_format.json_schema.schema"),
    (
        CHAT,
        {"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        [SAID],
        "tool_choice.function.name",
    ),
    (CHAT, {"tools": [FUNCTION], "tool_choice": {"type": "custom"}}, [SAID], "tool_choice"),
    (
        CHAT,
        {"tools": [FUNCTION], "tool_choice": "required", "response_format": {"type": "json_object"}},
        [SAID],
        "response_format",
    ),
    (ANTHROPIC, {"output_config": {"format": {"type": "json_schema"}}}, [SAID], "output_config.format"),
    (CHAT, {}, [{"role": "function", "content": "x"}], r"messages\[0\].role"),
    (
        CHAT,
        {},
        [SAID, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
        r"messages\[1\].content\[0\]",
    ),
    (CHAT, {}, [{"role": "tool", "content": "x"}], r"messages\[0\].tool_call_id"),
    (CHAT, {}, [{"role": "user", "content": None}], r"messages\[0\].content"),
    (CHAT, {}, ["hi"], r"messages\[0\]"),
    (CHAT, {}, [{"role": "assistant", "tool_calls": [{"type": "custom"}]}], r"messages\[0\].tool_calls\[0\]"),
    (RESPONSES, {"background": True}, [SAID], "background"),
    (RESPONSES, {"truncation": "auto"}, [SAID], "truncation"),
    (RESPONSES, {"conversation": "c"}, [SAID], "conversation"),
    (RESPONSES, {"include": ["file_search_call.results"]}, [SAID], r"include\[0\]"),
    (RESPONSES, {"tools": [{"type": "web_search"}]}, [SAID], r"tools\[0\].type"),
    (
        RESPONSES,
        {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}]},
        [SAID],
        r"tools\[0\].tools\[0\].type",
    ),
    (
        RESPONSES,
        {
            "tools": [
                {"type": "custom", "name": "n__f"},
                {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]},
            ]
        },
        [SAID],
        r"tools\[1\].tools\[0\]",
    ),
    (RESPONSES, {"previous_response_id": "x"}, [SAID], "previous_response_id"),
    (RESPONSES, {"previous_response_id": "resp_ns_n"}, [SAID], "store: false"),
    (RESPONSES, {"max_tool_calls": 3}, [SAID], "max_tool_calls"),
    (RESPONSES, {}, [{"type": "item_reference", "id": "x"}], r"input\[0\].type"),
    (
        RESPONSES,
        {},
        [{"type": "message", "role": "user", "content": [{"type": "input_image"}]}],
        r"input\[0\].content\[0\]",
    ),
    (RESPONSES, {}, [{"type": "function_call", "name": "f"}], r"input\[0\]"),
    (ANTHROPIC, {"max_tokens": None}, [SAID], "max_tokens"),
    (ANTHROPIC, {"mcp_servers": []}, [SAID], "mcp_servers"),
    (ANTHROPIC, {"container": "c"}, [SAID], "container"),
    (ANTHROPIC, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, [SAID], r"tools\[0\].type"),
    (ANTHROPIC, {"tools": [{"name": "f"}]}, [SAID], r"tools\[0\]"),
    (ANTHROPIC, {"tool_choice": {"type": "maybe"}}, [SAID], "tool_choice.type"),
    (
        ANTHROPIC,
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        [SAID],
        r"context_management.edits\[0\]",
    ),
    (ANTHROPIC, {}, [{"role": "user", "content": [{"type": "image", "source": {}}]}], r"messages\[0\].content\[0\]"),
    (ANTHROPIC, {}, [{"role": "user", "content": [{"type": "document"}]}], r"messages\[0\].content\[0\]"),
    (ANTHROPIC, {}, [SAID, {"role": "assistant", "content": "Sure, "}], "prefilled"),
    (
        ANTHROPIC,
        {},
        [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}],
        "redacted_thinking",
    ),
    (ANTHROPIC, {}, [{"role": "user", "content": []}], r"messages\[0\].content"),
    (ANTHROPIC, {}, [{"role": "tool", "content": "x"}], r"messages\[0\].role"),
]


@pytest.mark.parametrize(
    ("dialect", "head", "items", "named"), REFUSED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_what_is_not_supported_is_refused_by_name(
    dialect: Dialect, head: dict[str, Any], items: list[Any], named: str
) -> None:
    with pytest.raises(InputError, match=named):
        asked(dialect, head, items)


def test_every_json_value_of_a_request_can_be_echoed() -> None:
    value = {"maximum": 10**30, "minimum": -(2**64), "text": "\ud800", "flag": True, "list": [2**64]}
    assert json.loads(encode(value)) == value


def test_the_client_in_this_process_takes_the_same_hints() -> None:
    fields = get_type_hints(ChatBody, include_extras=True)
    hints = {name for name, kind in fields.items() if kind == base.Hint}
    assert len(hints) > 5 and hints <= client._IGNORED


def test_hints_are_accepted() -> None:
    asked(
        CHAT, {"user": "u", "metadata": {}, "store": True, "service_tier": "auto", "parallel_tool_calls": False}, [SAID]
    )
    asked(
        CHAT,
        {"reasoning_effort": "high", "prompt_cache_key": "k", "safety_identifier": "s", "verbosity": "low"},
        [SAID],
    )
    asked(
        RESPONSES,
        {
            "reasoning": {"effort": "low", "summary": "auto"},
            "prompt_cache_key": "k",
            "include": ["reasoning.encrypted_content"],
        },
        [SAID],
    )
    asked(
        ANTHROPIC,
        {"metadata": {"user_id": "u"}, "thinking": {"type": "enabled", "budget_tokens": 99}, "service_tier": "auto"},
        [SAID],
    )
    marked = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    call, messages = asked(ANTHROPIC, {"system": [marked]}, [{"role": "user", "content": [marked]}])
    assert (call.leading_messages, messages) == (
        ({"role": "system", "content": "hi"},),
        [{"role": "user", "content": "hi"}],
    )


def test_sampling_reaches_the_engine_by_name() -> None:
    head = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "seed": 4,
        "stop": "END",
        "max_completion_tokens": 7,
        "n": 3,
    }
    call, _ = asked(
        CHAT,
        {**head, "presence_penalty": 0.1, "logprobs": True, "top_logprobs": 5, "chat_template_kwargs": {"a": 1}},
        [SAID],
    )
    sampling = call.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed) == (
        0.5,
        0.9,
        0,
        0.1,
        4,
    )
    assert (sampling.stop, sampling.max_tokens, call.n, sampling.top_logprobs) == (("END",), 7, 3, 5)
    assert (sampling.presence_penalty, call.template_kwargs) == (0.1, {"a": 1})
    call, _ = asked(ANTHROPIC, {"stop_sequences": ["A", "B"], "top_k": 5}, [SAID])
    assert (call.sampling.stop, call.sampling.top_k, call.sampling.max_tokens) == (("A", "B"), 5, 9)
    assert asked(RESPONSES, {"max_output_tokens": 3}, [SAID])[0].sampling.max_tokens == 3


def test_what_only_an_engine_can_enforce_goes_on_by_name() -> None:
    tools = {"tools": [FUNCTION]}
    assert asked(CHAT, {**tools, "tool_choice": "required"}, [SAID])[0].sampling.extra == {"tool_choice": "required"}
    assert asked(CHAT, {**tools, "tool_choice": "none"}, [SAID])[0].tools is None
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
    assert asked(CHAT, {"response_format": schema}, [SAID])[0].sampling.extra == {"response_format": schema}
    flat = {"format": {"type": "json_schema", "name": "s", "schema": {"type": "object"}}}
    assert asked(RESPONSES, {"text": flat}, [SAID])[0].sampling.extra == {"response_format": schema}
    one = {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "tool", "name": "f"}}
    assert asked(ANTHROPIC, one, [SAID])[0].sampling.extra == {
        "tool_choice": {"type": "function", "function": {"name": "f"}}
    }


def test_items_of_one_model_turn_are_one_assistant_message() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "g", "input": "x\ny"},
        {"type": "function_call", "call_id": "c3", "name": "h", "namespace": "n", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "2"},
    ]
    _, messages = asked(RESPONSES, {}, items)
    calls = [("c1", "f", "{}"), ("c2", "g", '{"input":"x\\ny"}'), ("c3", "n__h", "{}")]
    assert messages == [
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "ok",
            "reasoning_content": "hm",
            "tool_calls": [{"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in calls],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
    ]


def test_tool_results_and_text_keep_their_order() -> None:
    content = [
        {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "1"}], "is_error": True},
        {"type": "tool_result", "tool_use_id": "b", "content": "2"},
        {"type": "tool_result", "tool_use_id": "c"},
        {"type": "text", "text": "and"},
        {"type": "text", "text": "then"},
    ]
    _, messages = asked(ANTHROPIC, {}, [{"role": "user", "content": content}])
    assert messages == [
        {"role": "tool", "tool_call_id": "a", "content": "1", "is_error": True},
        {"role": "tool", "tool_call_id": "b", "content": "2"},
        {"role": "tool", "tool_call_id": "c", "content": ""},
        {"role": "user", "content": "and\nthen"},
    ]


def test_the_billing_block_is_no_part_of_the_prompt() -> None:
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=ab12;"},
        {"type": "text", "text": "Be brief."},
    ]
    assert asked(ANTHROPIC, {"system": system}, [SAID])[0].leading_messages == (
        {"role": "system", "content": "Be brief."},
    )
