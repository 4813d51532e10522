"""OpenAI Chat Completions: requests. Answers and chunks are in `chat_answers.py`.

Reasoning travels as `reasoning_content`, on the way out and on the way back. Developer messages are system messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, cast

import msgspec

from tokentrue.errors import MessageError, SamplingError
from tokentrue.gateway.dialects.base import (
    DecodedBody,
    RequestHead,
    TextOf,
    decode_body,
    describe_item,
    echo,
    join_text,
    object_of,
    raw_items,
)
from tokentrue.gateway.dialects.chat_answers import ChatEncoder, ChatOptions, build_completion, build_error
from tokentrue.gateway.dialects.tools import check_function
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.sessions.constraints import constraints_from
from tokentrue.types import MAX_CHOICES, Message, Reply, Sampling

ROLES = ("system", "developer", "user", "assistant", "tool")  # tuples: what is compared with them may be unhashable
TEXT_PARTS = ("text", "refusal")


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


class OpenAIChat:
    name: ClassVar[str] = "openai_chat"
    items_key = "messages"
    splits_turns = False

    def decode(self, body: bytes) -> DecodedBody:
        decoded = decode_body(body, ChatBody)
        return DecodedBody(head=head_from_chat(decoded), items=raw_items(decoded.messages, self.items_key))

    def parse_item(self, item: Any, path: str) -> tuple[Message, ...]:
        return (message_from_chat(item, path),)

    def is_settled(self, item: Any) -> bool:
        return True

    def continues_turn(self, parts: Sequence[Message], part: Message) -> bool:
        return True

    def join_turn(self, parts: Sequence[Message]) -> Message:
        raise NotImplementedError("a chat message is one item")

    def check_messages(self, messages: Sequence[Message]) -> None:
        """A last assistant message is history here: the model writes a new one after it."""

    def build_answer(self, head: RequestHead, replies: Sequence[Reply], text_of: TextOf) -> JsonObject:
        return build_completion(head, replies, text_of)

    def new_encoder(self, head: RequestHead, text_of: TextOf) -> ChatEncoder:
        return ChatEncoder(head, text_of)

    build_error = staticmethod(build_error)


def head_from_chat(head: ChatHead) -> RequestHead:
    tools = tools_from_chat(head.tools, "tools")
    extra, tools = constraints_from(head.tool_choice, head.response_format, tools)
    return RequestHead(
        model=head.model,
        stream=bool(head.stream),
        n=check_choices(head.n),
        sampling=sampling_from_chat(head, extra),
        tools=tools,
        template_kwargs=head.chat_template_kwargs or {},
        options=ChatOptions(
            logprobs=bool(head.logprobs),
            include_usage=bool(head.stream_options and head.stream_options.include_usage),
            return_token_ids=bool(head.return_token_ids),
        ),
    )


def check_choices(n: int | None) -> int:
    if n is None:
        return 1
    if not 1 <= n <= MAX_CHOICES:
        raise SamplingError(f"n must be between 1 and {MAX_CHOICES}, got {n}")
    return n


def sampling_from_chat(head: ChatHead, extra: JsonMapping) -> Sampling:
    limits = {head.max_tokens, head.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise SamplingError("max_tokens and max_completion_tokens differ; send one of them")
    if head.top_logprobs is not None and not head.logprobs:
        raise MessageError("needs logprobs: true", field="top_logprobs")
    stop = (head.stop,) if isinstance(head.stop, str) else tuple(head.stop or ())
    given = {
        "temperature": head.temperature,
        "top_p": head.top_p,
        "top_k": head.top_k,
        "min_p": head.min_p,
        "seed": head.seed,
        "presence_penalty": head.presence_penalty,
        "frequency_penalty": head.frequency_penalty,
        "repetition_penalty": head.repetition_penalty,
        "top_logprobs": head.top_logprobs,
        "max_tokens": next(iter(limits), None),
    }
    present: JsonObject = {name: value for name, value in given.items() if value is not None}
    if present.get("top_k") == -1:  # vLLM and SGLang write "off" so
        present["top_k"] = 0
    return Sampling(**present, stop=stop, stop_token_ids=tuple(head.stop_token_ids or ()), extra=extra)


def tools_from_chat(tools: list[JsonObject] | None, path: str) -> tuple[JsonObject, ...] | None:
    if not tools:
        return None
    for index, tool in enumerate(tools):
        where = f"{path}[{index}]"
        if tool.get("type") != "function":
            raise MessageError(
                f"tool type {echo(tool.get('type'))} is not supported; use 'function'", field=f"{where}.type"
            )
        check_function(tool.get("function"), f"{where}.function")
    return tuple(tools)


def message_from_chat(item: Any, path: str) -> Message:
    message = dict(object_of(item, path))
    role = message.get("role")
    if role not in ROLES:
        raise MessageError(
            f"role {echo(role)} is not supported; use one of {', '.join(sorted(ROLES))}", field=f"{path}.role"
        )
    message["content"] = join_text(
        message.get("content"), TEXT_PARTS, f"{path}.content", glue="" if role == "assistant" else "\n"
    )
    if role == "developer":
        message["role"] = "system"
    if role == "assistant":
        check_assistant(message, path)
    elif message["content"] is None:
        raise MessageError("must be a string or a list of text parts", field=f"{path}.content")
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        raise MessageError("must name the call that this answers", field=f"{path}.tool_call_id")
    return message


def check_assistant(message: JsonObject, path: str) -> None:
    if message.get("function_call") is not None or message.get("audio") is not None:
        raise MessageError("function_call and audio are not supported; use tool_calls", field=path)
    reasoning = message.get("reasoning_content")
    if reasoning is None and isinstance(message.get("reasoning"), str):  # OpenRouter's and vLLM's name for it
        message["reasoning_content"] = reasoning = message["reasoning"]
    if reasoning is not None and not isinstance(reasoning, str):
        raise MessageError("must be a string", field=f"{path}.reasoning_content")
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise MessageError("must be a list", field=f"{path}.tool_calls")
    if not calls:
        message.pop("tool_calls", None)
        return
    for index, call in enumerate(cast("list[Any]", calls)):
        check_call(call, f"{path}.tool_calls[{index}]")


def check_call(call: Any, where: str) -> None:
    fields: JsonObject = cast("JsonObject", call) if isinstance(call, dict) else {}
    if not fields or fields.get("type", "function") != "function":
        raise MessageError("must be a call of type 'function'", field=where)
    function: JsonObject = cast("JsonObject", fields["function"]) if isinstance(fields.get("function"), dict) else {}
    if not isinstance(function.get("name"), str):
        raise MessageError("must name a function", field=f"{where}.function.name")
    if not isinstance(function.get("arguments", ""), str | dict):
        raise MessageError("must be JSON text", field=f"{where}.function.arguments")
    if not isinstance(fields.get("id", ""), str):
        raise MessageError("must be a string", field=f"{where}.id")
