"""A plan that is remembered from another request of the same shape gives what planning on a whole render gives, for any
request."""

from __future__ import annotations

import random
from collections import UserDict
from typing import Any

import pytest

import tokentrue as tt
from tests.marks import examples
from tests.renderers.talk import OWN, TOOLS, calls, extended, folder_of, judge, loaded, result, says, stop_id, user
from tokentrue.errors import TokenTrueError
from tokentrue.ids import TokenIds
from tokentrue.renderers import Renderer, renderer_of
from tokentrue.renderers.extending import extender
from tokentrue.renderers.extending.extender import make_key
from tokentrue.renderers.extending.splicer import Splicer

NAMES = [*OWN, "real:qwen3", "real:glm-4.6", "real:kimi-k2", "real:mistral-nemo"]
TEXTS = [
    "21 degrees", "def f(x):\n    return x['a'] + 1  # it's done\n" * 9, "é 中 😀", "<|im_end|>", "a <|im_", "im_end|> b",
    "<tool_response>\n", "</tool_response>", " \n ", "\n", "x", "<", ">", "[", "]", "\ufdd0", "</think>",
    "it's 12345, they'LL see;  \n\n\t", "", "\x00\x1c",
]  # fmt: skip


def odd_calls(rng: random.Random, made: list[dict[str, Any]]) -> Any:
    """Calls as no two clients write them."""
    kind = rng.randrange(10)
    call = made[0]
    if kind == 0:
        call["id"] = rng.choice(("", None, 7, made[-1]["id"]))
    elif kind == 1:
        call["function"]["arguments"] = rng.choice(({"city": "Oslo"}, "not JSON", "", None, "[1]"))
    elif kind == 2:
        call["function"]["strict"] = True
    elif kind == 3:
        call["function"]["name"] = rng.choice(("clock", "", "other"))
    elif kind == 4:
        made[0] = call["function"] | {"id": call["id"]}
    elif kind == 5:
        return rng.choice((None, [], tuple(made)))
    return made


def make_turn(rng: random.Random) -> dict[str, Any]:
    last: dict[str, Any] = says(rng.choice((*TEXTS, None)))
    if rng.random() < 0.7:
        last = calls(*("Paris", "Oslo")[: rng.randrange(1, 3)], text=rng.choice((None, "", "Look.")))
        if rng.random() < 0.3:
            last["tool_calls"] = odd_calls(rng, last["tool_calls"])
    if rng.random() < 0.3:
        last[rng.choice(("reasoning_content", "reasoning_content", "thinking", "name", "refusal"))] = rng.choice(
            ("hm", None, "")
        )
    if rng.random() < 0.1 and last["content"] is None:
        del last["content"]
    return last


def make_new(rng: random.Random) -> list[Any]:
    new: list[Any] = []
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3))):
        text: Any = (
            rng.choice(TEXTS) if rng.random() < 0.9 else rng.choice((None, 3, [{"type": "text", "text": "part"}]))
        )
        message = rng.choice(
            (result(text, rng.choice((0, 0, 0, 1, 5))),) * 3
            + (user(text), {"role": "system", "content": text}, says(text))
        )
        if rng.random() < 0.1:
            message[rng.choice(("name", "tool_call_id", "role", "extra"))] = rng.choice(
                ("clock", "developer", "user", None, 4)
            )
        if rng.random() < 0.03:
            message.pop(rng.choice(list(message)))
        new.append(UserDict(message) if rng.random() < 0.05 else message)
    return new


def outcome(renderer: Renderer, *args: Any) -> Any:
    """The added ids, or the reason of a refusal, or the error."""
    try:
        found = renderer.extend(*args)
    except TokenTrueError as error:
        return type(error), str(error)
    return found.why if isinstance(found, tt.Refusal) else (found.added_ids, found.spans)


def count_differences(name: str, cases: int) -> tuple[int, int]:
    """How many requests a remembered plan answers otherwise, and how many were extended."""
    rng = random.Random(name)
    remembering, planning = (
        renderer_of(judge(name), directory=folder_of(name), extend_plans=most) for most in (4096, 0)
    )
    wrong = done = 0
    for _ in range(cases):
        head = [{"role": "system", "content": "Be brief."}] if rng.random() < 0.5 else []
        last, new, tools = make_turn(rng), make_new(rng), rng.choice((TOOLS, TOOLS, None))
        own = stop_id(remembering, call=bool(last.get("tool_calls")))
        args = ((7, rng.choice([own, own, *remembering.stop_token_ids, 5])), [*head, user("a"), last], new, tools)
        found = outcome(remembering, *args)
        wrong += found != outcome(planning, *args)
        done += isinstance(found, tuple) and isinstance(found[0], TokenIds)
    return wrong, done


