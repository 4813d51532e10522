"""Every way a conversation can go on, held against the render of the real history in ids."""

from __future__ import annotations

from typing import Any

import pytest

import tokentrue as tt
from tests import parts
from tests.renderers.talk import OWN, TOOLS, calls, extended, loaded, result, says, stop_id, user
from tokentrue.renderers import Renderer

SYSTEM = {"role": "system", "content": "Be brief."}
LATER = {"role": "system", "content": "NEW system"}


def whole(renderer: Renderer, messages: list[Any], tools: Any = None, **kwargs: Any) -> tuple[int, ...]:
    return renderer.render(messages, tools, template_kwargs=kwargs).token_ids


def check(renderer: Renderer, messages: list[Any], new: list[Any], tools: Any = None, **kwargs: Any) -> tt.Extension:
    """What was added must be the end of the real history's render, and stand right behind a stop token there."""
    stop = stop_id(renderer, call=bool(messages[-1].get("tool_calls")))
    found = extended(renderer, [7, stop], messages, new, tools, template_kwargs=kwargs)
    truth = whole(renderer, [*messages, *new], tools, **kwargs)
    assert truth[len(truth) - len(found.added_ids) :] == found.added_ids
    if found.join == "stop":
        assert truth[len(truth) - len(found.added_ids) - 1] == stop
    return found


CHAIN = [SYSTEM, user("a"), calls("Paris", text="Look."), result("fine"), calls("Oslo")]
GOES_ON: dict[str, tuple[list[Any], list[Any]]] = {
    "user": ([user("a"), says("Hi.")], [user("NEW")]),
    "user after reasoning": ([user("a"), says("Hi.", reasoning_content="hm")], [user("NEW")]),
    "two users": ([user("a"), says("Hi.")], [user("NEW"), user("MORE")]),
    "tool": ([user("a"), calls("Paris")], [result("NEW")]),
    "tool in a chain": (CHAIN, [result("NEW")]),
    "parallel tools": ([user("a"), calls("Paris", "Oslo")], [result("NEW"), result("MORE", 1)]),
    "tools in another order": ([user("a"), calls("Paris", "Oslo")], [result("MORE", 1), result("NEW")]),
    "tool, then user": ([user("a"), calls("Paris")], [result("NEW"), user("MORE")]),
    "injected assistant": ([user("a"), says("Hi.")], [says("NEW"), user("MORE")]),
    "injected call and its result": (
        [user("a"), says("Hi.")],
        [user("NEW"), calls("Rome", text="I look", first=3), result("MORE", 3)],
    ),
    "content in parts": ([user("a"), says("Hi.")], [user([{"type": "text", "text": "NEW"}])]),
    "empty tool result": ([user("a"), calls("Paris")], [result("")]),
    "null tool result": ([user("a"), calls("Paris")], [result(None)]),
    "padded content": ([user("a"), calls("Paris")], [result("\n  NEW \n")]),
    "JSON content": ([user("a"), calls("Paris")], [result('{"a": [1, "é"], "b": "</x>"}')]),
}
REFUSED = {  # such a template shows one call per turn and no text beside it
    ("harmony-like", way) for way in ("parallel tools", "tools in another order", "injected call and its result")
}


@pytest.mark.parametrize("name", [*OWN, "real:qwen3", "real:glm-4.6", "real:kimi-k2", "real:deepseek-v3.1"])
@pytest.mark.parametrize("way", GOES_ON)
def test_goes_on_as_the_real_history(name: str, way: str) -> None:
    renderer = loaded(name)
    messages, new = GOES_ON[way]
    if (name, way) in REFUSED:
        stop = stop_id(renderer, call=bool(messages[-1].get("tool_calls")))
        assert isinstance(renderer.extend([7, stop], messages, new, TOOLS), tt.Refusal)
        return
    check(renderer, messages, new, TOOLS)


@pytest.mark.parametrize("name", ["qwen3-like", "k2v3-like", "real:qwen3", "real:kimi-k2"])
def test_system_in_the_middle(name: str) -> None:
    found = check(loaded(name), [SYSTEM, user("a"), says("Hi.")], [LATER, user("MORE")])
    assert "NEW system" in loaded(name).decode(found.added_ids)


DROPS = """{%- for m in messages if m.role != 'system' or m == messages[0] -%}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>
{%- endfor -%}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"""


@pytest.mark.parametrize(
    ("name", "why"),
    [("real:deepseek-v3.1", "message_moved"), ("drops", "message_dropped"), ("real:mistral-nemo", "template_raises")],
)
def test_system_in_the_middle_is_refused_where_the_template_hoists_drops_or_raises(name: str, why: str) -> None:
    renderer = of_template(DROPS) if name == "drops" else loaded(name)
    found = renderer.extend([7, stop_id(renderer)], [SYSTEM, user("a"), says("Hi.")], [LATER, user("MORE")])
    assert isinstance(found, tt.Refusal) and found.why == why and found.detail


