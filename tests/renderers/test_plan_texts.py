"""A prompt is a function of its conversation: neither plans that other conversations left behind nor earlier messages
without text change it, whatever words, lengths, positions and counts a template asks for. The judge is jinja2 with the
template as it is."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from jinja2 import nodes
from transformers.utils import chat_template_utils

import tokentrue as tt
from tests import parts
from tests.marks import slow_but_every
from tests.renderers.hostile_templates import CHATML, HOSTILE
from tests.renderers.standins import standin
from tests.renderers.talk import OWN, TOOLS, calls, folder_of, judge, result, says, stop_id, user
from tokentrue.errors import TokenTrueError
from tokentrue.renderers import Renderer, renderer_of
from tokentrue.renderers.codec import shield, shield_each
from tokentrue.renderers.earlier import SKIPPED, EarlierMessage
from tokentrue.renderers.messages import normalise_messages, normalise_tools
from tokentrue.renderers.template import InputFormat, Template

SMALL = {
    "position": CHATML.replace("{{ m.content }}", "{{ loop.index }}: {{ m.content }}"),
    "parity": CHATML.replace("END", "{{ 'even' if messages | length % 2 == 0 else 'odd' }}"),
    "number": CHATML.replace("END", "{{ messages | length }}"),
    "word in the first": CHATML.replace("END", "{{ 'magic' if 'magic' in messages[0].content else '' }}"),
    "word in any": "{%- set ns = namespace(found=false) -%}{%- for m in messages -%}"
    "{%- if 'magic' in m.content %}{% set ns.found = true %}{% endif -%}{%- endfor -%}"
    + CHATML.replace("END", "{{ 'magic' if ns.found else '' }}"),
    "last word": "{%- set ns = namespace(mode='') -%}{%- for m in messages -%}{%- set text = m.content | trim -%}"
    "{%- if text.startswith('/a') %}{% set ns.mode = 'a' %}{% elif text.startswith('/b') %}{% set ns.mode = 'b' %}"
    "{% endif -%}{%- endfor -%}" + CHATML.replace("END", "{{ ns.mode }}"),
    "first word": "{%- set ns = namespace(mode='') -%}{%- for m in messages -%}"
    "{%- if not ns.mode and m.content.startswith('/') %}{% set ns.mode = m.content[:2] %}{% endif -%}{%- endfor -%}"
    + CHATML.replace("END", "{{ ns.mode }}"),
    "count of words": "{%- set ns = namespace(n=0) -%}{%- for m in messages -%}"
    "{%- if 'magic' in m.content %}{% set ns.n = ns.n + 1 %}{% endif -%}{%- endfor -%}"
    + CHATML.replace("END", "{{ ns.n }}"),
    "toggle": "{%- set ns = namespace(on=false) -%}{%- for m in messages -%}"
    "{%- if 'magic' in m.content %}{% set ns.on = not ns.on %}{% endif -%}{%- endfor -%}"
    + CHATML.replace("END", "{{ ns.on }}"),
    "after another": "{%- set ns = namespace(a=false, b=false) -%}{%- for m in messages -%}"
    "{%- if '/a' in m.content %}{% set ns.a = true %}{% elif ns.a and '/b' in m.content %}{% set ns.b = true %}"
    "{% endif -%}{%- endfor -%}" + CHATML.replace("END", "{{ ns.b }}"),
    "length": CHATML.replace("END", "{{ messages | map(attribute='content') | join | length }}"),
    "chosen": CHATML.replace("END", "{{ (messages | selectattr('role', 'equalto', 'user') | list)[-1].content[:2] }}"),
    "distance": "{%- set ns = namespace(at=-1) -%}{%- for m in messages -%}"
    "{%- if 'magic' in m.content %}{% set ns.at = loop.index0 %}{% endif -%}{%- endfor -%}"
    + CHATML.replace("{{ m.content }}", "{{ 'near ' if loop.index0 - 1 == ns.at else '' }}{{ m.content }}"),
    "after a word": "{%- set ns = namespace(at=-1) -%}{%- for m in messages -%}"
    "{%- if 'magic' in m.content %}{% set ns.at = loop.index0 %}{% endif -%}{%- endfor -%}"
    + CHATML.replace("{{ m.content }}", "{{ 'late ' if loop.index0 > ns.at else '' }}{{ m.content }}"),
    "neighbour": CHATML.replace(
        "{{ m.content }}", "{{ m.content }}{{ '!' if loop.previtem and 'magic' in loop.previtem.content else '' }}"
    ),
    "collected": "{%- set found %}{% for m in messages %}{{ 'M' if 'magic' in m.content }}{% endfor %}{% endset -%}"
    + CHATML.replace("END", "{{ found }}"),
    "roles collected": "{%- set found %}{% for m in messages if m.role == 'tool' %}T{% endfor %}{% endset -%}"
    + CHATML.replace("END", "{{ found }}"),
    "word in a block": "{%- set ns = namespace(found=false) -%}{%- for m in messages -%}"
    "{%- set text %}{{ m.content }}{% endset -%}{%- if 'magic' in text %}{% set ns.found = true %}{% endif -%}"
    "{%- endfor -%}" + CHATML.replace("END", "{{ ns.found }}"),
    "another name": "{%- set ns = namespace(n=0) -%}{%- set other = ns -%}{%- for m in messages -%}"
    "{%- if 'magic' in m.content %}{% set other.n = other.n + 1 %}{% endif -%}{%- endfor -%}"
    + CHATML.replace("END", "{{ ns.n }}"),
    "turned over": "{%- set ns = namespace(on=false) -%}{%- for m in messages -%}"
    "{%- if ns.on %}{% set ns.on = false %}{% else %}{% set ns.on = true %}{% endif -%}{%- endfor -%}"
    + CHATML.replace("END", "{{ ns.on }}"),
    "word in the printing loop": "{%- set ns = namespace(mode='') -%}"
    + CHATML.replace(
        "{{ m.content }}",
        "{{ m.content }}{%- set text = m.content | trim -%}{%- if '/a' in text %}{% set ns.mode = 'a' %}"
        "{% elif '/b' in text %}{% set ns.mode = 'b' %}{% endif -%}",
    ).replace("END", "{{ ns.mode }}"),
    "macro that writes": "{%- set ns = namespace(mode='') -%}{%- macro note(text) -%}"
    "{%- if '/a' in text %}{% set ns.mode = 'a' %}{% elif '/b' in text %}{% set ns.mode = 'b' %}{% endif -%}"
    "{{ text }}{%- endmacro -%}"
    + CHATML.replace("{{ m.content }}", "{{ note(m.content) }}").replace("END", "{{ ns.mode }}"),
    "namespace of one message": CHATML.replace(
        "{{ m.content }}",
        "{%- set own = namespace(found=false) -%}{%- for other in messages[loop.index:] -%}"
        "{%- if 'magic' in other.content %}{% set own.found = true %}{% endif -%}{%- endfor -%}"
        "{{ m.content }}{{ 'M' if own.found }}",
    ),
    "namespace of the last message": "{%- set own = namespace(text='') -%}"
    + CHATML.replace(
        "{{ m.content }}",
        "{{ own.text }}{{ m.content }}{%- if '/a' in m.content %}{% set own = namespace(text='') %}{% endif -%}"
        "{%- set own.text = m.content[:2] -%}",
    ).replace("END", "{{ own.text }}"),
    "generation": CHATML.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}"),
    "break": CHATML.replace("{{ m.content }}", "{{ m.content }}{% if loop.last %}{% break %}{% endif %}"),
    "cycler": "{%- set turn = cycler('x', 'y') -%}"
    + CHATML.replace("{{ m.content }}", "{{ m.content }}{{ turn.next() }}"),
    "joiner": "{%- set turn = joiner(',') -%}" + CHATML.replace("{{ m.content }}", "{{ turn() }}{{ m.content }}"),
    "changed": CHATML.replace("{{ m.content }}", "{{ m.content }}{{ 'new' if loop.changed(m.role) }}"),
    "iterator": "{%- set words = messages | map(attribute='content') -%}"
    + CHATML.replace("{{ m.content }}", "{{ (words | first)[:3] }}{{ m.content }}"),
    "sorted": CHATML.replace("for m in messages", "for m in messages | sort(attribute='role')"),
    "all again": CHATML
    + "{%- for m in messages %}{% if m.role == 'user' %}{{ m.content[:2] }}{% endif %}{% endfor -%}",
    "raises": CHATML.replace(
        "{{ m.content }}", "{{ m.content }}{% if 'magic' in m.content %}{{ raise_exception('magic') }}{% endif %}"
    ),
    "tools and a word": CHATML.replace("{{ m.content }}", "{{ m.content }}{{ 'T' if tools and 'magic' in m.content }}"),
}
REFUSED = {"length", "sorted", "raises"}  # the turn's length is in its text; messages are moved; most requests raise


def list_words(source: str) -> list[str]:
    """Texts that make a template's conditions true: its own strings, alone and inside others."""
    tree = chat_template_utils._compile_jinja_template("").environment.parse(source)
    words = {
        str(node.value)
        for node in tree.find_all(nodes.Const)
        if isinstance(node.value, str) and 0 < len(node.value) < 40 and node.value.strip()
    }
    return sorted(words)


