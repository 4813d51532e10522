"""Finds what a template writes after a recorded assistant turn: renders a sentinel in place of what was sampled and
cuts at the recorded stop id.

`Splicer.render_tail` returns the text that follows the recorded prefix or raises `ExtendError`; it never guesses. A
short context (`ContextKind`) is used only if it gave the same text as the real history, for the messages of a first
request and for a render with marked words; `ExtendPlan` stores that per shape of request. If the template raises on the
real history there is nothing to compare. The marked render must have the sentinel once; each new message's mark once,
in order and after it; the turn's own text not after them; the recorded stop once between sentinel and first mark.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokentrue.errors import TemplateError
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.renderers.codec import Codec, ContentShield, needs_shield
from tokentrue.renderers.extending.contexts import (
    ContextBuilder,
    ContextKind,
    ExtendError,
    ExtendPlan,
    ExtendRequest,
    Join,
    SentinelPlace,
    mark_ids,
)
from tokentrue.renderers.extending.spans import split_at_words
from tokentrue.renderers.extending.stops import Stops
from tokentrue.renderers.template import InputFormat, Template, make_content


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """`gap`: the part of the region that the recorded turn already has; `literal`: the added token at its end."""

    join: Join
    gap: str
    literal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedRender:
    """`region` lies between the sentinel and the first new content, `rest` after that. `render_alone` returns what
    follows the sentinel if nothing follows the turn.
    """

    region: str
    rest: str
    render_alone: Callable[[], str]


def find_boundary(codec: Codec, stops: Stops, request: ExtendRequest, render: MarkedRender) -> Boundary:
    """Raises ExtendError if the recorded end of the turn does not match the template's."""
    ends = _list_literals(codec, render.region)
    if not ends:
        raise ExtendError("no_stop", "the template closes the assistant's turn with no token of its own")
    if request.stop is not None:
        hits = [end for literal, end in ends if literal == request.stop]
        own = _find_own_stop(ends, stops, request)
        if not request.is_stop:  # cut off inside the closing: the part already there is not repeated
            hits = [end for end in hits if end <= own]
        if len(hits) == 1:
            join: Join = "stop" if request.is_stop or hits[0] == own else "open"
            return Boundary(join=join, gap=render.region[: hits[0]], literal=request.stop)
        if hits:
            raise ExtendError(
                "ambiguous_stop",
                f"the template writes {request.stop!r} {len(hits)} times at the end of the assistant's turn",
            )
        if request.is_stop and (alias := _find_alias(codec, ends, request.stop, render)) is not None:
            return alias
    closing = _find_closing(ends, stops, request)
    return Boundary(join="foreign" if request.is_stop else "open", gap=render.region[:closing])


def _list_literals(codec: Codec, text: str) -> list[tuple[str, int]]:
    return [(literal, end) for _, literal, end in codec.split(text) if literal]


def _find_alias(codec: Codec, ends: list[tuple[str, int]], stop: str, render: MarkedRender) -> Boundary | None:
    """The recorded stop closes the turn only if nothing follows. The template's token in its place is not written
    again; it must also close the new message, otherwise it is the next turn's opener.
    """
    after = render.render_alone()
    if after.count(stop) != 1:
        return None
    before = after[: after.index(stop)]
    closer = next((literal for _, literal, _ in codec.split(render.rest) if literal), None)
    for literal, end in ends:
        if literal == closer and render.region[: end - len(literal)] == before:
            return Boundary(join="alias", gap=render.region[:end], literal=literal)
    return None


def _find_own_stop(ends: list[tuple[str, int]], stops: Stops, request: ExtendRequest) -> int:
    own = stops.call if request.last.get("tool_calls") else stops.text
    return next((end for literal, end in ends if literal in own), ends[0][1])


def _find_closing(ends: list[tuple[str, int]], stops: Stops, request: ExtendRequest) -> int:
    """A text turn is closed from the end of its text; after complete calls only the turn itself is closed."""
    if not request.last.get("tool_calls"):
        return 0
    for candidates in (stops.call or stops.text, stops.all):  # GLM: what follows may open with another stop token
        for literal, end in ends:
            if literal in candidates:
                return end - len(literal)
    raise ExtendError("no_stop", "after the assistant's calls the template writes no token that ends a turn")


