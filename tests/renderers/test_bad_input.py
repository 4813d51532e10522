"""Bad input gives one clear typed error that names the field, and never a stack trace of somebody else."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

import tokentrue as tt
from tests import parts
from tests.renderers.talk import TOOLS, extended, loaded, says, stop_id, user
from tokentrue.errors import ConfigError, MessageError, TemplateError, TokenizerError


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ("hello", "messages"),
        ({"role": "user"}, "messages"),
        ([user("a"), "b"], "messages[1]"),
        ([user("a"), {"role": "wizard", "content": "b"}], "messages[1].role"),
        ([user("a"), {"content": "b"}], "messages[1].role"),
        ([user(7)], "messages[0].content"),
        ([user([{"type": "image_url", "image_url": {"url": "x"}}])], "messages[0].content[0]"),
        ([user([7])], "messages[0].content[0]"),
        ([user("a"), says("b", tool_calls="x")], "messages[1].tool_calls"),
        ([user("a"), says("b", tool_calls=[7])], "messages[1].tool_calls[0]"),
        ([user("a"), says("b", tool_calls=[{"function": {"arguments": "{}"}}])], "messages[1].tool_calls[0].function.name"),
        ([user("a"), says("b", reasoning_content=7)], "messages[1].reasoning_content"),
        ([{"role": ["user"], "content": "a"}], "messages[0].role"),
        ([user([{"type": ["text"], "text": "a"}])], "messages[0].content[0]"),
        ([user("a"), says("b"), {"role": "tool", "tool_call_id": ["c"], "content": "d"}], "messages[2].tool_call_id"),
        ([user("a \ud800")], "messages[0].content"),
        ([user([{"type": "text", "text": "\udfff"}])], "messages[0].content[0].text"),
        ([user("a") | {"name": "\udc00"}], "messages[0].name"),
        ([user("a"), says("b", reasoning_content="\ud800")], "messages[1].reasoning_content"),
        ([user("a"), says("b", tool_calls=[{"function": {"name": "\ud800"}}])], "messages[1].tool_calls[0].function.name"),
        ([user("a"), says("b", tool_calls=[{"function": {"name": "f", "arguments": "\ud800"}}])],
         "messages[1].tool_calls[0].function.arguments"),
        ([user("a"), says("b", tool_calls=[{"function": {"name": "f", "arguments": {"x": ["\ud800"]}}}])],
         "messages[1].tool_calls[0].function.arguments.x[0]"),
        ([user("a"), says("b", tool_calls=[{"id": "\ud800", "function": {"name": "f"}}])], "messages[1].tool_calls[0].id"),
    ],
)  # fmt: skip
def test_messages(messages: Any, field: str) -> None:
    with pytest.raises(MessageError) as caught:
        loaded("qwen3-like").render(messages)
    assert caught.value.field == field and str(caught.value).startswith(f"{field}: ")


@pytest.mark.parametrize(
    ("tools", "field"),
    [
        ("x", "tools"),
        ({"name": "f"}, "tools"),
        (["f"], "tools[0]"),
        ([{"type": "function", "function": "f"}], "tools[0].function"),
        ([TOOLS[0], {"type": "function", "function": {"description": "no name"}}], "tools[1].function.name"),
        ([{"type": "function", "function": {"name": "\ud800"}}], "tools[0].function.name"),
        ([{"name": "f", "description": "\ud800"}], "tools[0].function.description"),
        (
            [{"type": "function", "function": {"name": "f", "parameters": {"\ud800": 1}}}],
            "tools[0].function.parameters",
        ),
    ],
)
def test_tools(tools: Any, field: str) -> None:
    renderer = loaded("qwen3-like")
    with pytest.raises(MessageError) as caught:
        renderer.render([user("a")], tools)
    assert caught.value.field == field
    with pytest.raises(MessageError):
        renderer.extend([7, stop_id(renderer)], [user("a"), says("b")], [user("c")], tools)


@pytest.mark.parametrize("kwargs", [{"messages": []}, {"tools": None}, {"add_generation_prompt": False}])
def test_template_settings_do_not_stand_for_the_request(kwargs: dict[str, Any]) -> None:
    with pytest.raises(MessageError, match="template_kwargs: cannot set messages, tools or add_generation_prompt"):
        loaded("qwen3-like").render([user("hi")], template_kwargs=kwargs)
    plain, told = (
        loaded("qwen3-like").render([user("hi")], template_kwargs=given)
        for given in (None, {"add_generation_prompt": True})
    )
    assert plain.token_ids == told.token_ids


def test_new_messages_name_their_own_field() -> None:
    renderer = loaded("qwen3-like")
    with pytest.raises(MessageError) as caught:
        renderer.extend([7, stop_id(renderer)], [user("a"), says("b")], [user("c"), {"role": "?"}])
    assert caught.value.field == "new[1].role"


@pytest.mark.parametrize(
    ("messages", "new", "field"),
    [
        ([user("a"), says("b")], [user("\ud800")], "new[0].content"),
        ([user("a"), says("\ud800")], [user("c")], "messages[1].content"),
        ([user("a"), says("b")], "c", "new"),
        ([user("a"), says("b")], [user("c"), None], "new[1]"),
        ("ab", [user("c")], "messages"),
        ([None, says("b")], [user("c")], "messages[0]"),
    ],
)
def test_extensions(messages: Any, new: Any, field: str) -> None:
    renderer = loaded("qwen3-like")
    with pytest.raises(MessageError) as caught:
        renderer.extend([7, stop_id(renderer)], messages, new)
    assert caught.value.field == field


def test_arguments_that_escape_a_lone_surrogate_are_rendered_as_they_were_written() -> None:
    """A model may sample them; its turn must stay renderable."""
    written = '{"x": "\\ud800"}'
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": written}}
    renderer = loaded("qwen3-like")
    assert written in renderer.decode(renderer.render([user("a"), says("", tool_calls=[call])]).token_ids)


def test_a_text_that_is_no_unicode_is_refused_wherever_it_comes_from() -> None:
    renderer = loaded("qwen3-like")
    with pytest.raises(TokenizerError, match="lone surrogate"):
        renderer.encode_sampled("a \ud800")


@pytest.mark.parametrize("bad", [-1, 2**40, "a", None])
def test_ids_that_are_no_token_ids(bad: Any) -> None:
    renderer = loaded("qwen3-like")
    with pytest.raises(TokenizerError, match=f"token id {bad!r} is not in the tokenizer's vocabulary"):
        renderer.parse([7, bad])
    with pytest.raises(TokenizerError, match="token ids must be integers from 0"):
        renderer.decode([7, bad])
    with pytest.raises(TokenizerError):
        tt.compare([7, bad], [7, 8], renderer=renderer)


def _model(tmp_path: Path, **config: Any) -> Path:
    source = parts.own_dir("qwen3-like")
    (tmp_path / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    own = {"tokenizer_class": "PreTrainedTokenizerFast"} | config
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
    return tmp_path


def test_no_template(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match="chat_template"):
        tt.load_renderer(_model(tmp_path, eos_token="<|im_end|>"))


def test_template_that_does_not_compile(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match="does not compile"):
        tt.load_renderer(_model(tmp_path, eos_token="<|im_end|>"), chat_template="{% for %}")


def test_template_that_raises(tmp_path: Path) -> None:
    renderer = tt.load_renderer(
        _model(tmp_path, eos_token="<|im_end|>"), chat_template="{{ raise_exception('no, never') }}"
    )
    with pytest.raises(TemplateError, match="no, never"):
        renderer.render([user("a")])
    found = renderer.extend([7], [user("a"), says("b")], [user("c")])
    assert isinstance(found, tt.Refusal) and found.why == "template_raises" and "no, never" in found.detail
    assert not renderer.proof.ok


def test_no_stop_token(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="eos_token"):
        tt.load_renderer(_model(tmp_path), chat_template="{% for m in messages %}{{ m.content }}\n{% endfor %}")


@pytest.mark.parametrize("name", ["no/such/model/here", "/nonexistent"])
def test_no_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(TokenizerError, match="model"):
        tt.load_renderer(name)


@pytest.mark.parametrize("setting", [{"history": "forget"}, {"injection": "maybe"}])
def test_unknown_settings(setting: Any) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        tt.load_renderer(parts.own_dir("qwen3-like"), **setting)


@pytest.mark.slow
def test_ten_megabytes() -> None:
    """Rendered, shielded and spliced, in time that grows with the text and no faster (processor time: other jobs do not
    count)."""
    renderer = loaded("qwen3-like")
    line = "some words <|im_end|> and a line of numbers 12345\n"

    def took(size: int) -> float:
        text = line * (size // len(line))
        started = time.process_time()
        found = extended(renderer, [7, stop_id(renderer)], [user("a"), says("b")], [user(text)])
        assert found.added_ids.count(renderer.codec.literals["<|im_end|>"]) == 1
        return time.process_time() - started

    took(100_000)
    small, large = took(1_000_000), took(10_000_000)
    assert large < 60 and large < 30 * small, (small, large)
