"""A template that takes too much time or memory is interrupted, whatever it does: at load, and in the middle of a
conversation."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator

import pytest
from transformers.utils import chat_template_utils as theirs

from tests.renderers.talk import judge, user
from tokentrue.errors import TemplateError, TemplateLimitError
from tokentrue.renderers import renderer_of
from tokentrue.renderers.budget import RenderBudget, TemplateLimits
from tokentrue.renderers.sandbox import bounded_environment
from tokentrue.renderers.template import Template

LOOPS = {
    "nested ranges": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "four loops": "{% for a in x %}{% for b in x %}{% for c in x %}{% for d in x %}{{ d }}{% endfor %}{% endfor %}{% endfor %}{% endfor %}",
    "a macro that calls itself twice": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "blocks that contain blocks": "".join(
        f"{{% block b{i} %}}{{{{ self.b{i + 1}() }}}}{{{{ self.b{i + 1}() }}}}{{% endblock %}}" for i in range(40)
    )
    + "{% block b40 %}x{% endblock %}",
    "a recursive loop": "{% for a in x recursive %}{{ loop(x) }}{% endfor %}",
    "a filter over the items of a filter": "{% for a in range(99999) %}{% set b = (range(99999) | map('string') | list) %}{% endfor %}",
    "map of sums": "{% set y = [x] * 900 %}{% for a in y %}{% set s = y | map('sum') | list %}{% endfor %}",
}
SIZES = {
    "a string times a number": "{{ 'a' * 9999999999 }}",
    "a number times a string": "{{ 9999999999 * 'a' }}",
    "a list times a number": "{{ ([0] * 99999999) | length }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "powers of powers": "{% set n = namespace(v=99) %}{% for i in range(60) %}{% set n.v = n.v * n.v %}{% endfor %}",
    "doubling with +": "{% set n = namespace(v='ab') %}{% for i in range(60) %}{% set n.v = n.v + n.v %}{% endfor %}",
    "doubling with ~": "{% set n = namespace(v='ab') %}{% for i in range(60) %}{% set n.v = n.v ~ n.v %}{% endfor %}",
    "doubling with a block": "{% set n = namespace(v='ab') %}{% for i in range(60) %}{% set b %}{{ n.v }}{{ n.v }}{% endset %}"
    "{% set n.v = b %}{% endfor %}",
    "doubling by macro": "{% macro m(s, n) %}{% if n %}{{ m(s + s, n - 1) }}{% endif %}{% endmacro %}{{ m('ab', 60) }}",
    "doubling by replace": "{% set n = namespace(v='aa') %}{% for i in range(60) %}{% set n.v = n.v.replace('a', 'aa') %}{% endfor %}",
    "doubling by the filter replace": "{% set n = namespace(v='aa') %}{% for i in range(60) %}"
    "{% set n.v = n.v | replace('a', 'aa') %}{% endfor %}",
    "doubling by join": "{% set n = namespace(v='ab') %}{% for i in range(60) %}{% set n.v = [n.v, n.v] | join %}{% endfor %}",
    "doubling by str.join": "{% set n = namespace(v='ab') %}{% for i in range(60) %}{% set n.v = n.v.join(['', '', '']) %}{% endfor %}",
    "doubling by format": "{% set n = namespace(v='ab') %}{% for i in range(60) %}{% set n.v = '{0}{0}'.format(n.v) %}{% endfor %}",
    "doubling by %": "{% set n = namespace(v='ab') %}{% for i in range(60) %}{% set n.v = '%s%s' % (n.v, n.v) %}{% endfor %}",
    "doubling a list": "{% set n = namespace(v=[1]) %}{% for i in range(60) %}{% set n.v = n.v + n.v %}{% endfor %}",
    "a list of itself": "{% set n = namespace(v=[1]) %}{% for i in range(60) %}{% set n.v = [n.v, n.v] %}{% endfor %}{{ n.v }}",
    "a dictionary of itself": "{% set n = namespace(v={}) %}{% for i in range(60) %}{% set n.v = {'a': n.v, 'b': n.v} %}{% endfor %}"
    "{{ n.v | tojson }}",
    "dict() of itself": "{% set n = namespace(v={}) %}{% for i in range(60) %}{% set n.v = dict(a=n.v, b=n.v) %}{% endfor %}{{ n.v }}",
    "two lists of themselves, compared": "{% set n = namespace(v=[1], w=[1]) %}{% for i in range(60) %}{% set n.v = [n.v, n.v] %}"
    "{% set n.w = [n.w, n.w] %}{% endfor %}{{ n.v == n.w }}",
    "a sum of lists": "{{ ([x] * 20000) | sum(start=[]) | length }}",
    "center": "{{ 'a' | center(9999999999) }}",
    "ljust": "{{ 'a'.ljust(9999999999) }}",
    "zfill": "{{ '1'.zfill(9999999999) }}",
    "expandtabs": "{{ '\\t'.expandtabs(999999999) }}",
    "indent": "{{ 'a\\nb' | indent(9999999999) }}",
    "a width in %": "{{ '%9999999999d' % 1 }}",
    "a width given to %": "{{ '%*d' % (999999999, 1) }}",
    "a width in the filter format": "{{ '%999999999d' | format(1) }}",
    "a width in format": "{{ '{:>9999999999}'.format(1) }}",
    "a width given to format": "{{ '{:>{w}}'.format(1, w=999999999) }}",
    "an indentation of JSON": "{{ {'a': x} | tojson(indent=99999999) }}",
    "slices": "{{ x | slice(999999999) | list | length }}",
    "output without end": "{% set s = 'a' * 999999 %}{% for i in range(99999) %}{{ s }}{% endfor %}",
    "a list of long strings": "{% set n = namespace(v=[]) %}{% set s = 'a' * 9999999 %}{% for i in range(9999) %}"
    "{% set n.v = n.v + [s + (i | string)] %}{% endfor %}",
    "long strings in a recursion": "{% macro m(s, n) %}{% set t = s + 'a' %}{% if n %}{{ m(t, n - 1) }}{% endif %}{% endmacro %}"
    "{{ m('a' * 20000000, 150) }}",
    "a source of megabytes": "x" * (5 << 20),
}


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    """A template that escapes the limits ends in a MemoryError, and not in the end of the machine."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (3 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def render(source: str, limits: TemplateLimits) -> str:
    template = bounded_environment().from_string(source) if len(source) < 1 << 20 else None
    if template is None:
        return Template(source, variables={}).render([], None, {})
    context = template.new_context({"x": list(range(1000))})
    context.use(RenderBudget(limits))  # pyright: ignore[reportAttributeAccessIssue]
    return context.join_buffer(template.root_render_func(context))  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("name", LOOPS)
