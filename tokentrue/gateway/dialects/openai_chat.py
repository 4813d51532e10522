"""OpenAI Chat Completions: requests, answers and chunks.

Reasoning travels as `reasoning_content`, on the way out and on the way back. Developer messages are system messages.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from tokentrue.errors import MessageError, SamplingError
from tokentrue.gateway.dialects.base import Call, Problem, TextOf, convert, encode, is_open, joined_text, shown
from tokentrue.types import Message, Reply, Sampling, TurnEvent

ROLES = ("system", "developer", "user", "assistant", "tool")  # tuples: what is compared with them may be unhashable
TEXT_PARTS = ("text", "refusal")
ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class ChatHead(msgspec.Struct, forbid_unknown_fields=True):
    """Every top-level field but `messages`. Fields typed Any are hints: accepted, without effect on tokens."""

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
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
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


class ChatOptions(msgspec.Struct, frozen=True):
    logprobs: bool
    include_usage: bool
    return_token_ids: bool


class OpenAIChat:
    name = "openai_chat"
    items_key = "messages"

    def call(self, head: dict[str, Any]) -> Call:
        asked = convert(head, ChatHead)
        tools = tools_from_chat(asked.tools, "tools")
        extra, tools = constraints(asked.tool_choice, asked.response_format, tools)
        return Call(
            model=asked.model,
            stream=bool(asked.stream),
            n=choices(asked.n),
            sampling=sampling_from_chat(asked, extra),
            tools=tools,
            template_kwargs=asked.chat_template_kwargs or {},
            options=ChatOptions(
                logprobs=bool(asked.logprobs),
                include_usage=bool(asked.stream_options and asked.stream_options.include_usage),
                return_token_ids=bool(asked.return_token_ids),
            ),
        )

    def messages(self, items: Sequence[Any], call: Call, *, start: int = 0) -> list[Message]:
        return [message_from_chat(item, f"messages[{start + index}]") for index, item in enumerate(items)]

    def answer(self, call: Call, replies: Sequence[Reply], text_of: TextOf) -> dict[str, Any]:
        choices = [choice_of(index, call, reply, text_of) for index, reply in enumerate(replies)]
        answer = {
            "id": f"chatcmpl-{replies[0].node}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": call.model,
            "choices": choices,
            "usage": usage_of(replies),
        }
        return answer

    def encoder(self, call: Call, text_of: TextOf) -> ChatEncoder:
        return ChatEncoder(call, text_of)

    def error(self, problem: Problem) -> dict[str, Any]:
        kind = ERROR_TYPES.get(problem.status, "invalid_request_error" if problem.status < 500 else "server_error")
        return {"error": {"message": problem.message, "type": kind, "param": problem.field, "code": problem.code}}


def choices(n: int | None) -> int:
    if n is None:
        return 1
    if not 1 <= n <= 128:
        raise SamplingError(f"n must be between 1 and 128, got {n}")
    return n


def sampling_from_chat(asked: ChatHead, extra: Mapping[str, Any]) -> Sampling:
    limits = {asked.max_tokens, asked.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise SamplingError("max_tokens and max_completion_tokens differ; send one of them")
    if asked.top_logprobs is not None and not asked.logprobs:
        raise MessageError("needs logprobs: true", field="top_logprobs")
    stop = (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ())
    given = {
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": asked.top_k,
        "min_p": asked.min_p,
        "seed": asked.seed,
        "presence_penalty": asked.presence_penalty,
        "frequency_penalty": asked.frequency_penalty,
        "repetition_penalty": asked.repetition_penalty,
        "top_logprobs": asked.top_logprobs,
        "max_tokens": next(iter(limits), None),
    }
    present: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if present.get("top_k") == -1:  # vLLM and SGLang write "off" so
        present["top_k"] = 0
    return Sampling(**present, stop=stop, stop_token_ids=tuple(asked.stop_token_ids or ()), extra=extra)


def tools_from_chat(tools: list[dict[str, Any]] | None, path: str) -> tuple[dict[str, Any], ...] | None:
    if not tools:
        return None
    for index, tool in enumerate(tools):
        where = f"{path}[{index}]"
        if tool.get("type") != "function":
            raise MessageError(f"tool type {shown(tool.get('type'))} is not supported; use 'function'", field=f"{where}.type")
        check_function(tool.get("function"), f"{where}.function")
    return tuple(tools)


def check_function(function: Any, where: str) -> None:
    if not isinstance(function, dict):
        raise MessageError("must be an object", field=where)
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise MessageError("must be a non-empty string", field=f"{where}.name")
    if not isinstance(function.get("description") or "", str):
        raise MessageError("must be a string", field=f"{where}.description")
    if not isinstance(function.get("parameters") or {}, dict):
        raise MessageError("must be a JSON schema object", field=f"{where}.parameters")


def constraints(
    choice: str | dict[str, Any] | None, format_: dict[str, Any] | None, tools: tuple[dict[str, Any], ...] | None
) -> tuple[dict[str, Any], tuple[dict[str, Any], ...] | None]:
    """What only the engine can enforce goes on in `Sampling.extra`, by name; "none" takes the tools out of the prompt."""
    extra: dict[str, Any] = {}
    if choice == "none":
        tools = None
    elif choice not in (None, "auto"):
        if isinstance(choice, str) and choice != "required":
            raise MessageError(f"must be 'auto', 'none', 'required' or a named function, not {shown(choice)}", field="tool_choice")
        if not tools:
            raise MessageError("needs tools", field="tool_choice")
        extra["tool_choice"] = named_choice(choice, tools) if isinstance(choice, dict) else choice
    if format_ is not None and format_.get("type") != "text":
        if format_.get("type") not in ("json_object", "json_schema"):
            raise MessageError(f"type {shown(format_.get('type'))} is not supported", field="response_format.type")
        declared = format_.get("json_schema")
        if format_["type"] == "json_schema" and not (isinstance(declared, dict) and isinstance(declared.get("schema"), dict)):
            raise MessageError("must have a JSON schema", field="response_format.json_schema.schema")
        if "tool_choice" in extra:
            raise MessageError("cannot be enforced together with tool_choice; send one of them", field="response_format")
        extra["response_format"] = format_
    return extra, tools


def named_choice(choice: dict[str, Any], tools: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise MessageError("must be 'auto', 'none', 'required' or a named function", field="tool_choice")
    if all(tool["function"]["name"] != name for tool in tools):
        raise MessageError(f"names {shown(name)}, which is not among the tools", field="tool_choice.function.name")
    return {"type": "function", "function": {"name": name}}


def message_from_chat(item: Any, path: str) -> Message:
    if not isinstance(item, dict):
        raise MessageError("must be an object", field=path)
    role = item.get("role")
    if role not in ROLES:
        raise MessageError(f"role {shown(role)} is not supported; use one of {', '.join(sorted(ROLES))}", field=f"{path}.role")
    message: dict[str, Any] = dict(item)
    message["content"] = joined_text(item.get("content"), TEXT_PARTS, f"{path}.content", glue="" if role == "assistant" else "\n")
    if role == "developer":
        message["role"] = "system"
    if role == "assistant":
        check_assistant(message, path)
    elif message["content"] is None:
        raise MessageError("must be a string or a list of text parts", field=f"{path}.content")
    if role == "tool" and not isinstance(item.get("tool_call_id"), str):
        raise MessageError("must name the call that this answers", field=f"{path}.tool_call_id")
    return message


def check_assistant(message: dict[str, Any], path: str) -> None:
    if message.get("function_call") is not None or message.get("audio") is not None:
        raise MessageError("function_call and audio are not supported; use tool_calls", field=path)
    reasoning = message.get("reasoning_content")
    if reasoning is None and isinstance(message.get("reasoning"), str):  # OpenRouter's and vLLM's name for it
        message["reasoning_content"] = reasoning = message["reasoning"]
    if reasoning is not None and not isinstance(reasoning, str):
        raise MessageError("must be a string", field=f"{path}.reasoning_content")
    calls = message.get("tool_calls")
    if calls is None:
        message.pop("tool_calls", None)
        return
    if not isinstance(calls, list):
        raise MessageError("must be a list", field=f"{path}.tool_calls")
    if not calls:
        message.pop("tool_calls")
    for index, call in enumerate(calls):
        check_call(call, f"{path}.tool_calls[{index}]")


def check_call(call: Any, where: str) -> None:
    if not isinstance(call, dict) or call.get("type", "function") != "function":
        raise MessageError("must be a call of type 'function'", field=where)
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise MessageError("must name a function", field=f"{where}.function.name")
    if not isinstance(function.get("arguments", ""), str | dict):
        raise MessageError("must be JSON text", field=f"{where}.function.arguments")
    if not isinstance(call.get("id", ""), str):
        raise MessageError("must be a string", field=f"{where}.id")


def finish_of(reply: Reply) -> str:
    if is_open(reply.completion.finish):
        return "length"  # an aborted turn is left open too; the protocol has no other word for it
    return "tool_calls" if reply.message.get("tool_calls") else "stop"


def choice_of(index: int, call: Call, reply: Reply, text_of: TextOf) -> dict[str, Any]:
    message = {"role": "assistant", "content": reply.message.get("content"), "refusal": None}
    if reply.message.get("reasoning_content"):
        message["reasoning_content"] = reply.message["reasoning_content"]
    if reply.message.get("tool_calls"):
        message["tool_calls"] = served_calls(reply.message["tool_calls"])
    choice: dict[str, Any] = {"index": index, "message": message, "finish_reason": finish_of(reply), "logprobs": None}
    if call.options.logprobs:
        completion = reply.completion
        choice["logprobs"] = logprobs_of(completion.token_ids, completion.logprobs, completion.top_logprobs, text_of)
    if call.options.return_token_ids:
        choice["token_ids"] = completion_ids(reply)
    return choice


def completion_ids(reply: Reply) -> list[int]:
    return list(reply.completion.token_ids)


def served_calls(calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"id": call["id"], "type": "function", "function": {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}}
        for call in calls
    ]


def logprobs_of(
    token_ids: Sequence[int], logprobs: Sequence[float], top: Sequence[Mapping[int, float]] | None, text_of: TextOf
) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    for index, (token, value) in enumerate(zip(token_ids, logprobs, strict=True)):
        entry = token_entry(token, value, text_of)
        ranked = sorted(top[index].items(), key=lambda pair: -pair[1]) if top else []
        entry["top_logprobs"] = [token_entry(other, other_value, text_of) for other, other_value in ranked]
        content.append(entry)
    return {"content": content, "refusal": None}


def token_entry(token: int, logprob: float, text_of: TextOf) -> dict[str, Any]:
    text = text_of((token,))
    whole = "\ufffd" not in text  # half a character has no bytes of its own to show
    return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace")) if whole else None}


def usage_of(replies: Sequence[Reply]) -> dict[str, int]:
    prompt = replies[0].prompt_tokens
    sampled = sum(len(reply.completion.token_ids) for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


class ChatEncoder:
    """Chunks: the role first, then deltas, then the finish reason; usage in a chunk of its own when asked for; `[DONE]` last."""

    ping = b": keep-alive\n\n"

    def __init__(self, call: Call, text_of: TextOf) -> None:
        self._call = call
        self._text_of = text_of
        self._base: dict[str, Any] = {}
        self._opened: set[int] = set()
        self._replies: list[Reply] = []

    def feed(self, event: TurnEvent) -> bytes:
        out = b""
        if event.index not in self._opened:
            self._open(event)
            out += self._chunk(event.index, {"role": "assistant", "content": ""})
        delta = delta_of(event)
        logprobs = None
        if self._call.options.logprobs and event.token_ids:
            logprobs = logprobs_of(event.token_ids, event.logprobs, None, self._text_of)
        if delta or logprobs:
            out += self._chunk(event.index, delta, logprobs=logprobs)
        if event.reply is not None:
            self._replies.append(event.reply)
            out += self._chunk(event.index, {}, finish=finish_of(event.reply))
        return out

    def _open(self, event: TurnEvent) -> None:
        self._opened.add(event.index)
        if not self._base:
            self._base = {
                "id": f"chatcmpl-{event.node}",
                "object": "chat.completion.chunk",
                "created": int(time.time()),
                "model": self._call.model,
            }

    def _chunk(self, index: int, delta: dict[str, Any], *, finish: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        chunk = {**self._base, "choices": [choice]}
        if self._call.options.include_usage:
            chunk["usage"] = None
        return b"data: " + encode(chunk) + b"\n\n"

    def finish(self) -> bytes:
        out = b""
        if self._call.options.include_usage:
            out = b"data: " + encode({**self._base, "choices": [], "usage": usage_of(self._replies)}) + b"\n\n"
        return out + b"data: [DONE]\n\n"

    def error(self, problem: Problem) -> bytes:
        return b"data: " + encode(OpenAIChat().error(problem)) + b"\n\n"


def delta_of(event: TurnEvent) -> dict[str, Any]:
    delta = event.delta
    if delta is None:
        return {}
    out: dict[str, Any] = {}
    if delta.reasoning:
        out["reasoning_content"] = delta.reasoning
    if delta.content:
        out["content"] = delta.content
    if delta.call is not None:
        call: dict[str, Any] = {"index": delta.call, "function": {"arguments": delta.arguments}}
        if delta.call_id or delta.name:
            call |= {"id": delta.call_id, "type": "function"}
            call["function"]["name"] = delta.name
        out["tool_calls"] = [call]
    return out
