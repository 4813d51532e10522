"""A template that takes too much time or memory is refused at load in one line, by the operating system's limits on a
child process."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers.utils import chat_template_utils as theirs

from tests import parts
from tests.marks import slow_but_every
from tests.renderers.talk import TOOLS, calls, judge, result, user
from tokentrue.errors import TemplateError, TemplateLimitError
from tokentrue.renderers import renderer_of
from tokentrue.renderers.confined import ProcessLimits, run_confined
from tokentrue.renderers.template import Template

DOUBLE = "{{% set n = namespace(v={0}) %}}{{% for i in range(60) %}}{{% set n.v = {1} %}}{{% endfor %}}"
HOSTILE = {
    "a division without a moment for another thread": "{% set n = 9000000 + (messages | length) %}"
    "{{ ('f' * n) | int(0, 16) // ('7' * (n // 2)) | int(0, 16) }}",
    "the same among constants, computed while it is compiled": "{{ ('f' * 9000000) | int(0, 16) // ('7' * 4500000) | int(0, 16) }}",
    "nested ranges": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a macro that calls itself twice": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "lists of themselves, compared": "{% set n = namespace(v=[1], w=[1]) %}{% for i in range(60) %}{% set n.v = [n.v, n.v] %}"
    "{% set n.w = [n.w, n.w] %}{% endfor %}{{ n.v == n.w }}",
    "a string times a number": "{{ 'a' * (9999999999 + (messages | length)) }}",
    "a power": "{{ 9 ** (9 ** 9 + (messages | length)) }}",
    "doubling with +": DOUBLE.format("'ab'", "n.v + n.v"),
    "doubling with ~": DOUBLE.format("'ab'", "n.v ~ n.v"),
    "doubling by join": DOUBLE.format("'ab'", "[n.v, n.v] | join"),
    "doubling by format": DOUBLE.format("'ab'", "'{0}{0}'.format(n.v)"),
    "doubling a list": DOUBLE.format("[1]", "n.v + n.v"),
    "center": "{{ 'a' | center(9999999999) }}",
    "unpacked arguments": "{{ '{}'.format(*range(99999)) }}{% set s = 'a' * 99999999 %}{{ [s] * 99 | map('upper') | list }}"
    + DOUBLE.format("'ab'", "(n.v, n.v) | string"),
    "output without end": "{% set s = 'a' * 999999 %}{% for i in range(99999) %}{{ s }}{% endfor %}",
    "lipsum": "{{ lipsum(n=999999) }}",
}
TIGHT = ProcessLimits(cpu_s=1, wall_s=120, memory_bytes=256 << 20)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize("name", slow_but_every(3, HOSTILE))
def test_a_costly_template_ends(name: str) -> None:
    template = Template(HOSTILE[name], variables={})
    with pytest.raises(TemplateLimitError) as caught:
        run_confined(lambda: template.render([user("x")], None, {}), TIGHT)
    assert str(caught.value).startswith("chat_template: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [pytest.param("nested ranges", marks=pytest.mark.slow), "a string times a number"])
def test_a_costly_template_is_refused_at_load(name: str) -> None:
    """Whole, and not once for each of the hundreds of conversations of the proof; no process is left over."""
    source = "{% for m in messages %}{{ m.role }}{{ m.content }}<|im_end|>{% endfor %}" + HOSTILE[name]
    with pytest.raises(TemplateLimitError, match=r"^chat_template: .*correct the template$"):
        renderer_of(judge("qwen3-like"), chat_template=source)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_the_wall_clock_counts_where_no_processor_time_is_used() -> None:
    began = time.monotonic()
    with pytest.raises(TemplateLimitError):
        run_confined(lambda: time.sleep(600), ProcessLimits(wall_s=0.5))
    assert time.monotonic() - began < 60


@pytest.fixture
def busy_thread() -> Iterator[None]:
    """Another thread that encodes: what a fork in its middle must not wait for."""
    tokenizer, stop = judge("qwen3-like").backend_tokenizer, threading.Event()

    def work() -> None:
        while not stop.is_set():
            tokenizer.encode_batch(["one text and another one"] * 8)

    thread = threading.Thread(target=work)
    thread.start()
    yield
    stop.set()
    thread.join()


@pytest.mark.usefixtures("busy_thread")
def test_a_process_with_threads_can_load(capfd: pytest.CaptureFixture[str]) -> None:
    source = judge("qwen3-like").chat_template
    for number in range(5):
        assert renderer_of(judge("qwen3-like"), chat_template=source + f"{{# {number} #}}").proof.ok
    assert capfd.readouterr().err == ""  # no advice of tokenizers about forks


def load_in_worker(source: str) -> bool:
    return renderer_of(judge("qwen3-like"), chat_template=source).proof.ok


def test_a_worker_of_a_pool_can_load() -> None:
    """Pools and data loaders forbid their workers to start processes by multiprocessing."""
    source = judge("qwen3-like").chat_template + "{# loaded by a worker #}"
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(load_in_worker, (source,))


def test_errors_and_defects_of_the_child_are_raised_here() -> None:
    def refuse() -> None:
        raise TemplateError("only users")

    with pytest.raises(TemplateError, match=r"^only users$"):
        run_confined(refuse)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        run_confined(lambda: 1 // 0)
    assert run_confined(lambda: {"a": [1, "é\n"]}) == {"a": [1, "é\n"]}


def test_a_conversation_past_the_memory_leaves_the_template_usable() -> None:
    template = Template("{{ 'a' * (messages[0].content | int) }}", variables={})
    with pytest.raises(TemplateLimitError):
        template.render([user("9" * 15)], None, {})
    assert template.render([user("2")], None, {}) == "aa"


def test_every_real_template_renders_as_in_transformers() -> None:
    """In transformers' own call, with all its filters, globals and extensions."""
    chats = ([user("Hello <b> 'a'")], [user("a"), calls("Paris"), result("fine"), user("b")])
    found = 0
    for name, source in parts.templates().items():
        if not name.startswith("llama.cpp/"):  # one set of many models
            continue
        template = Template(source, variables={"bos_token": "<s>", "eos_token": "</s>"})
        for messages, tools in zip(chats, (None, TOOLS), strict=True):
            given = {"tools": tools, "add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>"}
            try:
                expected = theirs.render_jinja_template([messages], chat_template=source, **given)[0][0]
            except Exception:
                with pytest.raises(TemplateError):
                    template.render(messages, tools, {})
                continue
            assert template.render(messages, tools, {}) == expected
            found += 1
    if not found:
        pytest.skip("no template of a released model is here")


def test_errors_of_the_template_keep_their_text() -> None:
    with pytest.raises(TemplateError, match="only users"):
        Template("{{ raise_exception('only users') }}", variables={}).render([], None, {})
