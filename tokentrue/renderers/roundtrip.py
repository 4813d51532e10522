"""Parse inverts render: a turn written by the template itself, cut as a model would have sampled it, must parse back to its message."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tokentrue.errors import TokenTrueError
from tokentrue.renderers.messages import plain_messages, plain_tools
from tokentrue.renderers.proof import TOOLS
from tokentrue.types import Message

if TYPE_CHECKING:
    from tokentrue.renderers.renderer import Renderer

_ASK: list[Message] = [{"role": "user", "content": "How is Paris?"}]


def _call(name: str, city: str) -> dict[str, Any]:
    return {"id": f"call{len(name)}{len(city):03d}", "type": "function", "function": {"name": name, "arguments": {"city": city}}}


TURNS: dict[str, Message] = {
    "text": {"role": "assistant", "content": "It is fine."},
    "reasoned text": {"role": "assistant", "content": "It is fine.", "reasoning_content": "Look it up."},
    "call": {"role": "assistant", "content": "", "tool_calls": [_call("weather", "Paris")]},
    "reasoned call": {"role": "assistant", "content": "", "reasoning_content": "Look it up.", "tool_calls": [_call("weather", "Paris")]},
    "two calls": {"role": "assistant", "content": "", "tool_calls": [_call("weather", "Paris"), _call("clock", "Oslo")]},
}


def parse_roundtrip(renderer: Renderer) -> dict[str, str]:
    """Per kind of turn: "ok", "differs: …", or why there is nothing to compare."""
    return {kind: _kind(renderer, turn) for kind, turn in TURNS.items()}


def _kind(renderer: Renderer, turn: Message) -> str:
    try:
        sampled = emitted(renderer, turn)
        if isinstance(sampled, str):
            return sampled
        prompt, ids = sampled
        parsed = renderer.parse(ids, prompt_ids=prompt, tools=TOOLS)
    except TokenTrueError as error:
        return f"not rendered: {str(error)[:120]}"
    got, want = _essence(parsed.message), _essence(turn)
    return "ok" if got == want else f"differs: {json.dumps(got, ensure_ascii=False)[:200]}"


def emitted(renderer: Renderer, turn: Message) -> tuple[list[int], list[int]] | str:
    """The prompt's ids and those that a model would sample to write `turn` as the template does; or why that cannot be told."""
    ask, answer = plain_messages(_ASK, renderer.habits), plain_messages([turn], renderer.habits)
    tools = plain_tools(TOOLS if turn.get("tool_calls") else None, renderer.habits)
    prompt = renderer.template.text(ask, tools, renderer.template_kwargs, habits=renderer.habits)
    whole = renderer.template.text([*ask, *answer], tools, renderer.template_kwargs, generate=False, habits=renderer.habits)
    if not whole.startswith(prompt):
        return "not compared: the template does not write its own generation prompt again"
    stops = renderer.stops.call if turn.get("tool_calls") else renderer.stops.text
    written = whole[len(prompt) :]
    if stops and not renderer.stops.opener:
        at = written.rfind(stops[0])
        written = written[: at + len(stops[0])] if at >= 0 else written
    elif stops:
        written += stops[0]
    for text in (turn["content"], turn.get("reasoning_content", "")):
        if text and text not in written:
            return "not rendered: the template leaves part of such a turn out"
    if any(call["function"]["arguments"]["city"] not in written for call in turn.get("tool_calls", ())):
        return "not rendered: the template leaves calls out"
    return renderer.codec.encode(prompt), renderer.codec.encode_after(written, literal="")


def _essence(message: Message) -> dict[str, Any]:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    arguments = [json.loads(call["arguments"]) if isinstance(call["arguments"], str) else call["arguments"] for call in calls]
    return {
        "content": (message.get("content") or "").strip(),
        "reasoning": (message.get("reasoning_content") or "").strip(),
        "calls": [[call["name"], argument] for call, argument in zip(calls, arguments, strict=True)],
    }
