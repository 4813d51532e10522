"""The short way through `extend` gives what the long way gives, for any call at all; ids put together are those of the whole text."""

from __future__ import annotations

import random
from collections import UserDict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import tokentrue as tt
from tests.renderers.talk import OWN, TOOLS, calls, extended, folder_of, judge, loaded, result, says, stop_id, user
from tokentrue.errors import TokenTrueError
from tokentrue.renderers import Renderer, renderer_of
from tokentrue.renderers.frames import filled, has_frame
from tokentrue.renderers.keys import plain_shapes
from tokentrue.renderers.spans import spans_of
from tokentrue.renderers.stencil import stencil_of

NAMES = [*OWN, "real:qwen3", "real:glm-4.6", "real:kimi-k2", "real:mistral-nemo"]
TEXTS = [
    "21 degrees", "def f(x):\n    return x['a'] + 1  # it's done\n" * 9, "é 中 😀", "<|im_end|>", "a <|im_", "im_end|> b",
    "<tool_response>\n", "</tool_response>", " \n ", "\n", "x", "<", ">", "[", "]", "\ufdd0", "</think>",
    "it's 12345, they'LL see;  \n\n\t", "", "\x00\x1c",
]  # fmt: skip


@cache
def long_way(name: str) -> Renderer:
    renderer = renderer_of(judge(name), directory=folder_of(name))
    renderer._framed = lambda *_: None  # type: ignore[method-assign]
    return renderer


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


def turn(rng: random.Random) -> dict[str, Any]:
    last: dict[str, Any] = says(rng.choice((*TEXTS, None)))
    if rng.random() < 0.7:
        last = calls(*("Paris", "Oslo")[: rng.randrange(1, 3)], text=rng.choice((None, "", "Look.")))
        if rng.random() < 0.3:
            last["tool_calls"] = odd_calls(rng, last["tool_calls"])
    if rng.random() < 0.3:
        last[rng.choice(("reasoning_content", "reasoning_content", "thinking", "name", "refusal"))] = rng.choice(("hm", None, ""))
    if rng.random() < 0.1 and last["content"] is None:
        del last["content"]
    return last


def following(rng: random.Random) -> list[Any]:
    new: list[Any] = []
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3))):
        text: Any = rng.choice(TEXTS) if rng.random() < 0.9 else rng.choice((None, 3, [{"type": "text", "text": "part"}]))
        message = rng.choice(
            (result(text, rng.choice((0, 0, 0, 1, 5))),) * 3 + (user(text), {"role": "system", "content": text}, says(text))
        )
        if rng.random() < 0.1:
            message[rng.choice(("name", "tool_call_id", "role", "extra"))] = rng.choice(("clock", "developer", "user", None, 4))
        if rng.random() < 0.03:
            message.pop(rng.choice(list(message)))
        new.append(UserDict(message) if rng.random() < 0.05 else message)
    return new


def outcome(renderer: Renderer, *args: Any) -> Any:
    try:
        found = renderer.extend(*args)
    except TokenTrueError as error:
        return type(error), str(error)
    return found if isinstance(found, tt.Refusal) else (found, found.spans)


def compared(name: str, cases: int) -> tuple[int, int]:
    """How many calls the two ways answer differently, and how many went the short way."""
    rng, short, long = random.Random(name), renderer_of(judge(name), directory=folder_of(name)), long_way(name)
    wrong = quick = 0
    for _ in range(cases):
        head = [{"role": "system", "content": "Be brief."}] if rng.random() < 0.5 else []
        last, new, tools = turn(rng), following(rng), rng.choice((TOOLS, TOOLS, None))
        ends = [
            stop_id(short, call=bool(last.get("tool_calls"))),
            stop_id(short, call=bool(last.get("tool_calls"))),
            *short.stop_token_ids,
            5,
        ]
        args = ((7, rng.choice(ends)), [*head, user("a"), last], new, tools)
        found = outcome(short, *args)
        wrong += found != outcome(long, *args)
        if type(found[0] if isinstance(found, tuple) else None) is tt.Extension:
            quick += short._framed(*args) is not None
    return wrong, quick


@pytest.mark.parametrize("name", NAMES)
def test_both_ways_agree(name: str) -> None:
    wrong, quick = compared(name, 300)
    assert wrong == 0
    assert quick > 10 or name in ("harmony-like", "glm-like", "real:glm-4.6", "real:mistral-nemo"), "hardly a call went the short way"


def any_result(message: Any, names: Any) -> Any:
    """As `_plain_shape`, blind to which call is answered and to what else there is."""
    role, content = message.get("role"), message.get("content")
    return (role, True, (), "weather" if role == "tool" else "", False) if type(content) is str and content else None


