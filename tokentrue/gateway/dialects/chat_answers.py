"""OpenAI Chat Completions: answers and chunks. Both are built from the reply by the same functions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tokentrue.gateway.dialects.base import Problem, RequestHead, TextOf, encode
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.sessions.stages.serving import chat_finish_reason
from tokentrue.types import Delta, Reply, TurnEvent

ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ChatOptions(msgspec.Struct, frozen=True):
    logprobs: bool
    include_usage: bool
    return_token_ids: bool


def build_completion(head: RequestHead, replies: Sequence[Reply], text_of: TextOf) -> JsonObject:
    return {
        **completion_base(head, replies[0].node, "chat.completion"),
        "choices": [build_choice(index, head, reply, text_of) for index, reply in enumerate(replies)],
        "usage": usage_of(replies),
    }


def completion_base(head: RequestHead, node: str, kind: str) -> JsonObject:
    return {"id": f"chatcmpl-{node}", "object": kind, "created": int(time.time()), "model": head.model}


def build_choice(index: int, head: RequestHead, reply: Reply, text_of: TextOf) -> JsonObject:
    message: JsonObject = {"role": "assistant", "content": reply.message.get("content"), "refusal": None}
    if reply.message.get("reasoning_content"):
        message["reasoning_content"] = reply.message["reasoning_content"]
    if reply.message.get("tool_calls"):
        message["tool_calls"] = [served_call(call) for call in reply.message["tool_calls"]]
    choice: JsonObject = {"index": index, "message": message, "logprobs": None, **choice_end(head, reply)}
    if head.options.logprobs:
        completion = reply.completion
        choice["logprobs"] = logprobs_of(completion.token_ids, completion.logprobs, completion.top_logprobs, text_of)
    return choice


def choice_end(head: RequestHead, reply: Reply) -> JsonObject:
    """The fields of a choice that are known only when it is complete."""
    end: JsonObject = {"finish_reason": chat_finish_reason(reply)}
    if head.options.return_token_ids:
        end["token_ids"] = list(reply.completion.token_ids)
    return end


def served_call(call: JsonMapping) -> JsonObject:
    function = call["function"]
    return {
        "id": call["id"],
        "type": "function",
        "function": {"name": function["name"], "arguments": function["arguments"]},
    }


def logprobs_of(
    token_ids: Sequence[int], logprobs: Sequence[float], top: Sequence[Mapping[int, float]] | None, text_of: TextOf
) -> JsonObject:
    content: list[JsonObject] = []
    for index, (token, value) in enumerate(zip(token_ids, logprobs, strict=True)):
        entry = token_entry(token, value, text_of)
        ranked = sorted(top[index].items(), key=lambda pair: -pair[1]) if top else []
        entry["top_logprobs"] = [token_entry(other, other_value, text_of) for other, other_value in ranked]
        content.append(entry)
    return {"content": content, "refusal": None}


def token_entry(token: int, logprob: float, text_of: TextOf) -> JsonObject:
    text = text_of((token,))
    whole = "\ufffd" not in text  # half a character has no bytes of its own to show
    return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace")) if whole else None}


def usage_of(replies: Sequence[Reply]) -> dict[str, int]:
    prompt = replies[0].prompt_tokens
    sampled = sum(len(reply.completion.token_ids) for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def build_error(problem: Problem) -> JsonObject:
    kind = ERROR_TYPES.get(problem.status, "invalid_request_error" if problem.status < 500 else "server_error")
    return {"error": {"message": problem.message, "type": kind, "param": problem.field, "code": problem.code}}


class ChatEncoder:
    """Chunks: the role first, then deltas, then the finish reason; usage in a chunk of its own when asked for; `[DONE]`
    last.

    Log-probabilities go out token by token, unless alternatives were asked for: engines report those with the whole
    completion, so that then all of them are in the last chunk of a choice.
    """

    ping = b": keep-alive\n\n"

    def __init__(self, head: RequestHead, text_of: TextOf) -> None:
        self._head, self._text_of = head, text_of
        self._base: JsonObject = {}
        self._has_content: dict[int, bool] = {}  # of every choice that has begun
        self._replies: list[Reply] = []
        self._logprobs_late = bool(head.options.logprobs and head.sampling.top_logprobs)

    def feed(self, event: TurnEvent) -> bytes:
        out = b""
        if event.index not in self._has_content:
            self._has_content[event.index] = False
            self._base = self._base or completion_base(self._head, event.node, "chat.completion.chunk")
            out += self._chunk(event.index, {"role": "assistant", "content": None})
        delta = delta_from(event.delta) if event.delta is not None else {}
        logprobs = None
        if self._head.options.logprobs and event.token_ids and not self._logprobs_late:
            logprobs = logprobs_of(event.token_ids, event.logprobs, None, self._text_of)
        if "content" in delta:
            self._has_content[event.index] = True
        if delta or logprobs:
            out += self._chunk(event.index, delta, logprobs=logprobs)
        if event.reply is not None:
            out += self._end(event.index, event.reply)
        return out

    def _end(self, index: int, reply: Reply) -> bytes:
        self._replies.append(reply)
        empty = reply.message.get("content") == "" and not self._has_content[index]
        logprobs = build_choice(index, self._head, reply, self._text_of)["logprobs"] if self._logprobs_late else None
        return self._chunk(
            index, {"content": ""} if empty else {}, end=choice_end(self._head, reply), logprobs=logprobs
        )

    def _chunk(self, index: int, delta: JsonObject, *, end: JsonObject | None = None, logprobs: Any = None) -> bytes:
        choice: JsonObject = {
            "index": index,
            "delta": delta,
            "finish_reason": None,
            "logprobs": logprobs,
            **(end or {}),
        }
        chunk: JsonObject = {**self._base, "choices": [choice]}
        if self._head.options.include_usage:
            chunk["usage"] = None
        return b"data: " + encode(chunk) + b"\n\n"

    def finish(self) -> bytes:
        out = b""
        if self._head.options.include_usage:
            out = b"data: " + encode({**self._base, "choices": [], "usage": usage_of(self._replies)}) + b"\n\n"
        return out + b"data: [DONE]\n\n"

    def error(self, problem: Problem) -> bytes:
        return b"data: " + encode(build_error(problem)) + b"\n\n"


def delta_from(delta: Delta) -> JsonObject:
    out: JsonObject = {}
    if delta.reasoning:
        out["reasoning_content"] = delta.reasoning
    if delta.content:
        out["content"] = delta.content
    if delta.call is not None:
        call: JsonObject = {"index": delta.call, "function": {"arguments": delta.arguments}}
        if delta.call_id or delta.name:
            call |= {"id": delta.call_id, "type": "function"}
            call["function"]["name"] = delta.name
        out["tool_calls"] = [call]
    return out
