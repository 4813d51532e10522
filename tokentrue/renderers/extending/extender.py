"""`extend`: the ids that follow a recorded prefix when new messages arrive, or a Refusal.

A plan is made on the real history, once per shape of request. After that the cost depends only on the new messages,
except for "history" plans.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, TypeAlias

from tokentrue.errors import TemplateError
from tokentrue.ids import TokenIds
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.renderers.codec import Codec
from tokentrue.renderers.extending.contexts import ExtendError, ExtendPlan, ExtendRequest
from tokentrue.renderers.extending.kept import MessageKeeper, describe_shape, make_key
from tokentrue.renderers.extending.spans import compute_spans
from tokentrue.renderers.extending.splicer import Splicer
from tokentrue.renderers.extending.stops import Stops
from tokentrue.renderers.messages import check_messages, normalise_messages
from tokentrue.renderers.seeing.images import HISTORY, ImageInputs
from tokentrue.renderers.template import InputFormat, Template
from tokentrue.types import Extension, Ids, Messages, Refusal, Rendered, Tools

History: TypeAlias = Literal["keep", "template"]
MAX_PLANS = 4096


class Extender:
    """`safe`: content cannot become structure, and tool messages get the name of the call they answer; without it an
    engine's template gets messages as the client sent them.

    `max_plans`: cache size; 0 plans every request on the real history.
    """

    def __init__(
        self,
        template: Template,
        codec: Codec,
        inputs: InputFormat,
        stops: Stops,
        images: ImageInputs,
        *,
        history: History,
        safe: bool,
        short_plans: bool,
        max_plans: int = MAX_PLANS,
    ) -> None:
        self.splicer = Splicer(template, codec, inputs, stops, safe=safe)
        self.keeper = MessageKeeper(template, codec, inputs, safe=safe, is_allowed=short_plans)
        self._codec, self._inputs, self._images, self._safe = codec, inputs, images, safe
        self._history, self._max_plans = history, max_plans
        self._stop_ids = {codec.literals[text] for text in stops.all}
        self._plans: OrderedDict[Hashable, ExtendPlan] = OrderedDict()

    def extend(
        self,
        prefix_ids: TokenIds,
        messages: Messages,
        new: Messages,
        tools: Tools | None,
        kwargs: JsonMapping,
        *,
        use_plans: bool = True,
    ) -> Extension | Refusal:
        """`use_plans=False` ignores the plan cache and renders the real history."""
        if refusal := _check_inputs(prefix_ids, messages, new):
            return refusal
        images = self._images.find(new, "new", safe=self._safe)
        use_plans = use_plans and not (images and HISTORY in self._images.roles.values())
        try:
            request, key = self._read_request(prefix_ids, messages, new, tools, kwargs)
            if self._history == "template" and self.splicer.rewrites(request, self._normalise_past(messages)):
                detail = "the template rewrites earlier turns when these messages follow; begin a new root"
                raise ExtendError("history_rewritten", detail)
            plan, tail, mark = self._render_tail(request, key, messages, use_plans=use_plans)
            if self.keeper.use.reads_turn:
                plan, tail, mark = self._check_turn(request, messages, plan, tail, mark)
        except ExtendError as refused:
            return Refusal(why=refused.why, detail=refused.detail)
        except TemplateError as error:
            return Refusal(why="template_raises", detail=str(error))
        added = self.encode(tail, mark, images, plan.template_texts, request.new, after=plan.literal)
        return Extension(
            prefix_ids=prefix_ids,
            added_ids=added.token_ids,
            spans=added.spans,
            images=added.images,
            context="history" if plan.context == "history" else "dummy",
            join=plan.join,
        )

    def encode(
        self,
        text: str,
        mark: str,
        images: Sequence[JsonMapping],
        template_texts: Sequence[str],
        messages: Sequence[JsonObject],
        *,
        after: str | None = None,
    ) -> Rendered:
        """`template_texts` are around the contents of the messages; `after`: the literal that the text follows."""
        if images:
            text = self._images.write(self._codec, text, mark)
        encode = self._codec.encode if after is None else partial(self._codec.encode_after, literal=after)
        ids, runs = encode(text, mark), ()
        spans = compute_spans(self._codec, text, mark, ids, template_texts, [message["role"] for message in messages])
        if images:
            ids, spans, runs = self._images.expand(self._codec, ids, spans, images)
        return Rendered(token_ids=ids, spans=spans, images=runs)

    def rewrites(self, messages: Messages, new: Messages, tools: Tools | None, kwargs: JsonMapping) -> bool:
        request, _ = self._read_request((0,), messages, new, tools, kwargs)
        return self.splicer.rewrites(request, self._normalise_past(messages))

    def _render_tail(
        self, request: ExtendRequest, key: Hashable, messages: Messages, *, use_plans: bool
    ) -> tuple[ExtendPlan, str, str]:
        """Plans on the real history are not reused: their gap belongs to that history."""
        known = self._plans.get(key) if use_plans else None
        if known is not None:
            self._plans.move_to_end(key)
            if known.context != "history":
                try:
                    return known, *self.splicer.render_tail(known, request, ())
                except ExtendError:
                    pass  # made on another turn of this shape, whose call id is in the gap; the real history decides
        past = self._normalise_past(messages)
        only_history = not use_plans or request.kept is None or (known is not None and known.context == "history")
        plan = self.splicer.plan(request, past, only_history=only_history)
        if use_plans:
            self._plans[key] = plan
            if len(self._plans) > self._max_plans:
                self._plans.popitem(last=False)
        return plan, *self.splicer.render_tail(plan, request, past if plan.context == "history" else ())

    def _check_turn(
        self, request: ExtendRequest, messages: Messages, plan: ExtendPlan, tail: str, mark: str
    ) -> tuple[ExtendPlan, str, str]:
        """If the template reads the recorded turn's text, the sentinel can change the result: then the plan puts the
        real text before the sentinel, after the real history.
        """
        past = self._normalise_past(messages) if plan.context == "history" else []
        if self.splicer.is_true_tail(plan, request, past, tail, mark):
            return plan, tail, mark
        request, past = replace(request, shows_text=True), self._normalise_past(messages)
        plan = self.splicer.plan(request, past, only_history=True)
        tail, mark = self.splicer.render_tail(plan, request, past)
        if not self.splicer.is_true_tail(plan, request, past, tail, mark):
            detail = "what the assistant's turn says changes what the template writes after it"
            raise ExtendError("turn_decides", detail)
        return plan, tail, mark

    # the request

    def _read_request(
        self, prefix_ids: Ids, messages: Messages, new: Messages, tools: Tools | None, kwargs: JsonMapping
    ) -> tuple[ExtendRequest, Hashable]:
        """The request, and everything that decides where to cut: requests with equal keys share a plan."""
        last = normalise_messages(messages[-1:], self._inputs, first=len(messages) - 1)[0]
        calls = last.get("tool_calls") or ()
        fresh = normalise_messages(new, self._inputs, field="new", named=self._safe, calls=calls)
        first = messages[0] if len(messages) > 1 and messages[0].get("role") in ("system", "developer") else None
        kwargs_key = repr(sorted(kwargs.items())) if kwargs else ""
        kept = self.keeper.choose(messages, last, kwargs, kwargs_key, self.splicer.contexts)
        if kept is not None and _answers_older_call(last, fresh):  # it is visible only in the real history
            kept = None
        use, last_id = self.keeper.use, int(prefix_ids[-1])
        is_stop = last_id in self._stop_ids
        request = ExtendRequest(
            last=last,
            new=fresh,
            given_tools=tools,
            kwargs=kwargs,
            given_system=first,
            inputs=self._inputs,
            kept=kept and kept.messages,
            needs_tools=use.tools or use.first or use.gaps,
            stop=self._codec.texts.get(last_id),
            is_stop=is_stop,
            in_reasoning=not is_stop and self._is_in_reasoning(prefix_ids, last, kwargs),
        )
        shapes = tuple(map(describe_shape, (last, *fresh)))
        values = make_key(tools), make_key(first), kwargs_key
        return request, (shapes, kept and kept.signature, *values, request.stop, request.in_reasoning)

    def _normalise_past(self, messages: Messages) -> list[JsonObject]:
        return normalise_messages(messages[:-1], self._inputs, named=self._safe)

    def _is_in_reasoning(self, prefix_ids: Ids, last: JsonObject, kwargs: JsonMapping) -> bool:
        """True if an open turn was cut off during reasoning: no content, and no end-of-reasoning marker."""
        if not last.get("reasoning_content") or last["content"] or last.get("tool_calls"):
            return False
        closing = self.splicer.render_reasoning_end(kwargs).strip()
        end = self._codec.decode(prefix_ids[-64:])  # with no content, only blanks can follow it
        return bool(closing) and closing not in end


def _answers_older_call(last: JsonObject, new: Sequence[JsonObject]) -> bool:
    """True if a tool message answers a call of an earlier turn."""
    ids = {call["id"] for message in (last, *new) for call in message.get("tool_calls") or ()}
    return any(message["role"] == "tool" and (message.get("tool_call_id") or "") not in ids for message in new)


def _check_inputs(prefix_ids: Ids, messages: Messages, new: Messages) -> Refusal | None:
    check_messages(messages, "messages")
    check_messages(new, "new")
    if not len(prefix_ids):
        return Refusal(why="empty_prefix", detail="prefix_ids is empty: render the conversation instead")
    if not len(messages) or messages[-1].get("role") != "assistant":
        detail = "messages must end with the assistant's turn that prefix_ids ends with"
        return Refusal(why="not_after_assistant", detail=detail)
    if not len(new):
        return Refusal(why="nothing_new", detail="new is empty: there is nothing to extend by")
    return None
