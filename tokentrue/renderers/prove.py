"""Proves a template and tokenizer by trial: shapes of conversation × roles appended, compared in ids with the truth.

The truth is the real conversation rendered and encoded whole, cut by offsets after the last turn's last word (`zlastz`)
and stop. `zn0z` is the first new content.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jinja2 import nodes

from tokentrue.errors import TokenTrueError
from tokentrue.ids import TokenIds
from tokentrue.json_types import JsonObject
from tokentrue.renderers.extending.template_nodes import chat_environment
from tokentrue.renderers.messages import fill_in_tool_names, normalise_messages, normalise_tools
from tokentrue.renderers.proof import Case, Proof
from tokentrue.renderers.renderer import Renderer
from tokentrue.types import Extension, Message, Refusal, Tool

ROLES = ("user", "tool", "tools", "system", "assistant")
TOOLS: tuple[Tool, ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name}.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "a place"}},
                "required": ["city"],
            },
        },
    }
    for name in ("weather", "clock")
)


def _user(word: str) -> Message:
    return {"role": "user", "content": f"Ask {word}"}


def _turn(word: str, **more: Any) -> Message:
    return {"role": "assistant", "content": f"Say {word}", **more}


def _calls(*words: str, text: str = "", first: int = 0, **more: Any) -> Message:
    calls = [
        {
            "id": f"callid{first + index:03d}",
            "type": "function",
            "function": {"name": name, "arguments": {"city": word}},
        }
        for index, (name, word) in enumerate(zip(("weather", "clock"), words, strict=False))
    ]
    return {"role": "assistant", "content": text, "tool_calls": calls, **more}


def _result(word: str, index: int = 0) -> Message:
    name = ("weather", "clock")[index % 2]
    return {"role": "tool", "tool_call_id": f"callid{index:03d}", "name": name, "content": f"Got {word}"}


SYSTEM: Message = {"role": "system", "content": "Be brief."}
THOUGHT: JsonObject = {"reasoning_content": "Think zthoughtz"}
SHAPES: dict[str, tuple[Message, ...]] = {
    "text": (_user("za"), _turn("zlastz")),
    "system, text": (SYSTEM, _user("za"), _turn("zlastz")),
    "reasoned text": (_user("za"), _turn("zlastz", **THOUGHT)),
    "long text": (SYSTEM, _user("za"), _turn("zb"), _user("zc"), _turn("zlastz")),
    "text after a call": (_user("za"), _calls("zb"), _result("zc"), _turn("zlastz")),
    "call": (_user("za"), _calls("zlastz")),
    "system, call": (SYSTEM, _user("za"), _calls("zlastz")),
    "text and call": (_user("za"), _calls("zlastz", text="Say zb")),
    "reasoned call": (_user("za"), _calls("zlastz", **THOUGHT)),
    "chain of calls": (_user("za"), _calls("zb"), _result("zc"), _calls("zlastz")),
    "long chain": (
        SYSTEM,
        _user("za"),
        _calls("zb"),
        _result("zc"),
        _calls("zd"),
        _result("ze"),
        _turn("zf"),
        _user("zg"),
        _calls("zlastz"),
    ),
    "two calls": (_user("za"), _calls("zb", "zlastz")),
    "chain of two calls": (
        _user("za"),
        _calls("zb", "zc", first=2),
        _result("zd", 2),
        _result("ze", 3),
        _calls("zf", "zlastz"),
    ),
}
ANSWER: Message = {"role": "user", "content": "New zn0z"}
LATE_SYSTEM: Message = {"role": "system", "content": "New zn0z"}
ADDED: dict[str, dict[str, tuple[Message, ...]]] = {
    "user": {shape: (ANSWER,) for shape in ("text", "system, text", "reasoned text", "long text", "text after a call")},
    "tool": {
        shape: (_result("zn0z"),)
        for shape in ("call", "system, call", "text and call", "reasoned call", "chain of calls", "long chain")
    },
    "tools": {shape: (_result("zn0z"), _result("zn1z", 1)) for shape in ("two calls", "chain of two calls")},
    "system": {
        "text": (LATE_SYSTEM,),
        "long text": (LATE_SYSTEM, {"role": "user", "content": "New zn1z"}),
        "call": (_result("zn0z"), {"role": "system", "content": "New zn1z"}),
    },
    "assistant": {
        "text": ({"role": "assistant", "content": "New zn0z"}, {"role": "user", "content": "New zn1z"}),
        "call": (
            _result("zn0z"),
            {"role": "assistant", "content": "New zn1z"},
            {"role": "user", "content": "New zn2z"},
        ),
    },
}

MAX_WORDS = 8


def list_questions(words: Sequence[str]) -> Iterator[tuple[tuple[Message, ...], tuple[Message, ...]]]:
    """Conversations of two shapes, with and without each word in earlier messages that are neither the first nor the
    last, and what follows them."""
    for word in ("za", *words[:MAX_WORDS]):
        ask, say = {"role": "user", "content": f"{word} zb"}, {"role": "assistant", "content": f"za {word}"}
        yield (_user("zy"), _turn("zx"), ask, say, _user("zc"), _turn("zlastz")), (ANSWER,)
        ask, result = {"role": "user", "content": word}, {**_result("zd"), "content": f"{word} zb"}
        yield (ask, _calls("zb", text=f"za {word} zb"), result, _calls("zlastz")), (_result("zn0z"),)


def prove(renderer: Renderer) -> Proof:
    cases = tuple(
        _run_case(renderer, role, shape, new) for role, shapes in ADDED.items() for shape, new in shapes.items()
    )
    roles: dict[str, str] = {}
    why: dict[str, str] = {}
    for role in ROLES:
        outcomes = [case for case in cases if case.role == role]
        roles[role], why_role = _judge_role(outcomes)
        if why_role:
            why[role] = why_role
    shows_tools = _shows_tools(renderer)
    return Proof(
        roles=roles,
        why=why,
        stops={"text": renderer.stops.text, "call": renderer.stops.call, "declared": renderer.stops.declared},
        boundary={role: found for role in ROLES if (found := _find_boundary(renderer, role, cases)) is not None},
        rewrites={role: _check_rewrites(renderer, role, cases) for role in ROLES},
        cases=cases,
        template_hash=renderer.template_hash,
        tokenizer_hash=renderer.tokenizer_hash,
        tools="rendered" if shows_tools else "ignored",
        warnings=tuple(_list_warnings(renderer, shows_tools=shows_tools)),
        inputs=renderer.inputs,
        short_plans=_check_short_plans(renderer),
    )


def _check_short_plans(renderer: Renderer) -> bool:
    """True if requests get the ids of their real history despite cached plans of other requests, with and without the
    words of the template's conditions in earlier messages.
    """
    if renderer.history_use.why:
        return True  # there are none
    for history, new in list_questions(_list_words(renderer.template.source)):
        stop = next(iter(_list_stops(renderer, calls=bool(history[-1].get("tool_calls")))), None)
        if stop is None:
            continue
        tools = _choose_tools(history)
        found, expected = (
            renderer.extend([renderer.codec.literals[stop]], history, new, tools, use_plans=use_plans)
            for use_plans in (True, False)
        )
        if isinstance(found, Extension) and isinstance(expected, Extension) and found.added_ids != expected.added_ids:
            return False
    return True


def _list_words(source: str) -> list[str]:
    conditions = chat_environment().parse(source).find_all((nodes.If, nodes.CondExpr))
    constants = (constant.value for node in conditions for constant in node.test.find_all(nodes.Const))
    found = dict.fromkeys(word for word in constants if isinstance(word, str) and word.strip())
    return [word for word in found if not word.isidentifier()] + [word for word in found if word.isidentifier()]


def _judge_role(cases: Sequence[Case]) -> tuple[str, str]:
    found = {case.outcome for case in cases}
    reasons = "; ".join(
        f"{case.shape}: {case.why}" for case in cases if case.outcome in {"refused", "unsupported", "wrong"}
    )
    if "wrong" in found or not found & {"proven", "history"}:
        return "refused", reasons
    return ("history" if "history" in found else "proven"), reasons


def _run_case(renderer: Renderer, role: str, shape: str, new: Sequence[Message]) -> Case:
    history, tools = SHAPES[shape], _choose_tools(SHAPES[shape])
    calls = bool(history[-1].get("tool_calls"))
    stop = next(iter(_list_stops(renderer, calls=calls)), None)
    if stop is None:
        return Case(
            shape=shape, role=role, outcome="refused", why="no_stop", detail="no token is known to end such a turn"
        )
    prefix = [renderer.codec.literals[stop]]
    try:
        found = renderer.extend(prefix, history, new, tools)
        join = found.join if isinstance(found, Extension) else "stop"
        expected = find_truth(renderer, history, new, tools, stop, join)
    except TokenTrueError as error:
        return Case(shape=shape, role=role, outcome="unsupported", why=error.code, detail=str(error))
    if isinstance(found, Refusal):
        return Case(shape=shape, role=role, outcome="refused", why=found.why, detail=found.detail)
    if expected is None or found.added_ids != expected:
        detail = (
            "the render of the real history has no such place"
            if expected is None
            else "ids differ from the real history's"
        )
        return Case(shape=shape, role=role, outcome="wrong", why="differs", detail=detail)
    why = "" if found.join == "stop" else f"{found.join}_stop"
    return Case(shape=shape, role=role, outcome="history" if found.context == "history" else "proven", why=why)


def _list_stops(renderer: Renderer, *, calls: bool) -> Sequence[str]:
    return renderer.stops.call if calls else renderer.stops.text


def _choose_tools(history: Sequence[Message]) -> Sequence[Tool] | None:
    return TOOLS if any(message.get("tool_calls") for message in history) else None


def find_truth(
    renderer: Renderer,
    history: Sequence[Message],
    new: Sequence[Message],
    tools: Sequence[Tool] | None,
    stop: str,
    join: str = "stop",
) -> TokenIds | None:
    """Ids after the last turn's stop in the real conversation, by offsets; None if there is no such place."""
    plain = fill_in_tool_names(normalise_messages([*history, *new], renderer.inputs))
    text = renderer.template.render(
        plain, normalise_tools(tools, renderer.inputs), renderer.template_kwargs, inputs=renderer.inputs
    )
    word, first = text.rfind("zlastz"), text.find("zn0z")
    encoding = renderer.codec.encode_with_offsets(text)
    ids, starts = encoding.ids, [start for start, _ in encoding.offsets]
    between = [index for index, start in enumerate(starts) if max(word, 0) < start < first]
    hits = [index for index in between if ids[index] == renderer.codec.literals[stop]]
    if word < 0:  # the template shows no calls: the turn before the new message is this one
        return TokenIds(ids[hits[-1] + 1 :]) if hits else None
    if join == "foreign":  # the recorded stop stays; all that closes the turn comes after it
        return renderer.codec.encode_after(text[word + len("zlastz") :], literal="")
    if join == "alias":
        hits = [index for index in between if ids[index] in renderer.codec.texts]
    return TokenIds(ids[hits[0] + 1 :]) if hits else None


