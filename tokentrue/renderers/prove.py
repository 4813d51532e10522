"""Proves a template and tokenizer by trial: shapes of conversation × roles appended, compared in ids with the truth:
the real conversation rendered and encoded whole, cut by offsets after the last turn's last word (`zlastz`) and stop.
`zn0z` is the first new content."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from tokentrue.errors import TokenTrueError
from tokentrue.ids import TokenIds
from tokentrue.json_types import JsonObject, JsonValue
from tokentrue.renderers.extending.stops import Stops
from tokentrue.renderers.renderer import Case, Proof, Renderer
from tokentrue.types import Extension, Message, Refusal, Tool

ROLES = ("user", "tool", "tools", "system", "assistant")
SHOWN = {"proven", "history"}
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


def _turn(word: str, **more: JsonValue) -> Message:
    return {"role": "assistant", "content": f"Say {word}", **more}


def make_calls(*words: str, text: str = "", first: int = 0, **more: JsonValue) -> Message:
    functions = [
        {"name": name, "arguments": {"city": word}} for name, word in zip(("weather", "clock"), words, strict=False)
    ]
    calls = [
        {"id": f"callid{index:03d}", "type": "function", "function": function}
        for index, function in enumerate(functions, first)
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
    "text after a call": (_user("za"), make_calls("zb"), _result("zc"), _turn("zlastz")),
    "call": (_user("za"), make_calls("zlastz")),
    "system, call": (SYSTEM, _user("za"), make_calls("zlastz")),
    "text and call": (_user("za"), make_calls("zlastz", text="Say zb")),
    "reasoned call": (_user("za"), make_calls("zlastz", **THOUGHT)),
    "chain of calls": (_user("za"), make_calls("zb", first=2), _result("zc", 2), make_calls("zlastz")),
    "long chain": (
        *(SYSTEM, _user("za"), make_calls("zb", first=2), _result("zc", 2)),
        *(make_calls("zd", first=4), _result("ze", 4), _turn("zf"), _user("zg"), make_calls("zlastz")),
    ),
    "two calls": (_user("za"), make_calls("zb", "zlastz")),
    "chain of two calls": (
        *(_user("za"), make_calls("zb", "zc", first=2), _result("zd", 2), _result("ze", 3)),
        make_calls("zf", "zlastz"),
    ),
}


def _new(role: str, index: int = 0) -> Message:
    return {"role": role, "content": f"New zn{index}z"}


_TEXT_SHAPES = ("text", "system, text", "reasoned text", "long text", "text after a call")
_CALL_SHAPES = ("call", "system, call", "text and call", "reasoned call", "chain of calls", "long chain")
ADDED: dict[str, dict[str, tuple[Message, ...]]] = {
    "user": dict.fromkeys(_TEXT_SHAPES, (_new("user"),)),
    "tool": dict.fromkeys(_CALL_SHAPES, (_result("zn0z"),)),
    "tools": dict.fromkeys(("two calls", "chain of two calls"), (_result("zn0z"), _result("zn1z", 1))),
    "system": {
        "text": (_new("system"),),
        "long text": (_new("system"), _new("user", 1)),
        "call": (_result("zn0z"), _new("system", 1)),
    },
    "assistant": {
        "text": (_new("assistant"), _new("user", 1)),
        "call": (_result("zn0z"), _new("assistant", 1), _new("user", 2)),
    },
}


def prove(renderer: Renderer) -> Proof:
    trials = [(role, shape, new) for role, shapes in ADDED.items() for shape, new in shapes.items()]
    cases = tuple(_run_case(renderer, *trial) for trial in trials)
    judged = {role: _judge_role([case for case in cases if case.role == role]) for role in ROLES}
    shows_tools = _shows_tools(renderer)
    stops = renderer.stops
    return Proof(
        roles={role: outcome for role, (outcome, _) in judged.items()},
        why={role: why for role, (_, why) in judged.items() if why},
        stops={"text": stops.text, "call": stops.call, "declared": stops.declared},
        boundary={role: found for role in ROLES if (found := _find_boundary(renderer, role, cases)) is not None},
        rewrites={role: _check_rewrites(renderer, role, cases) for role in ROLES},
        cases=cases,
        template_hash=renderer.template_hash,
        tokenizer_hash=renderer.tokenizer_hash,
        tools="rendered" if shows_tools else "ignored",
        warnings=tuple(_list_warnings(stops, shows_tools=shows_tools)),
        inputs=renderer.inputs,
    )


def _judge_role(cases: Sequence[Case]) -> tuple[str, str]:
    found = {case.outcome for case in cases}
    reasons = "; ".join(f"{case.shape}: {case.why}" for case in cases if case.outcome not in SHOWN)
    if "wrong" in found or not found & SHOWN:
        return "refused", reasons
    return ("history" if "history" in found else "proven"), reasons


def _run_case(renderer: Renderer, role: str, shape: str, new: Sequence[Message]) -> Case:
    history, tools = SHAPES[shape], _choose_tools(SHAPES[shape])
    case = partial(Case, shape=shape, role=role)
    stop = find_stop(renderer, history)
    if stop is None:
        return case(outcome="refused", why="no_stop", detail="no token is known to end such a turn")
    try:
        found = renderer.extend([renderer.codec.literals[stop]], history, new, tools)
        join = found.join if isinstance(found, Extension) else "stop"
        expected = find_truth(renderer, history, new, tools, stop, join)
    except TokenTrueError as error:
        return case(outcome="unsupported", why=error.code, detail=str(error))
    if isinstance(found, Refusal):
        return case(outcome="refused", why=found.why, detail=found.detail)
    if expected is None:
        return case(outcome="wrong", why="differs", detail="the render of the real history has no such place")
    if found.added_ids != expected:
        return case(outcome="wrong", why="differs", detail="ids differ from the real history's")
    system = [message for message in history[:1] if message is SYSTEM]
    alone = renderer.extend([renderer.codec.literals[stop]], [*system, _user("zu"), history[-1]], new, tools)
    is_same = isinstance(alone, Extension) and alone.added_ids == found.added_ids
    outcome = "proven" if is_same else "history"
    return case(outcome=outcome, why="" if found.join == "stop" else f"{found.join}_stop")


def find_stop(renderer: Renderer, history: Sequence[Message]) -> str | None:
    return next(iter(renderer.stops.after(history[-1])), None)


def _choose_tools(history: Sequence[Message]) -> Sequence[Tool] | None:
    return TOOLS if any(message.get("tool_calls") for message in history) else None


def find_truth(
    renderer: Renderer,
    history: Sequence[Message],
    new: Sequence[Message],
    tools: Sequence[Tool] | None,
    stop: str,
    join: str = "stop",
    *,
    write: Callable[[str], str] = str,
) -> TokenIds | None:
    """Ids after the last turn's stop, by offsets; None if there is no such place. `write` changes the text as an image
    processor does."""
    text = write(renderer.render_plain([*history, *new], tools))
    word, first = text.rfind("zlastz"), text.find("zn0z")
    encoding = renderer.codec.backend.encode(text, add_special_tokens=False)
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
    case = next((case for case in cases if case.role == role and case.outcome in SHOWN), None)
    if case is None:
        return None
    history, new = SHAPES[case.shape], ADDED[role][case.shape]
    prefix = [renderer.codec.literals[find_stop(renderer, history) or ""]]
    found = renderer.extend(prefix, history, new, _choose_tools(history))
    if not isinstance(found, Extension):
        return None
    return renderer.decode(found.added_ids).partition("Got" if role in ("tool", "tools") else "New")[0]


def _check_rewrites(renderer: Renderer, role: str, cases: Sequence[Case]) -> bool:
    added = {case.shape: ADDED[role][case.shape] for case in cases if case.role == role and case.outcome in SHOWN}
    try:
        return any(renderer.rewrites(SHAPES[each], new, _choose_tools(SHAPES[each])) for each, new in added.items())
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


def _list_warnings(stops: Stops, *, shows_tools: bool) -> Iterator[str]:
    if not shows_tools:
        yield "the template ignores tools: no prompt shows a request's tools to the model, calls are only parsed"
    derived = {*stops.text, *stops.call}
    if stops.declared and stops.text and not derived & set(stops.declared):
        written, declared = ", ".join(sorted(derived)), ", ".join(stops.declared)
        yield f"the template ends turns with {written}, the model's files declare {declared}"
