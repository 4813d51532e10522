"""OpenAI Responses: replies and events, which share the methods that build items.

Events: created, in progress, the items, completed or incomplete; each has its sequence number.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import orjson

from tokentrue.gateway.dialects.base import HttpProblem, RequestHead, TextOf, encode, is_cut
from tokentrue.gateway.dialects.openai_chat import build_error, build_logprobs
from tokentrue.gateway.dialects.signing import ReasoningSigner
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.types import Delta, Reply, TurnEvent

UNSTORED = "resp_ns_"
STORED = "resp_"
INSTRUCTED = "_i"  # ends the id of a response that was made with `instructions`
_INPUT_OPENS = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_DECODABLE = re.compile(  # whole characters and escapes; both halves of a surrogate pair
    r'(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTool:
    name: str
    namespace: str | None = None
    custom: bool = False


class ResponsesOptions(msgspec.Struct, frozen=True):
    stored: bool
    logprobs: bool
    served: Mapping[str, ServedTool]  # by the name that the model sees
    echo: JsonMapping  # the request's own settings, which every answer repeats

    def find_tool(self, name: str) -> ServedTool:
        return self.served.get(name) or ServedTool(name=name)


class CustomInput:
    """Decodes the arguments of a custom tool's call as they are sampled; `feed` returns new text that is certain."""

    def __init__(self) -> None:
        self._text = ""
        self._place: int | None = None  # start of the undecoded rest of `_text`; None before the string begins

    def feed(self, arguments: str) -> str:
        self._text += arguments
        if self._place is None:
            opened = _INPUT_OPENS.match(self._text)
            if opened is None:
                return ""
            self._place = opened.end()
        found = _DECODABLE.match(self._text, self._place)
        assert found is not None
        self._place = found.end()
        return orjson.loads(f'"{found[0]}"') if found[0] else ""

    def finish(self) -> str:
        return self._text if self._place is None else ""


def custom_input(arguments: str) -> str:
    """The single string of a custom tool's call; arguments other than `{"input": "…` are served unchanged."""
    decoder = CustomInput()
    return decoder.feed(arguments) + decoder.finish()


@dataclass(slots=True, kw_only=True)
class OutputItem:
    kind: str  # "reasoning", "message" or "call"
    suffix: str  # of the item's id
    pieces: list[str]  # reasoning, text, or arguments as the model wrote them
    call_id: str = ""
    tool: ServedTool = field(default_factory=lambda: ServedTool(name=""))  # of a call
    logprobs: Sequence[JsonObject] = ()
    # Of a stream.
    index: int = 0
    place: JsonObject = field(default_factory=dict[str, Any])
    is_open: bool = True
    custom: CustomInput = field(default_factory=CustomInput)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def id(self) -> str:
        mark = {"reasoning": "rs", "message": "msg", "call": "ctc" if self.tool.custom else "fc"}[self.kind]
        return f"{mark}_{self.suffix}"

    def build_part(self) -> JsonObject:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": list(self.logprobs)}

    def build(self, signer: ReasoningSigner, *, status: str) -> JsonObject:
        """`status` is that of reasoning or text; a call is incomplete if its arguments broke off."""
        if self.kind == "reasoning":
            sealed = {"encrypted_content": signer.wrap(self.text), "status": status}
            return {"type": "reasoning", "id": self.id, "summary": [], "content": [self.build_part()], **sealed}
        if self.kind == "message":
            return {**self._message(status), "content": [self.build_part()]}
        return self._call("completed" if is_json(self.text) else "incomplete")

    def build_opening(self) -> JsonObject:
        """The item of `output_item.added`, without its text."""
        if self.kind == "reasoning":
            return {"type": "reasoning", "id": self.id, "summary": [], "status": "in_progress"}
        if self.kind == "message":
            return {**self._message("in_progress"), "content": []}
        return self._call("in_progress")

    def _message(self, status: str) -> JsonObject:
        return {"type": "message", "id": self.id, "role": "assistant", "status": status}

    def _call(self, status: str) -> JsonObject:
        name: JsonObject = {"call_id": self.call_id, "name": self.tool.name}
        if self.tool.namespace:
            name["namespace"] = self.tool.namespace
        if self.tool.custom:
            return {"type": "custom_tool_call", "id": self.id, **name, "input": custom_input(self.text)}
        return {"type": "function_call", "id": self.id, **name, "arguments": self.text, "status": status}


