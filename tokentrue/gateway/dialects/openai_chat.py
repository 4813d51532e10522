"""OpenAI Chat Completions: requests, replies and chunks.

Reasoning is `reasoning_content` in both directions. Developer messages are system messages.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from tokentrue.errors import MessageError, SamplingError
from tokentrue.gateway.dialects.base import (
    DecodedBody,
    Dialect,
    FunctionTool,
    HttpProblem,
    RequestHead,
    TextOf,
    check_choices,
    decode_body,
    describe_item,
    echo,
    encode,
    join_text,
    present,
    raw_items,
    require_object,
)
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.plain_json import convert
from tokentrue.sessions.constraints import constraints_from
from tokentrue.sessions.stages.generation import chat_finish_reason
from tokentrue.types import PENALTIES, TRUNCATIONS, Delta, Message, Reply, Sampling, TurnEvent

ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ChatOptions(msgspec.Struct, frozen=True):
    logprobs: bool
    include_usage: bool
    return_token_ids: bool


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
        choice["logprobs"] = build_logprobs(completion.token_ids, completion.logprobs, completion.top_logprobs, text_of)
    return choice


def choice_end(head: RequestHead, reply: Reply) -> JsonObject:
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


def build_logprobs(
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
    whole = "\ufffd" not in text  # half a character has no bytes to show
    return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace")) if whole else None}


def build_usage(replies: Sequence[Reply]) -> dict[str, int]:
    prompt = replies[0].prompt_tokens
    sampled = sum(len(reply.completion.token_ids) for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def build_error(problem: HttpProblem) -> JsonObject:
    kind = ERROR_TYPES.get(problem.status, "invalid_request_error" if problem.status < 500 else "server_error")
    return {"error": {"message": problem.message, "type": kind, "param": problem.field, "code": problem.code}}


class ChatEncoder:
    """Chunks: the role, deltas, the finish reason; usage in a separate chunk if requested; `[DONE]` last.

    Log-probabilities are sent token by token. If alternatives are requested they all come in the last chunk of a
    choice, because engines report those with the whole completion.
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
            self._base = self._base or completion_base(self._head, event.node_id, "chat.completion.chunk")
            out += self._chunk(event.index, {"role": "assistant", "content": None})
        delta = delta_from(event.delta) if event.delta is not None else {}
        logprobs = None
        if self._head.options.logprobs and event.token_ids and not self._logprobs_late:
            logprobs = build_logprobs(event.token_ids, event.logprobs, None, self._text_of)
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
            out = b"data: " + encode({**self._base, "choices": [], "usage": build_usage(self._replies)}) + b"\n\n"
        return out + b"data: [DONE]\n\n"

    def error(self, problem: HttpProblem) -> bytes:
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


