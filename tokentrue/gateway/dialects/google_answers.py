"""Google GenerateContent: replies and chunks; both build their parts here.

Reasoning is sent as parts with `thought` if requested. The part after it carries it sealed, as `thoughtSignature`:
clients drop thoughts from their history and keep signatures.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokentrue.gateway.dialects.base import HttpProblem, RequestHead, TextOf, arguments_object, encode, is_cut
from tokentrue.gateway.dialects.signing import ReasoningSigner
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.types import Delta, Message, Reply, TurnEvent

STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ABORTED",
    413: "INVALID_ARGUMENT",
    422: "FAILED_PRECONDITION",
    429: "RESOURCE_EXHAUSTED",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


class GoogleOptions(msgspec.Struct, frozen=True):
    logprobs: bool
    thoughts: bool  # shown, and not only sealed


def build_response(head: RequestHead, replies: Sequence[Reply], text_of: TextOf, signer: ReasoningSigner) -> JsonObject:
    candidates: list[JsonObject] = []
    for index, reply in enumerate(replies):
        end = candidate_end(head, reply, text_of)
        candidates.append(
            build_candidate(index, build_parts(reply.message, signer, thoughts=head.options.thoughts), end)
        )
    return {"candidates": candidates, "usageMetadata": build_usage(replies), **response_base(head, replies[0].node)}


def response_base(head: RequestHead, node: str) -> JsonObject:
    return {"modelVersion": head.model, "responseId": node}


def build_candidate(index: int, parts: Sequence[JsonObject], end: JsonMapping) -> JsonObject:
    return {"content": {"role": "model", "parts": list(parts)}, "index": index, **end}


def build_parts(message: Message, signer: ReasoningSigner, *, thoughts: bool) -> list[JsonObject]:
    reasoning: str = message.get("reasoning_content") or ""
    parts: list[JsonObject] = []
    if message.get("content"):
        parts.append({"text": message["content"]})
    calls: Sequence[JsonMapping] = message.get("tool_calls") or ()
    parts += [call_part(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls]
    parts = parts or [{"text": ""}]  # SDKs take a content without parts for an error
    if reasoning:
        parts[0]["thoughtSignature"] = signer.wrap_as_bytes(reasoning)
    return [thought_part(reasoning), *parts] if reasoning and thoughts else parts


def thought_part(text: str) -> JsonObject:
    return {"text": text, "thought": True}


def call_part(call_id: str, name: str, arguments: str) -> JsonObject:
    return {"functionCall": {"id": call_id, "name": name, "args": arguments_object(arguments)}}


def candidate_end(head: RequestHead, reply: Reply, text_of: TextOf) -> JsonObject:
    end: JsonObject = {"finishReason": "MAX_TOKENS" if is_cut(reply.completion.finish) else "STOP"}
    if head.options.logprobs:
        end |= build_logprobs(reply, text_of)
    return end


def build_logprobs(reply: Reply, text_of: TextOf) -> JsonObject:
    done = reply.completion
    chosen = [token_entry(token, value, text_of) for token, value in zip(done.token_ids, done.logprobs, strict=True)]
    result: JsonObject = {"chosenCandidates": chosen}
    if done.top_logprobs is not None:
        ranked = [sorted(top.items(), key=lambda pair: -pair[1]) for top in done.top_logprobs]
        result["topCandidates"] = [
            {"candidates": [token_entry(token, value, text_of) for token, value in top]} for top in ranked
        ]
    mean = {"avgLogprobs": sum(done.logprobs) / len(done.logprobs)} if done.logprobs else {}
    return {"logprobsResult": result, **mean}


def token_entry(token: int, logprob: float, text_of: TextOf) -> JsonObject:
    return {"token": text_of((token,)), "tokenId": token, "logProbability": logprob}


def build_usage(replies: Sequence[Reply]) -> JsonObject:
    prompt = replies[0].prompt_tokens
    sampled = sum(len(reply.completion.token_ids) for reply in replies)
    return {"promptTokenCount": prompt, "candidatesTokenCount": sampled, "totalTokenCount": prompt + sampled}


def build_error(problem: HttpProblem) -> JsonObject:
    """`code` is the HTTP status in this protocol; the gateway's code and the field are in `details`."""
    metadata = {"field": problem.field} if problem.field else {}
    info = {
        "@type": "type.googleapis.com/google.rpc.ErrorInfo",
        "reason": problem.code,
        "domain": "tokentrue",
        "metadata": metadata,
    }
    status = STATUSES.get(problem.status, "INTERNAL" if problem.status >= 500 else "INVALID_ARGUMENT")
    return {"error": {"code": problem.status, "message": problem.message, "status": status, "details": [info]}}