def make_text(rng: random.Random, words: list[str]) -> str:
    word = rng.choice(words) if words else "x"
    return rng.choice((word, f"{word} go on", f"well {word}", f"a {word} b {rng.choice(words or ['y'])}", "plain", ""))


def make_message(rng: random.Random, words: list[str], index: int) -> list[dict[str, Any]]:
    text = make_text(rng, words)
    kind = rng.randrange(6)
    if kind < 2:
        return [user(text), says(make_text(rng, words))]
    if kind == 2:
        more = {"reasoning_content": make_text(rng, words)} if rng.random() < 0.5 else {}
        return [user(text), says(make_text(rng, words), **more)]
    if kind == 3:
        return [{"role": "system", "content": text}, user(text), says("well")]
    many = calls(*("Paris", "Oslo")[: rng.choice((1, 1, 2))], text=rng.choice((None, text)), first=index * 10)
    results = [result(make_text(rng, words), index * 10 + n) for n in range(len(many["tool_calls"]))]
    return [user(text), many, *results, says(text)] if kind == 4 else [many, *results]


def make_request(rng: random.Random, renderer: Renderer, words: list[str]) -> tuple[Any, ...]:
    head = [{"role": "system", "content": make_text(rng, words)}] if rng.random() < 0.5 else []
    history: list[dict[str, Any]] = [*head, user(make_text(rng, words))]
    for index in range(rng.choice((0, 0, 1, 2, 3, 6))):
        history += make_message(rng, words, index + 1)
    if rng.random() < 0.5:
        last = calls("Paris", text=rng.choice((None, make_text(rng, words))))
        new = [result(make_text(rng, words))]
    else:
        last, new = says(make_text(rng, words) or "yes"), [user(make_text(rng, words))]
        if history[-1]["role"] == "assistant":
            history.append(user("and"))
    if rng.random() < 0.2:
        new += [says(make_text(rng, words)), user(make_text(rng, words))]
    tools = TOOLS if last.get("tool_calls") or rng.random() < 0.3 else None
    stops = renderer.stops.call if last.get("tool_calls") else renderer.stops.text
    stop = renderer.codec.literals[stops[0]] if stops else renderer.stop_token_ids[0]
    return (7, stop), [*history, last], new, tools


