"""`verify`: a report on the proof of a model's template."""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from tokentrue.errors import TokenTrueError
from tokentrue.ids import TokenIds
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.records import record
from tokentrue.renderers.load import load_renderer
from tokentrue.renderers.prove import TOOLS, make_calls
from tokentrue.renderers.renderer import Proof, Renderer
from tokentrue.types import Message

TURNS: dict[str, Message] = {
    "text": {"role": "assistant", "content": "It is fine."},
    "reasoned text": {"role": "assistant", "content": "It is fine.", "reasoning_content": "Look it up."},
    "call": make_calls("Paris"),
    "reasoned call": make_calls("Paris", reasoning_content="Look it up."),
    "two calls": make_calls("Paris", "Oslo"),
}


def check_roundtrip(renderer: Renderer, turn: Message) -> str:
    """ "ok", "differs: …", or why there is nothing to compare."""
    try:
        sampled = encode_turn(renderer, turn)
        if isinstance(sampled, str):
            return sampled
        prompt, ids = sampled
        parsed = renderer.parse(ids, prompt_ids=prompt, tools=TOOLS)
    except TokenTrueError as error:
        return f"not rendered: {str(error)[:120]}"
    got, want = _summarise(parsed.message), _summarise(turn)
    return "ok" if got == want else f"differs: {json.dumps(got, ensure_ascii=False)[:200]}"


def encode_turn(renderer: Renderer, turn: Message) -> tuple[TokenIds, TokenIds] | str:
    """The ids of the prompt, and those that a model samples to write `turn` as the template does; or why not known."""
    talk: list[Message] = [{"role": "user", "content": "How is Paris?"}, turn]
    tools = TOOLS if turn.get("tool_calls") else None
    prompt, whole = renderer.render_plain(talk[:1], tools), renderer.render_plain(talk, tools, generate=False)
    if not whole.startswith(prompt):
        return "not compared: the template does not write its own generation prompt again"
    stops = renderer.stops.after(turn)
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


def _summarise(message: Message) -> JsonObject:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    arguments = [
        json.loads(call["arguments"]) if isinstance(call["arguments"], str) else call["arguments"] for call in calls
    ]
    return {
        "content": (message.get("content") or "").strip(),
        "reasoning": (message.get("reasoning_content") or "").strip(),
        "calls": [[call["name"], argument] for call, argument in zip(calls, arguments, strict=True)],
    }


@record
class Verification(Proof):
    """The proof of `model`; `parse`: how each kind of rendered turn parses back."""

    model: str
    family: str
    parse: Mapping[str, str]


def verify(
    model: str | Path, chat_template: str | None = None, template_kwargs: JsonMapping | None = None
) -> Verification:
    """Proves or refutes in ids that the model's template can be extended; works offline on a directory."""
    renderer = load_renderer(model, chat_template=chat_template, template_kwargs=template_kwargs)
    proof = {field.name: getattr(renderer.proof, field.name) for field in fields(Proof)}
    parse = {kind: check_roundtrip(renderer, turn) for kind, turn in TURNS.items()}
    return Verification(**proof, model=str(model), family=renderer.family.name, parse=parse)