def _find_boundary(renderer: Renderer, role: str, cases: Sequence[Case]) -> str | None:
    case = next((case for case in cases if case.role == role and case.outcome in {"proven", "history"}), None)
    if case is None:
        return None
    history = SHAPES[case.shape]
    new = ADDED[role][case.shape]
    stop = _list_stops(renderer, calls=bool(history[-1].get("tool_calls")))[0]
    found = renderer.extend([renderer.codec.literals[stop]], history, new, _choose_tools(history))
    if not isinstance(found, Extension):
        return None
    return renderer.decode(found.added_ids).partition("New" if role != "tool" and role != "tools" else "Got")[0]


def _check_rewrites(renderer: Renderer, role: str, cases: Sequence[Case]) -> bool:
    shapes = [case.shape for case in cases if case.role == role and case.outcome in {"proven", "history"}]
    try:
        return any(
            renderer.rewrites(SHAPES[shape], ADDED[role][shape], _choose_tools(SHAPES[shape])) for shape in shapes
        )
    except TokenTrueError:  # cannot render the conversation with nothing after the turn: nothing to compare
        return False


def _shows_tools(renderer: Renderer) -> bool:
    for messages in ([{"role": "user", "content": "Ask"}], [SYSTEM, {"role": "user", "content": "Ask"}]):
        try:
            text = renderer.decode(renderer.render(messages, TOOLS).token_ids)
        except TokenTrueError:
            continue
        if any(tool["function"]["name"] in text for tool in TOOLS):
            return True
    return False


def _list_warnings(renderer: Renderer, *, shows_tools: bool) -> Iterator[str]:
    if not shows_tools:
        yield "the template ignores tools: no prompt shows a request's tools to the model, calls are only parsed"
    stops = renderer.stops
    derived = {*stops.text, *stops.call}
    if stops.declared and stops.text and not derived & set(stops.declared):
        yield f"the template ends turns with {', '.join(sorted(derived))}, the model's files declare {', '.join(stops.declared)}"