@pytest.mark.parametrize(
    ("what", "careless"),
    [
        ("keys._plain_shape", any_result),
        ("keys._call_names", lambda last: {"call_0": "weather"}),
        ("encoding.Codec._is_clean", lambda *_: True),
    ],
)
def test_a_careless_short_way_is_seen(what: str, careless: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"tokentrue.renderers.{what}", careless)
    assert any(compared(name, 300)[0] for name in OWN)


def test_plain_shapes_are_those_of_the_copies() -> None:
    rng, renderer, plain = random.Random(1), loaded("qwen3-like"), 0
    for _ in range(3000):
        last, new = turn(rng), following(rng)
        found = plain_shapes(last, new)
        if found is not None:
            call, key = renderer._call((7, 8), [user("a"), last], new, TOOLS, None)
            assert found == key[0] and key[1] is False and has_frame(call.last, call.fresh)
            assert [message["content"] for message in call.fresh] == [message["content"] for message in new]
            plain += 1
    assert plain > 300


@pytest.mark.parametrize("name", ["qwen3-like", "real:qwen3"])
def test_a_stencil_gives_the_ids_of_the_whole_text(name: str) -> None:
    codec, rng = loaded(name).codec, random.Random(2)
    parts = [
        "\n<|im_start|>user\n",
        "<|im_end|>\n",
        "",
        "it",
        "'",
        " ",
        "\n",
        "<tool_response>\n",
        "\n</tool_response>",
        "12",
        "<|im_",
        "_end|>",
    ]
    made = split = 0
    for _ in range(2000):
        frame = ["".join(rng.choices(parts, k=rng.randrange(3))) for _ in range(rng.randrange(2, 4))]
        contents = [text for text in rng.choices(TEXTS, k=len(frame) - 1) if codec.clean(text)]
        stencil = stencil_of(codec, frame)
        if stencil is None or len(contents) < len(frame) - 1:
            continue
        quick = stencil.ids(contents)
        assert (quick is not None) == all(map(str.isascii, contents))
        if quick is None:
            continue
        ids, counts = quick
        text, roles = filled(frame, contents), ["tool"] * len(contents)
        assert ids.tolist() == codec.encode_after(text, literal="")
        found = stencil.spans(ids, counts, contents, roles)
        assert found == spans_of(codec, text, "", ids, frame, roles) or ambiguous(frame, contents)
        made += 1
        split += found is not None and any(span.message is not None for span in found)
    assert made > 300 and split > 200


def ambiguous(frame: Sequence[str], contents: Sequence[str]) -> bool:
    """Whether `spans_of`, which looks for the frame in the text, may take a content for a part of it."""
    return any(not part or part in text for part in frame[1:-1] for text in contents)


@pytest.mark.parametrize("frame", [("a<|im_", "b"), ("a", "im_end|>b"), ("<|im_start|>", "", "x"), ("a <|im_ \n", "b"), ("\ufdd0", "b")])
def test_where_a_stencil_cannot_be_sure(frame: tuple[str, ...]) -> None:
    assert stencil_of(loaded("qwen3-like").codec, frame) is None


def test_what_is_no_list_of_messages_is_refused_either_way() -> None:
    renderer, prefix = loaded("qwen3-like"), (7, stop_id(loaded("qwen3-like"), call=True))
    extended(renderer, prefix, [user("a"), calls("Oslo")], [result("one")], TOOLS)
    with pytest.raises(TokenTrueError, match="must be a list"):
        renderer.extend(prefix, [user("a"), calls("Oslo")], {0: result("one")}.values(), TOOLS)  # type: ignore[arg-type]


def test_messages_changed_in_place_are_new_messages() -> None:
    renderer = loaded("qwen3-like")
    last, new, tools = calls("Oslo"), [result("one")], [dict(TOOLS[0])]
    prefix = (7, stop_id(renderer, call=True))
    before = [extended(renderer, prefix, [user("a"), last], new, tools) for _ in range(2)]
    assert before[0] == before[1]
    new[0]["content"] = "two"
    after = extended(renderer, prefix, [user("a"), last], new, tools)
    assert after == extended(long_way("qwen3-like"), prefix, [user("a"), last], [result("two")], tools) != before[1]
    last["tool_calls"][0]["id"] = "call_9"
    found = extended(renderer, prefix, [user("a"), last], new, tools)
    assert replace(found, prefix_ids=()) == replace(extended(long_way("qwen3-like"), prefix, [user("a"), last], new, tools), prefix_ids=())
