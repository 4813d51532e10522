"""What holds for one template and tokenizer, found by trying: shapes of conversation × roles appended, each compared in ids with the truth.

The truth of a case uses no sentinel: the real conversation is rendered and encoded whole, the last turn's own last word and the stop token
behind it are found by their offsets, and everything after that stop is what `extend` must have added.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tokentrue.errors import TokenTrueError
from tokentrue.renderers.messages import filled_in, plain_messages, plain_tools
from tokentrue.types import Extension, Message, Refusal, Tool

if TYPE_CHECKING:
    from tokentrue.renderers.renderer import Renderer

ROLES = ("user", "tool", "tools", "system", "assistant")
TOOLS: tuple[Tool, ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name}.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "a place"}}, "required": ["city"]},
        },
    }
    for name in ("weather", "clock")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`outcome`: "proven" (a dummy context suffices), "history", "refused", "unsupported" (the template cannot render it) or "wrong"."""

    shape: str
    role: str
    outcome: str
    why: str = ""
    detail: str = ""

    def to_json(self) -> dict[str, str]:
        return {"shape": self.shape, "role": self.role, "outcome": self.outcome, "why": self.why, "detail": self.detail}


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The whole result; `boundary` is the text between the stop and the next turn's content, per role, as far as it is proven."""

    roles: Mapping[str, str]
    why: Mapping[str, str]
    stops: Mapping[str, Sequence[str]]
    boundary: Mapping[str, str]
    rewrites: Mapping[str, bool]
    cases: tuple[Case, ...]
    template_hash: str
    tokenizer_hash: str
    warnings: tuple[str, ...] = ()
    habits: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def ok(self) -> bool:
        """Nothing is wrong, and both an answer and a tool's result can follow the model's turn."""
        settled = all(self.roles.get(role) in {"proven", "history"} for role in ("user", "tool"))
        return settled and not any(case.outcome == "wrong" for case in self.cases)

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "roles": dict(self.roles),
            "why": dict(self.why),
            "stops": {kind: list(texts) for kind, texts in self.stops.items()},
            "boundary": dict(self.boundary),
            "rewrites": dict(self.rewrites),
            "cases": [case.to_json() for case in self.cases],
            "warnings": list(self.warnings),
            "habits": dict(self.habits),
            "template_hash": self.template_hash,
            "tokenizer_hash": self.tokenizer_hash,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Proof:
        fields = {key: data[key] for key in ("roles", "why", "boundary", "rewrites", "habits", "template_hash", "tokenizer_hash")}
        stops = {kind: tuple(texts) for kind, texts in data["stops"].items()}
        return cls(**fields, stops=stops, cases=tuple(Case(**case) for case in data["cases"]), warnings=tuple(data["warnings"]))


# conversations


def _user(word: str) -> Message:
    return {"role": "user", "content": f"Ask {word}"}


def _says(word: str, **more: Any) -> Message:
    return {"role": "assistant", "content": f"Say {word}", **more}


def _calls(*words: str, text: str = "", first: int = 0, **more: Any) -> Message:
    calls = [
        {"id": f"callid{first + index:03d}", "type": "function", "function": {"name": name, "arguments": {"city": word}}}
        for index, (name, word) in enumerate(zip(("weather", "clock"), words, strict=False))
    ]
    return {"role": "assistant", "content": text, "tool_calls": calls, **more}


def _result(word: str, index: int = 0) -> Message:
    name = ("weather", "clock")[index % 2]
    return {"role": "tool", "tool_call_id": f"callid{index:03d}", "name": name, "content": f"Got {word}"}


SYSTEM: Message = {"role": "system", "content": "Be brief."}
THOUGHT: dict[str, Any] = {"reasoning_content": "Think zthoughtz"}
SHAPES: dict[str, tuple[Message, ...]] = {
    "text": (_user("za"), _says("zlastz")),
    "system, text": (SYSTEM, _user("za"), _says("zlastz")),
    "reasoned text": (_user("za"), _says("zlastz", **THOUGHT)),
    "long text": (SYSTEM, _user("za"), _says("zb"), _user("zc"), _says("zlastz")),
    "text after a call": (_user("za"), _calls("zb"), _result("zc"), _says("zlastz")),
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
        _says("zf"),
        _user("zg"),
        _calls("zlastz"),
    ),
    "two calls": (_user("za"), _calls("zb", "zlastz")),
    "chain of two calls": (_user("za"), _calls("zb", "zc", first=2), _result("zd", 2), _result("ze", 3), _calls("zf", "zlastz")),
}
ANSWER: Message = {"role": "user", "content": "New zn0z"}
LATE_SYSTEM: Message = {"role": "system", "content": "New zn0z"}
ADDED: dict[str, dict[str, tuple[Message, ...]]] = {
    "user": {shape: (ANSWER,) for shape in ("text", "system, text", "reasoned text", "long text", "text after a call")},
    "tool": {
        shape: (_result("zn0z"),) for shape in ("call", "system, call", "text and call", "reasoned call", "chain of calls", "long chain")
    },
    "tools": {shape: (_result("zn0z"), _result("zn1z", 1)) for shape in ("two calls", "chain of two calls")},
    "system": {
        "text": (LATE_SYSTEM,),
        "long text": (LATE_SYSTEM, {"role": "user", "content": "New zn1z"}),
        "call": (_result("zn0z"), {"role": "system", "content": "New zn1z"}),
    },
    "assistant": {
        "text": ({"role": "assistant", "content": "New zn0z"}, {"role": "user", "content": "New zn1z"}),
        "call": (_result("zn0z"), {"role": "assistant", "content": "New zn1z"}, {"role": "user", "content": "New zn2z"}),
    },
}


# the proof


