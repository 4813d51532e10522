"""The quick sandbox answers whatever transformers' own answers: same text, same refusals; the escapes that it must stop stay stopped."""

from __future__ import annotations

import re
from typing import Any

import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template

from tokentrue.renderers.sandbox import quick

MESSAGES = [{"role": "user", "content": " a<b ", "items": "mine", "keys": 1, "_secret": "s"}, {"role": "tool", "content": None}]
EXPRESSIONS = [
    "messages[0].role", "messages[0].content.strip()", "messages[0].items", "messages[0].keys", "messages[0]['items']",
    "messages[0].missing", "messages[0].missing is defined", "messages[0].missing.deeper", "messages[0]._secret", "messages[1].content",
    "messages[0].get('role')", "messages[0].content.upper().split('<')", "messages.first", "none.x", "(1).real", "'a'.missing",
    "'{}'.format(1)", "'{0.__class__}'.format(1)", "'{x.__class__}'.format_map({'x': 1})", "''.__class__", "''['__class__']",
    "messages[0].__class__", "messages.append(1)", "messages[0].update({'a': 1})", "messages[0].pop('role')", "messages.__class__",
    "messages[0].content.format", "raise_exception('no')", "cycler.__init__.__globals__", "namespace(a=1).a", "namespace(a=1).b",
    "namespace(a=messages).a.append(1)", "namespace(a='{0.__class__}'.format).a(1)", "namespace(a=1).__class__", "namespace()._x",
]  # fmt: skip
LOOP = (
    "{% for m in messages %}{{ loop.index }}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.revindex }}"
    "{{ loop.previtem }}{{ loop.cycle('a', 'b') }}{{ loop.depth }}{{ loop._iterator }}{{ loop.missing }}{% endfor %}"
)


def outcome(template: Any) -> str:
    try:
        text = template.render(messages=[dict(message) for message in MESSAGES])
        return "text: " + re.sub(r"0x[0-9a-f]+", "", text)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("source", [*("{{ " + expression + " }}" for expression in EXPRESSIONS), LOOP])
def test_answers_as_the_sandbox_does(source: str) -> None:
    plain = _compile_jinja_template(source)
    ours = quick(plain.environment).from_string(source)
    assert outcome(ours) == outcome(plain)


@pytest.mark.parametrize("source", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ '{0.__class__.__mro__}'.format(1) }}"])
def test_forbidden_things_stay_forbidden(source: str) -> None:
    ours = quick(_compile_jinja_template("").environment).from_string(source)
    assert outcome(ours).startswith(("SecurityError", "UndefinedError"))


def test_the_shared_environment_is_left_alone() -> None:
    plain = _compile_jinja_template("{{ 1 }}").environment
    quick(plain)
    assert type(plain).__name__ == "ImmutableSandboxedEnvironment"
