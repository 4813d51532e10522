"""OpenAI Responses: requests and whole answers. Items of requests are in `responses_requests.py`, events in
`responses_events.py`.

One model turn is several items here (reasoning, message, function calls); consecutive ones are one assistant message,
unless their ids say that two turns of this session served them. Reasoning travels as `reasoning_text` and, sealed, as
`encrypted_content`: it survives clients that keep only the latter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import msgspec

from tokentrue.errors import MessageError
from tokentrue.gateway.dialects.base import (
    ContinuedResponse,
    DecodedBody,
    Dialect,
    RequestHead,
    TextOf,
    decode_body,
    echo,
    encode,
    is_cut,
    object_of,
    present,
    raw_items,
)
from tokentrue.gateway.dialects.chat_answers import build_error
from tokentrue.gateway.dialects.responses_events import ResponsesEncoder
from tokentrue.gateway.dialects.responses_items import (
    ItemName,
    OutputItem,
    ServedTool,
    logprobs_for,
    node_from_item_id,
    served_tool,
    status_of,
    text_status,
)
from tokentrue.gateway.dialects.responses_requests import (
    TURN,
    FindArguments,
    choice_from_responses,
    is_same_turn,
    message_from_item,
    tools_from_responses,
)
from tokentrue.gateway.dialects.signing import ReasoningSigner
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.sessions.constraints import constraints_from
from tokentrue.types import Message, Reply, Sampling

INCLUDES = {"reasoning.encrypted_content", "message.output_text.logprobs"}
UNSTORED = "resp_ns_"
STORED = "resp_"
INSTRUCTED = "_i"  # ends the id of a response that was made with `instructions`


class Reasoning(msgspec.Struct):
    effort: Any = None
    summary: Any = None


class TextConfig(msgspec.Struct, forbid_unknown_fields=True):
    format: JsonObject | None = None
    verbosity: Any = None


class ResponsesHead(msgspec.Struct, forbid_unknown_fields=True):
    """Every top-level field but `input`. Fields typed Any are hints: accepted, without effect on tokens."""

    model: str = ""
    instructions: str | None = None
    stream: bool | None = False
    store: bool | None = True
    previous_response_id: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    max_output_tokens: int | None = None
    tools: list[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None
    text: TextConfig | None = None
    include: list[str] | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    metadata: dict[str, str] | None = None
    user: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    service_tier: Any = None
    stream_options: Any = None
    client_metadata: Any = None
    max_tool_calls: None = None


class ResponsesBody(ResponsesHead, kw_only=True, forbid_unknown_fields=True):
    input: str | list[msgspec.Raw]


class ResponsesOptions(msgspec.Struct, frozen=True):
    stored: bool
    logprobs: bool
    served: Mapping[str, ServedTool]  # by the name that the model sees
    echo: JsonMapping  # the request's own settings, which every answer repeats


class OpenAIResponses(Dialect):
    name: ClassVar[str] = "openai_responses"
    items_key = "input"
    splits_turns = True

    def __init__(
        self,
        signer: ReasoningSigner,
        find_arguments: FindArguments = lambda _: (),
        is_node: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """`is_node`: whether the session has a node of this name."""
        self._signer, self._find_arguments, self._is_node = signer, find_arguments, is_node

    def decode(self, body: bytes) -> DecodedBody:
        decoded = decode_body(body, ResponsesBody)
        if isinstance(decoded.input, str):
            items: Sequence[msgspec.Raw] = [msgspec.Raw(encode({"role": "user", "content": decoded.input}))]
        else:
            items = raw_items(decoded.input, self.items_key)
        head = head_from_responses(decoded)
        last_node = self._find_last_node(items) or (head.continues.node if head.continues is not None else None)
        return DecodedBody(head=replace(head, last_node=last_node), items=items)

    def _find_last_node(self, items: Sequence[msgspec.Raw]) -> str | None:
        """Of the last item that a model wrote; None where it has no id of this session."""
        for raw in reversed(items):
            try:
                item = msgspec.json.decode(raw, type=ItemName)
            except (msgspec.DecodeError, UnicodeDecodeError):  # what is wrong with it is said where it is parsed
                return None
            if not item.is_given:
                node = node_from_item_id(item.id)
                return node if node is not None and self._is_node(node) else None
        return None

    def parse_item(self, item: Any, path: str) -> tuple[Message, ...]:
        fields = object_of(item, path)
        message = message_from_item(fields, path, self._signer, self._find_arguments)
        if message is None:
            return ()
        node = node_from_item_id(fields.get("id"))
        if message["role"] == "assistant" and node is not None and self._is_node(node):
            return ({**message, TURN: node},)
        return (message,)

    def is_settled(self, item: Any) -> bool:
        node, call_id = node_from_item_id(item.get("id")), item.get("call_id")
        is_custom = item.get("type") == "custom_tool_call"
        return (node is None or self._is_node(node)) and (not is_custom or bool(self._find_arguments(call_id)))

    def continues_turn(self, parts: Sequence[Message], part: Message) -> bool:
        return is_same_turn(parts, part)

    def build_answer(self, head: RequestHead, replies: Sequence[Reply], text_of: TextOf) -> JsonObject:
        items = items_from_reply(head, replies[0], logprobs_for(head, replies[0], text_of))
        return self._build_response(head, replies[0], items, int(time.time()))

    def _build_response(self, head: RequestHead, reply: Reply, items: Sequence[OutputItem], created: int) -> JsonObject:
        """The response from its items."""
        status = status_of(reply)
        response = response_base(head, reply.node, created, status=status)
        response["output"] = [item.build(self._signer, status=text_status(item, items, status)) for item in items]
        response["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut(reply.completion.finish) else None
        response["usage"] = usage_of(reply)
        return response

    def new_encoder(self, head: RequestHead, text_of: TextOf) -> ResponsesEncoder:
        def build_opening(node: str) -> JsonObject:
            return response_base(head, node, int(time.time()), status="in_progress")

        def build_response(reply: Reply, items: Sequence[OutputItem], created: int) -> JsonObject:
            return self._build_response(head, reply, items, created)

        return ResponsesEncoder(
            head,
            signer=self._signer,
            text_of=text_of,
            build_opening=build_opening,
            build_response=build_response,
            build_error=self.build_error,
        )

    build_error = staticmethod(build_error)


def head_from_responses(head: ResponsesHead) -> RequestHead:
    for index, name in enumerate(head.include or ()):
        if name not in INCLUDES:
            raise MessageError(
                f"{echo(name)} is not supported; known: {', '.join(sorted(INCLUDES))}", field=f"include[{index}]"
            )
    tools, served = tools_from_responses(head.tools)
    extra, tools = constraints_from(choice_from_responses(head.tool_choice), format_from_text(head.text), tools)
    given = present(
        temperature=head.temperature,
        top_p=head.top_p,
        top_logprobs=head.top_logprobs,
        max_tokens=head.max_output_tokens,
    )
    return RequestHead(
        model=head.model,
        stream=bool(head.stream),
        sampling=Sampling(extra=extra, **given),
        tools=tools,
        leading_messages=({"role": "system", "content": head.instructions},) if head.instructions else (),
        continues=read_response_id(head.previous_response_id),
        options=ResponsesOptions(
            stored=head.store is not False,
            logprobs="message.output_text.logprobs" in (head.include or ()),
            served=served,
            echo=echoed_settings(head),
        ),
    )


def format_from_text(text: TextConfig | None) -> JsonObject | None:
    """Responses flattens what Chat Completions nests under `json_schema`."""
    format_ = text.format if text else None
    if format_ is None or format_.get("type") != "json_schema":
        return format_
    return {"type": "json_schema", "json_schema": {name: value for name, value in format_.items() if name != "type"}}


def read_response_id(response_id: str | None) -> ContinuedResponse | None:
    if response_id is None:
        return None
    if response_id.startswith(UNSTORED):
        raise MessageError(
            "that response was made with store: false and cannot be continued by id", field="previous_response_id"
        )
    if not response_id.startswith(STORED):
        raise MessageError("is not a response of this gateway", field="previous_response_id")
    node = response_id.removeprefix(STORED)
    return ContinuedResponse(node=node.removesuffix(INSTRUCTED), instructed=node.endswith(INSTRUCTED))


def echoed_settings(head: ResponsesHead) -> JsonObject:
    return {
        "instructions": head.instructions,
        "max_output_tokens": head.max_output_tokens,
        "metadata": head.metadata or {},
        "parallel_tool_calls": head.parallel_tool_calls is not False,
        "previous_response_id": head.previous_response_id,
        "temperature": head.temperature,
        "top_p": head.top_p,
        "tools": head.tools or [],
        "tool_choice": head.tool_choice or "auto",
        "text": {"format": (head.text and head.text.format) or {"type": "text"}},
        "truncation": "disabled",
    }


def items_from_reply(head: RequestHead, reply: Reply, logprobs: Sequence[JsonObject]) -> list[OutputItem]:
    message, node = reply.message, reply.node
    items: list[OutputItem] = []
    if message.get("reasoning_content"):
        items.append(OutputItem(kind="reasoning", suffix=node, text=message["reasoning_content"]))
    if message.get("content") or not message.get(
        "tool_calls"
    ):  # an empty message, too, has an id that the next request sends back
        items.append(OutputItem(kind="message", suffix=node, text=message.get("content") or "", logprobs=logprobs))
    for index, call in enumerate(message.get("tool_calls") or ()):
        tool = served_tool(call["function"]["name"], head.options.served)
        text = call["function"]["arguments"]
        items.append(OutputItem(kind="call", suffix=f"{node}_{index}", text=text, call_id=call["id"], tool=tool))
    return items


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


def usage_of(reply: Reply) -> JsonObject:
    sampled = len(reply.completion.token_ids)
    return {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.prompt_tokens + sampled,
    }