def test_mixed_chain() -> None:
    new = [
        result("one"),
        user("two"),
        calls("Rome", first=5),
        result("three", 5),
        {"role": "system", "content": "four"},
    ]
    renderer = loaded("k2v3-like")
    text = renderer.decode(check(renderer, CHAIN, new, TOOLS).added_ids)
    assert [word for word in ("one", "two", "three", "four") if word in text] == ["one", "two", "three", "four"]
    assert text.index("one") < text.index("two") < text.index("three") < text.index("four")


@pytest.mark.parametrize("name", OWN)
def test_late_tool_result(name: str) -> None:
    """It answers a call of an earlier turn."""
    renderer = loaded(name)
    messages = [user("a"), calls("Paris", first=8), result("still running", 8), says("I wait.")]
    found = renderer.extend([7, stop_id(renderer)], messages, [result("NEW", 8)], TOOLS)
    if isinstance(found, tt.Refusal):
        assert found.why == "template_raises", found
        return
    truth = whole(renderer, [*messages, result("NEW", 8)], TOOLS)
    assert truth[len(truth) - len(found.added_ids) :] == found.added_ids


STATEFUL = """{%- set ns = namespace(first=true) -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}{%- if ns.first -%}<|im_start|>results{%- set ns.first = false -%}{%- endif -%}<|im_start|>{{ m.content }}
{%- elif m.tool_calls -%}<|im_start|>assistant {{ m.tool_calls[0].function.arguments | tojson }}<|im_end|>
{%- else -%}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{%- endif -%}
{%- endfor -%}<|im_start|>assistant"""


FORGETFUL = """{%- for m in messages -%}<|im_start|>{{ m.role }} {% if m.reasoning_content and not
(messages[loop.index0 + 1:] | selectattr('role', 'equalto', 'user') | list) %}<think>{{ m.reasoning_content }}</think>{% endif %}
{{- m.content }}{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}</tool_call>{% endfor %}<|im_end|>
{%- endfor -%}<|im_start|>assistant"""


def of_template(text: str, **more: Any) -> Renderer:
    return tt.load_renderer(str(parts.standin_dir(text)), **more)


def test_state_carried_over_turns() -> None:
    """The opener of results comes only once in a conversation."""
    renderer = of_template(STATEFUL)
    stop = stop_id(renderer, call=True)
    first = extended(renderer, [7, stop], [user("a"), calls("Paris")], [result("NEW")], TOOLS)
    again = extended(
        renderer, [7, stop], [user("a"), calls("Rome"), result("x"), calls("Paris")], [result("NEW")], TOOLS
    )
    assert renderer.decode(first.added_ids) == "<|im_start|>results<|im_start|>NEW<|im_start|>assistant"
    assert renderer.decode(again.added_ids) == "<|im_start|>NEW<|im_start|>assistant"
    assert renderer.proof.roles["tool"] == "history" and renderer.proof.roles["user"] == "proven"


def test_tools_that_change_between_turns() -> None:
    """The tools of this request count; where the template repeats them at the last user, the new ones are there."""
    renderer = loaded("real:mistral-nemo")
    first = renderer.decode(
        extended(renderer, [7, stop_id(renderer)], [user("a"), says("Hi.")], [user("NEW")], TOOLS[:1]).added_ids
    )
    other = renderer.decode(
        extended(renderer, [7, stop_id(renderer)], [user("a"), says("Hi.")], [user("NEW")], TOOLS[1:]).added_ids
    )
    assert "weather" in first and "clock" not in first and "clock" in other and "weather" not in other
    changed = [dict(tool) for tool in TOOLS[:1]]
    extended(renderer, [7, stop_id(renderer)], [user("a"), says("Hi.")], [user("NEW")], changed)
    changed[0] = TOOLS[1]  # in place: the same list is another value now
    again = renderer.decode(
        extended(renderer, [7, stop_id(renderer)], [user("a"), says("Hi.")], [user("NEW")], changed).added_ids
    )
    assert again == other


def test_template_kwargs_of_one_request() -> None:
    renderer = loaded("k2v3-like")
    messages = [user("a"), says("Hi.")]
    for effort, opener in (("high", "<think>"), ("low", "<think_faster>"), ("medium", "<think_fast>")):
        found = check(renderer, messages, [user("NEW")], reasoning_effort=effort)
        assert renderer.decode(found.added_ids).endswith(f"assistant\n{opener}")


