"""The renderer: messages to tokens and back for one tokenizer and one template. See protocols.Renderer for the contract.

Invariants: recorded ids are never encoded, copied or changed; `extend` returns what the template puts after them, or a Refusal;
its cost depends on what is new, not on the history, except where only the real history gives the right answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from tokentrue.errors import MessageError, TemplateError
from tokentrue.renderers.encoding import Codec, Shield
from tokentrue.renderers.frames import filled
from tokentrue.renderers.keys import Seen, plain_shapes, recent, shape
from tokentrue.renderers.messages import filled_in, plain_messages, plain_tools
from tokentrue.renderers.spans import joins_of, spans_of
from tokentrue.renderers.splice import Call, Plan, Refused, Splicer
from tokentrue.renderers.stops import Stops
from tokentrue.renderers.template import Habits, Plain, Template
from tokentrue.types import Extension, Ids, Messages, Parsed, PromptSpan, Refusal, Rendered, TemplateKwargs, Tools

if TYPE_CHECKING:
    from tokentrue.protocols import TurnParser
    from tokentrue.renderers.families import Family
    from tokentrue.renderers.parsing import Grammar
    from tokentrue.renderers.parsing_structure import Structure
    from tokentrue.renderers.proof import Proof

History = Literal["keep", "template"]
Injection = Literal["safe", "engine"]
_PLANS = 4096


class Renderer:
    """Built by `load_renderer`. `family` adds what a template cannot tell (how to parse, pinned kwargs)."""

    def __init__(
        self,
        *,
        template: Template,
        codec: Codec,
        habits: Habits,
        stops: Stops,
        tokenizer_hash: str,
        template_kwargs: Mapping[str, Any],
        history: History,
        injection: Injection,
        family: Family,
        proof: Proof | None = None,
    ) -> None:
        self.template, self.codec, self.habits, self.stops = template, codec, habits, stops
        self.template_kwargs, self.history, self.injection, self.family = dict(template_kwargs), history, injection, family
        self._tokenizer_hash, self._proof = tokenizer_hash, proof
        self._splicer = Splicer(template, codec, habits, stops, safe=injection == "safe")
        self._stop_ids = tuple(dict.fromkeys(codec.literals[text] for text in stops.all))
        self._plans: OrderedDict[tuple[Any, ...], Plan] = OrderedDict()
        self._seen_tools, self._seen_systems = Seen(), Seen()

    @property
    def proof(self) -> Proof:
        """What was proven for this template and tokenizer when it was loaded."""
        if self._proof is None:
            from tokentrue.renderers.proof import prove

            self._proof = prove(self)
        return self._proof

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self._stop_ids

    @property
    def template_hash(self) -> str:
        return self.template.hash

    @property
    def tokenizer_hash(self) -> str:
        return self._tokenizer_hash

    # messages -> ids

    def render(self, messages: Messages, tools: Tools | None = None, *, template_kwargs: TemplateKwargs | None = None) -> Rendered:
        if not messages:
            raise MessageError("is empty; give at least one message", field="messages")
        plain = self._filled_in(plain_messages(messages, self.habits))
        given = plain_tools(tools, self.habits)
        kwargs = {**self.template_kwargs, **(template_kwargs or {})}
        if self.injection == "engine" or (self.codec.clean(plain) and self.codec.clean(given)):
            text, mark = self.template.text(plain, given, kwargs, habits=self.habits), ""
            ids = self.codec.encode(text)
            shown = given
        else:
            shield = Shield(self.codec, [plain, given])
            shown = shield.shielded(given)
            text = self.template.text([shield.shielded(message) for message in plain], shown, kwargs, habits=self.habits)
            mark = shield.mark if shield.used else ""
            ids = self.codec.encode_shielded(text, mark) if mark else self.codec.encode(text)
        return Rendered(token_ids=tuple(ids), spans=self._render_spans(text, mark, ids, plain, shown, kwargs))

    def _render_spans(
        self, text: str, mark: str, ids: Ids, messages: list[Plain], tools: list[Plain] | None, kwargs: Mapping[str, Any]
    ) -> tuple[PromptSpan, ...]:
        try:
            joins = joins_of(*self._splicer.marked_text(messages, tools, kwargs))
        except TemplateError:  # a template may look into contents and refuse the marked words
            joins = ()
        return spans_of(self.codec, text, mark, ids, joins, [message["role"] for message in messages])

    def extend(
        self,
        prefix_ids: Ids,
        messages: Messages,
        new: Messages,
        tools: Tools | None = None,
        *,
        template_kwargs: TemplateKwargs | None = None,
    ) -> Extension | Refusal:
        if refusal := _misplaced(prefix_ids, messages, new):
            return refusal
        if not template_kwargs and (framed := self._framed(prefix_ids, messages, new, tools)) is not None:
            return framed
        call, key = self._call(prefix_ids, messages, new, tools, template_kwargs)
        known = False
        try:
            if self.history == "template" and self._rewrites(call, messages):
                raise Refused("history_rewritten", "the template rewrites earlier turns when these messages follow; begin a new root")
            known = key in self._plans
            plan = self._plan(call, key, messages)
            tail, mark = self._splicer.tail(plan, call, self._past(messages) if plan.context == "history" else ())
        except Refused as refused:
            if refused.why == "boundary_changed" and known:  # planned on another turn of this shape, whose call id stands in the gap
                del self._plans[key]
                return self.extend(prefix_ids, messages, new, tools, template_kwargs=template_kwargs)
            return Refusal(why=refused.why, detail=refused.detail)
        except TemplateError as error:
            return Refusal(why="template_raises", detail=str(error))
        added = tuple(self._encode_tail(tail, mark, plan))
        roles = tuple(message["role"] for message in call.fresh)
        return Extension(
            prefix_ids=prefix_ids,
            added_ids=added,
            spans=lambda: spans_of(self.codec, tail, mark, added, plan.joins, roles),
            context="history" if plan.context == "history" else "dummy",
            join=plan.join,
        )

    def _framed(self, prefix_ids: Ids, messages: Messages, new: Messages, tools: Tools | None) -> Extension | None:
        """What `extend` gives for messages of the plainest form whose frame is known, without copying them; None for all others."""
        last_id, shapes = int(prefix_ids[-1]), plain_shapes(messages[-1], new)
        if shapes is None or last_id not in self._stop_ids or self.history == "template":
            return None
        _, tools_version, _, system_version = self._seen(messages, tools)
        stop = self.codec.texts.get(last_id)
        plan = self._plans.get((shapes, False, recent(messages), tools_version, system_version, "", stop, False))
        if plan is None or (frame := plan.frame) is None:
            return None
        contents = [message["content"] for message in new]
        if not all(map(self.codec.clean, contents)):
            return None
        stencil, roles = plan.stencil, [shape[0] for shape in shapes[1:]]
        quick = None if stencil is None else stencil.ids(contents)
        added, counts = (tuple(self._encode_tail(filled(frame, contents), "", plan)), None) if quick is None else quick

        def spans() -> tuple[PromptSpan, ...]:
            found = None if stencil is None or counts is None else stencil.spans(added, counts, contents, roles)
            return found or spans_of(self.codec, filled(frame, contents), "", tuple(added), plan.joins, roles)

        return Extension(prefix_ids=prefix_ids, added_ids=added, spans=spans, join=plan.join)

    def _call(
        self, prefix_ids: Ids, messages: Messages, new: Messages, tools: Tools | None, template_kwargs: TemplateKwargs | None
    ) -> tuple[Call, tuple[Any, ...]]:
        count = len(messages)
        last = plain_messages(messages[count - 1 :], self.habits, first=count - 1)[0]
        calls = last.get("tool_calls") or []
        fresh = self._filled_in(plain_messages(new, self.habits, field="new"), calls)
        given, tools_version, lead, system_version = self._seen(messages, tools)
        kwargs = {**self.template_kwargs, **(template_kwargs or {})}
        last_id = int(prefix_ids[-1])
        stop = self.codec.texts.get(last_id)
        is_stop = last_id in self._stop_ids
        thinking = not is_stop and self._in_reasoning(prefix_ids, last, kwargs)
        call = Call(
            last=last, fresh=fresh, tools=given, kwargs=kwargs, system=lead, stop=stop, is_stop=is_stop, in_reasoning=thinking
        )  # fmt: skip
        ids = {item["id"] for item in (*calls, *(item for message in fresh for item in message.get("tool_calls") or ()))}
        late = any(message["role"] == "tool" and (message.get("tool_call_id") or "") not in ids for message in fresh)
        key = (
            tuple(shape(message) for message in (last, *fresh)), late, recent(messages), tools_version, system_version,
            repr(sorted(kwargs.items())) if template_kwargs else "", stop, thinking,
        )  # fmt: skip
        return call, key

    def _seen(self, messages: Messages, tools: Tools | None) -> tuple[list[Plain] | None, int, Plain | None, int]:
        """The tools and the leading system message in plain form, each with its number."""
        given, tools_version = self._seen_tools.number(tools, lambda: plain_tools(tools, self.habits))
        system = messages[0] if len(messages) > 1 and messages[0].get("role") in {"system", "developer"} else None
        lead, system_version = self._seen_systems.number(system, lambda: system and plain_messages([system], self.habits)[0])
        return given, tools_version, lead, system_version

    def _plan(self, call: Call, key: tuple[Any, ...], messages: Messages) -> Plan:
        """Remembered per shape of call. A plan on the real history is made anew each time: its gap belongs to that history."""
        plan = self._plans.get(key)
        if plan is None or plan.context == "history":
            plan = self._splicer.plan(call, self._past(messages), only_history=plan is not None or bool(key[1]))
            plan = self._plans[key] = self._splicer.framed(plan, call)
            if len(self._plans) > _PLANS:
                self._plans.popitem(last=False)
        return plan

    def _past(self, messages: Messages) -> list[Plain]:
        return self._filled_in(plain_messages(messages[:-1], self.habits))

    def _filled_in(self, messages: list[Plain], calls: Sequence[Plain] = ()) -> list[Plain]:
        """An engine's own template gets tool messages as the client sent them."""
        return messages if self.injection == "engine" else filled_in(messages, calls)

    def _encode_tail(self, tail: str, mark: str, plan: Plan) -> list[int]:
        if mark:
            return self.codec.encode_shielded_after(tail, mark, literal=plan.literal)
        return self.codec.encode_after(tail, literal=plan.literal)

    def _in_reasoning(self, prefix_ids: Ids, last: Plain, kwargs: Mapping[str, Any]) -> bool:
        """Whether an open turn was cut off while reasoning: it has reasoning and nothing else, and its end of reasoning is not there."""
        if not last.get("reasoning_content") or last["content"] or last.get("tool_calls"):
            return False
        closing = self._splicer.reasoning_end(kwargs).strip()
        end = self.decode(prefix_ids[max(0, len(prefix_ids) - 64) :])  # with no content, only blanks can stand behind it
        return bool(closing) and closing not in end

    def rewrites(
        self, messages: Messages, new: Messages, tools: Tools | None = None, *, template_kwargs: TemplateKwargs | None = None
    ) -> bool:
        """Whether the template itself would write the history otherwise once `new` follows (reasoning stripped, say)."""
        return self._rewrites(self._call((0,), messages, new, tools, template_kwargs)[0], messages)

    def _rewrites(self, call: Call, messages: Messages) -> bool:
        return self._splicer.rewrites(call, self._past(messages))

    # ids -> messages

    def parse(self, sampled_ids: Ids, *, prompt_ids: Ids = (), tools: Tools | None = None) -> Parsed:
        return self._grammar.parser(prompt_ids=prompt_ids, tools=tools, early=False).whole(sampled_ids)

    def parser(self, *, prompt_ids: Ids = (), tools: Tools | None = None, early: bool = True) -> TurnParser:
        return self._grammar.parser(prompt_ids=prompt_ids, tools=tools, early=early)

    @cached_property
    def _grammar(self) -> Grammar:
        from tokentrue.renderers.parsing import grammar_of

        return grammar_of(self)

    def call_tag(self, tools: Tools, *, name: str | None = None) -> Mapping[str, Any] | Refusal:
        """The structural tag that makes an engine sample at least one call of these tools (of tool `name`, and only it)."""
        from tokentrue.renderers.calls import call_tag

        return call_tag(self, tools, name=name)

    def decode(self, token_ids: Ids) -> str:
        return self.codec.decode(token_ids)

    @cached_property
    def structure(self) -> Structure:
        """Which ids are structure and how turns open, for `tokentrue.compare`."""
        from tokentrue.renderers.parsing_structure import structure_of

        return structure_of(self)

    def encode_sampled(self, text: str) -> list[int]:
        """Text that plays a model's own output, its markers as tokens; for engines that answer from a script."""
        return self.codec.encode_after(text, literal="")


def _misplaced(prefix_ids: Ids, messages: Messages, new: Messages) -> Refusal | None:
    if not len(prefix_ids):
        return Refusal(why="empty_prefix", detail="prefix_ids is empty: render the conversation instead")
    if not len(messages) or messages[-1].get("role") != "assistant":
        return Refusal(why="not_after_assistant", detail="messages must end with the assistant's turn that prefix_ids ends with")
    if not len(new):
        return Refusal(why="nothing_new", detail="new is empty: there is nothing to extend by")
    return None