class OpenCandidate:
    """The part of a candidate that is not sent yet."""

    def __init__(self) -> None:
        self.reasoning = ""
        self.call: int | None = None
        self.call_id = self.name = self.arguments = ""


class GoogleEncoder:
    """Each chunk is a whole response; the last chunk of a candidate has the finish reason and the usage.

    Calls are sent when complete: the protocol has no partial arguments. A keep-alive is an empty line, because Google's
    SDKs parse comments as JSON; an error is bare JSON, as Google's server sends it.
    """

    ping = b"\n"

    def __init__(self, head: RequestHead, text_of: TextOf, signer: ReasoningSigner) -> None:
        self._head, self._text_of, self._signer = head, text_of, signer
        self._open: dict[int, OpenCandidate] = {}
        self._replies: list[Reply] = []
        self._node = ""  # of the first candidate

    def feed(self, event: TurnEvent) -> bytes:
        candidate = self._open.setdefault(event.index, OpenCandidate())
        self._node = self._node or event.node_id
        out = b""
        if event.delta is not None:
            parts = self._feed_delta(candidate, event.delta)
            out += self._chunk(event.index, parts, {}) if parts else b""
        if event.reply is not None:
            self._replies.append(event.reply)
            parts = [*self._close_call(candidate), *self._seal_rest(candidate)] or [{"text": ""}]
            out += self._chunk(event.index, parts, candidate_end(self._head, event.reply, self._text_of))
        return out

    def _feed_delta(self, candidate: OpenCandidate, delta: Delta) -> list[JsonObject]:
        parts: list[JsonObject] = []
        if candidate.call is not None and delta.call != candidate.call:
            parts += self._close_call(candidate)
        if delta.reasoning:
            candidate.reasoning += delta.reasoning
            parts += [thought_part(delta.reasoning)] if self._head.options.thoughts else []
        if delta.content:
            parts.append(self._sign(candidate, {"text": delta.content}))
        if delta.call is not None:
            if candidate.call is None:
                candidate.call, candidate.call_id, candidate.name = delta.call, delta.call_id or "", delta.name or ""
            candidate.arguments += delta.arguments
        return parts

    def _close_call(self, candidate: OpenCandidate) -> list[JsonObject]:
        if candidate.call is None:
            return []
        part = call_part(candidate.call_id, candidate.name, candidate.arguments)
        candidate.call, candidate.arguments = None, ""
        return [self._sign(candidate, part)]

    def _sign(self, candidate: OpenCandidate, part: JsonObject) -> JsonObject:
        if candidate.reasoning:
            part["thoughtSignature"], candidate.reasoning = self._signer.wrap_as_bytes(candidate.reasoning), ""
        return part

    def _seal_rest(self, candidate: OpenCandidate) -> list[JsonObject]:
        return [self._sign(candidate, {"text": ""})] if candidate.reasoning else []

    def _chunk(self, index: int, parts: Sequence[JsonObject], end: JsonMapping) -> bytes:
        chunk: JsonObject = {
            "candidates": [build_candidate(index, parts, end)],
            **response_base(self._head, self._node),
        }
        if end:
            chunk["usageMetadata"] = build_usage(self._replies)
        return b"data: " + encode(chunk) + b"\n\n"

    def finish(self) -> bytes:
        return b""

    def error(self, problem: HttpProblem) -> bytes:
        return encode(build_error(problem)) + b"\n\n"
