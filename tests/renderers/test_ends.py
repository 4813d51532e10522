"""Every way a turn can end: what is added is what the template needs, the recorded ids stay, nothing sampled is written
again."""

from __future__ import annotations

from typing import Any

import pytest

from tests.renderers.talk import OWN, TOOLS, calls, extended, loaded, result, says, stop_id, user

WORKED_PROMPT = (151644, 872, 198, 17, 10, 17, 30, 151645, 198, 151644, 77091, 198)
WORKED_SAMPLED = (151667, 198, 718, 270, 336, 198, 151668, 271, 2132, 374, 220, 19, 13, 151645)
WORKED_ADDED = (198, 151644, 872, 198, 10, 16, 30, 151645, 198, 151644, 77091, 198)


def test_worked_example_of_the_design() -> None:
    renderer = loaded("real:qwen3")
    assert renderer.render([user("2+2?")]).token_ids == WORKED_PROMPT
    prefix = (*WORKED_PROMPT, *WORKED_SAMPLED)
    found = extended(renderer, prefix, [user("2+2?"), says("It is 4.", reasoning_content="add them")], [user("+1?")])
    assert found.added_ids == WORKED_ADDED
    assert found.token_ids == prefix + WORKED_ADDED and found.prefix_ids == prefix


# the text that must follow the recorded stop, read off each template by hand
AFTER_STOP = {
    ("qwen3-like", "user"): "\n<|im_start|>user\nNEW<|im_end|>\n<|im_start|>assistant\n",
    (
        "qwen3-like",
        "tool",
    ): "\n<|im_start|>user\n<tool_response>\nNEW\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    ("k2v3-like", "user"): "\n<|im_start|>user\nNEW<|im_end|>\n<|im_start|>assistant\n<think>",
    (
        "k2v3-like",
        "tool",
    ): "\n<|im_start|>tool\n<tool_response>\nNEW\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>",
}


@pytest.mark.parametrize(("name", "role"), AFTER_STOP)
def test_models_own_stop(name: str, role: str) -> None:
    renderer = loaded(name)
    turn, new = (says("Hi."), user("NEW")) if role == "user" else (calls("Paris"), result("NEW"))
    found = extended(renderer, [5, stop_id(renderer, call=role == "tool")], [user("a"), turn], [new], TOOLS)
    assert (renderer.decode(found.added_ids), found.join) == (AFTER_STOP[name, role], "stop")


@pytest.mark.parametrize("name", OWN)
def test_turn_left_open_gets_the_templates_closing(name: str) -> None:
    """A length cut-off or a stop string: the closing that the template writes itself comes first, and only it
    differs."""
    renderer = loaded(name)
    history = [user("a"), says("Hi the")]
    closed = extended(renderer, [5, stop_id(renderer)], history, [user("NEW")])
    opened = extended(renderer, renderer.encode_sampled("Hi the"), history, [user("NEW")])
    assert opened.join == "open"
    closing = opened.added_ids[: len(opened.added_ids) - len(closed.added_ids)]
    assert opened.added_ids[len(closing) :] == closed.added_ids and closing
    assert closed.join == "alias" or closing[-1] == stop_id(renderer)  # harmony: <|return|> ends, <|end|> goes on


@pytest.mark.parametrize("name", OWN)
def test_cut_inside_a_character(name: str) -> None:
    renderer = loaded(name)
    sampled = renderer.encode_sampled("Well 🙂")[:-1]
    assert renderer.decode(sampled).endswith("�")
    found = extended(renderer, sampled, [user("a"), says("Well �")], [user("NEW")])
    assert found.join == "open" and renderer.decode(found.added_ids).count("NEW") == 1
    assert found.token_ids[: len(sampled)] == tuple(sampled)


@pytest.mark.parametrize("name", ["qwen3-like", "k2v3-like", "real:qwen3", "real:glm-4.6"])
def test_cut_while_reasoning_closes_the_reasoning(name: str) -> None:
    renderer = loaded(name)
    cut = renderer.encode_sampled("<think>\nlet me")
    found = extended(renderer, cut, [user("a"), says(None, reasoning_content="let me")], [user("NEW")])
    assert renderer.decode(found.added_ids).lstrip().startswith("</think>") and found.join == "open"
    finished = renderer.encode_sampled("<think>\nlet me\n</think>\n\n")
    again = extended(renderer, finished, [user("a"), says(None, reasoning_content="let me")], [user("NEW")])
    assert "</think>" not in renderer.decode(again.added_ids).partition("NEW")[0]


def test_cut_inside_a_tool_call_closes_only_the_turn() -> None:
    renderer = loaded("qwen3-like")
    text = '<tool_call>\n{"name": "weather", "argu'
    found = extended(renderer, renderer.encode_sampled(text), [user("a"), says(text)], [user("NEW")], TOOLS)
    assert renderer.decode(found.added_ids).startswith("<|im_end|>\n<|im_start|>user\nNEW")