# Requests.
ROLES = ("system", "developer", "user", "assistant", "tool")  # tuples: what is compared with them may be unhashable
TEXT_PARTS = ("text", "refusal")
SAMPLING = ("temperature", *TRUNCATIONS, "seed", *PENALTIES, "top_logprobs")


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class ChatHead(msgspec.Struct, forbid_unknown_fields=True):
    """All top-level fields except `messages`. Fields typed Any are hints: accepted, without effect on tokens."""

    model: str = ""
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    tools: list[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None
    response_format: JsonObject | None = None
    chat_template_kwargs: JsonObject | None = None
    return_token_ids: bool | None = False
    parallel_tool_calls: bool | None = None
    reasoning_effort: Any = None
    verbosity: Any = None
    user: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    modalities: list[Literal["text"]] | None = None


class ChatBody(ChatHead, kw_only=True, forbid_unknown_fields=True):
    messages: list[Annotated[msgspec.Raw, describe_item(*ROLES)]]


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str | JsonObject = ""


class ChatCall(msgspec.Struct):
    function: CalledFunction
    id: str = ""
    type: Literal["function"] = "function"


class AssistantFields(msgspec.Struct):
    reasoning_content: str | None = None
    tool_calls: list[ChatCall] | None = None
    function_call: None = None
    audio: None = None


class OpenAIChat(Dialect):
    name: ClassVar[str] = "openai_chat"

    def decode(self, body: bytes) -> DecodedBody:
        decoded = decode_body(body, ChatBody)
        return DecodedBody(head=head_from_chat(decoded), items=raw_items(decoded.messages, self.items_key))

    def parse_item(self, item: Any, path: str) -> tuple[Message, ...]:
        return (message_from_chat(item, path),)

    def build_answer(self, head: RequestHead, replies: Sequence[Reply], text_of: TextOf) -> JsonObject:
        return {
            **completion_base(head, replies[0].node, "chat.completion"),
            "choices": [build_choice(index, head, reply, text_of) for index, reply in enumerate(replies)],
            "usage": build_usage(replies),
        }

    def new_encoder(self, head: RequestHead, text_of: TextOf) -> ChatEncoder:
        return ChatEncoder(head, text_of)

    build_error = staticmethod(build_error)


def head_from_chat(head: ChatHead) -> RequestHead:
    tools = tools_from_chat(head.tools)
    extra, tools = constraints_from(head.tool_choice, head.response_format, tools)
    return RequestHead(
        model=head.model,
        stream=bool(head.stream),
        n=check_choices(head.n, "n"),
        sampling=sampling_from_chat(head, extra),
        tools=tools,
        template_kwargs=head.chat_template_kwargs or {},
        options=ChatOptions(
            logprobs=bool(head.logprobs),
            include_usage=bool(head.stream_options and head.stream_options.include_usage),
            return_token_ids=bool(head.return_token_ids),
        ),
    )


def sampling_from_chat(head: ChatHead, extra: JsonMapping) -> Sampling:
    limits = {head.max_tokens, head.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise SamplingError("max_tokens and max_completion_tokens differ; send one of them")
    if head.top_logprobs is not None and not head.logprobs:
        raise MessageError("needs logprobs: true", field="top_logprobs")
    given = {name: getattr(head, name) for name in SAMPLING}
    if given["top_k"] == -1:  # vLLM and SGLang write "off" so
        given["top_k"] = 0
    return Sampling(
        **present(**given, max_tokens=next(iter(limits), None)),
        stop=(head.stop,) if isinstance(head.stop, str) else tuple(head.stop or ()),
        stop_token_ids=tuple(head.stop_token_ids or ()),
        extra=extra,
    )


def tools_from_chat(tools: list[JsonObject] | None) -> tuple[JsonObject, ...] | None:
    for index, tool in enumerate(tools or ()):
        if tool.get("type") != "function":
            message = f"tool type {echo(tool.get('type'))} is not supported; use 'function'"
            raise MessageError(message, field=f"tools[{index}].type")
        convert(tool.get("function"), FunctionTool, f"tools[{index}].function")
    return tuple(tools) if tools else None


def message_from_chat(item: Any, path: str) -> Message:
    """Keeps unknown fields: templates may use them."""
    message = dict(require_object(item, path))
    role = message.get("role")
    if role not in ROLES:
        known = ", ".join(sorted(ROLES))
        raise MessageError(f"role {echo(role)} is not supported; use one of {known}", field=f"{path}.role")
    glue = "" if role == "assistant" else "\n"
    message["content"] = join_text(message.get("content"), TEXT_PARTS, f"{path}.content", glue=glue)
    if role == "developer":
        message["role"] = "system"
    if role == "assistant":
        if message.get("reasoning_content") is None and isinstance(message.get("reasoning"), str):
            message["reasoning_content"] = message["reasoning"]  # OpenRouter's and vLLM's name for it
        if not convert(message, AssistantFields, path).tool_calls:
            message.pop("tool_calls", None)
    elif message["content"] is None:
        raise MessageError("must be a string or a list of text parts", field=f"{path}.content")
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        raise MessageError("must name the call that this answers", field=f"{path}.tool_call_id")
    return message
