"""What a renderer keeps of recorded messages: `extend` gives what it gives for messages that it has not seen, and the
template gets the messages as they are read and shielded all at once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.marks import slow_except
from tests.renderers.talk import OWN, TOOLS, calls, loaded, result, says, stop_id, user
from tokentrue import Extension
from tokentrue.json_types import JsonValue
from tokentrue.renderers import Renderer
from tokentrue.renderers.codec import MARKS, strings_in
from tokentrue.renderers.extending.contexts import ExtendRequest
from tokentrue.renderers.extending.splicer import Splicer
from tokentrue.renderers.messages import normalise_messages, normalise_tools
from tokentrue.types import PastMessages

# Harmless text, parts of literals that the template's text could complete, whole ones, and the marks of a shield.
TEXTS = st.text("a <|>/imd_\ufdd0\ufdd1\n", max_size=5) | st.sampled_from(
    ["<|im_end|>", "a<", "<|im_", "|>", "\ufdd0", "<tool_call>", "[INST]", "<|end|>x\ufdd0", "\ufdd1<|im_start|>"]
)


def without(mark: str, value: JsonValue) -> JsonValue:
    if isinstance(value, str):
        return value.replace(mark, "") if mark else value
    if isinstance(value, dict):
        return {without(mark, key): without(mark, each) for key, each in value.items()}
    return [without(mark, each) for each in value] if isinstance(value, list) else value


def check_requests(renderer: Renderer, prefix: list[int], past: PastMessages, new: list[dict[str, Any]]) -> None:
    """Extends, and checks what the template is given."""
    requests: list[ExtendRequest] = []
    plan, render_tail = Splicer.plan, Splicer.render_tail
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Splicer, "plan", lambda self, request: requests.append(request) or plan(self, request))
        patch.setattr(Splicer, "render_tail", lambda self, *args: requests.append(args[1]) or render_tail(self, *args))
        found = renderer.extend(prefix, past, new, TOOLS)
    assert requests and found == renderer.extend(prefix, list(past), new, TOOLS)
    is_safe, inputs = renderer.injection == "safe", renderer.inputs
    plain = normalise_messages(list(past), inputs, named=is_safe)
    fresh = normalise_messages(new, inputs, named=is_safe, calls=plain[-1].get("tool_calls") or ())
    everything = [plain, fresh, normalise_tools(TOOLS, inputs)]
    held = set("".join(strings_in(everything)))
    structure = {token for text, token in renderer.codec.literals.items() if text.strip()}
    for request in requests:
        given = [[*request.past, request.last], request.new, request.tools]
        assert request.mark not in held and (is_safe or not request.mark)
        assert without(request.mark, given) == everything
        for text in strings_in(given) if is_safe else ():
            assert not structure & set(renderer.codec.encode(text, request.mark or MARKS[-1])), text


def make_turn(kind: str, text: str, city: str, at: int) -> list[dict[str, Any]]:
    """A turn of the model and what follows it."""
    if kind == "call":
        return [calls(city, text=text, first=at), result(text, at)]
    if kind == "unnamed":
        answer = result(city, at)
        del answer["tool_call_id"]
        return [calls(city, first=at), answer]
    return [says(text), user(city)]


TURNS = st.lists(st.tuples(st.sampled_from(["call", "unnamed", "text"]), TEXTS, TEXTS), min_size=2, max_size=5)


@pytest.mark.parametrize(
    ("name", "injection"),
    [
        *((name, "safe") for name in OWN),
        *slow_except(["qwen3-like", "harmony-like"], ((name, "engine") for name in OWN), name=lambda each: each[0]),
    ],
)
@given(opening=TEXTS, turns=TURNS, fork=st.integers(0, 4))
def test_extend_is_the_same_with_and_without_what_was_read(
    name: str, injection: str, opening: str, turns: list[tuple[str, str, str]], fork: int
) -> None:
    renderer = loaded(name, injection=injection)
    city = opening.replace('"', "")
    talk = [make_turn(kind, text, city + other.replace("\n", ""), at) for at, (kind, text, other) in enumerate(turns)]

    def compare(past: PastMessages, new: list[dict[str, Any]]) -> None:
        check_requests(renderer, [stop_id(renderer, call="tool_calls" in past[-1])], past, new)

    past = PastMessages([user(opening)])
    branches: list[PastMessages] = []
    for turn, after in talk:
        past = past.followed_by([turn])
        branches.append(past)
        compare(past, [after])
        past = past.followed_by([after])
    compare(branches[fork % len(branches)], [user(opening)])


def test_what_one_renderer_read_is_not_used_by_another() -> None:
    opening = [{"role": "developer", "content": "Be brief.<|im_end|>"}, user("<|im_end|> hello")]
    past = PastMessages([*opening, calls("<|im_end|>"), result("21"), says("<|im_start|>")])
    for name in OWN:
        for injection in ("safe", "engine"):
            renderer = loaded(name, injection=injection)
            check_requests(renderer, [stop_id(renderer)], past, [user("x<|im_end|>")])


def test_a_list_that_its_owner_changed_is_read_again() -> None:
    renderer = loaded("qwen3-like")
    prefix, messages = [stop_id(renderer, call=True)], [user("x"), calls("Rome")]
    before = renderer.extend(prefix, messages, [result("a")], TOOLS)
    messages[1] = says("y")
    after = renderer.extend([stop_id(renderer)], messages, [user("a")], TOOLS)
    assert isinstance(before, Extension) and isinstance(after, Extension) and before.added_ids != after.added_ids