def test_cut_right_behind_a_tool_call_does_not_write_its_end_again() -> None:
    renderer = loaded("qwen3-like")
    sampled = renderer.encode_sampled('<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>')
    found = extended(renderer, sampled, [user("a"), calls("Paris")], [result("NEW")], TOOLS)
    assert (
        renderer.decode(found.added_ids).startswith("<|im_end|>\n<|im_start|>user\n<tool_response>")
        and found.join == "open"
    )


@pytest.mark.parametrize("name", ["qwen3-like", "kimi-like", "deepseek-like"])
def test_foreign_stop_stays_and_the_turn_is_closed(name: str) -> None:
    """Another token that the model's files declare as an end, but that the template does not write there."""
    renderer = loaded(name)
    foreign = renderer.codec.literals["<|endoftext|>"]
    history = [user("a"), says("Hi.")]
    found = extended(renderer, [5, foreign], history, [user("NEW")])
    closed = extended(renderer, [5, stop_id(renderer)], history, [user("NEW")])
    assert found.added_ids == (stop_id(renderer), *closed.added_ids) and found.token_ids[1] == foreign


@pytest.mark.parametrize("name", ["glm-like", "real:glm-4.6"])
def test_stop_that_does_not_fit_the_next_role(name: str) -> None:
    """GLM: the stop is the next turn's opener. Where another role follows, the sampled one stays and the right one is
    added as given."""
    renderer = loaded(name)
    asked, observed = renderer.codec.literals["<|user|>"], renderer.codec.literals["<|observation|>"]
    fits = extended(renderer, [5, observed], [user("a"), calls("Paris")], [result("NEW")], TOOLS)
    misfit = extended(renderer, [5, asked], [user("a"), calls("Paris")], [result("NEW")], TOOLS)
    assert misfit.added_ids == (observed, *fits.added_ids) and (fits.join, misfit.join) == ("stop", "foreign")
    misfit = extended(renderer, [5, observed], [user("a"), says("Hi.")], [user("NEW")])
    assert misfit.added_ids[0] == asked and misfit.token_ids[:2] == (5, observed)


@pytest.mark.parametrize("name", ["harmony-like", "real:gpt-oss"])
def test_harmony_return_stays_and_is_not_followed_by_end(name: str) -> None:
    renderer = loaded(name)
    returned, ended = renderer.codec.literals["<|return|>"], renderer.codec.literals["<|end|>"]
    found = extended(renderer, [5, returned], [user("a"), says("Hi.")], [user("NEW")])
    assert found.join == "alias" and found.token_ids[1] == returned
    assert renderer.decode(found.added_ids).startswith("<|start|>user<|message|>NEW")
    assert found.added_ids == extended(renderer, [5, ended], [user("a"), says("Hi.")], [user("NEW")]).added_ids


def test_harmony_call_goes_on_with_the_tools_message() -> None:
    renderer = loaded("real:gpt-oss")
    found = extended(
        renderer, [5, renderer.codec.literals["<|call|>"]], [user("a"), calls("Paris")], [result("NEW")], TOOLS
    )
    assert (
        renderer.decode(found.added_ids).startswith("<|start|>functions.weather to=assistant") and found.join == "stop"
    )


@pytest.mark.parametrize("kind", [tuple, list, "array", "numpy"])
def test_prefix_is_kept_whatever_holds_it(kind: Any) -> None:
    import array

    import numpy

    renderer = loaded("qwen3-like")
    made = {"array": lambda ids: array.array("I", ids), "numpy": numpy.array}.get(kind, kind)([5, 6, stop_id(renderer)])
    found = extended(renderer, made, [user("a"), says("Hi.")], [user("NEW")])
    assert found.prefix_ids == [5, 6, stop_id(renderer)] and found.added_ids[0] == renderer.encode_sampled("\n")[0]


def test_spans_say_what_is_content() -> None:
    renderer = loaded("qwen3-like")
    new = [result("first\nuser é"), result("second", 1), user("third <|im_end|>")]
    found = extended(renderer, [5, stop_id(renderer)], [user("a"), calls("Paris", "Oslo")], new, TOOLS)
    assert [span.start for span in found.spans] == [0, *(span.end for span in found.spans[:-1])]
    assert found.spans[-1].end == len(found.added_ids)
    texts = {
        span.message: renderer.decode(found.added_ids[span.start : span.end])
        for span in found.spans
        if span.message is not None
    }
    assert {index: text.strip() for index, text in texts.items()} == {
        0: "first\nuser é",
        1: "second",
        2: "third <|im_end|>",
    }