def test_loops_end(name: str) -> None:
    began = time.thread_time()
    with pytest.raises((TemplateLimitError, RecursionError)) as caught:
        render(LOOPS[name], TemplateLimits(cpu_s=0.2))
    assert time.thread_time() - began < 1.5
    if caught.type is TemplateLimitError:
        assert "processor time" in str(caught.value)


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_bounded(name: str) -> None:
    began = time.thread_time()
    with pytest.raises(TemplateLimitError) as caught:
        render(SIZES[name], TemplateLimits(string_chars=32 << 20))
    assert time.thread_time() - began < 5
    assert str(caught.value).startswith("chat_template: rendering it takes more than ")


def test_a_costly_template_is_refused_at_load() -> None:
    """At once, and not once for each of the hundreds of conversations of the proof."""
    source = "{% for m in messages %}{{ m.role }}{{ m.content }}<|im_end|>{% endfor %}" + LOOPS["nested ranges"]
    began = time.thread_time()
    with pytest.raises(TemplateLimitError):
        renderer_of(judge("qwen3-like"), chat_template=source)
    assert time.thread_time() - began < 10


def test_a_long_message_is_not_refused() -> None:
    template = Template(
        "{% for m in messages %}{{ '<' + m.role + '>' + m.content | trim ~ '\n' }}{% endfor %}", variables={}
    )
    text = "word " * 4_000_000
    assert template.render([user(text)], None, {}) == f"<user>{text.strip()}\n"


def test_limits_hold_for_one_rendering_each() -> None:
    template = Template("{% set s = messages[0].content ~ '!' %}{{ s }}", variables={})
    with template.proving():  # 64 MB in all
        for _ in range(80):
            assert len(template.render([user("a" * 1_000_000)], None, {})) == 1_000_001


def test_a_conversation_past_a_limit_leaves_the_template_usable() -> None:
    template = Template("{{ 'a' * (messages[0].content | int) }}", variables={})
    with pytest.raises(TemplateLimitError):
        template.render([user("999999999")], None, {})
    assert template.render([user("2")], None, {}) == "aa"


def test_markup_and_numbers_add_as_in_jinja() -> None:
    given = [user("<b>")]
    for source in (
        "{{ messages[0].content | e + '<' }}",
        "{{ 1 + 2 + 3.5 }}",
        "{{ [1] + [2] + messages }}",
        "{{ 'a' ~ 1 ~ none ~ missing }}",
    ):
        expected = theirs._compile_jinja_template(source).render(messages=given)
        assert Template(source, variables={}).render(given, None, {}) == expected


def test_errors_of_the_template_keep_their_text() -> None:
    with pytest.raises(TemplateError, match="only users") as caught:
        Template("{{ raise_exception('only users') }}", variables={}).render([], None, {})
    assert not isinstance(caught.value, TemplateLimitError)
