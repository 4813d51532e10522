"""The contract of one subject, as cases: trajectories, append shapes, round trips, long flows, defence and wiring.

A model is played by its dialect: prefixes end at the stop token that it sampled, not where a render ends. The truth for
an extension is transformers' own render of the real history with the new messages, cut after the stop of the last
assistant turn; the place is found by the words that the turn ends with, without any help from the renderer under test.
Compared are ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tokentrue as tt
from tests.contract.subjects import Subject

Message = dict[str, Any]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"The tool {name}.",
            "parameters": {
                "type": "object",
                "properties": {
                    "count": {"type": "integer", "description": "n"},
                    "query": {"type": "string", "description": "q"},
                },
                "required": ["query"],
            },
        },
    }
    for name in ("search", "fetch")
]
MAY_REFUSE = {"system", "mixed"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    check: Callable[[], None]


class NoTruth(Exception):
    """The template itself cannot render this conversation in order."""


def cases(subject: Subject) -> Iterator[Case]:
    for name in trajectory_names(subject):
        yield Case(name=f"trajectory-{name}", check=lambda name=name: check_trajectory(subject, name))
        for shape in SHAPES:
            yield Case(
                name=f"append-{shape}-{name}", check=lambda name=name, shape=shape: check_append(subject, name, shape)
            )
        yield Case(name=f"roundtrip-{name}", check=lambda name=name: check_round_trip(subject, name))
    for shape in FLOWS:
        yield Case(name=f"flow-{shape}", check=lambda shape=shape: check_flow(subject, shape))
    yield Case(name="defence", check=lambda: check_defence(subject))
    yield Case(name="wiring", check=lambda: check_wiring(subject))


# The trajectories: {single tool, several turns, several tools, several tools over several turns} × {plain, thinking}

_PLANS = {"single_tool": (1,), "multi_turn": (1, 1), "multi_tool": (2,), "multi_tool_multi_turn": (2, 2)}


def trajectory_names(subject: Subject) -> list[str]:
    plans = [name for name, plan in _PLANS.items() if subject.dialect.parallel or max(plan) == 1]
    if subject.dialect.calls is None:
        plans = ["single_tool", "multi_turn"]  # the same walk with plain text turns
    return [
        f"{plan}-{mode}"
        for plan in plans
        for mode in (("plain", "thinking") if subject.dialect.think is not None else ("plain",))
    ]


def opening(subject: Subject) -> list[Message]:
    system: list[Message] = [{"role": "system", "content": "Be brief."}] if subject.system else []
    return [*system, {"role": "user", "content": "Find it, please. begin0q"}]


def assistant(subject: Subject, turn: int, calls: int, *, thinking: bool) -> Message:
    dialect = subject.dialect
    message: Message = {"role": "assistant", "content": "" if calls else f"Here you are: é 東京. end{turn}q"}
    if calls and dialect.calls is not None:
        if turn % 2 and dialect.text_with_calls:
            message["content"] = f"Looking ({turn})."
        message["tool_calls"] = [
            {
                "id": dialect.ids(name, turn, place),
                "type": "function",
                "function": {
                    "name": name,
                    "arguments": json.dumps(
                        {"count": 3 + place, "query": f"{place} <é> end{turn}q"}, ensure_ascii=False
                    ),
                },
            }
            for place, name in enumerate(("search", "fetch")[:calls])
        ]
    elif calls:
        message["content"] = f"A step. end{turn}q"
    if thinking and dialect.think is not None:
        message["reasoning_content"] = f"Let me think about step {turn}.\nYes."
    return message


def results(message: Message, place: int = 0) -> list[Message]:
    calls = message.get("tool_calls") or ()
    if not calls:
        return [{"role": "user", "content": f"go on new{place}q"}]
    return [
        {
            "role": "tool",
            "tool_call_id": call["id"],
            "name": call["function"]["name"],
            "content": f'{{"found": {n}}} new{place + n}q',
        }
        for n, call in enumerate(calls)
    ]


class Walk:
    """One conversation: the recorded ids and the messages that led to them."""

    def __init__(self, subject: Subject) -> None:
        self.subject, self.renderer = subject, subject.renderer()
        self.tools = TOOLS if subject.dialect.calls is not None else None
        self.messages = opening(subject)
        self.ids: list[int] = list(self.renderer.render(self.messages, tools=self.tools).token_ids)
        self.turns = 0

    def sample(self, message: Message, *, through_parser: bool = False) -> Message:
        """The model writes `message`; with `through_parser` the history gets what the parser made of it, as a client
        would."""
        text = self.subject.dialect.write(message, prompt=self.subject.judge().decode(self.ids[-24:]))
        sampled = self.subject.judge().encode(text, add_special_tokens=False)
        stop = self.subject.judge().convert_ids_to_tokens(sampled[-1])
        assert text.endswith(stop) and sampled[-1] in self.renderer.stop_token_ids, f"{stop!r} is no stop token"
        if through_parser:
            parsed = self.renderer.parse(sampled, prompt_ids=self.ids, tools=self.tools)
            assert parsed.raw == text
            assert_same(parsed.message, message)
            message = (
                {**parsed.message, "tool_calls": message["tool_calls"]}
                if message.get("tool_calls")
                else dict(parsed.message)
            )
        self.stop, self.last = stop, self.turns
        self.turns += 1
        self.ids += sampled
        self.messages = [*self.messages, message]
        return message

    def append(self, new: Sequence[Message], *, may_refuse: bool = False) -> None:
        extension = self.renderer.extend(self.ids, self.messages, list(new), self.tools)
        try:
            truth = self.truth(new)
        except NoTruth as reason:
            if isinstance(extension, tt.Extension) and not self._renders(self.messages):
                self.ids, self.messages = (
                    list(extension.token_ids),
                    [*self.messages, *new],
                )  # it is the past that the template rejects
                return
            assert isinstance(extension, tt.Refusal), f"extended though the template cannot: {reason}"
            assert extension.why and extension.detail
            raise
        if isinstance(extension, tt.Refusal):
            assert may_refuse, f"refused: {extension}"
            raise NoTruth(extension.why)
        assert list(extension.token_ids[: len(self.ids)]) == self.ids, "the recorded prefix changed"
        assert list(extension.added_ids) == truth, self._explained(extension, truth)
        self.ids = list(extension.token_ids)
        self.messages = [*self.messages, *new]

    def truth(self, new: Sequence[Message]) -> list[int]:
        judge = self.subject.judge()
        text = self._rendered([*self.messages, *new])
        stop = self.subject.dialect.closes.get(self.stop, self.stop)
        end = text.rfind(f"end{self.last}q")
        cut = self._cut(text, end, stop, marks_of(new)[0])
        if end < 0 or cut < 0:
            raise NoTruth("the last turn is not in the render, or not closed")
        marks = [text.find(mark, cut) for mark in marks_of(new)]
        if -1 in marks or marks != sorted(marks) or any(text.count(mark) != 1 for mark in marks_of(new)):
            raise NoTruth("the new messages are not rendered in order after the last turn")
        return judge.encode(text[cut:], add_special_tokens=False)

    def _cut(self, text: str, end: int, stop: str, first: str) -> int:
        """Right after the stop that was sampled. A stop that opens another role than the one that follows is no part of
        the render:
        then right before the opener that is."""
        found = text.find(stop, end)
        if 0 <= found < text.find(first, end):
            return found + len(stop)
        others = [
            text.find(other, end)
            for other in (self.subject.dialect.stop, self.subject.dialect.call_stop)
            if other and other != stop
        ]
        return max(others, default=-1)

    def _renders(self, messages: list[Message]) -> bool:
        try:
            self._rendered(messages)
        except NoTruth:
            return False
        return True

    def _rendered(self, messages: list[Message]) -> str:
        """Arguments as objects; as JSON text for the few templates that want it."""
        for objects in (True, False):
            try:
                return self.subject.truth(
                    [as_template_wants(message, objects=objects) for message in messages],
                    tools=self.tools,
                    add_generation_prompt=True,
                    **self.renderer.template_kwargs,
                )
            except Exception as error:
                reason = error
                if "concatenate str" not in str(error):
                    break
        raise NoTruth(str(reason))

    def _explained(self, extension: tt.Extension, truth: list[int]) -> str:
        judge = self.subject.judge()
        return f"added {judge.decode(list(extension.added_ids))!r}\ntruth {judge.decode(truth)!r}"


def marks_of(new: Sequence[Message]) -> list[str]:
    return [str(message["content"]).split()[-1] for message in new]


def as_template_wants(message: Message, *, objects: bool) -> Message:
    """No null content, arguments as objects or as text."""
    plain: Message = {**message, "content": message.get("content") or ""}
    if "tool_calls" in plain and objects:
        plain["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
            for call in plain["tool_calls"]
        ]
    return plain


def assert_same(parsed: Any, message: Message) -> None:
    assert (parsed.get("content") or "") == (message.get("content") or "")
    assert (parsed.get("reasoning_content") or "") == (message.get("reasoning_content") or "")
    assert calls_of(parsed) == calls_of(message)


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]


def walk(subject: Subject, name: str, *, until_calls: bool = False, through_parser: bool = False) -> Walk:
    """Through the trajectory; with `until_calls` it stops after its last turn of calls, before their results."""
    plan, _, mode = name.rpartition("-")
    steps = _PLANS[plan]
    on = Walk(subject)
    for turn, calls in enumerate(steps):
        message = on.sample(assistant(subject, turn, calls, thinking=mode == "thinking"), through_parser=through_parser)
        if until_calls and turn == len(steps) - 1:
            return on
        on.append(results(message, place=10 * turn))
    on.sample(assistant(subject, len(steps), 0, thinking=mode == "thinking"), through_parser=through_parser)
    return on


# The checks


def check_trajectory(subject: Subject, name: str) -> None:
    """Every extension on the way is exact, and one more after the end, so that a missing boundary cannot hide at the
    tail."""
    on = walk(subject, name)
    on.append([{"role": "user", "content": "One more. new90q"}])


def _shape_user(on: Walk) -> list[Message]:
    return [{"role": "user", "content": "And then? new50q"}]


def _shape_tool(on: Walk) -> list[Message]:
    return results(on.messages[-1], place=50)


def _shape_system(on: Walk) -> list[Message]:
    return [*results(on.messages[-1], place=50), {"role": "system", "content": "Hurry. new60q"}]


def _shape_mixed(on: Walk) -> list[Message]:
    return [*results(on.messages[-1], place=50), {"role": "user", "content": "Wait. new60q"}, *results(on.messages[-1], place=70),
            {"role": "user", "content": "Go. new80q"}]  # fmt: skip


SHAPES: dict[str, Callable[[Walk], list[Message]]] = {
    "tool": _shape_tool, "user": _shape_user, "system": _shape_system, "mixed": _shape_mixed,
}  # fmt: skip


def check_append(subject: Subject, name: str, shape: str) -> None:
    on = walk(subject, name, until_calls=shape != "user")
    try:
        on.append(SHAPES[shape](on), may_refuse=shape in MAY_REFUSE)
    except NoTruth:
        assert shape in MAY_REFUSE or shape not in subject.roles, f"{shape} must be proven"


def check_round_trip(subject: Subject, name: str) -> None:
    on = Walk(subject)
    plan, _, mode = name.rpartition("-")
    on.sample(assistant(subject, 0, _PLANS[plan][0], thinking=mode == "thinking"), through_parser=True)


FLOWS: dict[str, tuple[str, ...]] = {
    "tool": ("t",),
    "tutu": ("t", "u", "t", "u"),
    "system": ("s",),
    "tutst": ("t", "u", "t", "s", "t"),
}


def check_flow(subject: Subject, shape: str) -> None:
    """Every turn through the real parser; after each turn of calls, what the environment says next."""
    mode = "thinking" if subject.dialect.think is not None else "plain"
    calls = 2 if subject.dialect.parallel else 1
    on = Walk(subject)
    for turn, step in enumerate(FLOWS[shape]):
        message = on.sample(assistant(subject, turn, calls, thinking=mode == "thinking"), through_parser=True)
        new = results(message, place=10 * turn)
        if step == "u" or (step == "s" and message.get("tool_calls")):
            new.append({"role": {"u": "user", "s": "system"}[step], "content": f"Hm. new{10 * turn + 5}q"})
        try:
            on.append(new, may_refuse=step != "t")
        except NoTruth:
            on.append(results(message, place=10 * turn))  # a refusal changes nothing: the plain results still fit
    on.sample(assistant(subject, len(FLOWS[shape]), 0, thinking=mode == "thinking"), through_parser=True)
    try:
        on.append([{"role": "user", "content": "One more. new90q"}])
    except NoTruth:
        assert "s" in FLOWS[shape], "a template may take a late system message and refuse what comes after it"


def check_defence(subject: Subject) -> None:
    """A buffer whose boundary is damaged differs hard from the true one, and says where."""
    on = walk(subject, trajectory_names(subject)[0])
    before = len(on.ids)
    on.append([{"role": "user", "content": "One more. new90q"}])
    damaged = on.ids[: before - 1] + on.ids[before:]  # the stop token is lost
    found = tt.compare(on.ids, damaged, renderer=on.renderer)
    assert any(mismatch.severity == "hard" for mismatch in found)
    assert tt.compare(on.ids, on.ids, renderer=on.renderer) == []


def check_wiring(subject: Subject) -> None:
    renderer = subject.renderer()
    stops = {subject.judge().convert_ids_to_tokens(id_) for id_ in renderer.stop_token_ids}
    assert renderer.family.name == subject.family
    assert {subject.dialect.stop, subject.dialect.call_stop or subject.dialect.stop} <= stops
