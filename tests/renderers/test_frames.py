"""Frames: written around any content exactly what a render writes, and never found where a template looks into a content."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.renderers.talk import OWN, TOOLS, calls, loaded, result, says, stop_id, user
from tokentrue.renderers import Renderer
from tokentrue.renderers.frames import Frames, frame_from, opaque_messages
from tokentrue.renderers.template import Habits, Template

TALKS: list[tuple[list[Any], list[Any]]] = [
    ([user("a"), calls("Paris")], [result("NEW")]),
    ([user("a"), calls("Paris", "Oslo")], [result("NEW"), result("MORE", 1)]),
    ([user("a"), says("Hi.")], [user("NEW")]),
    ([user("a"), calls("Paris")], [result("NEW"), user("MORE")]),
]
NAMES = [*OWN, "real:qwen3", "real:qwen2.5", "real:kimi-k2", "real:deepseek-v3.1"]
TEXTS = st.one_of(
    st.text(max_size=30),
    st.sampled_from(
        ["<tool_response>x</tool_response>", "</think>", " padded \n", "{{ 7 }}", "<|im_end|>", "0", "\ufdd0", "\ufdee1:0;", "a\nb"]
    ),
)


def planned(renderer: Renderer, messages: list[Any], new: list[Any]) -> Any:
    """The call and its plan, or None where the renderer refuses."""
    prefix = [7, stop_id(renderer, call=bool(messages[-1].get("tool_calls")))]
    if not hasattr(renderer.extend(prefix, messages, new, TOOLS), "added_ids"):
        return None
    call, key = renderer._call(prefix, messages, new, TOOLS, None)
    return call, renderer._plans[key]


@pytest.mark.parametrize("name", NAMES)
@given(texts=st.lists(TEXTS, min_size=2, max_size=2))
@settings(max_examples=25, deadline=None)
def test_a_frame_writes_what_a_render_writes(name: str, texts: list[str]) -> None:
    renderer = loaded(name)
    for messages, new in TALKS:
        known = planned(renderer, messages, new)
        if known is None or known[1].context == "history":
            continue
        shown = [{**message, "content": text} for message, text in zip(new, texts, strict=False)]
        call = planned(renderer, messages, shown)[0]
        plan = known[1]
        assert renderer._splicer.tail(plan, call, ()) == renderer._splicer.tail(replace(plan, frame=None), call, ())


@pytest.mark.parametrize("name", ["real:qwen3", "real:qwen2.5", "real:deepseek-v3.1"])
def test_frames_are_there_for_tool_results(name: str) -> None:
    renderer = loaded(name)
    frame = planned(renderer, *TALKS[0])[1].frame
    assert frame is not None and len(frame) == 2


def test_a_template_that_looks_at_user_text_has_no_frame_for_it() -> None:
    """Qwen3 asks whether a user's text is a wrapped tool response."""
    assert planned(loaded("real:qwen3"), *TALKS[2])[1].frame is None


MESSAGES = [{"role": "user", "content": "u"}, {"role": "tool", "content": "c", "tool_call_id": "i", "name": "n"}]
HONEST = [
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}!",
    "{% for m in messages %}{{ '[' + m['content'] + ']' }}{% endfor %}",
    "{% for m in messages %}{% if m.content is string and m.content %}{% set x = m.content %}{{ x }}{% else %}none{% endif %}{% endfor %}",
    "{% for m in messages %}{% if m.content is none or m.content is mapping %}odd{% else %}{{ '(' + m.content }}{% endif %}{% endfor %}",
]
PEEKING = [
    "{{ m.content | trim }}", "{{ m.content | length }}{{ m.content }}", "{% if 'x' in m.content %}y{% endif %}{{ m.content }}",
    "{% if m.content == 'c' %}y{% endif %}{{ m.content }}", "{{ m.content[0] }}", "{{ m.content[:3] }}", "{{ m.content.strip() }}",
    "{{ m.content | tojson }}", "{{ m | tojson }}", "{{ m }}", "{{ messages | string }}", "{{ m.content ~ 'x' }}", "{{ m.content * 2 }}",
    "{{ '%s' % m.content }}", "{{ '{}'.format(m.content) }}", "{{ ','.join([m.content]) }}", "{% for c in m.content %}{{ c }}{% endfor %}",
    "{% if m.content < 'd' %}{% endif %}{{ m.content }}", "{{ m.content | upper }}", "{{ m.content | replace('c', 'd') }}",
    "{{ m.content.parts }}{{ m.content }}", "{% if m.content in ['c'] %}{% endif %}{{ m.content }}", "{{ {m.content: 1} }}",
    "{% if m.content is sequence %}{{ m.content }}{% endif %}", "{{ m.content | default('') | first }}", "{{ m.content | safe }}",
    "{% if m.content is upper %}u{% endif %}{{ m.content }}", "{% set x %}{{ m.content }}{% endset %}{{ x | trim }}",
    "{% macro f(x) %}{{ x }}{% endmacro %}{{ f(m.content) | trim }}", "{% filter trim %}{{ m.content }}{% endfilter %}",
    "{{ m.content }}{{ strftime_now('%H') }}", "{{ m.content }}{{ [1, 2, 3] | random }}", "{{ m.content if loop.changed(m.content) }}",
    "{{ messages | map(attribute='content') | join }}", "{{ messages | groupby('content') }}",
    "{{ messages | unique(attribute='content') | list }}",
]  # fmt: skip


def framed(source: str) -> tuple[str, ...] | None:
    text = Frames(Template(source, variables={})).text(opaque_messages(MESSAGES), None, {}, Habits())
    return None if text is None else frame_from(text, len(MESSAGES))


@pytest.mark.parametrize("source", HONEST)
def test_what_only_passes_contents_on_has_a_frame(source: str) -> None:
    frame = framed(source)
    assert frame is not None
    plain = Template(source, variables={}).text(MESSAGES, None, {}, habits=Habits())
    assert frame[0] + "u" + frame[1] + "c" + frame[2] == plain


@pytest.mark.parametrize("expression", PEEKING)
def test_what_looks_into_a_content_has_none(expression: str) -> None:
    assert framed("{% for m in messages %}" + expression + "{% endfor %}") is None


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.content }}{{ m.tool_call_id }}{% endfor %}",  # an id is shown
        "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
        "{% for m in messages | reverse %}{{ m.content }}{% endfor %}",
        "{{ messages[0].content }}",
    ],
)
def test_contents_must_stand_once_and_in_order(source: str) -> None:
    assert framed(source) is None
