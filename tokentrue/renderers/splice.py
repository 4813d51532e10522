"""What a template puts after a recorded assistant turn: found with a sentinel in place of what was sampled, cut at the recorded stop id.

Contract: `Splicer.tail` gives the text that follows the recorded prefix, or raises `Refused` with a reason; it never guesses.
A conversation is rendered in one of three contexts: "light" (a dummy user, the assistant turn), "dummy" (real system message and tools as
well) or "history" (the real messages, only the last turn replaced). The cheaper ones are used only after they gave, on the very messages
of a first call and on a render with marked words, what the real history gives; a plan remembers that per shape of call.

Checks on the marked render: the sentinel once; each new message's mark once, in order and after it; the turn's own text not behind
them; the recorded stop exactly once between sentinel and first mark. Nothing of this is decided by a model's name.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from tokentrue.errors import TemplateError
from tokentrue.renderers.encoding import Codec, Shield
from tokentrue.renderers.frames import Frames, filled, frame_from, has_frame, opaque_messages, opaque_turn
from tokentrue.renderers.spans import joins_of
from tokentrue.renderers.stencil import Stencil, stencil_of
from tokentrue.renderers.stops import Stops, content_of
from tokentrue.renderers.template import Habits, Plain, Template

Context = Literal["light", "dummy", "history"]
Join = Literal["stop", "alias", "foreign", "open"]
"""How the recorded turn ended, seen from the template: at a token it writes there itself; at one that it writes only while nothing
follows (harmony's <|return|>); at a stop token that it does not write there; at no stop token at all. The last two get the template's
own closing."""


class Refused(Exception):
    def __init__(self, why: str, detail: str) -> None:
        super().__init__(detail)
        self.why, self.detail = why, detail


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request to extend, normalised. `system` is the real leading system message; `history` is made plain only when it is needed."""

    last: Plain
    fresh: Sequence[Plain]
    tools: Sequence[Plain] | None
    kwargs: Mapping[str, Any]
    system: Plain | None
    stop: str | None  # the literal of the last recorded id, where it is an added token
    is_stop: bool
    in_reasoning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where to cut in a context: behind `gap`, which follows the sentinel; `closing` is inserted before what the template has there."""

    context: Context
    place: Literal["content", "argument"]
    gap: str
    literal: str  # the added token that the gap ends with; empty where it ends in text
    join: Join
    closing: str = ""
    joins: tuple[str, ...] = ()  # what the template writes around the new contents, `closing` included
    frame: tuple[str, ...] | None = None  # the same, where it is proven that no content can change it
    stencil: Stencil | None = None  # the frame as ids, where that can be


@dataclass(frozen=True, slots=True, kw_only=True)
class _Probe:
    """The marked render behind the first new content, and the context rendered with nothing after it."""

    alone: Callable[[], str]
    behind: str


class Splicer:
    def __init__(self, template: Template, codec: Codec, habits: Habits, stops: Stops, *, safe: bool) -> None:
        self._template, self._codec, self._habits, self._stops, self._safe = template, codec, habits, stops, safe
        self._base = "qz" + "".join(chr(97 + byte % 16) for byte in secrets.token_bytes(8))  # no text can hold it on purpose
        self._sentinel, self._own = self._base + "sampled", self._base + "own"
        self._frames = Frames(template)
        self._last_tools: tuple[Sequence[Plain], bool] | None = None
        self._dummy_user: Plain = {"role": "user", "content": content_of("Hello.", habits)}

    # the corridor

    def plan(self, call: Call, history: Sequence[Plain], *, only_history: bool = False) -> Plan:
        """The cheapest context that gives what the real history gives, or Refused."""
        truth, why_not = self._attempt("history", call, history)
        if truth is None and (only_history or why_not.why != "template_raises"):
            raise why_not
        cheap: list[Context] = [] if only_history else ["light", "dummy"]
        cheap = cheap if truth is not None else ["dummy"]
        expected = self.tail(truth, call, history)[0] if truth is not None else None
        for context in cheap:
            plan, _ = self._attempt(context, call, ())
            if plan is None:
                continue
            marked = truth is None or self._marked_tail(plan, call, ()) == self._marked_tail(truth, call, history)
            if marked and expected in (None, self.tail(plan, call, ())[0]):
                return plan
        if truth is None:
            raise why_not
        return truth

    def _attempt(self, context: Context, call: Call, history: Sequence[Plain]) -> tuple[Plan | None, Refused]:
        try:
            return self._probe(context, call, history), Refused("", "")
        except Refused as refused:
            return None, refused
        except TemplateError as error:
            return None, Refused("template_raises", str(error))

    def tail(self, plan: Plan, call: Call, history: Sequence[Plain]) -> tuple[str, str]:
        """The text after the recorded prefix, and the mark that shields content in it (empty where nothing had to be shielded)."""
        if plan.frame is not None and has_frame(call.last, call.fresh):
            contents = [message["content"] for message in call.fresh]
            if all(map(self._codec.clean, contents)):
                return filled(plan.frame, contents), ""
        context = self._context(plan.context, plan.place, call, history)
        tools = None if plan.context == "light" else call.tools
        text, mark = self._text([*context, *call.fresh], tools, call.kwargs)
        return plan.closing + self._after(text, plan), mark

    def framed(self, plan: Plan, call: Call) -> Plan:
        """The plan with its frame, where there is one."""
        if not self._safe or plan.context == "history" or not has_frame(call.last, call.fresh):
            return plan
        *context, last = self._context(plan.context, plan.place, call, ())
        tools = None if plan.context == "light" else call.tools
        if not self._codec.clean([*context, last]) or not self._clean_tools(tools):
            return plan
        text = self._frames.text([*context, opaque_turn(last), *opaque_messages(call.fresh)], tools, call.kwargs, self._habits)
        try:
            frame = None if text is None else frame_from(plan.closing + self._after(text, plan), len(call.fresh))
        except Refused:
            return plan
        return plan if frame is None else replace(plan, frame=frame, stencil=stencil_of(self._codec, frame))

    def _text(
        self, messages: list[Plain], tools: Sequence[Plain] | None, kwargs: Mapping[str, Any], *, generate: bool = True
    ) -> tuple[str, str]:
        """Rendered from shielded content, with the mark if one was needed; as it is where injection is not guarded against."""
        if not self._safe:
            return self._template.text(messages, tools, kwargs, generate=generate, habits=self._habits), ""
        if self._codec.clean(messages) and self._clean_tools(tools):
            return self._template.text(messages, tools, kwargs, generate=generate, habits=self._habits), ""
        shield = Shield(self._codec, [messages, tools])
        shown = [shield.shielded(message) for message in messages]
        text = self._template.text(shown, shield.shielded(tools), kwargs, generate=generate, habits=self._habits)
        return text, shield.mark if shield.used else ""

    def _clean_tools(self, tools: Sequence[Plain] | None) -> bool:
        """Remembered for the set seen last: it may be long, and is the same object from turn to turn."""
        if not tools:
            return True
        known = self._last_tools
        if known is None or known[0] is not tools:
            known = self._last_tools = (tools, self._codec.clean(tools))
        return known[1]

    def _after(self, text: str, plan: Plan) -> str:
        _, found, rest = text.partition(self._sentinel)
        if not found or self._sentinel in rest:
            raise Refused("turn_lost", "the assistant's turn does not show once when these messages follow it")
        if not rest.startswith(plan.gap):
            raise Refused("boundary_changed", "the new messages change what the template writes at the end of the assistant's turn")
        return rest[len(plan.gap) :]

    def rewrites(self, call: Call, history: Sequence[Plain]) -> bool:
        """Whether the template writes the conversation before the last turn's end otherwise once the new messages follow."""
        last = {**self._stand_in(call.last, "argument" if call.last.get("tool_calls") else "content", real=True)}
        thought = self._base + "thought" if call.last.get("reasoning_content") else ""
        if thought:
            last |= {"reasoning_content": thought, "thinking": thought}
        past = [*history, last]

        def head(messages: list[Plain], *, generate: bool) -> str:
            return self._text(messages, call.tools, call.kwargs, generate=generate)[0].partition(self._sentinel)[0]

        followed = head([*past, *call.fresh], generate=True)
        return thought not in followed or head(past, generate=False) != followed  # Kimi-K2.5 leaves it out before anything follows

    # contexts

    def _context(self, context: Context, place: str, call: Call, history: Sequence[Plain]) -> list[Plain]:
        last = self._stand_in(call.last, place, real=context == "history")
        if context == "history":
            return [*history, last]
        if context == "light" or call.system is None:
            return [self._dummy_user, last]
        return [call.system, self._dummy_user, last]

    def _stand_in(self, last: Plain, place: str, *, real: bool) -> Plain:
        """The recorded turn with the sentinel for what was sampled: calls keep names and ids, text stays text, nothing else is kept."""
        out: Plain = {"role": "assistant"}
        if real and place == "argument":
            out = {key: value for key, value in last.items() if key != "tool_calls"}
        calls = [dict(call) for call in last.get("tool_calls") or ()]
        has_text = bool(last["content"])
        if place == "content":
            out["content"] = content_of(self._sentinel, self._habits)
        elif not real:
            out["content"] = content_of(self._own if has_text else "", self._habits)
        for index, call in enumerate(calls):
            final = place == "argument" and index == len(calls) - 1
            arguments = self._arguments(call["function"]["arguments"], final=final, real=real)
            call["function"] = {**call["function"], "arguments": arguments}
        if calls:
            out["tool_calls"] = calls
        return out

    def _arguments(self, arguments: Any, *, final: bool, real: bool) -> Any:
        if not final:
            value = arguments if real else {"q": "v"}
        elif real and isinstance(arguments, dict) and arguments:
            value = {**arguments, list(arguments)[-1]: self._sentinel}
        else:
            value = {"q": self._sentinel}
        if self._habits.arguments == "string" and not isinstance(value, str):
            return json.dumps(value, ensure_ascii=False)
        return value

    def marked_text(self, messages: Sequence[Plain], tools: Sequence[Plain] | None, kwargs: Mapping[str, Any]) -> tuple[str, list[str]]:
        """A whole conversation with a unique word for each content, and those words."""
        marked, words = self._marked(messages)
        return self._template.text(marked, tools, kwargs, habits=self._habits), words

    def _marked(self, fresh: Sequence[Plain]) -> tuple[list[Plain], list[str]]:
        """The new messages with a unique word for each content; a message of calls alone carries its word in the last argument."""
        out: list[Plain] = []
        words = [f"{self._base}n{index}e" for index in range(len(fresh))]
        for message, word in zip(fresh, words, strict=True):
            if message.get("tool_calls") and not message["content"]:
                calls = [dict(call) for call in message["tool_calls"]]
                arguments: Any = {"q": word} if self._habits.arguments == "object" else json.dumps({"q": word})
                calls[-1]["function"] = {**calls[-1]["function"], "arguments": arguments}
                out.append({**message, "tool_calls": calls})
            else:
                out.append({**message, "content": content_of(word, self._habits)})
        return out, words

    # the probe

    def _probe(self, context: Context, call: Call, history: Sequence[Plain]) -> Plan:
        marked, words = self._marked(call.fresh)
        tools = None if context == "light" else call.tools
        place: Literal["content", "argument"] = "argument" if call.last.get("tool_calls") else "content"

        def render(place: str, *, calls: bool = True, alone: bool = False) -> str:
            messages = self._context(context, place, call, history)
            if not calls:
                messages[-1].pop("tool_calls", None)
            return self._text([*messages, *([] if alone else marked)], tools, call.kwargs, generate=not alone)[0]

        text = render(place)
        if place == "argument" and text.count(self._sentinel) != 1:
            place = "content"
            if (text := render(place)) != render(place, calls=False):
                raise Refused("calls_dropped", "the template does not show the last tool call of the assistant's turn")
        region = self._region(text, words)
        probe = _Probe(alone=lambda: render(place, alone=True), behind=text.partition(words[0])[2])
        join, gap, literal = self._cut(region, call, probe)
        closing = self.reasoning_end(call.kwargs) if join in {"open", "foreign"} and call.in_reasoning else ""
        joins = joins_of(closing + text.partition(self._sentinel)[2].removeprefix(gap), words)
        return Plan(context=context, place=place, gap=gap, literal=literal, join=join, closing=closing, joins=joins)

    def _region(self, text: str, words: Sequence[str]) -> str:
        """What lies between the sentinel and the first new message, after the order checks."""
        if text.count(self._sentinel) != 1:
            raise Refused("turn_lost", "the assistant's turn does not show once when these messages follow it")
        end = text.index(self._sentinel) + len(self._sentinel)
        position = end
        for index, word in enumerate(words):
            found = text.find(word)
            if found < 0:
                raise Refused("message_dropped", f"the template drops new[{index}] without saying so")
            if found < position or text.find(word, found + 1) >= 0:
                raise Refused("message_moved", f"the template does not put new[{index}] once, behind the assistant's turn and in order")
            position = found
        first = text.find(words[0])
        if text.find(self._own, first) >= 0:
            raise Refused("turn_split", "the template writes part of the assistant's turn behind the new messages")
        return text[end:first]

    def _cut(self, region: str, call: Call, probe: _Probe) -> tuple[Join, str, str]:
        ends = self._literal_ends(region)
        if not ends:
            raise Refused("no_stop", "the template closes the assistant's turn with no token of its own")
        if call.stop is not None:
            hits = [end for literal, end in ends if literal == call.stop]
            own = self._own_stop_end(ends, call)
            if not call.is_stop:  # cut off inside the closing: what it already has of it is not written again
                hits = [end for end in hits if end <= own]
            if len(hits) == 1:
                return "stop" if call.is_stop or hits[0] == own else "open", region[: hits[0]], call.stop
            if hits:
                raise Refused("ambiguous_stop", f"the template writes {call.stop!r} {len(hits)} times at the end of the assistant's turn")
            if call.is_stop and (found := self._alias(region, ends, call.stop, probe)):
                return "alias", *found
        return "foreign" if call.is_stop else "open", region[: self._closing_start(region, ends, call)], ""

    def _literal_ends(self, region: str) -> list[tuple[str, int]]:
        return [(literal, end) for _, literal, end in self._codec.pieces(region) if literal]

    def _alias(self, region: str, ends: Sequence[tuple[str, int]], stop: str, probe: _Probe) -> tuple[str, str] | None:
        """The recorded stop closes the turn only while nothing follows it; the token that stands there instead is not written again.

        Instead means: at the same place, and the one that closes the new message as well (else it would be the next turn's opener).
        """
        after = probe.alone().rpartition(self._sentinel)[2]
        if after.count(stop) != 1:
            return None
        before = after[: after.index(stop)]
        closer = next((literal for _, literal, _ in self._codec.pieces(probe.behind) if literal), None)
        same = ((region[:end], literal) for literal, end in ends if literal == closer and region[: end - len(literal)] == before)
        return next(same, None)

    def _own_stop_end(self, ends: Sequence[tuple[str, int]], call: Call) -> int:
        own = self._stops.call if call.last.get("tool_calls") else self._stops.text
        return next((end for literal, end in ends if literal in own), ends[0][1])

    def _closing_start(self, region: str, ends: Sequence[tuple[str, int]], call: Call) -> int:
        """Text turns are closed from the end of the text on; behind complete calls only the turn itself is closed."""
        if not call.last.get("tool_calls"):
            return 0
        for stops in (self._stops.call or self._stops.text, self._stops.all):  # GLM: what follows may open with another stop token
            for literal, end in ends:
                if literal in stops:
                    return end - len(literal)
        raise Refused("no_stop", "behind the assistant's calls the template writes no token that ends a turn")

    def reasoning_end(self, kwargs: Mapping[str, Any]) -> str:
        """What the template writes between reasoning and content, for a turn that was cut off while reasoning."""
        thought = self._base + "thought"
        turn: Plain = {"role": "assistant", "content": content_of(self._own, self._habits)}
        turn |= {"reasoning_content": thought, "thinking": thought}
        try:
            text = self._template.text([self._dummy_user, turn], None, kwargs, generate=False, habits=self._habits)
        except TemplateError:
            return ""
        between, found, _ = text.partition(thought)[2].partition(self._own)
        return between if found else ""

    def _marked_tail(self, plan: Plan, call: Call, history: Sequence[Plain]) -> str:
        marked, _ = self._marked(call.fresh)
        context = self._context(plan.context, plan.place, call, history)
        tools = None if plan.context == "light" else call.tools
        return self._text([*context, *marked], tools, call.kwargs)[0].partition(self._sentinel)[2]