def is_json(text: str) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True


def build_whole(head: RequestHead, reply: Reply, text_of: TextOf, signer: ReasoningSigner) -> JsonObject:
    message, node = reply.message, reply.node
    items: list[OutputItem] = []
    if message.get("reasoning_content"):
        items.append(OutputItem(kind="reasoning", suffix=node, pieces=[message["reasoning_content"]]))
    # An empty message, too, has an id that the next request sends back.
    if message.get("content") or not message.get("tool_calls"):
        logprobs = logprobs_for(head, reply, text_of)
        content = message.get("content") or ""
        items.append(OutputItem(kind="message", suffix=node, pieces=[content], logprobs=logprobs))
    for index, call in enumerate(message.get("tool_calls") or ()):
        tool, arguments = head.options.find_tool(call["function"]["name"]), call["function"]["arguments"]
        suffix = f"{node}_{index}"
        items.append(OutputItem(kind="call", suffix=suffix, pieces=[arguments], call_id=call["id"], tool=tool))
    return build_response(head, reply, items, signer, int(time.time()))


def build_response(
    head: RequestHead, reply: Reply, items: Sequence[OutputItem], signer: ReasoningSigner, created: int
) -> JsonObject:
    is_incomplete, sampled = is_cut(reply.completion.finish), len(reply.completion.token_ids)
    status = "incomplete" if is_incomplete else "completed"
    response = response_base(head, reply.node, created, status=status)
    response["output"] = [item.build(signer, status=text_status(item, items, status)) for item in items]
    response["incomplete_details"] = {"reason": "max_output_tokens"} if is_incomplete else None
    response["usage"] = {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.prompt_tokens + sampled,
    }
    return response


def response_base(head: RequestHead, node: str, created: int, *, status: str) -> JsonObject:
    return {
        "id": (STORED if head.options.stored else UNSTORED) + node + (INSTRUCTED if head.leading_messages else ""),
        "object": "response",
        "created_at": created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "model": head.model,
        "output": [],
        "usage": None,
        **head.options.echo,
    }


def text_status(item: OutputItem, items: Sequence[OutputItem], status: str) -> str:
    """Status of reasoning or text in a turn that ended in `status`: only the last item of a turn without calls has it.
    With calls the position says nothing: in a whole reply, text sampled after a call precedes it.
    """
    return status if item is items[-1] and all(one.kind != "call" for one in items) else "completed"


def logprobs_for(head: RequestHead, reply: Reply, text_of: TextOf) -> list[JsonObject]:
    if not head.options.logprobs:
        return []
    done = reply.completion
    return build_logprobs(done.token_ids, done.logprobs, done.top_logprobs, text_of)["content"]


