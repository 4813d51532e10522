"""OpenAI Chat Completions: requests. Answers and chunks are in `chat_answers.py`.

Reasoning travels as `reasoning_content`, on the way out and on the way back. Developer messages are system messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from tokentrue.conversion import convert
from tokentrue.errors import MessageError, SamplingError
from tokentrue.gateway.dialects.base import (
    DecodedBody,
    Dialect,
    FunctionTool,
    RequestHead,
    TextOf,
    check_choices,
    decode_body,
    describe_item,
    echo,
    join_text,
    object_of,
    present,
    raw_items,
)
from tokentrue.gateway.dialects.chat_answers import ChatEncoder, ChatOptions, build_completion, build_error
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.sessions.constraints import constraints_from
from tokentrue.types import Message, Reply, Sampling

ROLES = ("system", "developer", "user", "assistant", "tool")  # tuples: what is compared with them may be unhashable
TEXT_PARTS = ("text", "refusal")
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "top_logprobs",
)


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
    """What is checked of an assistant message."""

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
        return build_completion(head, replies, text_of)

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
    """Fields that nobody here knows stay: templates may."""
    message = dict(object_of(item, path))
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
