"""The conversation as it is rendered: a sentinel for what was sampled, marked words for new contents."""

import secrets
from collections.abc import Sequence
from typing import Literal

from tokentrue.json_types import JsonMapping, JsonObject, is_object
from tokentrue.records import record
from tokentrue.renderers.template import InputFormat, make_arguments, make_content

SentinelPlace = Literal["content", "argument"]

Join = Literal["stop", "alias", "foreign", "open"]
"""How the recorded turn ended. "stop": at a token that the template writes there; "alias": at one that it writes only
if nothing follows (harmony's <|return|>); "foreign": at a stop token that it does not write there; "open": at no stop
token. The last two get the template's closing."""


class ExtendError(Exception):
    """`Extender.extend` turns it into a `Refusal`."""

    def __init__(self, why: str, detail: str) -> None:
        super().__init__(detail)
        self.why, self.detail = why, detail


@record
class ExtendRequest:
    """Normalised for the template and shielded with `mark`."""

    past: Sequence[JsonObject]  # the messages before `last`
    last: JsonObject  # the recorded assistant turn
    new: Sequence[JsonObject]
    tools: Sequence[JsonObject] | None
    mark: str
    kwargs: JsonMapping
    stop: str | None  # the literal of the last recorded id, where it is an added token
    is_stop: bool
    in_reasoning: bool  # the turn was cut off during reasoning
    is_whole: bool = False  # earlier messages are printed, too
    shows_text: bool = False  # the sentinel follows the turn's text, because the new text depends on it


@record
class ExtendPlan:
    """Where to cut a render: after `gap`, which follows the sentinel. `closing` is inserted there. In `gap` and
    `template_texts`, `mark_ids` has replaced the turn's call ids."""

    place: SentinelPlace
    gap: str
    literal: str  # the added token that the gap ends with; empty where it ends in text
    join: Join
    closing: str
    template_texts: tuple[str, ...]  # the template's text around the new contents, `closing` included


def mark_ids(text: str, last: JsonObject, *, back: bool = False) -> str:
    """Replaces each call id of the turn by a mark; `back=True` replaces the marks by the ids."""
    for index, call in enumerate(last.get("tool_calls") or ()):
        call_id, mark = call["id"], f"\0{index}\0"
        if call_id:
            text = text.replace(mark, call_id) if back else text.replace(call_id, mark)
    return text


class ContextBuilder:
    """Placeholders: `sentinel` for what was sampled, `own` and `thought` for the texts of a turn. Random per process,
    so no input can contain them deliberately. `twin` has another length than `sentinel` and none of its letters: a text
    that is the same with both has nothing of either."""

    def __init__(self, inputs: InputFormat) -> None:
        self._inputs = inputs
        self._base = "qz" + "".join(chr(97 + byte % 16) for byte in secrets.token_bytes(8))
        self.sentinel, self.own, self.thought = self._base + "sampled", self._base + "own", self._base + "thought"
        self.twin = "".join("rtuvwxy"[byte % 7] for byte in secrets.token_bytes(24))
        self.dummy_user: JsonObject = {"role": "user", "content": make_content("Hello.", inputs)}

    def build_turn(self, request: ExtendRequest, place: SentinelPlace, sentinel: str = "") -> JsonObject:
        """In "content", the turn has no other text; in "argument", it keeps all of its texts but one."""
        last = request.last
        calls: list[JsonObject] = [*(last.get("tool_calls") or ())]
        sentinel = sentinel or self.sentinel
        if place == "argument":
            return {**last, "tool_calls": [*calls[:-1], self._mark_call(calls[-1], sentinel, keeps_others=True)]}
        marked = make_content(sentinel, self._inputs)
        if request.shows_text:
            content = last["content"]
            return {**last, "content": content + (sentinel if isinstance(content, str) else marked)}
        return {"role": "assistant", "content": marked, **({"tool_calls": calls} if calls else {})}

    def _mark_call(self, call: JsonObject, word: str, *, keeps_others: bool = False) -> JsonObject:
        """With the word as its last argument."""
        arguments = call["function"]["arguments"]
        known = {"q": word}
        if keeps_others and is_object(arguments) and arguments:
            known = {**arguments, list(arguments)[-1]: word}
        return {**call, "function": {**call["function"], "arguments": make_arguments(known, self._inputs)}}

    def mark(self, messages: Sequence[JsonObject]) -> tuple[list[JsonObject], list[str]]:
        """Replaces each content by a unique word; if a message has only calls, the last argument. Also returns the
        words."""
        out: list[JsonObject] = []
        words = [f"{self._base}n{index}e" for index in range(len(messages))]
        for message, word in zip(messages, words, strict=True):
            if message.get("tool_calls") and not message["content"]:
                *calls, call = message["tool_calls"]
                out.append({**message, "tool_calls": [*calls, self._mark_call(call, word)]})
            else:
                out.append({**message, "content": make_content(word, self._inputs)})
        return out, words