def test_call_ids_that_the_template_cannot_take_are_shortened_alike() -> None:
    renderer = loaded("real:mistral-nemo")
    assert renderer.inputs.short_ids
    found = extended(renderer, [7, stop_id(renderer, call=True)], [user("a"), calls("Paris")], [result("NEW")], TOOLS)
    text = renderer.decode(found.added_ids)
    head = renderer.decode(renderer.render([user("a"), calls("Paris"), result("x")], TOOLS).token_ids)
    call_id = text.partition('"call_id": "')[2][:9]
    assert len(call_id) == 9 and f'"id": "{call_id}"' in head


def test_history_keep_and_template() -> None:
    messages, new = [user("a"), says("Hi.", reasoning_content="hm")], [user("NEW")]
    pairs = [(of_template(FORGETFUL), of_template(FORGETFUL, history="template"))]
    if parts.shared() is not None:
        pairs.append((loaded("real:qwen3"), loaded("real:qwen3", history="template")))
    for keep, follow in pairs:
        assert keep.proof.rewrites["user"]
        assert isinstance(keep.extend([7, stop_id(keep)], messages, new), tt.Extension)
        found = follow.extend([7, stop_id(follow)], messages, new)
        assert isinstance(found, tt.Refusal) and found.why == "history_rewritten"
        bare = calls("Paris", reasoning_content="hm")
        assert isinstance(follow.extend([7, stop_id(follow)], [user("a"), bare], [result("NEW")], TOOLS), tt.Extension)


FORGETS_AT_ONCE = """{%- for m in messages -%}<|im_start|>{{ m.role }}\n{% if m.reasoning_content and m.tool_calls %}<think>
{{- m.reasoning_content }}</think>{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>
{{- c.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{%- endfor -%}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"""


def test_reasoning_that_the_template_leaves_out_before_anything_follows() -> None:
    """Kimi-K2.5 shows no reasoning of an answer, not even of the last one: its recorded tokens are rewritten all the
    same."""
    follow = of_template(FORGETS_AT_ONCE, history="template")
    answer, call = says("Hi.", reasoning_content="hm"), calls("Paris", reasoning_content="hm")
    found = follow.extend([7, stop_id(follow)], [user("a"), answer], [user("NEW")])
    assert isinstance(found, tt.Refusal) and found.why == "history_rewritten"
    assert isinstance(follow.extend([7, stop_id(follow)], [user("a"), says("Hi.")], [user("NEW")]), tt.Extension)
    assert isinstance(follow.extend([7, stop_id(follow)], [user("a"), call], [result("NEW")], TOOLS), tt.Extension)


@pytest.mark.parametrize(
    ("prefix", "messages", "new", "why"),
    [
        ([], [user("a"), says("Hi.")], [user("b")], "empty_prefix"),
        ([1], [user("a")], [user("b")], "not_after_assistant"),
        ([1], [], [user("b")], "not_after_assistant"),
        ([1], [user("a"), says("Hi.")], [], "nothing_new"),
    ],
)
def test_refusals_of_misplaced_calls(prefix: Any, messages: Any, new: Any, why: str) -> None:
    found = loaded("qwen3-like").extend(prefix, messages, new)
    assert isinstance(found, tt.Refusal) and found.why == why


FUSSY = """{%- for m in messages -%}<|im_start|>{{ m.role }} {{ m.content }}{% for c in m.tool_calls or [] %}
{%- for key, value in c.function.arguments.items() %}<tool_call>{{ key }}={{ value }}</tool_call>{% endfor %}{% endfor %}<|im_end|>
{%- endfor -%}<|im_start|>assistant"""


def test_a_refusal_of_one_content_is_not_remembered_for_others() -> None:
    """Arguments that are no object make this template raise; the next turn of the same shape must not suffer for it."""
    renderer = of_template(FUSSY)
    stop = stop_id(renderer, call=True)
    broken = calls("Paris", "Oslo")
    broken["tool_calls"][0]["function"]["arguments"] = "not json"
    new = [result("NEW"), result("MORE", 1)]
    assert isinstance(renderer.extend([7, stop], [user("a"), broken], new, TOOLS), tt.Refusal)
    check(renderer, [user("a"), calls("Rome", "Oslo")], new, TOOLS)


def test_an_earlier_turn_that_the_template_cannot_print_does_not_end_the_conversation() -> None:
    """The model wrote it, so it is recorded; the prompt after it does not hold it again."""
    renderer = of_template(FUSSY)
    stop = stop_id(renderer, call=True)
    broken = calls("Paris")
    broken["tool_calls"][0]["function"]["arguments"] = "not json"
    first = extended(renderer, [7, stop], [user("a"), broken], [result("NEW")], TOOLS)
    later = extended(renderer, [7, stop], [user("a"), broken, result("x"), calls("Rome")], [result("NEW")], TOOLS)
    assert renderer.decode(first.added_ids) == "<|im_start|>tool NEW<|im_end|><|im_start|>assistant"
    assert later.added_ids == first.added_ids
