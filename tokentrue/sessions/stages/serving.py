"""What the client is served: the parsed turn with its call ids, cut at a stop string. Pure.

Call ids come from the node, so that they are the same in a stream and in the committed turn, and name the turn when
they come back:
two answers to one prompt never share an id. An id that the model wrote itself stays (it is in its tokens), unless it
has the form of those that parsers make up; so does the short form that some templates insist on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tokentrue.conversation.match_keys import calls_of
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.types import Delta, Finish, Message, Parsed, Reply

_MADE_UP = re.compile(r"call_[0-9a-f]{24}")  # by a parser, for a format that carries no ids


def make_call_id(node_id: str, index: int) -> str:
    return f"call_{node_id[:20]}{index:04x}"


def _choose_id(written: str, node_id: str, index: int) -> str:
    return make_call_id(node_id, index) if not written or _MADE_UP.fullmatch(written) else written


def serve_message(parsed: Parsed, node_id: str, *, stops: Sequence[str]) -> Message:
    """The message of a whole turn. Of the visible text, the client sees what precedes the first stop string."""
    message: JsonObject = dict(parsed.message)
    calls = calls_of(message)
    if calls:
        message["tool_calls"] = [_with_id(call, node_id, index) for index, call in enumerate(calls)]
    content = message.get("content")
    if isinstance(content, str) and (at := find_stop(content, stops)) is not None:
        message["content"] = content[:at]
    return message


def _with_id(call: JsonMapping, node_id: str, index: int) -> JsonObject:
    return {**call, "id": _choose_id(str(call.get("id") or ""), node_id, index), "type": call.get("type", "function")}


def chat_finish_reason(reply: Reply) -> str:
    """`finish_reason` of a chat completion. An aborted turn is left open, too; the protocol has no other word for it
    than "length"."""
    if reply.completion.finish is not Finish.STOP:
        return "length"
    return "tool_calls" if reply.message.get("tool_calls") else "stop"


def find_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the stop string begins that is complete first (of two complete at once, the longer): the one at which an
    engine stops."""
    found = [(at + len(stop), at) for stop in stops if stop and (at := text.find(stop)) >= 0]
    return min(found)[1] if found else None


class StreamedMessage:
    """What a stream has shown of a message so far. Its final state is the served message.

    Text that may be the beginning of a stop string is held back until it is known not to be.
    """

    def __init__(self, node_id: str, stops: Sequence[str]) -> None:
        self._node, self._stops = node_id, [stop for stop in stops if stop]
        self._shown, self._held, self._is_cut = "", "", False
        self._reasoning = ""
        self._calls: list[dict[str, str]] = []

    def feed(self, delta: Delta) -> Delta | None:
        """The delta as the client may see it; None where it shows nothing."""
        if delta.call is not None:
            delta = self._feed_call(delta)
        self._reasoning += delta.reasoning
        delta = replace(delta, content=self._release(delta.content)) if delta.content else delta
        return delta if delta.content or delta.reasoning or delta.call is not None else None

    def _feed_call(self, delta: Delta) -> Delta:
        index = delta.call or 0
        while len(self._calls) <= index:
            self._calls.append({"id": "", "name": "", "arguments": ""})
        if delta.name or delta.call_id:
            delta = replace(delta, call_id=_choose_id(delta.call_id, self._node, index))
        call = self._calls[index]
        call["id"], call["name"] = delta.call_id or call["id"], delta.name or call["name"]
        call["arguments"] += delta.arguments
        return delta

    def _release(self, text: str) -> str:
        if self._is_cut:
            return ""
        self._held += text
        end = find_stop(self._held, self._stops)
        self._is_cut = end is not None
        if end is None:
            starts = (size for stop in self._stops for size in range(1, len(stop)) if self._held.endswith(stop[:size]))
            end = len(self._held) - max(starts, default=0)
        shown, self._held = self._held[:end], self._held[end:]
        self._shown += shown
        return shown

    def finish(self, served: Message) -> tuple[list[Delta], Message]:
        """The deltas that are still missing from `served`, and the message that the client then has.

        The two are equal to what the whole turn serves, unless the stream has shown something that the whole parse
        takes back (a call that broke off): then the record keeps what was shown, because that is what the client has
        and will replay.
        """
        deltas: list[Delta] = []
        message = dict(served)
        reasoning, content = str(served.get("reasoning_content") or ""), str(served.get("content") or "")
        for field, have, want in (("reasoning_content", self._reasoning, reasoning), ("content", self._shown, content)):
            if not want.startswith(have):
                message[field] = have
            elif len(want) > len(have):
                deltas.append(
                    Delta(reasoning=want[len(have) :])
                    if field == "reasoning_content"
                    else Delta(content=want[len(have) :])
                )
        calls = [dict(call) for call in calls_of(served)]
        for index in range(max(len(calls), len(self._calls))):
            self._finish_call(index, calls, deltas)
        if calls:
            message["tool_calls"] = calls
        return deltas, message

    def _finish_call(self, index: int, calls: list[JsonObject], deltas: list[Delta]) -> None:
        shown = self._calls[index] if index < len(self._calls) else {"id": "", "name": "", "arguments": ""}
        wanted = calls[index] if index < len(calls) else None
        function: JsonMapping = {} if wanted is None else wanted["function"]
        arguments = str(function.get("arguments") or "")
        if (
            wanted is None
            or (shown["name"] and shown["name"] != function["name"])
            or not arguments.startswith(shown["arguments"])
        ):
            call = {
                "id": shown["id"],
                "type": "function",
                "function": {"name": shown["name"], "arguments": shown["arguments"]},
            }
            calls[index : index + 1] = [call]
            return
        if not shown["name"]:
            deltas.append(Delta(call=index, call_id=str(wanted["id"]), name=str(function["name"])))
        if len(arguments) > len(shown["arguments"]):
            deltas.append(Delta(call=index, arguments=arguments[len(shown["arguments"]) :]))


def deltas_from_message(message: Message) -> Iterator[Delta]:
    """A whole message as deltas: for a recorded answer that is streamed again."""
    yield from StreamedMessage("", ()).finish(message)[0]