def find_outcome(renderer: Renderer, request: tuple[Any, ...]) -> Any:
    try:
        found = renderer.extend(*request)
    except TokenTrueError as error:
        return type(error), str(error)
    return found.why if isinstance(found, tt.Refusal) else found.added_ids


def render_whole(tokenizer: Any, renderer: Renderer, request: tuple[Any, ...]) -> str | None:
    """The template's text of the conversation, with shielded content; None if it raises."""
    _, history, new, tools = request
    given = normalise_messages(history, renderer.inputs, named=True)
    calls = given[-1].get("tool_calls") or ()
    given += normalise_messages(new, renderer.inputs, named=True, calls=calls)
    none = [] if renderer.inputs.no_tools == "empty" else None
    both = given, normalise_tools(tools, renderer.inputs) or none
    (given, given_tools), mark = shield_each(renderer.codec, [shield(renderer.codec, value) for value in both])
    more = {**tokenizer.special_tokens_map, **renderer.template_kwargs, "add_generation_prompt": True}
    template = chat_template_utils._compile_jinja_template(renderer.template.source)
    try:
        text = template.render(messages=given, tools=given_tools, documents=None, **more)
    except Exception:
        return None
    return text.replace(mark, "") if mark else text


def count_differences(tokenizer: Any, source: str | None, folder: Path | None, cases: int) -> tuple[int, int]:
    """How many requests get another prompt than from whole renders, those of a renderer without plans and jinja2's; and
    how many got a prompt."""
    with_plans, without = (
        renderer_of(tokenizer, chat_template=source, directory=folder, extend_plans=most) for most in (4096, 0)
    )
    rng = random.Random(with_plans.template_hash)
    words = list_words(with_plans.template.source)
    wrong = done = 0
    for _ in range(cases):
        request = make_request(rng, with_plans, words)
        found = find_outcome(with_plans, request)
        wrong += found != find_outcome(without, request)
        if isinstance(found, (str, tuple)):
            continue
        done += 1
        whole = render_whole(tokenizer, with_plans, request)
        wrong += whole is not None and not whole.endswith(with_plans.decode(found))
    return wrong, done


