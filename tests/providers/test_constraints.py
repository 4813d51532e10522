"""What must be enforced while sampling, in each engine's own words; and the model's own call format as a structural
tag."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

import tokentrue as tt
from tests import parts
from tokentrue.errors import SamplingError
from tokentrue.providers import sglang, vllm
from tokentrue.providers.hf import HFProvider
from tokentrue.providers.remote import dump_settings
from tokentrue.renderers.families import CallForm, Family
from tokentrue.renderers.renderer import make_call_tag
from tokentrue.types import Sampling

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ASKED = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
ANY_OBJECT = {"type": "json_object"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
OTHER = {"type": "function", "function": {"name": "wait"}}


def test_sglang_takes_json_text() -> None:
    params = sglang.sampling_params(Sampling(extra={"response_format": ASKED, "ignore_eos": True}))
    assert isinstance(params["json_schema"], str) and json.loads(params["json_schema"]) == SCHEMA
    assert params["ignore_eos"] is True and "response_format" not in params
    assert json.loads(sglang.sampling_params(Sampling(extra={"response_format": ANY_OBJECT}))["json_schema"]) == {
        "type": "object"
    }


def test_vllm_takes_structured_outputs() -> None:
    assert vllm.sampling_params(Sampling(extra={"response_format": ASKED}))["structured_outputs"] == {"json": SCHEMA}
    any_object = vllm.sampling_params(Sampling(extra={"response_format": ANY_OBJECT}))
    assert any_object["structured_outputs"] == {"json_object": True} and "response_format" not in any_object


def qwen() -> Any:
    return tt.load_renderer(str(parts.own_dir("qwen3-like")))


def test_a_call_that_must_be_made_is_the_models_own_format() -> None:
    tag = qwen().call_tag([TOOL, OTHER])
    before, calls = tag["format"]["elements"]
    assert before == {"type": "any_text", "excludes": ["<tool_call>"]}
    assert [one["begin"] for one in calls["tags"]] == [
        '<tool_call>\n{"name": "look", "arguments": ', '<tool_call>\n{"name": "wait", "arguments": ',
    ]  # fmt: skip
    assert calls["at_least_one"] and not calls["stop_after_first"]
    assert calls["tags"][0]["content"]["json_schema"] == SCHEMA and calls["tags"][1]["content"]["json_schema"] == {
        "type": "object"
    }
    written = calls["tags"][0]["begin"] + '{"a": 1}' + calls["tags"][0]["end"]
    parsed = qwen().parse(qwen().encode_sampled(written + "<|im_end|>"), tools=[TOOL])
    assert parsed.message["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"a": 1}'}
    for engine in (sglang, vllm):
        params = engine.sampling_params(Sampling(extra={"tool_choice": tag}))
        text = params["structural_tag"] if engine is sglang else params["structured_outputs"]["structural_tag"]
        assert json.loads(text) == tag


def test_a_named_tool_is_the_only_one() -> None:
    calls = qwen().call_tag([TOOL, OTHER], name="wait")["format"]["elements"][1]
    assert len(calls["tags"]) == 1 and calls["stop_after_first"]


@pytest.mark.parametrize("name", ["glm-like", "harmony-like"])
def test_formats_that_cannot_be_enforced_say_so(name: str) -> None:
    refusal = tt.load_renderer(str(parts.own_dir(name))).call_tag([TOOL])
    assert isinstance(refusal, tt.Refusal) and refusal.why == "no_call_form" and refusal.detail


@pytest.mark.parametrize(
    "extra",
    [
        {"response_format": ASKED, "regex": "a+"},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "xml"}},
        {"tool_choice": "required"},
    ],
)
def test_what_cannot_be_enforced_is_refused(extra: dict[str, Any]) -> None:
    with pytest.raises(SamplingError):
        sglang.sampling_params(Sampling(extra=extra))


@pytest.mark.parametrize("value", [2**64, "\ud800"])
@pytest.mark.parametrize("params", [sglang.sampling_params, vllm.sampling_params])
def test_schemas_that_json_cannot_hold_are_the_clients_mistake(params: Callable[[Sampling], Any], value: Any) -> None:
    asked = {"type": "json_schema", "json_schema": {"schema": {"const": value}}}
    with pytest.raises(SamplingError, match="cannot be sent to an engine"):
        dump_settings(params(Sampling(extra={"response_format": asked})))


@pytest.mark.parametrize("name", ["response_format", "tool_choice"])
async def test_engines_that_cannot_constrain_refuse_by_name(tiny_model: Any, name: str) -> None:
    with pytest.raises(SamplingError, match=name):
        await HFProvider(tiny_model).generate([1, 2], Sampling(max_tokens=1, extra={name: ASKED}))


def test_a_format_with_bare_names_can_be_enforced() -> None:
    """A name is written as the family writes it: as a JSON string, or bare."""
    form = CallForm(opening="<call ", begin="name=NAME>", end="</call>")
    family = Family(name="bare", call_form=form)
    tag = make_call_tag(family, qwen().codec, [TOOL], name=None)
    assert not isinstance(tag, tt.Refusal)
    (made,) = tag["format"]["elements"][1]["tags"]
    assert (made["begin"], made["end"]) == ("<call name=look>", "</call>")
