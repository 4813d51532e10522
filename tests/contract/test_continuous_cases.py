"""The cases of verl's continuous-token suite that a renderer answers, as cases: each boundary kept, inserted or
refused, in ids.

Theirs edit the recorded prefix where a stop token does not fit (GLM); ours never does: what the next role needs is
added, as given.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import tokentrue as tt
from tests import carriers, parts
from tokentrue.renderers import renderer_of

USER = {"role": "user", "content": "question"}


def renderer(name: str) -> Any:
    return tt.load_renderer(str(parts.own_dir(name)))


def extended(
    name: str, sampled: str, new: list[dict[str, Any]], *, past: list[dict[str, Any]] | None = None
) -> tuple[str, Any]:
    """The text that is added after `sampled`, and the extension."""
    r = renderer(name)
    history = past or [USER]
    prompt = list(r.render(history).token_ids)
    ids = r.encode_sampled(sampled)
    turn = dict(r.parse(ids, prompt_ids=prompt).message)
    extension = r.extend([*prompt, *ids], [*history, turn], [_answering(message, turn) for message in new])
    if isinstance(extension, tt.Refusal):
        return "", extension
    assert list(extension.token_ids[: len(prompt) + len(ids)]) == [*prompt, *ids]
    return r.decode(extension.added_ids), extension


def _answering(message: dict[str, Any], turn: dict[str, Any]) -> dict[str, Any]:
    place = message.get("answers")
    plain = {key: value for key, value in message.items() if key != "answers"}
    return plain if place is None else {**plain, "tool_call_id": turn["tool_calls"][place]["id"]}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def tool(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "tool", "content": text, **more}


CALL = '<tool_call>\n{"name": "lookup", "arguments": {}}\n</tool_call>'
HARMONY_CALL = "<|channel|>commentary to=functions.lookup <|constrain|>json<|message|>{}<|call|>"
GLM_CALL = "so</think><tool_call>lookup</tool_call>"
CASES = {
    "qwen: the newline after the stop is inserted": (
        "qwen3-like", "yes<|im_end|>", [user("more")], "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"),
    "qwen: the same before a tool result": (
        "qwen3-like", f"{CALL}<|im_end|>", [tool("ok", answers=0)],
        "\n<|im_start|>user\n<tool_response>\nok\n</tool_response><|im_end|>\n<|im_start|>assistant\n"),
    "qwen: results of one turn stay one group": (
        "qwen3-like", f"{CALL}\n{CALL}<|im_end|>", [tool("a", answers=0), tool("b", answers=1)],
        "\n<|im_start|>user\n<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response><|im_end|>\n<|im_start|>assistant\n"),
    "qwen: system and user, then the generation prompt": (
        "qwen3-like", "yes<|im_end|>", [{"role": "system", "content": "policy"}, user("retry")],
        "\n<|im_start|>system\npolicy<|im_end|>\n<|im_start|>user\nretry<|im_end|>\n<|im_start|>assistant\n"),
    "minimax: the newline after its stop is inserted": (
        "minimax-like", "so\n</think>\n\nyes[e~[", [user("more")], "\n]~b]user\nmore[e~[\n]~b]ai\n<think>\n"),
    "glm: the stop is the opener that follows, once": (
        "glm-like", "so</think>yes<|user|>", [user("more")], "more<|assistant|><think>"),
    "glm: observation then a tool result": (
        "glm-like", f"{GLM_CALL}<|observation|>", [tool("ok", answers=0)], "<tool_response>ok</tool_response><|assistant|><think>"),
    "glm: a stop that does not fit stays, and the right opener follows": (
        "glm-like", "so</think>yes<|observation|>", [user("more")], "<|user|>more<|assistant|><think>"),
    "kimi: nothing is inserted": (
        "kimi-like", "so</think>yes<|im_end|>", [user("more")],
        "<|im_user|>user<|im_middle|>more<|im_end|><|im_assistant|>assistant<|im_middle|><think>"),
    "deepseek: nothing is inserted": (
        "deepseek-like", "so</think>yes<｜end▁of▁sentence｜>", [user("more")], "<｜User｜>more<｜Assistant｜><think>"),
    "harmony: the tool's name comes from the call": (
        "harmony-like", HARMONY_CALL, [tool("ok", answers=0)],
        "<|start|>functions.lookup to=assistant<|channel|>commentary<|message|>ok<|end|><|start|>assistant"),
    "harmony: by position, without an id": (
        "harmony-like", HARMONY_CALL, [tool("ok")],
        "<|start|>functions.lookup to=assistant<|channel|>commentary<|message|>ok<|end|><|start|>assistant"),
    "harmony: content in parts": (
        "harmony-like", HARMONY_CALL, [tool([{"type": "text", "text": "ok"}], answers=0)],
        "<|start|>functions.lookup to=assistant<|channel|>commentary<|message|>ok<|end|><|start|>assistant"),
    "harmony: a returned turn is followed as an ended one": (
        "harmony-like", "<|channel|>final<|message|>yes<|return|>", [user("more")],
        "<|start|>user<|message|>more<|end|><|start|>assistant"),
    "an open turn is closed, then extended": (
        "qwen3-like", "yes", [user("more")], "<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_boundary(case: str) -> None:
    name, sampled, new, added = CASES[case]
    assert extended(name, sampled, new)[0] == added


@pytest.mark.parametrize(("new", "why"), [([], "nothing_new")])
def test_nothing_appended_is_refused_by_name(new: list[dict[str, Any]], why: str) -> None:
    assert extended("qwen3-like", "yes<|im_end|>", new)[1].why == why


def test_an_unstable_template_is_extended_by_its_suffix_or_refused() -> None:
    """A template that rewrites its head once there are more than two messages: the suffix is still exact."""
    template = (
        "{{ 'mutated ' if messages | length > 2 else '' }}{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
    )
    r = tt.load_renderer(str(parts.standin_dir(template)))
    prompt = list(r.render([USER]).token_ids)
    ids = [*prompt, *r.encode_sampled("yes<|im_end|>")]
    kept = r.extend(ids, [USER, {"role": "assistant", "content": "yes"}], [user("more")])
    assert isinstance(kept, tt.Extension) and list(kept.token_ids[: len(ids)]) == ids
    assert r.decode(kept.added_ids) == "<|im_start|>user more<|im_end|><|im_start|>assistant "
    follows = tt.load_renderer(str(parts.standin_dir(template)), history="template")
    refused = follows.extend(ids, [USER, {"role": "assistant", "content": "yes"}], [user("more")])
    assert isinstance(refused, tt.Refusal) and refused.why == "history_rewritten"


# Names of tools' results, where the format wants them: gpt-oss and Gemma-4


def calling(*names: str, ids: bool = False) -> dict[str, Any]:
    made = [{"type": "function", "function": {"name": name, "arguments": "{}"}} for name in names]
    return says("", tool_calls=[{**call, "id": f"call_{place}"} if ids else call for place, call in enumerate(made)])


def says(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


@cache
def gpt_oss() -> Any:
    folder = parts.tokenizer_dir("gpt-oss")
    return renderer_of(parts.loaded_tokenizer(folder), folder)


@cache
def gemma_4() -> Any:
    template = carriers.all_templates().get("llama.cpp/google-gemma-4-31B-it.jinja")
    if template is None:
        pytest.skip("Gemma-4's template is in llama.cpp's collection, which cannot be had here")
    return tt.load_renderer(str(parts.standin_dir(template)))


def result_of(name: str, text: str) -> str:
    return f"<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>{text}<|end|>"


NAMED = {
    "by the id of its call": (calling("lookup", ids=True), [tool("ok", tool_call_id="call_0")], result_of("lookup", "ok")),
    "its own name before that of the call": (
        calling("from_context", ids=True), [tool("ok", tool_call_id="call_0", name="from_message")], result_of("from_message", "ok")),
    "by place": (calling("search", "calculate"), [tool("hits"), tool("42")], result_of("search", "hits") + result_of("calculate", "42")),
    "not by place among two": (calling("search", "calculate"), [tool("hits")], None),
    "not from an older turn": (says("an answer"), [tool("answer")], None),
    "not by place in a broken group": (
        calling("search", "calculate", "order", "weather"), [tool("hits"), tool("42"), user("go on"), tool("shipped")], None),
}  # fmt: skip


@pytest.mark.parametrize("case", NAMED)
def test_names_of_results(case: str) -> None:
    turn, new, added = NAMED[case]
    r = gpt_oss()
    stop = r.codec.literals["<|call|>" if turn.get("tool_calls") else "<|return|>"]
    past = [USER, calling("old_lookup"), tool("x"), turn] if added is None else [USER, turn]
    found = r.extend([7, stop], past, new)
    if added is None:
        assert isinstance(found, tt.Refusal) and found.why == "template_raises" and "name" in found.detail
    else:
        assert r.decode(found.added_ids) == added + "<|start|>assistant"


@pytest.mark.parametrize("sampled", ["<tool_call|>", "<tool_call|><|tool_response>"])
def test_gemma_4_opens_results_once(sampled: str) -> None:
    r = gemma_4()
    ids = r.encode_sampled("<|tool_call>call:lookup{}" + sampled)
    found = r.extend([7, *ids], [USER, calling("lookup", ids=True)], [tool("answer", tool_call_id="call_0")])
    whole = r.decode([*ids, *found.added_ids])
    assert whole.count("<|tool_response>") == 1 and 'response:lookup{value:<|"|>answer<|"|>}<tool_response|>' in whole


def test_gemma_4_names_a_result_by_place() -> None:
    r = gemma_4()
    found = r.extend(
        [7, *r.encode_sampled("<|tool_call>call:lookup{}<tool_call|>")], [USER, calling("lookup")], [tool("answer")]
    )
    assert 'response:lookup{value:<|"|>answer<|"|>}' in r.decode(found.added_ids)


def test_variables_and_tools_reach_the_first_prompt() -> None:
    r = gpt_oss()
    tools = [
        {
            "type": "function",
            "function": {"name": "lookup", "description": "d", "parameters": {"type": "object", "properties": {}}},
        }
    ]
    text = r.decode(r.render([USER], tools, template_kwargs={"reasoning_effort": "high"}).token_ids)
    assert "Reasoning: high" in text and "type lookup" in text and text.endswith("<|start|>assistant")
