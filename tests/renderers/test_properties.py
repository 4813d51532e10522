"""Sampled tokens are never canonical: whatever ids a turn was recorded with, `extend` keeps them and adds what the
template adds.

The slow ones (`-m slow`) see 10,000 cases: 7,500 turns of text in six formats, 2,500 turns of calls in two. The others
keep the suite short; TOKENTRUE_CASES sets their number.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tokentrue as tt
from tests.marks import examples
from tests.renderers.talk import TOOLS, loaded, result, says, stop_id, user
from tokentrue.renderers import Renderer
from tokentrue.types import Ended

CASES = int(os.environ.get("TOKENTRUE_CASES", examples(60)))
many = settings(
    max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck), database=None, print_blob=True
)
NAMES = ("qwen3-like", "k2v3-like", "glm-like", "kimi-like", "minimax-like", "deepseek-like")

text = st.text(
    alphabet=st.one_of(
        st.sampled_from('ab Z9.,\n\t"{}<>|\\é日🙂'), st.characters(codec="utf-8", exclude_characters="\ufffd")
    ),
    max_size=40,
)
literals = st.sampled_from(
    ["<|im_end|>", "<|im_start|>", "<think>", "</think>", "<tool_call>", "<|user|>", "[e~[", "<|endoftext|>"]
)
content = st.lists(st.one_of(text, literals), max_size=5).map("".join)


def respelled(renderer: Renderer, draw: Any, written: str) -> list[int]:
    """The same text in other tokens: cut anywhere, also inside a character, and each piece encoded for itself."""
    data = written.encode()
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=6)))
    pieces = [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    ids: list[int] = []
    for piece in pieces:
        try:
            ids += renderer.encode_sampled(piece.decode())
        except UnicodeDecodeError:
            ids += [index for byte in piece for index in _byte(renderer, byte)]
    return ids


def _byte(renderer: Renderer, byte: int) -> list[int]:
    """The token of one byte: every byte-level vocabulary has all of them."""
    from tokentrue.renderers.codec import _gpt2_alphabet

    letter = next(char for char, value in _gpt2_alphabet().items() if value == byte)
    index = renderer.codec.backend.token_to_id(letter)
    return [] if index is None else [index]


def spaced(draw: Any, value: Any) -> str:
    """JSON with the spacing of somebody else."""
    inner, outer = draw(st.sampled_from([": ", ":", " :  ", ":\n"])), draw(st.sampled_from([", ", ",", " ,\n "]))
    return json.dumps(value, separators=(outer, inner), ensure_ascii=draw(st.booleans()))


def text_turn(name: str, data: st.DataObject) -> None:
    """Any text, any split, any end: the prefix is bit-identical, and what is added does not depend on how the turn was
    spelled."""
    renderer = loaded(name)
    said, asked = data.draw(content), data.draw(content)
    prompt = renderer.render([user("a")]).token_ids
    end = data.draw(st.sampled_from(["stop", "open", "foreign"]))
    foreign = renderer.codec.literals["<|endoftext|>"]
    tail = {"stop": [stop_id(renderer)], "open": [], "foreign": [foreign]}[end]
    sampled = respelled(renderer, data.draw, said) + tail
    prefix = (*prompt, *sampled)
    found = renderer.extend(prefix, [user("a"), says(said)], [user(asked)])
    assert isinstance(found, tt.Extension), found
    assert found.token_ids[: len(prefix)] == prefix and found.prefix_ids == prefix
    plain = renderer.extend((*prompt, *tail) if tail else (*prompt, 5), [user("a"), says("x")], [user(asked)])
    assert isinstance(plain, tt.Extension)
    if tail or (sampled and sampled[-1] not in renderer.codec.texts):
        assert found.added_ids == plain.added_ids
    assert renderer.decode(found.added_ids).count(asked) >= 1 or not asked or asked != asked.strip()
    forged = [index for index in found.added_ids if index in renderer.codec.texts]
    harmless = renderer.extend((*prompt, *tail) if tail else prefix, [user("a"), says("x")], [user("b")])
    assert isinstance(harmless, tt.Extension) and forged == [
        index for index in harmless.added_ids if index in renderer.codec.texts
    ]


def call_turn(name: str, data: st.DataObject) -> None:
    """Calls with odd spacing and odd tokens: parse finds them, the extension after them is the same, the prefix is
    bit-identical."""
    renderer = loaded(name)
    city = data.draw(text.filter(lambda value: "�" not in value))
    arguments = {"city": city}
    body = spaced(data.draw, {"name": "weather", "arguments": arguments})
    thought = data.draw(st.sampled_from(["", "hm"]))
    head = {"qwen3-like": f"<think>\n{thought}\n</think>\n\n", "k2v3-like": f"\n{thought}\n</think>\n"}[name]
    prompt = renderer.render([user("a")], TOOLS).token_ids
    marks = [renderer.codec.literals["<tool_call>"]], [renderer.codec.literals["</tool_call>"]]
    inner = "\n" + body + "\n"
    calls_ids = [*marks[0], *respelled(renderer, data.draw, inner), *marks[1]]
    if any(index in renderer.codec.texts for index in calls_ids[1:-1]):
        return  # the value spells a literal of the template: the model would have written a token there
    sampled = [*renderer.encode_sampled(head), *calls_ids, stop_id(renderer, call=True)]
    parsed = renderer.parse(sampled, prompt_ids=prompt, tools=TOOLS)
    assert parsed.ended is Ended.STOP and parsed.stop_id == sampled[-1]
    assert [json.loads(call["function"]["arguments"]) for call in parsed.message["tool_calls"]] == [arguments]
    assert (parsed.message.get("reasoning_content") or "").strip() == thought
    message = {**parsed.message, "tool_calls": [{**parsed.message["tool_calls"][0], "id": "call_0"}]}
    prefix = (*prompt, *sampled)
    found = renderer.extend(prefix, [user("a"), message], [result("fine")], TOOLS)
    assert isinstance(found, tt.Extension) and found.token_ids[: len(prefix)] == prefix
    canonical = renderer.extend((*prompt, sampled[-1]), [user("a"), _plain_call()], [result("fine")], TOOLS)
    assert isinstance(canonical, tt.Extension) and canonical.added_ids == found.added_ids


def _plain_call() -> dict[str, Any]:
    call = {"id": "call_0", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


CHECKS = {f"text-{name}": (text_turn, name) for name in NAMES} | {
    f"calls-{name}": (call_turn, name) for name in NAMES[:2]
}


@pytest.mark.parametrize("case", CHECKS)
@given(data=st.data())
@many
def test_any_turn(case: str, data: st.DataObject) -> None:
    check, name = CHECKS[case]
    check(name, data)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", CHECKS)
@given(data=st.data())
@settings(many, max_examples=1250)
def test_many_turns(case: str, data: st.DataObject) -> None:
    check, name = CHECKS[case]
    check(name, data)


@given(pieces=st.lists(st.one_of(text, literals), max_size=8))
@many
def test_shield_changes_no_text(pieces: list[str]) -> None:
    """Whatever the content: it reads back as it was, and holds no token of structure."""
    renderer = loaded("qwen3-like")
    written = "".join(pieces)
    rendered = renderer.render([user(f"a{written}b")])
    assert f"a{written}b" in renderer.decode(rendered.token_ids)
    bare = renderer.render([user("ab")]).token_ids
    structure = [index for index in bare if index in renderer.codec.texts]
    assert [index for index in rendered.token_ids if index in renderer.codec.texts] == structure
