"""Conversations rendered instead of the real one: a sentinel for what was sampled, marked words for new contents."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

from tokentrue.json_types import JsonMapping, JsonObject, JsonValue, is_object
from tokentrue.records import record
from tokentrue.renderers.messages import normalise_messages, normalise_tools
from tokentrue.renderers.template import InputFormat, make_arguments, make_content
from tokentrue.types import Message, Tools

ContextKind: TypeAlias = Literal["light", "dummy", "history"]
"""What precedes the assistant turn in a render. "light": the kept messages; "dummy": also the real system message and
tools; "history": the whole history.
"""

SentinelPlace: TypeAlias = Literal["content", "argument"]

Join: TypeAlias = Literal["stop", "alias", "foreign", "open"]
"""How the recorded turn ended. "stop": at a token that the template writes there; "alias": at one that it writes only
if nothing follows (harmony's <|return|>); "foreign": at a stop token that it does not write there; "open": at no stop
token. The last two get the template's closing.
"""


class ExtendError(Exception):
    """`Extender.extend` turns it into a `Refusal`."""

    def __init__(self, why: str, detail: str) -> None:
        super().__init__(detail)
        self.why, self.detail = why, detail


@dataclass(frozen=True, kw_only=True)
class ExtendRequest:
    """One `extend` call, normalised for the template. Tools and `system` (the leading system message) are normalised
    only if the render needs them. `kept`: the earlier messages that the new text depends on; None for the whole
    history.
    """

    last: JsonObject  # the recorded assistant turn
    new: Sequence[JsonObject]
    given_tools: Tools | None
    kwargs: JsonMapping
    given_system: Message | None
    inputs: InputFormat
    kept: Sequence[JsonObject] | None
    needs_tools: bool  # the new text depends on the tools or the system message
    stop: str | None  # the literal of the last recorded id, where it is an added token
    is_stop: bool
    in_reasoning: bool = False  # the turn was cut off during reasoning
    shows_text: bool = False  # the sentinel follows the turn's text, because the new text depends on it

    @cached_property
    def tools(self) -> list[JsonObject] | None:
        return normalise_tools(self.given_tools, self.inputs)

    @cached_property
    def system(self) -> JsonObject | None:
        return None if self.given_system is None else normalise_messages([self.given_system], self.inputs)[0]


@record
class ExtendPlan:
    """Where to cut a render: after `gap`, which follows the sentinel. `closing` is inserted before the template's text
    there. In `gap`, `mark_ids` has replaced the turn's call ids.
    """

    context: ContextKind
    place: SentinelPlace
    gap: str
    literal: str  # the added token that the gap ends with; empty where it ends in text
    join: Join
    closing: str
    template_texts: tuple[str, ...]  # the template's text around the new contents, `closing` included


def mark_ids(text: str, last: JsonObject, *, back: bool = False) -> str:
    """Replaces each call id of the turn `last` by a mark; `back=True` replaces the marks by the ids."""
    for index, call in enumerate(last.get("tool_calls") or ()):
        call_id, mark = call["id"], f"\0{index}\0"
        if call_id:
            text = text.replace(mark, call_id) if back else text.replace(call_id, mark)
    return text


class ContextBuilder:
    """Placeholders: `sentinel` for what was sampled, `own` for text beside sampled calls, `thought` for reasoning.
    Random per process, so no input can contain them deliberately.
    """

    def __init__(self, inputs: InputFormat) -> None:
        self._inputs = inputs
        self._base = "qz" + "".join(chr(97 + byte % 16) for byte in secrets.token_bytes(8))
        self.sentinel, self.own, self.thought = self._base + "sampled", self._base + "own", self._base + "thought"
        self.dummy_user: JsonObject = {"role": "user", "content": make_content("Hello.", inputs)}

    def build(
        self,
        kind: ContextKind,
        place: SentinelPlace,
        request: ExtendRequest,
        history: Sequence[JsonObject],
        *,
        real: bool = True,
    ) -> list[JsonObject]:
        """The conversation up to the assistant turn with the sentinel. `real`: the turn keeps its other texts."""
        last = self.build_turn(request.last, place, real=real)
        if request.shows_text and place == "content":
            content = request.last["content"]
            sentinel = self.sentinel if isinstance(content, str) else make_content(self.sentinel, self._inputs)
            last = {**request.last, "content": content + sentinel}
        if kind == "history" or request.kept is None:
            return [*history, last]
        has_system = request.kept[0]["role"] in ("system", "developer") and request.kept[0] == request.system
        if kind == "light" or request.system is None or has_system:
            return [*request.kept, last]
        return [request.system, *request.kept, last]

    def build_turn(self, last: JsonObject, place: SentinelPlace, *, real: bool) -> JsonObject:
        """The recorded turn with the sentinel; keeps only text, call names and call ids."""
        out: JsonObject = {"role": "assistant"}
        if real and place == "argument":
            out = {key: value for key, value in last.items() if key != "tool_calls"}
        if place == "content":
            out["content"] = make_content(self.sentinel, self._inputs)
        elif not real:
            out["content"] = make_content(self.own if last["content"] else "", self._inputs)
        calls: list[JsonObject] = [*(last.get("tool_calls") or ())]
        if not real:
            calls = [_with_arguments(call, make_arguments({"q": "v"}, self._inputs)) for call in calls]
        if calls and place == "argument":
            calls[-1] = self._mark_call(calls[-1], self.sentinel, real=real)
        if calls:
            out["tool_calls"] = calls
        return out

    def _mark_call(self, call: JsonObject, word: str, *, real: bool) -> JsonObject:
        """The call with the word as its last argument; `real`: after its other ones."""
        arguments = call["function"]["arguments"]
        known = {**arguments, list(arguments)[-1]: word} if real and is_object(arguments) and arguments else {"q": word}
        return _with_arguments(call, make_arguments(known, self._inputs))

    def mark(self, messages: Sequence[JsonObject]) -> tuple[list[JsonObject], list[str]]:
        """Replaces each content by a unique word; returns the messages and the words. If a message has only calls, its
        word is in the last argument.
        """
        out: list[JsonObject] = []
        words = [f"{self._base}n{index}e" for index in range(len(messages))]
        for message, word in zip(messages, words, strict=True):
            if message.get("tool_calls") and not message["content"]:
                *calls, call = message["tool_calls"]
                out.append({**message, "tool_calls": [*calls, self._mark_call(call, word, real=False)]})
            else:
                out.append({**message, "content": make_content(word, self._inputs)})
        return out, words


def _with_arguments(call: JsonObject, arguments: JsonValue) -> JsonObject:
    return {**call, "function": {**call["function"], "arguments": arguments}}
