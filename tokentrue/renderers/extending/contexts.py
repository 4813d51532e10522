"""Conversations to render instead of the real one: a sentinel in place of what was sampled, marked words in place of
new contents."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any

from tokentrue.json_types import JsonObject, is_object
from tokentrue.renderers.extending.request import ContextKind, ExtendRequest, SentinelPlace
from tokentrue.renderers.extending.stops import make_content
from tokentrue.renderers.template import InputFormat


class ContextBuilder:
    """`sentinel` stands for what was sampled, `own` for text beside sampled calls, `thought` for reasoning. They are
    different in every
    process: no text can hold them on purpose."""

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
        """The conversation up to the assistant's turn, with the sentinel in it; `real`: the turn has its own texts
        where the sentinel is not."""
        last = self.build_turn(request.last, place, real=real)
        if request.shows_text and place == "content":
            content = request.last["content"]
            if isinstance(content, str):
                last = {**request.last, "content": content + self.sentinel}
            else:
                last = {**request.last, "content": [*content, *make_content(self.sentinel, self._inputs)]}
        if kind == "history" or request.kept is None:
            return [*history, last]
        has_system = request.kept[0]["role"] in ("system", "developer") and request.kept[0] == request.system
        if kind == "light" or request.system is None or has_system:
            return [*request.kept, last]
        return [request.system, *request.kept, last]

    def build_turn(self, last: JsonObject, place: SentinelPlace, *, real: bool) -> JsonObject:
        """The recorded turn with the sentinel for what was sampled: calls keep names and ids, text stays text, nothing
        else is kept."""
        out: JsonObject = {"role": "assistant"}
        if real and place == "argument":
            out = {key: value for key, value in last.items() if key != "tool_calls"}
        calls: list[JsonObject] = [dict(call) for call in last.get("tool_calls") or ()]
        if place == "content":
            out["content"] = make_content(self.sentinel, self._inputs)
        elif not real:
            out["content"] = make_content(self.own if last["content"] else "", self._inputs)
        for index, call in enumerate(calls):
            holds_sentinel = place == "argument" and index == len(calls) - 1
            arguments = self._build_arguments(call["function"]["arguments"], holds_sentinel=holds_sentinel, real=real)
            call["function"] = {**call["function"], "arguments": arguments}
        if calls:
            out["tool_calls"] = calls
        return out

    def _build_arguments(self, arguments: Any, *, holds_sentinel: bool, real: bool) -> Any:
        value: Any
        if not holds_sentinel:
            value = arguments if real else {"q": "v"}
        elif real and is_object(arguments) and arguments:
            value = {**arguments, list(arguments)[-1]: self.sentinel}
        else:
            value = {"q": self.sentinel}
        if self._inputs.arguments == "string" and not isinstance(value, str):
            return json.dumps(value, ensure_ascii=False)
        return value

    def mark(self, messages: Sequence[JsonObject]) -> tuple[list[JsonObject], list[str]]:
        """The messages with a unique word for each content, and the words; a message of calls alone has its word in the
        last argument."""
        out: list[JsonObject] = []
        words = [f"{self._base}n{index}e" for index in range(len(messages))]
        for message, word in zip(messages, words, strict=True):
            if message.get("tool_calls") and not message["content"]:
                calls: list[JsonObject] = [dict(call) for call in message["tool_calls"]]
                arguments: Any = {"q": word} if self._inputs.arguments == "object" else json.dumps({"q": word})
                calls[-1]["function"] = {**calls[-1]["function"], "arguments": arguments}
                out.append({**message, "tool_calls": calls})
            else:
                out.append({**message, "content": make_content(word, self._inputs)})
        return out, words
