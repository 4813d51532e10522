"""`extend`: the ids that follow a recorded prefix when new messages arrive, or a Refusal.

Steps: normalise the request; get its plan (made on the real history, once per shape of request); render the plan's
short context with the new messages; cut; encode. The cost depends only on the new messages, except for "history" plans
and the first request of a shape.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Literal, TypeAlias

from tokentrue.errors import TemplateError
from tokentrue.ids import TokenIds
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.renderers.codec import Codec
from tokentrue.renderers.extending.contexts import ExtendError, ExtendPlan, ExtendRequest
from tokentrue.renderers.extending.kept import (
    MessageKeeper,
    PlanKey,
    answers_older_call,
    describe_shape,
    name_value,
)
from tokentrue.renderers.extending.spans import compute_spans
from tokentrue.renderers.extending.splicer import Splicer
from tokentrue.renderers.extending.stops import Stops
from tokentrue.renderers.messages import check_messages, fill_in_tool_names, normalise_messages
from tokentrue.renderers.template import InputFormat, Template
from tokentrue.types import Extension, Ids, Messages, Refusal, Tools

History: TypeAlias = Literal["keep", "template"]
MAX_PLANS = 4096


class Extender:
    """`safe`: content cannot become structure, and tool messages get the name of the call they answer; without it an
    engine's template gets messages as the client sent them.

    `max_plans`: cache size; 0 plans every request on the real history. Cost of `benchmarks.gateway` relative to the
    bare proxy, cache on and off: turn 8 3.9 and 7.6, turn 128 2.6 and 31.
    """

    def __init__(
        self,
        template: Template,
        codec: Codec,
        inputs: InputFormat,
        stops: Stops,
        *,
        history: History,
        safe: bool,
        short_plans: bool,
        max_plans: int = MAX_PLANS,
    ) -> None:
        self.splicer = Splicer(template, codec, inputs, stops, safe=safe)
        self.keeper = MessageKeeper(template, codec, inputs, safe=safe, is_allowed=short_plans)
        self._codec, self._inputs, self._safe = codec, inputs, safe
        self._history, self._max_plans = history, max_plans
        self._stop_ids = {codec.literals[text] for text in stops.all}
        self._plans: OrderedDict[PlanKey, ExtendPlan] = OrderedDict()

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
        request, key = self._read_request(prefix_ids, messages, new, tools, kwargs)
        try:
            if self._history == "template" and self.splicer.rewrites(request, self._normalise_past(messages)):
                raise ExtendError(
                    "history_rewritten",
                    "the template rewrites earlier turns when these messages follow; begin a new root",
                )
            plan, tail, mark = self._render_tail(request, key, messages, use_plans=use_plans)
            if self.keeper.use.reads_turn:
                plan, tail, mark = self._check_turn(request, messages, plan, tail, mark)
        except ExtendError as refused:
            return Refusal(why=refused.why, detail=refused.detail)
        except TemplateError as error:
            return Refusal(why="template_raises", detail=str(error))
        added = self._encode_tail(tail, mark, plan)
        roles = [message["role"] for message in request.new]
        return Extension(
            prefix_ids=prefix_ids,
            added_ids=added,
            spans=compute_spans(self._codec, tail, mark, added, plan.template_texts, roles),
            context="history" if plan.context == "history" else "dummy",
            join=plan.join,
        )

    def rewrites(self, messages: Messages, new: Messages, tools: Tools | None, kwargs: JsonMapping) -> bool:
        request, _ = self._read_request((0,), messages, new, tools, kwargs)
        return self.splicer.rewrites(request, self._normalise_past(messages))

    def _render_tail(
        self, request: ExtendRequest, key: PlanKey, messages: Messages, *, use_plans: bool
    ) -> tuple[ExtendPlan, str, str]:
        """Plans on the real history are not reused: their gap belongs to that history."""
        if not use_plans:
            past = self._normalise_past(messages)
            plan = self.splicer.plan(request, past, only_history=True)
            return plan, *self.splicer.render_tail(plan, request, past)
        known = self._plans.get(key)
        if known is not None:
            self._plans.move_to_end(key)
        if known is not None and known.context != "history":
            try:
                return known, *self.splicer.render_tail(known, request, ())
            except (ExtendError, TemplateError):
                pass  # made on another turn of this shape, whose call id is in the gap; the real history decides
        past = self._normalise_past(messages)
        needs_all = key.answers_older_call or request.kept is None
        only_history = needs_all or (known is not None and known.context == "history")
        plan = self._plans[key] = self.splicer.plan(request, past, only_history=only_history)
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
            raise ExtendError(
                "turn_decides", "what the assistant's turn says changes what the template writes after it"
            )
        return plan, tail, mark

    def _encode_tail(self, tail: str, mark: str, plan: ExtendPlan) -> TokenIds:
        if mark:
            return self._codec.encode_shielded_after(tail, mark, literal=plan.literal)
        return self._codec.encode_after(tail, literal=plan.literal)

    # the request

    def _read_request(
        self, prefix_ids: Ids, messages: Messages, new: Messages, tools: Tools | None, kwargs: JsonMapping
    ) -> tuple[ExtendRequest, PlanKey]:
        last = normalise_messages(messages[-1:], self._inputs, first=len(messages) - 1)[0]
        fresh = normalise_messages(new, self._inputs, field="new")
        if self._safe:
            fresh = fill_in_tool_names(fresh, last.get("tool_calls") or [])
        first = messages[0] if len(messages) > 1 and messages[0].get("role") in ("system", "developer") else None
        spelled = repr(sorted(kwargs.items())) if kwargs else ""
        turn = self.splicer.build_turn(last)
        kept = self.keeper.choose(messages, turn, kwargs, spelled, self.splicer.dummy_user)
        use = self.keeper.use
        last_id = int(prefix_ids[-1])
        is_stop = last_id in self._stop_ids
        request = ExtendRequest(
            last=last,
            new=fresh,
            given_tools=tools,
            kwargs=kwargs,
            given_system=first,
            inputs=self._inputs,
            kept=kept and kept.messages,
            needs_tools=use.tools or use.first or use.second or use.gaps,
            stop=self._codec.texts.get(last_id),
            is_stop=is_stop,
            in_reasoning=not is_stop and self._is_in_reasoning(prefix_ids, last, kwargs),
        )
        key = PlanKey(
            shapes=tuple(map(describe_shape, (last, *fresh))),
            answers_older_call=answers_older_call(last, fresh),
            kept=kept and kept.signature,
            tools=name_value(tools),
            system=name_value(first),
            kwargs=spelled,
            stop=request.stop,
            in_reasoning=request.in_reasoning,
        )
        return request, key

    def _normalise_past(self, messages: Messages) -> list[JsonObject]:
        past = normalise_messages(messages[:-1], self._inputs)
        return fill_in_tool_names(past) if self._safe else past

    def _is_in_reasoning(self, prefix_ids: Ids, last: JsonObject, kwargs: JsonMapping) -> bool:
        """True if an open turn was cut off during reasoning: no content, and no end-of-reasoning marker."""
        if not last.get("reasoning_content") or last["content"] or last.get("tool_calls"):
            return False
        closing = self.splicer.render_reasoning_end(kwargs).strip()
        end = self._codec.decode(prefix_ids[-64:])  # with no content, only blanks can follow it
        return bool(closing) and closing not in end


def _check_inputs(prefix_ids: Ids, messages: Messages, new: Messages) -> Refusal | None:
    check_messages(messages, "messages")
    check_messages(new, "new")
    if not len(prefix_ids):
        return Refusal(why="empty_prefix", detail="prefix_ids is empty: render the conversation instead")
    if not len(messages) or messages[-1].get("role") != "assistant":
        return Refusal(
            why="not_after_assistant", detail="messages must end with the assistant's turn that prefix_ids ends with"
        )
    if not len(new):
        return Refusal(why="nothing_new", detail="new is empty: there is nothing to extend by")
    return None
