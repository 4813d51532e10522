"""Finds what a template writes after a recorded assistant turn: renders a sentinel in place of what was sampled and
cuts at the recorded stop id. It never guesses. A first render has marked words in place of the new contents: it must
have the sentinel once; each mark once, in order and after it; the recorded stop once between sentinel and first mark. A
plan is used for a request if its render has the template's texts of that first one."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tokentrue.errors import TemplateError
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.renderers.codec import Codec
from tokentrue.renderers.earlier import SKIPPED
from tokentrue.renderers.extending.contexts import (
    ContextBuilder,
    ExtendError,
    ExtendPlan,
    ExtendRequest,
    Join,
    SentinelPlace,
    mark_ids,
)
from tokentrue.renderers.extending.spans import find_contents, split_at_words
from tokentrue.renderers.extending.stops import Stops
from tokentrue.renderers.template import InputFormat, Template, make_content


class Boundary(NamedTuple):
    """`gap`: the part of the region that the recorded turn already has; `literal`: the added token at its end."""

    join: Join
    gap: str
    literal: str = ""


class MarkedRender(NamedTuple):
    """`region` lies between the sentinel and the first new content, `rest` after that. `render_alone`: what follows the
    sentinel if nothing follows the turn."""

    region: str
    rest: str
    render_alone: Callable[[], str]


def find_boundary(codec: Codec, stops: Stops, request: ExtendRequest, render: MarkedRender) -> Boundary:
    """ExtendError if the recorded end of the turn does not match the template's."""
    region, stop, has_calls = render.region, request.stop, bool(request.last.get("tool_calls"))
    ends = [(literal, end) for _, literal, end in codec.split(region) if literal]
    if not ends:
        raise ExtendError("no_stop", "the template closes the assistant's turn with no token of its own")
    if stop is not None:
        hits = [end for literal, end in ends if literal == stop]
        own = next((end for literal, end in ends if literal in stops.after(request.last)), ends[0][1])
        if not request.is_stop:  # cut off inside the closing: the part already there is not repeated
            hits = [end for end in hits if end <= own]
        if len(hits) == 1:
            return Boundary("stop" if request.is_stop or hits[0] == own else "open", region[: hits[0]], stop)
        if hits:
            detail = f"the template writes {stop!r} {len(hits)} times at the end of the assistant's turn"
            raise ExtendError("ambiguous_stop", detail)
        if request.is_stop and (after := render.render_alone()).count(stop) == 1:
            # This stop closes the turn only if nothing follows. The token in its place is not written again; it must also
            # close the new message, otherwise it is the next turn's opener.
            before = after[: after.index(stop)]
            closer = next((literal for _, literal, _ in codec.split(render.rest) if literal), None)
            for literal, end in ends:
                if literal == closer and region[: end - len(literal)] == before:
                    return Boundary("alias", region[:end], literal)
    join: Join = "foreign" if request.is_stop else "open"
    if not has_calls:  # a text turn is closed from the end of its text
        return Boundary(join, "")
    for candidates in (stops.call or stops.text, stops.all):  # GLM: what follows may open with another stop token
        for literal, end in ends:
            if literal in candidates:  # after complete calls only the turn itself is closed
                return Boundary(join, region[: end - len(literal)])
    raise ExtendError("no_stop", "after the assistant's calls the template writes no token that ends a turn")