@pytest.mark.parametrize("name", slow_but_every(4, SMALL))
def test_small_templates(name: str) -> None:
    wrong, done = count_differences(standin(SMALL[name]), SMALL[name], None, 120)
    assert wrong == 0 and (done > 60) == (name not in REFUSED)


@pytest.mark.parametrize("name", slow_but_every(6, HOSTILE))
def test_hostile_templates(name: str) -> None:
    assert count_differences(standin(HOSTILE[name]), HOSTILE[name], None, 40)[0] == 0


@pytest.mark.parametrize("name", slow_but_every(3, OWN))
def test_templates_of_our_own(name: str) -> None:
    wrong, done = count_differences(judge(name), None, folder_of(name), 60)
    assert wrong == 0 and done > 20


def list_shared() -> list[Path]:
    return sorted((parts.shared() or Path("/nonexistent")).glob("templates/*.jinja"))


PRINT_EARLIER = {"Kimi-K3", "Reka-Edge", "google-gemma-4-31B-it", "google-gemma-4-31B-it-interleaved"}


def test_which_real_templates_write_nothing_for_earlier_messages() -> None:
    """The others render the whole history, which is right and slower."""
    talk: list[Any] = [{"role": "system", "content": "Be brief."}]
    for index in range(40):
        talk += [user(f"ask {index} " * 20), says(f"say {index} " * 20)]
    whole: set[str] = set()
    for path in list_shared():
        template = Template(path.read_text(encoding="utf-8"), variables={"bos_token": "<s>", "eos_token": "</s>"})
        for messages in (talk, talk[1:]):
            given = normalise_messages(messages, InputFormat())
            given = [*map(EarlierMessage, given[:-1]), given[-1]]
            try:
                texts = [template.render(given, None, {}, skips_earlier=skips) for skips in (False, True)]
            except TokenTrueError:
                continue
            if len(texts[1].replace(SKIPPED, "")) > len(texts[0]) // 10:
                whole.add(path.stem)
    if not list_shared():
        pytest.skip("the templates are in ../shared/templates, which is not here")
    assert whole == PRINT_EARLIER


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem) for path in list_shared()])
def test_every_real_template(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    try:
        wrong, _ = count_differences(standin(source), source, None, 80)
    except TokenTrueError as error:
        pytest.skip(f"does not load: {error}")
    assert wrong == 0


def test_nemotron_after_another_conversation() -> None:
    """Its prompt ends otherwise where any user message holds /no_think."""
    path = (parts.shared() or Path("/nonexistent")) / "templates" / "NVIDIA-Nemotron-Nano-v2.jinja"
    if not path.exists():
        pytest.skip("NVIDIA-Nemotron-Nano-v2.jinja is in ../shared/templates, which is not here")
    source = path.read_text(encoding="utf-8")
    tokenizer = standin(source)
    tokenizer.chat_template = source
    renderer = renderer_of(tokenizer, chat_template=source)
    prefix = (7, stop_id(renderer))
    for first in ("hello", "/no_think hi", "hello again", "/think hi"):
        history = [user(first), says("yes"), user("so"), says("well")]
        found = renderer.extend(prefix, history, [user("go on")])
        assert isinstance(found, tt.Extension)
        whole = tokenizer.apply_chat_template([*history, user("go on")], tokenize=False, add_generation_prompt=True)
        end = "<think></think>" if "/no_think" in first else "<think>\n"
        assert whole.endswith(end) and renderer.decode(found.added_ids).endswith(end), first


MUTANTS: dict[str, tuple[str, Any, str]] = {
    "writes to namespaces": ("_Skipping._is_pure", lambda *_: True, "word in the printing loop"),
    "assignments that writes need": ("_list_names", lambda _: {"ns"}, "word in the printing loop"),
    "calls of macros that write": ("_Skipping._is_pure", lambda *_: True, "macro that writes"),
    "writes to namespaces that live on": ("_list_local_namespaces", lambda _: {"ns"}, "word in the printing loop"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_what_is_wrongly_left_out_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, mutant, template = MUTANTS[name]
    monkeypatch.setattr(f"tokentrue.renderers.earlier.{place}", mutant)
    assert count_differences(standin(SMALL[template]), SMALL[template], None, 120)[0]


@pytest.mark.parametrize("asked", ["m.nothing.x", "m['nothing'].x", "m + 'x'", "'x' + m", "m[0].x", "m.role.x.y"])
def test_errors_name_an_earlier_message_as_any_other(asked: str) -> None:
    ending = "{% set m = messages[0] %}{{ " + asked + " if 'magic' in m.content }}"
    source = CHATML.replace("END", ending)
    renderer = renderer_of(standin(CHATML), chat_template=source)
    history = [user("magic"), says("b"), user("c"), says("d")]
    found = renderer.extend((7, stop_id(renderer)), history, [user("e")])
    with pytest.raises(TokenTrueError) as raised:
        renderer.render([*history, user("e")])
    assert isinstance(found, tt.Refusal) and found.detail == str(raised.value)


READS_TURN = {
    "word in any": (SMALL["word in any"], "magic words", ""),
    "first letters": (
        CHATML.replace("{{ m.content }}", "{{ m.content }}{{ loop.previtem.content[:3] if loop.previtem }}"),
        "Hello there",
        "",
    ),
    "last of the assistant": (
        CHATML.replace("END", "{{ (messages | selectattr('role', 'equalto', 'assistant') | list)[-1].content[:4] }}"),
        "Well said",
        "",
    ),
    "its length": (
        CHATML.replace("END", "{{ messages | map(attribute='content') | join | length }}"),
        "Four",
        "turn_decides",
    ),
    "its end": (
        CHATML.replace("{{ m.content }}", "{{ m.content }}{{ loop.previtem.content[-3:] if loop.previtem }}"),
        "Hello there",
        "turn_decides",
    ),
}


@pytest.mark.parametrize("name", READS_TURN)
def test_what_the_recorded_turn_says_is_asked_of_its_own_text(name: str) -> None:
    source, said, why = READS_TURN[name]
    tokenizer = standin(source)
    tokenizer.chat_template = source
    renderer = renderer_of(tokenizer, chat_template=source)
    for history in ([user("a"), says("b"), user("c"), says(said)], [user("a"), says("b"), user("c"), says("done")]):
        found = renderer.extend((7, stop_id(renderer)), history, [user("go on")])
        if isinstance(found, tt.Refusal):
            assert found.why == why
            continue
        whole = tokenizer.apply_chat_template([*history, user("go on")], tokenize=False, add_generation_prompt=True)
        assert whole.endswith(renderer.decode(found.added_ids)), history


EMPTY = {"none": says(None), "empty": says(""), "line": says("\n"), "thought": says("", reasoning_content="hm")}
READS_EMPTY = {
    "first letters": CHATML.replace(
        "{{ m.content }}", "{{ loop.previtem.content[:3] if loop.previtem }}{{ m.content }}"
    ),
    "last letters": CHATML.replace(
        "{{ m.content }}", "{{ loop.previtem.content[-3:] if loop.previtem }}{{ m.content }}"
    ),
    "length": CHATML.replace("END", "{{ messages | map(attribute='content') | join | length }}"),
    "raises": CHATML.replace(
        "{{ m.content }}",
        "{{ loop.previtem.content[:3] if loop.previtem }}{{ m.content }}"
        "{{ raise_exception('said nothing') if m.role == 'assistant' and not m.content | trim }}",
    ),
}


@pytest.mark.parametrize("said", EMPTY)
@pytest.mark.parametrize("name", READS_EMPTY)
def test_no_placeholder_of_an_empty_turn_reaches_a_prompt(name: str, said: str) -> None:
    renderer = renderer_of(standin(READS_EMPTY[name]), chat_template=READS_EMPTY[name])
    first = [user("a"), EMPTY[said]]
    for history in (first, [*first, user("b"), EMPTY[said]]):
        found = renderer.extend((7, stop_id(renderer)), history, [user("go on")])
        assert isinstance(found, tt.Refusal) and found.why == "turn_decides", found


@pytest.mark.parametrize("said", EMPTY)
def test_an_empty_turn_that_decides_nothing_is_gone_on_with(said: str) -> None:
    omits = "{%- for m in messages if m.content | trim -%}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{%- endfor -%}"
    for source in (
        CHATML.replace("END", ""),
        omits + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ):
        renderer = renderer_of(standin(source), chat_template=source)
        found = renderer.extend((7, stop_id(renderer)), [user("a"), EMPTY[said]], [user("go on")])
        assert isinstance(found, tt.Extension) and "go on" in renderer.decode(found.added_ids), found


ATTRIBUTES = [
    "append",
    "__class__",
    "__init__",
    "mro",
    "pop",
    "items",
    "get",
    "update",
    "setdefault",
    "clear",
    "add",
    "format",
    "upper",
    "gi_frame",
    "cr_frame",
    "f_globals",
    "func_globals",
    "im_func",
    "__globals__",
    "_Namespace__attrs",
    "index0",
    "previtem",
    "name",
    "role",
]


def test_the_sandbox_decides_as_it_does_without_memory() -> None:
    template = Template(CHATML, variables={})
    template.render([{"role": "user", "content": "x"}], None, {}, skips_earlier=True)
    plain, remembering = template._compiled.environment, template._without_earlier.environment
    generator = (number for number in range(1))
    owners: list[Any] = [
        {},
        EarlierMessage(role="x"),
        {"role": None},
        [],
        set(),
        "x",
        1,
        None,
        dict,
        str.upper,
        "x".upper,
        generator,
        template,
        ImportError("x"),
    ]
    for _ in range(2):  # asked, then remembered
        for owner in owners:
            for name in ATTRIBUTES:
                value = getattr(owner, name, None)
                told = [sandbox.is_safe_attribute(owner, name, value) for sandbox in (plain, remembering)]
                assert told[0] == told[1], (owner, name)
                read = [repr(sandbox.getattr(owner, name)) for sandbox in (plain, remembering)]
                assert read[0] == read[1], (owner, name)
    for number in range(3000):
        remembering.is_safe_attribute({}, f"name{number}", None)
    assert not remembering.is_safe_attribute([], "append", None), "however many names a conversation makes it ask for"