class ResponsesEncoder:
    ping = b": keep-alive\n\n"

    def __init__(self, head: RequestHead, text_of: TextOf, signer: ReasoningSigner) -> None:
        self._head, self._signer, self._text_of = head, signer, text_of
        self._opening: JsonObject = {}
        self._node = ""
        self._sequence = -1
        self._items: list[OutputItem] = []

    def feed(self, event: TurnEvent) -> bytes:
        out = b""
        if not self._node:
            self._node = event.node_id
            self._opening = response_base(self._head, event.node_id, int(time.time()), status="in_progress")
            out += self._event("response.created", response=self._opening)
            out += self._event("response.in_progress", response=self._opening)
        if event.delta is not None:
            out += self._feed_delta(event.delta)
        if event.reply is not None:
            out += self._finish(event.reply)
        return out

    def _event(self, kind: str, **body: Any) -> bytes:
        self._sequence += 1
        data = encode({"type": kind, "sequence_number": self._sequence, **body})
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    # Deltas.
    def _feed_delta(self, delta: Delta) -> bytes:
        out = b""
        if delta.reasoning:
            out += self._enter("reasoning", self._suffix("reasoning"))
            out += self._append("response.reasoning_text.delta", delta.reasoning, content_index=0)
        if delta.content:
            out += self._enter("message", self._suffix("message"))
            out += self._append("response.output_text.delta", delta.content, content_index=0, logprobs=[])
        if delta.call is not None:
            out += self._enter("call", f"{self._node}_{delta.call}", delta)
            out += self._append_arguments(delta.arguments)
        return out

    def _last_open(self) -> OutputItem | None:
        return self._items[-1] if self._items and self._items[-1].is_open else None

    def _suffix(self, kind: str) -> str:
        """A turn has one message, except for the text of a call that broke off."""
        last = self._last_open()
        if last is not None and last.kind == kind:
            return last.suffix
        return self._node if all(one.kind != kind for one in self._items) else f"{self._node}_{len(self._items)}"

    def _enter(self, kind: str, suffix: str, delta: Delta | None = None) -> bytes:
        last = self._last_open()
        if last is not None and (last.kind, last.suffix) == (kind, suffix):
            return b""
        out = self._close_finished()
        item = OutputItem(kind=kind, suffix=suffix, pieces=[], index=len(self._items))
        if delta is not None:
            item.call_id, item.tool = delta.call_id or "", self._head.options.find_tool(delta.name or "")
        item.place = {"item_id": item.id, "output_index": item.index}
        self._items.append(item)
        out += self._event("response.output_item.added", output_index=item.index, item=item.build_opening())
        if kind != "call":
            out += self._event("response.content_part.added", **item.place, content_index=0, part=item.build_part())
        return out

    def _append(self, kind: str, text: str, **more: Any) -> bytes:
        item = self._items[-1]
        item.pieces.append(text)
        return self._event(kind, **item.place, delta=text, **more)

    def _append_arguments(self, arguments: str) -> bytes:
        item = self._items[-1]
        if not arguments:
            return b""
        if not item.tool.custom:
            return self._append("response.function_call_arguments.delta", arguments)
        item.pieces.append(arguments)
        return self._custom_delta(item, item.custom.feed(arguments))

    def _custom_delta(self, item: OutputItem, text: str) -> bytes:
        return self._event("response.custom_tool_call_input.delta", **item.place, delta=text) if text else b""

    # Ends.
    def _close_finished(self) -> bytes:
        """Closes the open item, except a message with log-probabilities: those cover the whole turn."""
        waits = self._head.options.logprobs
        return b"".join(
            self._close(item, "completed") for item in self._items if not (waits and item.kind == "message")
        )

    def _close(self, item: OutputItem, status: str) -> bytes:
        if not item.is_open:
            return b""
        item.is_open = False
        place, text, out = item.place, item.text, b""
        if item.kind == "reasoning":
            out += self._event("response.reasoning_text.done", **place, content_index=0, text=text)
        elif item.kind == "message":
            logprobs = list(item.logprobs)
            out += self._event("response.output_text.done", **place, content_index=0, text=text, logprobs=logprobs)
        elif item.tool.custom:
            out += self._custom_delta(item, item.custom.finish())
            out += self._event("response.custom_tool_call_input.done", **place, input=custom_input(text))
        else:
            name = item.tool.name
            out += self._event("response.function_call_arguments.done", **place, name=name, arguments=text)
        if item.kind != "call":
            out += self._event("response.content_part.done", **place, content_index=0, part=item.build_part())
        built = item.build(self._signer, status=status)
        return out + self._event("response.output_item.done", output_index=item.index, item=built)

    def _finish(self, reply: Reply) -> bytes:
        out = b""
        if all(item.kind == "reasoning" for item in self._items):  # as in a whole answer: an empty message has an id
            out += self._enter("message", self._suffix("message"))
        status, logprobs = (
            "incomplete" if is_cut(reply.completion.finish) else "completed",
            logprobs_for(self._head, reply, self._text_of),
        )
        for item in self._items:
            if item.is_open and item.kind == "message":
                item.logprobs = logprobs
            out += self._close(item, text_status(item, self._items, status))
        response = build_response(self._head, reply, self._items, self._signer, self._opening["created_at"])
        return out + self._event(f"response.{status}", response=response)

    def finish(self) -> bytes:
        return b""

    def error(self, problem: HttpProblem) -> bytes:
        error = build_error(problem)["error"]
        if not self._node:
            return self._event("error", code=error["code"], message=error["message"], param=error["param"])
        failed = {**self._opening, "status": "failed", "error": {"code": "server_error", "message": error["message"]}}
        return self._event("response.failed", response=failed)