class Splicer:
    def __init__(self, template: Template, codec: Codec, inputs: InputFormat, stops: Stops) -> None:
        self._template, self._codec, self._inputs, self._stops = template, codec, inputs, stops
        self.contexts = ContextBuilder(inputs)

    def plan(self, request: ExtendRequest) -> ExtendPlan:
        """The cut in a render with marked words; ExtendError if there is none."""
        marked, words = self.contexts.mark(request.new)
        place = _find_place(request)

        def render(place: SentinelPlace, *, calls: bool = True, alone: bool = False) -> str:
            turn = self.contexts.build_turn(request, place)
            if not calls:
                turn.pop("tool_calls", None)
            return self._render(request, [turn] if alone else [turn, *marked], generate=not alone)

        dropped = ExtendError("calls_dropped", "the template does not show the last tool call of the assistant's turn")
        try:
            text = render(place)
        except ExtendError as raised:  # on what the turn says; in "content" it says nothing
            if place == "content":
                raise
            text, dropped = "", raised
        if place == "argument" and text.count(self.contexts.sentinel) != 1:
            place = "content"
            if (text := render(place)) != render(place, calls=False):
                raise dropped
        marked_render = MarkedRender(
            region=self._find_region(text, words),
            rest=text.partition(words[0])[2],
            render_alone=lambda: render(place, alone=True).rpartition(self.contexts.sentinel)[2],
        )
        join, gap, literal = find_boundary(self._codec, self._stops, request, marked_render)
        is_cut_off = join in {"open", "foreign"} and request.in_reasoning
        closing = self.render_reasoning_end(request.kwargs) if is_cut_off else ""
        after = text.partition(self.contexts.sentinel)[2].removeprefix(gap)
        texts = split_at_words(closing + after, words)
        return ExtendPlan(
            place=place,
            gap=mark_ids(gap, request.last),
            literal=literal,
            join=join,
            closing=closing,
            template_texts=tuple(mark_ids(text, request.last) for text in texts),
        )

    def render_tail(self, plan: ExtendPlan, request: ExtendRequest, sentinel: str = "") -> str:
        """The text after the recorded prefix."""
        sentinel = sentinel or self.contexts.sentinel
        text = self._render(request, [self.contexts.build_turn(request, plan.place, sentinel), *request.new])
        _, found, rest = text.partition(sentinel)
        if not found or sentinel in rest:
            raise ExtendError("turn_lost", "the assistant's turn does not show once when these messages follow it")
        gap = mark_ids(plan.gap, request.last, back=True)
        if not rest.startswith(gap) or SKIPPED in rest:
            detail = "the new messages change what the template writes at the end of the assistant's turn"
            raise ExtendError("boundary_changed", detail)
        return plan.closing + rest[len(gap) :]

    def fits(self, plan: ExtendPlan, request: ExtendRequest, tail: str) -> bool:
        return bool(find_contents(tail, request.mark, list_texts(plan, request)))

    def is_true_tail(self, plan: ExtendPlan, request: ExtendRequest, tail: str) -> bool:
        """Whether the conversation ends with the same text when the turn has its real text."""
        if request.last.get("tool_calls") or str(request.last["content"]).strip(" \n[]"):
            try:
                text = self._render(request, [request.last, *request.new])
            except ExtendError:  # the template raised on what the model wrote
                pass
            else:
                return text.endswith(tail[len(plan.closing) :])
        # A template may omit an empty turn: there is no real text to compare, but nothing of the sentinel may be in it.
        try:
            return self.render_tail(plan, request, self.contexts.twin) == tail
        except ExtendError:
            return False

    def rewrites(self, request: ExtendRequest) -> bool:
        """Whether the template changes earlier turns when the new messages follow."""
        last = self.contexts.build_turn(request, _find_place(request))
        thought = self.contexts.thought if request.last.get("reasoning_content") else ""
        if thought:
            last |= {"reasoning_content": thought, "thinking": thought}
        followed = self._render(request, [last, *request.new]).partition(self.contexts.sentinel)[0]
        # Kimi-K2.5 leaves the thought out before anything follows
        if thought not in followed:
            return True
        return self._render(request, [last], generate=False).partition(self.contexts.sentinel)[0] != followed

    def render_reasoning_end(self, kwargs: JsonMapping) -> str:
        """Between reasoning and content, for a turn cut off during reasoning."""
        thought, own = self.contexts.thought, self.contexts.own
        turn: JsonObject = {"role": "assistant", "content": make_content(own, self._inputs)}
        messages = [self.contexts.dummy_user, turn | {"reasoning_content": thought, "thinking": thought}]
        try:
            text = self._template.render(messages, None, kwargs, generate=False, inputs=self._inputs)
        except TemplateError:
            return ""
        between, found, _ = text.partition(thought)[2].partition(own)
        return between if found else ""

    def mark_text(
        self, messages: Sequence[JsonObject], tools: Sequence[JsonObject] | None, kwargs: JsonMapping
    ) -> tuple[str, ...]:
        """The template's texts around the contents; empty if they cannot be told apart."""
        marked, words = self.contexts.mark(messages)
        try:
            return split_at_words(self._template.render(marked, tools, kwargs, inputs=self._inputs), words)
        except TemplateError:  # a template may look into contents and refuse the marked words
            return ()

    def _render(self, request: ExtendRequest, messages: Sequence[JsonObject], *, generate: bool = True) -> str:
        try:
            return self._template.render(
                [*request.past, *messages],
                request.tools,
                request.kwargs,
                generate=generate,
                inputs=self._inputs,
                skips_earlier=bool(request.past) and not request.is_whole,
            )
        except TemplateError as error:
            raise ExtendError("template_raises", str(error)) from error

    def _find_region(self, text: str, words: Sequence[str]) -> str:
        sentinel = self.contexts.sentinel
        if text.count(sentinel) != 1:
            raise ExtendError("turn_lost", "the assistant's turn does not show once when these messages follow it")
        position = end = text.index(sentinel) + len(sentinel)
        for index, word in enumerate(words):
            found = text.find(word)
            if found < 0:
                raise ExtendError("message_dropped", f"the template drops new[{index}] without saying so")
            if found < position or text.find(word, found + 1) >= 0:
                detail = f"the template does not put new[{index}] once, after the assistant's turn and in order"
                raise ExtendError("message_moved", detail)
            position = found
        return text[end : text.find(words[0])]


def list_texts(plan: ExtendPlan, request: ExtendRequest) -> list[str]:
    return [mark_ids(text, request.last, back=True) for text in plan.template_texts]


def _find_place(request: ExtendRequest) -> SentinelPlace:
    return "argument" if request.last.get("tool_calls") else "content"
