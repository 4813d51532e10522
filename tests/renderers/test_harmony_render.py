"""gpt-oss: what we render and add is what OpenAI's own library encodes, id for id; the shipped template alone does
not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

import tokentrue as tt
from tests import parts
from tests.contract.outside_reasons import harmony_ids
from tests.marks import slow_but_every
from tests.renderers.talk import loaded, stop_id

DATE = "2025-01-15"


@pytest.fixture(autouse=True, scope="module")
def vocabulary() -> Iterator[None]:
    """The library reads its vocabulary from a folder that we write, once per process."""
    pytest.importorskip("openai_harmony")
    with pytest.MonkeyPatch.context() as patch:
        if "TIKTOKEN_ENCODINGS_BASE" not in os.environ:
            patch.setenv("TIKTOKEN_ENCODINGS_BASE", str(parts.harmony_vocabulary()))
        yield


def tool(name: str, properties: dict[str, Any], required: tuple[str, ...] = ()) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": f"The {name}.", "parameters": parameters}}


TOOLS = [
    tool("weather", {"city": {"type": "string", "description": "Where."}}, ("city",)),
    tool("search", {"q": {"type": "string"}, "n": {"type": "integer"}, "deep": {"type": "boolean"}}, ("q",)),
    tool(
        "choose",
        {"unit": {"type": "string", "enum": ["c", "f"]}, "many": {"type": "array", "items": {"type": "string"}}},
        ("unit",),
    ),
]


def call(name: str, index: int, **arguments: Any) -> dict[str, Any]:
    return {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}


def said(content: str, *calls: dict[str, Any], thought: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {"role": "assistant", "content": content}
    out |= {"reasoning_content": thought} if thought else {}
    return out | ({"tool_calls": list(calls)} if calls else {})


def result(index: int, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{index}", "content": content}


SYSTEM, ASK = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "How is é 東京?"}
TALKS = {
    "user": [ASK],
    "system": [SYSTEM, ASK],
    "answered": [SYSTEM, ASK, said("Fine.", thought="hm"), ASK],
    "call": [ASK, said("", call("weather", 0, city="Ōsaka"), thought="Look."), result(0, '{"temp": 20}')],
    "text and call": [SYSTEM, ASK, said("Let me look.", call("weather", 0, city="x"), thought="Look."), result(0, "20")],
    "two calls": [ASK, said("", call("weather", 0, city="x"), call("search", 1, q="y", n=3)), result(1, "b"), result(0, "a")],
    "chain": [ASK, said("", call("search", 0, q="x"), thought="one"), result(0, "1"), said("", call("choose", 1, unit="c"), thought="two"),
              result(1, "2")],
    "then answered": [ASK, said("", call("search", 0, q="x"), thought="one"), result(0, "1"), said("So.", thought="two"), ASK],
    "system in the middle": [SYSTEM, ASK, said("Fine."), {"role": "system", "content": "Hurry."}, ASK],
}  # fmt: skip


def library(messages: list[dict[str, Any]], tools: list[dict[str, Any]], effort: str = "medium") -> list[int]:
    return harmony_ids(messages, tools, effort=effort, date=DATE, generate=True)


@pytest.mark.parametrize("talk", slow_but_every(2, TALKS, start=1))
@pytest.mark.parametrize(
    "tools", [pytest.param([], id="bare", marks=pytest.mark.slow), pytest.param(TOOLS, id="tools")]
)
@pytest.mark.parametrize("effort", ["low", pytest.param("high", marks=pytest.mark.slow)])
def test_render_is_the_librarys(talk: str, tools: list[dict[str, Any]], effort: str) -> None:
    kwargs = {"conversation_start_date": DATE, "reasoning_effort": effort}
    found = loaded("real:gpt-oss").render(TALKS[talk], tools or None, template_kwargs=kwargs)
    assert list(found.token_ids) == library(TALKS[talk], tools, effort)


@pytest.mark.parametrize("talk", [name for name, talk in TALKS.items() if len(talk) > 2])
def test_what_is_added_is_the_librarys(talk: str) -> None:
    """Behind the last turn's stop token, which the library writes as <|end|> once something follows."""
    renderer, messages = loaded("real:gpt-oss"), TALKS[talk]
    place = max(index for index, message in enumerate(messages) if message["role"] == "assistant")
    past, new = messages[: place + 1], messages[place + 1 :]
    stop = stop_id(renderer, call=bool(past[-1].get("tool_calls")))
    found = renderer.extend([7, stop], past, new, TOOLS, template_kwargs={"conversation_start_date": DATE})
    assert isinstance(found, tt.Extension)
    whole = library(messages, TOOLS)
    assert whole[-len(found.added_ids) :] == list(found.added_ids)
    assert whole[-len(found.added_ids) - 1] in (stop, renderer.codec.literals["<|end|>"])


def test_the_shipped_template_departs_from_it() -> None:
    """Why there is a correction at all; where this fails, the shipped template was mended and the correction can go."""
    shipped = loaded("real:gpt-oss", injection="engine")
    text = shipped.decode(shipped.render(TALKS["call"], TOOLS).token_ids)
    assert '"{\\"temp\\": 20}"' in text and "commentary json<|message|>" in text
    ids = loaded("real:gpt-oss").render(TALKS["call"], TOOLS).token_ids
    assert list(ids) != list(shipped.render(TALKS["call"], TOOLS).token_ids)
