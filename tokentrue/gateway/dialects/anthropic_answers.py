"""Anthropic Messages: answers and events. The blocks of both are built here and nowhere else."""

from __future__ import annotations

from tokentrue.gateway.dialects.base import (
    Problem,
    RequestHead,
    arguments_object,
    encode,
    is_cut,
    is_raw_arguments,
)
from tokentrue.gateway.dialects.signing import ReasoningSigner
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.types import Delta, Message, Reply, TurnEvent

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "invalid_request_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def build_message(head: RequestHead, reply: Reply, signer: ReasoningSigner) -> JsonObject:
    return {
        **message_base(head, reply.node),
        "content": build_blocks(reply.message, signer),
        **message_end(head, reply),
    }


def message_base(head: RequestHead, node: str) -> JsonObject:
    return {"id": f"msg_{node}", "type": "message", "role": "assistant", "model": head.model}


def message_end(head: RequestHead, reply: Reply) -> JsonObject:
    """The fields of a message that are known only when it is complete."""
    return {"stop_reason": stop_reason(reply), "stop_sequence": stop_sequence(head, reply), "usage": usage_of(reply)}


def build_blocks(message: Message, signer: ReasoningSigner) -> list[JsonObject]:
    blocks: list[JsonObject] = []
    thought = message.get("reasoning_content")
    if thought:
        blocks.append({"type": "thinking", "thinking": thought, "signature": signer.sign(thought)})
    if message.get("content"):
        blocks.append({"type": "text", "text": message["content"]})
    calls: list[JsonMapping] = message.get("tool_calls") or []
    for call in calls:
        function = call["function"]
        blocks.append(
            {
                "type": "tool_use",
                "id": call["id"],
                "name": function["name"],
                "input": arguments_object(function["arguments"]),
            }
        )
    return blocks


def stop_sequence(head: RequestHead, reply: Reply) -> str | None:
    by = reply.completion.stopped_by
    return by if isinstance(by, str) and by in head.sampling.stop else None


def stop_reason(reply: Reply) -> str:
    if is_cut(reply.completion.finish):
        return "max_tokens"
    if reply.message.get("tool_calls"):
        return "tool_use"
    return "stop_sequence" if isinstance(reply.completion.stopped_by, str) else "end_turn"


def usage_of(reply: Reply) -> JsonObject:
    return {
        "input_tokens": reply.prompt_tokens,
        "output_tokens": len(reply.completion.token_ids),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def build_error(problem: Problem) -> JsonObject:
    kind = ERROR_TYPES.get(problem.status, "api_error" if problem.status >= 500 else "invalid_request_error")
    error = {"type": kind, "message": problem.message, "code": problem.code, "field": problem.field}
    return {"type": "error", "error": error}


class OpenBlock:
    """The content block that is being streamed. `call` is the index of its tool call."""

    def __init__(self, kind: str, call: int | None, index: int) -> None:
        self.kind, self.call, self.index = kind, call, index
        self.text = ""  # of thinking and of arguments


class AnthropicEncoder:
    """message_start, then one content block after the other (thinking with its signature, text, tool_use),
    message_delta, message_stop.

    Arguments go out when they are complete: only then is it known whether they are the JSON object that a client can
    parse.
    """

    ping = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, head: RequestHead, signer: ReasoningSigner) -> None:
        self._head, self._signer = head, signer
        self._open: OpenBlock | None = None
        self._blocks = 0
        self._started = False

    def feed(self, event: TurnEvent) -> bytes:
        out = b"" if self._started else self._start(event.node)
        if event.delta is not None:
            out += self._feed_delta(event.delta)
        if event.reply is not None:
            out += self._close() + self._end(event.reply)
        return out

    def _start(self, node: str) -> bytes:
        self._started = True
        end = {"stop_reason": None, "stop_sequence": None, "usage": {"input_tokens": 0, "output_tokens": 0}}
        return sse("message_start", {"message": {**message_base(self._head, node), "content": [], **end}}) + self.ping

    def _feed_delta(self, delta: Delta) -> bytes:
        out = b""
        if delta.reasoning:
            opened, block = self._enter("thinking", None, {"type": "thinking", "thinking": "", "signature": ""})
            block.text += delta.reasoning
            out += opened + block_delta(block, {"type": "thinking_delta", "thinking": delta.reasoning})
        if delta.content:
            opened, block = self._enter("text", None, {"type": "text", "text": ""})
            out += opened + block_delta(block, {"type": "text_delta", "text": delta.content})
        if delta.call is not None:
            start: JsonObject = {"type": "tool_use", "id": delta.call_id, "name": delta.name, "input": {}}
            opened, block = self._enter("tool_use", delta.call, start)
            block.text += delta.arguments
            out += opened
        return out

    def _enter(self, kind: str, call: int | None, start: JsonObject) -> tuple[bytes, OpenBlock]:
        """The block that this delta belongs to, and the events that open it where it is new."""
        if self._open is not None and (self._open.kind, self._open.call) == (kind, call):
            return b"", self._open
        out = self._close()
        self._open = OpenBlock(kind, call, self._blocks)
        self._blocks += 1
        return out + sse("content_block_start", {"index": self._open.index, "content_block": start}), self._open

    def _close(self) -> bytes:
        block, self._open = self._open, None
        if block is None:
            return b""
        out = b""
        if block.kind == "thinking":
            out += block_delta(block, {"type": "signature_delta", "signature": self._signer.sign(block.text)})
        elif block.kind == "tool_use" and block.text:
            out += block_delta(block, {"type": "input_json_delta", "partial_json": arguments_json(block.text)})
        return out + sse("content_block_stop", {"index": block.index})

    def _end(self, reply: Reply) -> bytes:
        end = message_end(self._head, reply)
        usage = end.pop("usage")
        return sse("message_delta", {"delta": end, "usage": usage}) + sse("message_stop", {})

    def finish(self) -> bytes:
        return b""

    def error(self, problem: Problem) -> bytes:
        return b"event: error\ndata: " + encode(build_error(problem)) + b"\n\n"


def arguments_json(text: str) -> str:
    """JSON text of `arguments_object`, as the model wrote it where that is an object."""
    value = arguments_object(text)
    return encode(value).decode() if is_raw_arguments(value) else text


def block_delta(block: OpenBlock, delta: JsonObject) -> bytes:
    return sse("content_block_delta", {"index": block.index, "delta": delta})


def sse(kind: str, body: JsonObject) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + encode({"type": kind, **body}) + b"\n\n"
