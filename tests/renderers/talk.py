"""Small conversations and renderers that the tests of this folder share."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import tokentrue as tt
from tests import parts
from tokentrue.renderers import Renderer, renderer_of

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"The {name}.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
    for name in ("weather", "clock")
]
OWN = ("qwen3-like", "k2v3-like", "glm-like", "harmony-like", "kimi-like", "minimax-like", "deepseek-like")


def judge(name: str) -> Any:
    """transformers' own tokenizer."""
    return parts.loaded_tokenizer(folder_of(name))


def folder_of(name: str) -> Path:
    """`real:NAME` is a real tokenizer (the test is skipped where it cannot be had), else one of our own."""
    return parts.tokenizer_dir(name.removeprefix("real:")) if name.startswith("real:") else parts.own_dir(name)


@cache
def loaded(name: str, history: Any = "keep", injection: Any = "safe") -> Renderer:
    folder = folder_of(name)
    return renderer_of(judge(name), directory=folder, history=history, injection=injection)


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def calls(*cities: str, text: Any = None, first: int = 0, **more: Any) -> dict[str, Any]:
    made = [
        {
            "id": f"call_{first + index}",
            "type": "function",
            "function": {"name": name, "arguments": '{"city": "' + city + '"}'},
        }
        for index, (name, city) in enumerate(zip(("weather", "clock"), cities, strict=False))
    ]
    return {"role": "assistant", "content": text, "tool_calls": made, **more}


def result(text: Any, index: int = 0) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{index}", "content": text}


def stop_id(renderer: Renderer, *, call: bool = False) -> int:
    return renderer.codec.literals[(renderer.stops.call if call else renderer.stops.text)[0]]


def extended(renderer: Renderer, prefix: Any, messages: Any, new: Any, tools: Any = None, **more: Any) -> tt.Extension:
    found = renderer.extend(prefix, messages, new, tools, **more)
    assert isinstance(found, tt.Extension), found
    return found