@pytest.mark.parametrize("name", NAMES)
def test_a_remembered_plan_gives_what_planning_gives(name: str) -> None:
    wrong, done = count_differences(name, 150)
    assert wrong == 0 and done > 20


def test_a_plan_of_another_shape_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the key forgets: a plan is held against the text. Without that, the prompts differ."""
    careless = lambda message: (message["role"], bool(message.get("tool_calls")))  # noqa: E731
    monkeypatch.setattr(extender, "describe_shape", careless)
    assert not any(count_differences(name, examples(375))[0] for name in OWN)
    monkeypatch.setattr(Splicer, "fits", lambda *_: True)
    assert any(count_differences(name, examples(375))[0] for name in OWN)


def test_what_is_no_list_of_messages_is_refused() -> None:
    renderer, prefix = loaded("qwen3-like"), (7, stop_id(loaded("qwen3-like"), call=True))
    extended(renderer, prefix, [user("a"), calls("Oslo")], [result("one")], TOOLS)
    with pytest.raises(TokenTrueError, match="must be a list"):
        renderer.extend(prefix, [user("a"), calls("Oslo")], {0: result("one")}.values(), TOOLS)  # type: ignore[arg-type]


def test_messages_changed_in_place_are_new_messages() -> None:
    renderer = loaded("qwen3-like")
    last, new, tools = calls("Oslo"), [result("one")], [dict(TOOLS[0])]
    prefix = (7, stop_id(renderer, call=True))
    before = extended(renderer, prefix, [user("a"), last], new, tools)
    new[0]["content"] = "two"
    after = extended(renderer, prefix, [user("a"), last], new, tools)
    assert before != after == extended(renderer, prefix, [user("a"), last], [result("two")], tools)
    tools[0]["function"] = {**TOOLS[0]["function"], "name": "other"}
    assert renderer.render([user("a")], tools) != renderer.render([user("a")], TOOLS)


def tools_with(schema: dict[str, Any]) -> list[dict[str, Any]]:
    function = {
        "name": "clock",
        "description": "The clock.",
        "parameters": {"type": "object", "properties": {"at": schema}},
    }
    return [{"type": "function", "function": function}]


def test_tools_that_compare_equal_are_shown_as_they_are_spelled() -> None:
    """This template writes the tools before the newest user message: those of this request, not an earlier one's."""
    shown = (
        {"default": 1},
        {"default": True},
        {"default": 1.0},
        {"type": "x", "default": 1},
        {"default": 1, "type": "x"},
    )
    prefix, messages = (7, stop_id(loaded("real:mistral-nemo"), call=False)), [user("a"), says("b")]
    shared = loaded("real:mistral-nemo")
    for schema in shown:
        alone = renderer_of(judge("real:mistral-nemo"), directory=folder_of("real:mistral-nemo"))
        args = (prefix, messages, [user("c")], tools_with(schema))
        assert extended(shared, *args).added_ids == extended(alone, *args).added_ids, schema


REMEMBERS_TOOLS = """{%- set ns = namespace(used=false) -%}{%- for m in messages -%}
{%- if m.role == 'tool' %}{% set ns.used = true %}{% endif -%}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor -%}{%- if add_generation_prompt %}<|im_start|>assistant
{% if ns.used %}Tools were used. {% endif %}{% endif %}"""


def test_a_plan_of_a_history_without_tools_is_not_used_long_after_a_tool() -> None:
    remembering, planning = (
        renderer_of(judge("qwen3-like"), chat_template=REMEMBERS_TOOLS, extend_plans=most) for most in (4096, 0)
    )
    plain = [message for _ in range(8) for message in (user("a"), says("b"))]
    prefix = (7, stop_id(remembering, call=False))
    for messages in (plain, [user("a"), calls("Oslo"), result("one"), says("b"), *plain]):
        found, expected = (extended(renderer, prefix, messages, [user("c")]) for renderer in (remembering, planning))
        assert found.added_ids == expected.added_ids


def test_tools_that_are_printed_otherwise_have_another_name() -> None:
    """NaN and None are one in orjson's JSON, 1 and True are equal to Python, and the order of keys is printed."""
    values: list[Any] = [None, float("nan"), 1, True, 1.0, "1", {"a": 1, "b": 2}, {"b": 2, "a": 1}]
    tools: list[Any] = [[{"type": "function", "function": {"name": "f", "x": value}}] for value in values]
    assert len({make_key(given) for given in (None, [], *tools)}) == len(values) + 2