class Splicer:
    def __init__(self, template: Template, codec: Codec, inputs: InputFormat, stops: Stops, *, safe: bool) -> None:
        self._template, self._codec, self._inputs, self._stops, self._safe = template, codec, inputs, stops, safe
        self._contexts = ContextBuilder(inputs)

    def plan(self, request: ExtendRequest, history: Sequence[JsonObject], *, only_history: bool) -> ExtendPlan:
        """Finds the cheapest context with the same text as the real history; ExtendError if that has none."""
        truth, why_not = self._try_context("history", request, history)
        if truth is None and (only_history or why_not.why != "template_raises"):
            raise why_not
        if only_history and truth is not None:
            return truth
        cheap: tuple[ContextKind, ...] = ("dummy",) if truth is None or request.needs_tools else ("light", "dummy")
        expected = self.render_tail(truth, request, history)[0] if truth is not None else None
        for context in cheap:
            plan, _ = self._try_context(context, request, ())
            if plan is None:
                continue
            try:
                is_same = truth is None or self._render_marked_tail(plan, request, ()) == self._render_marked_tail(
                    truth, request, history
                )
                if is_same and expected in (None, self.render_tail(plan, request, ())[0]):
                    return plan
            except (ExtendError, TemplateError):
                if truth is None:
                    raise
        if truth is None:
            raise why_not
        return truth

    @property
    def dummy_user(self) -> JsonObject:
        return self._contexts.dummy_user

    def build_turn(self, last: JsonObject) -> JsonObject:
        return self._contexts.build_turn({**last, "content": ""}, "content", real=False)

    def _try_context(
        self, context: ContextKind, request: ExtendRequest, history: Sequence[JsonObject]
    ) -> tuple[ExtendPlan | None, ExtendError]:
        try:
            return self._plan_context(context, request, history), ExtendError("", "")
        except ExtendError as refused:
            return None, refused
        except TemplateError as error:
            return None, ExtendError("template_raises", str(error))

    def render_tail(self, plan: ExtendPlan, request: ExtendRequest, history: Sequence[JsonObject]) -> tuple[str, str]:
        """Returns the text after the recorded prefix and the mark that shields its content ("" if none was needed)."""
        context = self._contexts.build(plan.context, plan.place, request, history)
        text, mark = self._render_request(plan.context, request, [*context, *request.new])
        _, found, rest = text.partition(self._contexts.sentinel)
        if not found or self._contexts.sentinel in rest:
            raise ExtendError("turn_lost", "the assistant's turn does not show once when these messages follow it")
        gap = mark_ids(plan.gap, request.last, back=True)
        if not rest.startswith(gap):
            raise ExtendError(
                "boundary_changed",
                "the new messages change what the template writes at the end of the assistant's turn",
            )
        return plan.closing + rest[len(gap) :], mark

    def is_true_tail(
        self, plan: ExtendPlan, request: ExtendRequest, history: Sequence[JsonObject], tail: str, mark: str
    ) -> bool:
        """True if the conversation ends with the same text when the turn has its real text and no sentinel."""
        if not request.last.get("tool_calls") and not str(request.last["content"]).strip(" \n[]"):
            return True  # an empty turn; a template may omit it
        context = self._contexts.build(plan.context, plan.place, request, history)[:-1]
        try:
            text, own_mark = self._render_request(plan.context, request, [*context, request.last, *request.new])
        except TemplateError:  # the template raised on what the model wrote: nothing to compare
            return True
        tail = tail[len(plan.closing) :]
        return _remove(own_mark, text).endswith(_remove(mark, tail))

    def _render_request(
        self, context: ContextKind, request: ExtendRequest, messages: Sequence[JsonObject], *, generate: bool = True
    ) -> tuple[str, str]:
        tools = None if context == "light" else request.tools
        return self.render_text(messages, tools, request.kwargs, generate=generate)

    def render_text(
        self,
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject] | None,
        kwargs: JsonMapping,
        *,
        generate: bool = True,
    ) -> tuple[str, str]:
        """Renders shielded content; returns the text and the mark ("" if not shielded)."""
        values = [*messages, *(tools or ())]
        if not self._safe or not needs_shield(self._codec, values):
            return self._template.render(messages, tools, kwargs, generate=generate, inputs=self._inputs), ""
        shield = ContentShield(self._codec, values)
        shielded = [shield.shield(message) for message in messages]
        text = self._template.render(
            shielded, tools and shield.shield([*tools]), kwargs, generate=generate, inputs=self._inputs
        )
        return text, shield.mark

    def mark_text(
        self, messages: Sequence[JsonObject], tools: Sequence[JsonObject] | None, kwargs: JsonMapping
    ) -> tuple[str, ...]:
        """Returns the template's texts around the contents of a conversation; empty if they cannot be told apart."""
        marked, words = self._contexts.mark(messages)
        try:
            return split_at_words(self._template.render(marked, tools, kwargs, inputs=self._inputs), words)
        except TemplateError:  # a template may look into contents and refuse the marked words
            return ()

    def rewrites(self, request: ExtendRequest, history: Sequence[JsonObject]) -> bool:
        last = self._contexts.build_turn(request.last, _find_place(request), real=True)
        thought = self._contexts.thought if request.last.get("reasoning_content") else ""
        if thought:
            last |= {"reasoning_content": thought, "thinking": thought}
        past = [*history, last]

        def render_head(messages: list[JsonObject], *, generate: bool) -> str:
            return self.render_text(messages, request.tools, request.kwargs, generate=generate)[0].partition(
                self._contexts.sentinel
            )[0]

        followed = render_head([*past, *request.new], generate=True)
        # Kimi-K2.5 leaves the thought out before anything follows
        return thought not in followed or render_head(past, generate=False) != followed

    def render_reasoning_end(self, kwargs: JsonMapping) -> str:
        """Returns what the template writes between reasoning and content, for a turn cut off during reasoning."""
        thought, own = self._contexts.thought, self._contexts.own
        turn: JsonObject = {"role": "assistant", "content": make_content(own, self._inputs)}
        turn |= {"reasoning_content": thought, "thinking": thought}
        try:
            text = self._template.render(
                [self._contexts.dummy_user, turn], None, kwargs, generate=False, inputs=self._inputs
            )
        except TemplateError:
            return ""
        between, found, _ = text.partition(thought)[2].partition(own)
        return between if found else ""

    # the marked render

    def _plan_context(self, context: ContextKind, request: ExtendRequest, history: Sequence[JsonObject]) -> ExtendPlan:
        marked, words = self._contexts.mark(request.new)
        place = _find_place(request)

        def render(place: SentinelPlace, *, calls: bool = True, alone: bool = False) -> str:
            messages = self._contexts.build(context, place, request, history, real=context == "history")
            if not calls:
                messages[-1].pop("tool_calls", None)
            return self._render_request(context, request, [*messages, *([] if alone else marked)], generate=not alone)[
                0
            ]

        text = render(place)
        if place == "argument" and text.count(self._contexts.sentinel) != 1:
            place = "content"
            if (text := render(place)) != render(place, calls=False):
                raise ExtendError(
                    "calls_dropped", "the template does not show the last tool call of the assistant's turn"
                )
        after = text.partition(self._contexts.sentinel)[2]
        marked_render = MarkedRender(
            region=self._find_region(text, words),
            rest=text.partition(words[0])[2],
            render_alone=lambda: render(place, alone=True).rpartition(self._contexts.sentinel)[2],
        )
        boundary = find_boundary(self._codec, self._stops, request, marked_render)
        is_cut_off = boundary.join in {"open", "foreign"} and request.in_reasoning
        closing = self.render_reasoning_end(request.kwargs) if is_cut_off else ""
        return ExtendPlan(
            context=context,
            place=place,
            gap=mark_ids(boundary.gap, request.last),
            literal=boundary.literal,
            join=boundary.join,
            closing=closing,
            template_texts=split_at_words(closing + after.removeprefix(boundary.gap), words),
        )

    def _find_region(self, text: str, words: Sequence[str]) -> str:
        sentinel = self._contexts.sentinel
        if text.count(sentinel) != 1:
            raise ExtendError("turn_lost", "the assistant's turn does not show once when these messages follow it")
        end = text.index(sentinel) + len(sentinel)
        position = end
        for index, word in enumerate(words):
            found = text.find(word)
            if found < 0:
                raise ExtendError("message_dropped", f"the template drops new[{index}] without saying so")
            if found < position or text.find(word, found + 1) >= 0:
                detail = f"the template does not put new[{index}] once, after the assistant's turn and in order"
                raise ExtendError("message_moved", detail)
            position = found
        first = text.find(words[0])
        if text.find(self._contexts.own, first) >= 0:
            raise ExtendError("turn_split", "the template writes part of the assistant's turn after the new messages")
        return text[end:first]

    def _render_marked_tail(self, plan: ExtendPlan, request: ExtendRequest, history: Sequence[JsonObject]) -> str:
        marked, _ = self._contexts.mark(request.new)
        context = self._contexts.build(plan.context, plan.place, request, history)
        text, _ = self._render_request(plan.context, request, [*context, *marked])
        return text.partition(self._contexts.sentinel)[2]


def _remove(mark: str, text: str) -> str:
    return text.replace(mark, "") if mark else text


def _find_place(request: ExtendRequest) -> SentinelPlace:
    return "argument" if request.last.get("tool_calls") else "content"