def prove(renderer: Renderer) -> Proof:
    cases = tuple(_case(renderer, role, shape, new) for role, shapes in ADDED.items() for shape, new in shapes.items())
    roles: dict[str, str] = {}
    why: dict[str, str] = {}
    for role in ROLES:
        outcomes = [case for case in cases if case.role == role]
        roles[role], why_role = _verdict(outcomes)
        if why_role:
            why[role] = why_role
    return Proof(
        roles=roles,
        why=why,
        stops={"text": renderer.stops.text, "call": renderer.stops.call, "declared": renderer.stops.declared},
        boundary={role: found for role in ROLES if (found := _boundary(renderer, role, cases)) is not None},
        rewrites={role: _rewrites(renderer, role, cases) for role in ROLES},
        cases=cases,
        template_hash=renderer.template_hash,
        tokenizer_hash=renderer.tokenizer_hash,
        warnings=tuple(_warnings(renderer)),
        habits=renderer.habits.to_json(),
    )


def _verdict(cases: Sequence[Case]) -> tuple[str, str]:
    found = {case.outcome for case in cases}
    reasons = "; ".join(f"{case.shape}: {case.why}" for case in cases if case.outcome in {"refused", "unsupported", "wrong"})
    if "wrong" in found or not found & {"proven", "history"}:
        return "refused", reasons
    return ("history" if "history" in found else "proven"), reasons


def _case(renderer: Renderer, role: str, shape: str, new: Sequence[Message]) -> Case:
    history, tools = SHAPES[shape], _tools_for(SHAPES[shape])
    calls = bool(history[-1].get("tool_calls"))
    stop = next(iter(_recorded_stop(renderer, new, calls=calls)), None)
    if stop is None:
        return Case(shape=shape, role=role, outcome="refused", why="no_stop", detail="no token is known to end such a turn")
    prefix = [renderer.codec.literals[stop]]
    try:
        found = renderer.extend(prefix, history, new, tools)
        join = found.join if isinstance(found, Extension) else "stop"
        expected = truth(renderer, history, new, tools, stop, join)
    except TokenTrueError as error:
        return Case(shape=shape, role=role, outcome="unsupported", why=error.code, detail=str(error))
    if isinstance(found, Refusal):
        return Case(shape=shape, role=role, outcome="refused", why=found.why, detail=found.detail)
    if expected is None or list(found.added_ids) != expected:
        detail = "the render of the real history has no such place" if expected is None else "ids differ from the real history's"
        return Case(shape=shape, role=role, outcome="wrong", why="differs", detail=detail)
    why = "" if found.join == "stop" else f"{found.join}_stop"
    return Case(shape=shape, role=role, outcome="history" if found.context == "history" else "proven", why=why)


def _recorded_stop(renderer: Renderer, new: Sequence[Message], *, calls: bool) -> Sequence[str]:
    """The stop with which a model that behaves ends such a turn."""
    return renderer.stops.call if calls else renderer.stops.text


def _tools_for(history: Sequence[Message]) -> Sequence[Tool] | None:
    return TOOLS if any(message.get("tool_calls") for message in history) else None


def truth(
    renderer: Renderer, history: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool] | None, stop: str, join: str = "stop"
) -> list[int] | None:
    """What follows the last turn's stop in the real conversation, by offsets in the whole encoding; None where it has no such place."""
    plain = filled_in(plain_messages([*history, *new], renderer.habits))
    text = renderer.template.text(plain, plain_tools(tools, renderer.habits), renderer.template_kwargs, habits=renderer.habits)
    word, first = text.rfind("zlastz"), text.find("zn0z")
    encoding = renderer.codec.encoding(text)
    ids, starts = encoding.ids, [start for start, _ in encoding.offsets]
    between = [index for index, start in enumerate(starts) if max(word, 0) < start < first]
    hits = [index for index in between if ids[index] == renderer.codec.literals[stop]]
    if word < 0:  # the template shows no calls: the turn before the new message is this one, whatever it holds
        return list(ids[hits[-1] + 1 :]) if hits else None
    if join == "foreign":  # the recorded stop stays; all that closes the turn comes behind it
        return renderer.codec.encode_after(text[word + len("zlastz") :], literal="")
    if join == "alias":
        hits = [index for index in between if ids[index] in renderer.codec.texts]
    return list(ids[hits[0] + 1 :]) if hits else None


def _boundary(renderer: Renderer, role: str, cases: Sequence[Case]) -> str | None:
    """The text between the stop and the first new content, in the first case of that role that holds."""
    case = next((case for case in cases if case.role == role and case.outcome in {"proven", "history"}), None)
    if case is None:
        return None
    history = SHAPES[case.shape]
    new = ADDED[role][case.shape]
    stop = _recorded_stop(renderer, new, calls=bool(history[-1].get("tool_calls")))[0]
    found = renderer.extend([renderer.codec.literals[stop]], history, new, _tools_for(history))
    if not isinstance(found, Extension):
        return None
    return renderer.decode(found.added_ids).partition("New" if role != "tool" and role != "tools" else "Got")[0]


def _rewrites(renderer: Renderer, role: str, cases: Sequence[Case]) -> bool:
    shapes = [case.shape for case in cases if case.role == role and case.outcome in {"proven", "history"}]
    try:
        return any(renderer.rewrites(SHAPES[shape], ADDED[role][shape], _tools_for(SHAPES[shape])) for shape in shapes)
    except TokenTrueError:  # it cannot render the conversation with nothing after the turn: there is nothing to compare
        return False


def _warnings(renderer: Renderer) -> Iterator[str]:
    stops = renderer.stops
    derived = {*stops.text, *stops.call}
    if stops.declared and stops.text and not derived & set(stops.declared):
        yield f"the template ends turns with {', '.join(sorted(derived))}, the model's files declare {', '.join(stops.declared)}"
