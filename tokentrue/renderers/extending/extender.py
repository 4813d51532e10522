"""`extend`: the ids that follow a recorded prefix when new messages arrive, or a Refusal.

Where to cut is planned on a whole render, once per shape of request. After that the real conversation is rendered
without the text of its earlier messages, and the plan is used if the template's texts around the new contents are the
same. Example: the recorded ids end with the sampled `Sure.<|im_end|>`, and a user says "More.":

    rendered, a sentinel for the answer    …assistant⏎SENTINEL<|im_end|>⏎<|im_start|>user⏎More.<|im_end|>⏎<|im_start|>…
    gap: the recorded ids have it                             <|im_end|>
    tail: encoded, and added to them                                    ⏎<|im_start|>user⏎More.<|im_end|>⏎<|im_start|>…
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

import orjson

from tokentrue.errors import TemplateError
from tokentrue.ids import TokenIds
from tokentrue.json_types import JsonMapping, JsonObject, JsonValue, is_array
from tokentrue.plain_json import digest
from tokentrue.renderers.codec import Codec, Shielded, shield, shield_each
from tokentrue.renderers.earlier import EarlierMessage
from tokentrue.renderers.extending.contexts import ExtendError, ExtendPlan, ExtendRequest
from tokentrue.renderers.extending.spans import compute_spans
from tokentrue.renderers.extending.splicer import Splicer, list_texts
from tokentrue.renderers.extending.stops import Stops
from tokentrue.renderers.messages import (
    ToolNamer,
    check_messages,
    normalise_message,
    normalise_messages,
    normalise_tools,
)
from tokentrue.renderers.seeing.images import ImageInputs
from tokentrue.renderers.template import InputFormat, Template
from tokentrue.types import Extension, Ids, Messages, PastMessages, Refusal, Rendered, Tools

History = Literal["keep", "template"]
MAX_PLANS = 4096


class ReadMessages(NamedTuple):
    """Recorded messages, as in `Shielded` (`shielded` is `values` if none needed a shield), and the calls in them."""

    values: Sequence[JsonObject] = ()
    shielded: Sequence[JsonObject] = values
    held: str = ""
    namer: ToolNamer = ToolNamer()


class Extender:
    """`safe`: content cannot become structure, and tool messages get the name of the call they answer; without it an
    engine's template gets messages as the client sent them. `max_plans`: cache size; 0 plans every request."""

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
        max_plans: int = MAX_PLANS,
    ) -> None:
        self.splicer = Splicer(template, codec, inputs, stops)
        self._codec, self._inputs, self._images, self._safe = codec, inputs, images, safe
        self._history, self._max_plans = history, max_plans
        self._stop_ids = {codec.literals[text] for text in stops.all}
        self._plans: OrderedDict[Hashable, ExtendPlan] = OrderedDict()
        self._tools = b"", Shielded(None, None)

    def extend(
        self, prefix_ids: TokenIds, messages: Messages, new: Messages, tools: Tools | None, kwargs: JsonMapping
    ) -> Extension | Refusal:
        if refusal := _check_inputs(prefix_ids, messages, new):
            return refusal
        images = self._images.find(new, "new", safe=self._safe)
        try:
            request, key = self._read_request(prefix_ids, messages, new, tools, kwargs)
            if self._history == "template" and self.splicer.rewrites(replace(request, is_whole=True)):
                detail = "the template rewrites earlier turns when these messages follow; begin a new root"
                raise ExtendError("history_rewritten", detail)
            plan, tail = self._render_tail(request, key)
        except ExtendError as refused:
            return Refusal(why=refused.why, detail=refused.detail)
        except TemplateError as error:
            return Refusal(why="template_raises", detail=str(error))
        texts = list_texts(plan, request)
        added = self.encode(tail, request.mark, images, texts, request.new, after=plan.literal)
        return Extension(
            prefix_ids=prefix_ids, added_ids=added.token_ids, spans=added.spans, images=added.images, join=plan.join
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
        """`template_texts` surround the contents of the messages; `after`: the literal that the text follows."""
        if images:
            text = self._images.write(self._codec, text, mark)
        encode = self._codec.encode if after is None else partial(self._codec.encode_after, literal=after)
        ids, runs = encode(text, mark), ()
        spans = compute_spans(self._codec, text, mark, ids, template_texts, [message["role"] for message in messages])
        if images:
            ids, spans, runs = self._images.expand(self._codec, ids, spans, images)
        return Rendered(token_ids=ids, spans=spans, images=runs)

    def shield(
        self, messages: list[JsonObject], tools: list[JsonObject] | None
    ) -> tuple[list[JsonObject], list[JsonObject] | None, str]:
        """Texts that cannot become structure, and the mark in them ("" if none was needed)."""
        (messages, tools), mark = shield_each(self._codec, list(map(self._shield, (messages, tools))))
        return messages, tools, mark

    def rewrites(self, messages: Messages, new: Messages, tools: Tools | None, kwargs: JsonMapping) -> bool:
        request, _ = self._read_request((0,), messages, new, tools, kwargs)
        return self.splicer.rewrites(replace(request, is_whole=True))

    def _render_tail(self, request: ExtendRequest, key: Hashable) -> tuple[ExtendPlan, str]:
        """The text after the recorded prefix, and the plan by which it was cut."""
        known = self._plans.get(key)
        if known is not None:
            self._plans.move_to_end(key)
            try:
                tail = self.splicer.render_tail(known, request)
                if self.splicer.fits(known, request, tail) and self.splicer.is_true_tail(known, request, tail):
                    return known, tail
            except ExtendError:
                pass  # a whole render shows whether this request is refused
        plan, request = self._plan(request)
        self._plans[key] = plan
        if len(self._plans) > self._max_plans:
            self._plans.popitem(last=False)
        tail = self.splicer.render_tail(plan, request)
        if not self.splicer.is_true_tail(plan, request, tail):
            # the template reads the turn's text, which the sentinel has replaced
            request = replace(request, shows_text=True)
            plan = self.splicer.plan(request)
            tail = self.splicer.render_tail(plan, request)
            if not self.splicer.is_true_tail(plan, request, tail):
                detail = "what the assistant's turn says changes what the template writes after it"
                raise ExtendError("turn_decides", detail)
        return plan, tail

    def _plan(self, request: ExtendRequest) -> tuple[ExtendPlan, ExtendRequest]:
        """The plan, and the request that it was made on: the whole one, unless the template raises on an earlier
        message, for example on malformed arguments of a call."""
        whole = replace(request, is_whole=True)
        try:
            return self.splicer.plan(whole), whole
        except ExtendError as refused:
            if refused.why != "template_raises":
                raise
            try:
                return self.splicer.plan(request), request
            except ExtendError:
                raise refused from None

    def _read_request(
        self, prefix_ids: Ids, messages: Messages, new: Messages, tools: Tools | None, kwargs: JsonMapping
    ) -> tuple[ExtendRequest, Hashable]:
        """The request, and a key that requests of one form share."""
        read = self._read_past(messages)
        first, last = read.values[0], read.values[-1]
        calls = last.get("tool_calls") or ()
        fresh = normalise_messages(new, self._inputs, field="new", named=self._safe, calls=calls)
        last_id = int(prefix_ids[-1])
        is_stop = last_id in self._stop_ids
        in_reasoning = not is_stop and self._is_in_reasoning(prefix_ids, last, kwargs)
        tools_key, known_tools = make_key(tools), self._tools
        if known_tools[0] != tools_key:
            known_tools = self._tools = tools_key, self._shield(normalise_tools(tools, self._inputs))
        parts = [Shielded(read.values, read.shielded, read.held), self._shield(fresh), known_tools[1]]
        ((*past, given_last), given_new, given_tools), mark = shield_each(self._codec, parts)
        request = ExtendRequest(
            past=[*map(EarlierMessage, past)],
            last=given_last,
            new=given_new,
            tools=given_tools,
            mark=mark,
            kwargs=kwargs,
            stop=self._codec.texts.get(last_id),
            is_stop=is_stop,
            in_reasoning=in_reasoning,
        )
        system = first if first["role"] in ("system", "developer") else None
        shapes = tuple(map(describe_shape, (last, *fresh)))
        values = tools_key, make_key(system), repr(sorted(kwargs.items()))
        return request, (shapes, *values, request.stop, in_reasoning)

    def _shield(self, value: JsonValue) -> Shielded:
        return shield(self._codec, value) if self._safe else Shielded(value, value)

    def _read_past(self, messages: Messages) -> ReadMessages:
        """Each recorded message is read once."""
        past = messages if isinstance(messages, PastMessages) else PastMessages(messages)
        reader, known = past.read
        read = known if reader is self and isinstance(known, ReadMessages) else ReadMessages()
        start, namer = len(read.values), read.namer.copy()
        added = [
            normalise_message(message, f"messages[{index}]", self._inputs)
            for index, message in enumerate(past[start:], start)
        ]
        added = [self._shield(message) for message in (namer.name(added) if self._safe else added)]
        values = [*read.values, *(each.value for each in added)]
        is_plain = read.shielded is read.values and all(each.shielded is each.value for each in added)
        read = ReadMessages(
            values=values,
            shielded=values if is_plain else [*read.shielded, *(each.shielded for each in added)],
            held=read.held + "".join(each.held for each in added),
            namer=namer,
        )
        past.read = self, read
        return read

    def _is_in_reasoning(self, prefix_ids: Ids, last: JsonObject, kwargs: JsonMapping) -> bool:
        """True if an open turn was cut off during reasoning: no content, and no end-of-reasoning marker."""
        if not last.get("reasoning_content") or last["content"] or last.get("tool_calls"):
            return False
        closing = self.splicer.render_reasoning_end(kwargs).strip()
        end = self._codec.decode(prefix_ids[-64:])  # with no content, only blanks can follow it
        return bool(closing) and closing not in end


def describe_shape(message: JsonObject) -> Hashable:
    """What can affect structure: role, presence of text, names of calls; never the text."""
    names = tuple(call["function"]["name"] for call in message.get("tool_calls") or ())
    content = message["content"]
    sees = is_array(content) and {"type": "image"} in content
    return message["role"], bool(content), sees, names, message.get("name", ""), "reasoning_content" in message


def make_key(value: JsonValue) -> bytes:
    """Empty if there is no value. Exact: `True` and `1`, or different key orders, differ."""
    if value is None:
        return b""
    try:
        data = orjson.dumps(value)
    except TypeError:  # not plain JSON
        return digest(repr(value).encode())
    return digest(data + repr(value).encode() if b"null" in data else data)  # orjson writes NaN as null


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
