"""Anthropic Messages: requests, `count_tokens`, replies and events.

Reasoning is sent as thinking blocks with a signature; a block that comes back changed is refused, as by Anthropic's
server. Claude Code's billing block changes with every request and is no part of the prompt: it is removed from the
system prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, cast

import msgspec

from tokentrue.errors import MessageError
from tokentrue.gateway.dialects.base import (
    CountingDialect,
    DecodedBody,
    HttpProblem,
    RequestHead,
    TextOf,
    arguments_object,
    arguments_text,
    assistant_message,
    call_entry,
    decode_body,
    describe_item,
    echo,
    encode,
    is_cut,
    is_raw_arguments,
    join_text,
    present,
    raw_items,
    user_and_tool_messages,
)
from tokentrue.gateway.dialects.signing import ReasoningSigner
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.plain_json import convert
from tokentrue.sessions.constraints import constraints_from
from tokentrue.types import Delta, Message, Reply, Sampling, TurnEvent

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


def message_base(head: RequestHead, node: str) -> JsonObject:
    return {"id": f"msg_{node}", "type": "message", "role": "assistant", "model": head.model}


def message_end(head: RequestHead, reply: Reply) -> JsonObject:
    return {"stop_reason": stop_reason(reply), "stop_sequence": stop_sequence(head, reply), "usage": build_usage(reply)}


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


def build_usage(reply: Reply) -> JsonObject:
    return {
        "input_tokens": reply.prompt_tokens,
        "output_tokens": len(reply.completion.token_ids),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def build_error(problem: HttpProblem) -> JsonObject:
    kind = ERROR_TYPES.get(problem.status, "api_error" if problem.status >= 500 else "invalid_request_error")
    error = {"type": kind, "message": problem.message, "code": problem.code, "field": problem.field}
    return {"type": "error", "error": error}


class OpenBlock:
    def __init__(self, kind: str, call: int | None, index: int) -> None:
        self.kind, self.call, self.index = kind, call, index
        self.text = ""  # thinking or arguments so far


class AnthropicEncoder:
    """message_start, the content blocks, message_delta, message_stop. Arguments are sent when complete: only then is it
    known whether they are a JSON object that a client can parse.
    """

    ping = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, head: RequestHead, signer: ReasoningSigner) -> None:
        self._head, self._signer = head, signer
        self._open: OpenBlock | None = None
        self._blocks = 0
        self._started = False

    def feed(self, event: TurnEvent) -> bytes:
        out = b"" if self._started else self._start(event.node_id)
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

    def error(self, problem: HttpProblem) -> bytes:
        return b"event: error\ndata: " + encode(build_error(problem)) + b"\n\n"


def arguments_json(text: str) -> str:
    """JSON text of `arguments_object`; the model's own text if that is an object."""
    value = arguments_object(text)
    return encode(value).decode() if is_raw_arguments(value) else text


def block_delta(block: OpenBlock, delta: JsonObject) -> bytes:
    return sse("content_block_delta", {"index": block.index, "delta": delta})


def sse(kind: str, body: JsonObject) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + encode({"type": kind, **body}) + b"\n\n"


# Requests.
ROLES = ("user", "assistant", "system")
TEXT_BLOCKS = ("text",)
BILLING = "x-anthropic-billing-header:"


class MessagesHead(msgspec.Struct, forbid_unknown_fields=True):
    """All top-level fields except `messages`. Fields typed Any are hints: accepted, without effect on tokens."""

    model: str
    max_tokens: int
    stream: bool | None = False
    system: str | list[Any] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    tools: list[JsonObject] | None = None
    tool_choice: JsonObject | None = None
    metadata: Any = None
    service_tier: Any = None
    cache_control: Any = None
    thinking: Any = None
    output_config: JsonObject | None = None
    context_management: JsonObject | None = None
    speed: Any = None
    inference_geo: Any = None
    diagnostics: Any = None
    fallbacks: Any = None


class CountHead(msgspec.Struct, forbid_unknown_fields=True):
    model: str = ""
    system: str | list[Any] | None = None
    tools: list[JsonObject] | None = None
    tool_choice: JsonObject | None = None
    thinking: Any = None
    output_config: Any = None
    context_management: Any = None
    cache_control: Any = None
    speed: Any = None


class MessagesBody(MessagesHead, kw_only=True, forbid_unknown_fields=True):
    messages: list[Annotated[msgspec.Raw, describe_item(*ROLES)]]


class CountBody(CountHead, kw_only=True, forbid_unknown_fields=True):
    messages: list[Annotated[msgspec.Raw, describe_item(*ROLES)]]


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: JsonObject


class ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: Any = None
    is_error: Any = None


class UserItem(msgspec.Struct, tag_field="role", tag="user"):
    content: str | Annotated[list[TextBlock | ToolResultBlock], msgspec.Meta(min_length=1)]


class AssistantItem(msgspec.Struct, tag_field="role", tag="assistant"):
    content: str | list[TextBlock | ThinkingBlock | ToolUseBlock]


class SystemItem(msgspec.Struct, tag_field="role", tag="system"):
    content: str | list[TextBlock]


ITEM: Any = UserItem | AssistantItem | SystemItem


class AnthropicTool(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(min_length=1)]
    input_schema: JsonObject
    description: str | None = None
    type: Any = None


class Anthropic(CountingDialect):
    name: ClassVar[str] = "anthropic"
    refuses_prefill = True

    def __init__(self, signer: ReasoningSigner) -> None:
        self._signer = signer

    def decode(self, body: bytes) -> DecodedBody:
        decoded = decode_body(body, MessagesBody)
        return DecodedBody(head=head_from_anthropic(decoded), items=raw_items(decoded.messages, self.items_key))

    def decode_count(self, body: bytes) -> DecodedBody:
        decoded = decode_body(body, CountBody)
        _, tools = constraints_from(
            choice_from_anthropic(decoded.tool_choice), None, tools_from_anthropic(decoded.tools)
        )
        head = RequestHead(model=decoded.model, tools=tools, leading_messages=leading_from(decoded.system))
        return DecodedBody(head=head, items=raw_items(decoded.messages, self.items_key))

    def build_count(self, tokens: int) -> JsonObject:
        return {"input_tokens": tokens}

    def parse_item(self, item: Any, path: str) -> tuple[Message, ...]:
        parsed: UserItem | AssistantItem | SystemItem = convert(item, ITEM, path)
        if isinstance(parsed.content, str):
            return ({"role": item["role"], "content": parsed.content},)
        if isinstance(parsed, SystemItem):
            return ({"role": "system", "content": "\n".join(block.text for block in parsed.content)},)
        if isinstance(parsed, AssistantItem):
            return (self._assistant(parsed.content, path),)
        return user_and_tool_messages(
            block.text if isinstance(block, TextBlock) else result_message(block, f"{path}.content[{index}]")
            for index, block in enumerate(parsed.content)
        )

    def _assistant(self, blocks: Sequence[TextBlock | ThinkingBlock | ToolUseBlock], path: str) -> Message:
        texts, thoughts, calls = list[str](), list[str](), list[JsonObject]()
        for index, block in enumerate(blocks):
            if isinstance(block, TextBlock):
                texts.append(block.text)
            elif isinstance(block, ToolUseBlock):
                calls.append(call_entry(block.id, block.name, arguments_text(block.input)))
            elif self._signer.holds(block.signature, block.thinking):
                thoughts.append(block.thinking)
            else:
                message = "the signature does not fit the thinking; send the block back as it came"
                raise MessageError(message, field=f"{path}.content[{index}].signature")
        return assistant_message(texts, thoughts, calls)

    def build_answer(self, head: RequestHead, replies: Sequence[Reply], text_of: TextOf) -> JsonObject:
        base, blocks = message_base(head, replies[0].node), build_blocks(replies[0].message, self._signer)
        return {**base, "content": blocks, **message_end(head, replies[0])}

    def new_encoder(self, head: RequestHead, text_of: TextOf) -> AnthropicEncoder:
        return AnthropicEncoder(head, self._signer)

    build_error = staticmethod(build_error)


def result_message(block: ToolResultBlock, where: str) -> Message:
    text = join_text(block.content, TEXT_BLOCKS, f"{where}.content", glue="\n")
    message: JsonObject = {"role": "tool", "tool_call_id": block.tool_use_id, "content": text or ""}
    return {**message, "is_error": True} if block.is_error else message


def head_from_anthropic(head: MessagesHead) -> RequestHead:
    check_context_management(head.context_management)
    tools = tools_from_anthropic(head.tools)
    extra, tools = constraints_from(
        choice_from_anthropic(head.tool_choice), format_from_config(head.output_config), tools
    )
    given = present(temperature=head.temperature, top_p=head.top_p, top_k=head.top_k)
    return RequestHead(
        model=head.model,
        stream=bool(head.stream),
        sampling=Sampling(max_tokens=head.max_tokens, stop=tuple(head.stop_sequences or ()), extra=extra, **given),
        tools=tools,
        leading_messages=leading_from(head.system),
    )


def leading_from(system: str | list[Any] | None) -> tuple[Message, ...]:
    if isinstance(system, list):
        system = [block for block in system if not is_billing(block)]
    text = join_text(system, TEXT_BLOCKS, "system", glue="\n\n")
    return ({"role": "system", "content": text},) if text else ()


def is_billing(block: Any) -> bool:
    text = cast("JsonObject", block).get("text") if isinstance(block, dict) else None
    return isinstance(text, str) and text.startswith(BILLING)


def tools_from_anthropic(tools: list[JsonObject] | None) -> tuple[JsonObject, ...] | None:
    out: list[JsonObject] = []
    for index, given in enumerate(tools or ()):
        if given.get("type", "custom") not in ("custom", None):
            message = f"tool type {echo(given['type'])} runs on its vendor's servers and is not supported"
            raise MessageError(message, field=f"tools[{index}].type")
        tool = convert(given, AnthropicTool, f"tools[{index}]")
        function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
        out.append({"type": "function", "function": function})
    return tuple(out) or None


def choice_from_anthropic(choice: JsonObject | None) -> str | JsonObject | None:
    kind = (choice or {}).get("type", "auto")
    words = {"auto": "auto", "none": "none", "any": "required"}
    if kind == "tool":
        return {"type": "function", "function": {"name": (choice or {}).get("name")}}
    if not isinstance(kind, str) or kind not in words:
        raise MessageError(f"must be auto, any, tool or none, not {echo(kind)}", field="tool_choice.type")
    return words[kind]


class SchemaFormat(msgspec.Struct):
    schema: JsonObject


def format_from_config(config: JsonObject | None) -> JsonObject | None:
    format_ = (config or {}).get("format")
    if format_ is None:
        return None
    schema = convert(format_, SchemaFormat, "output_config.format").schema
    return {"type": "json_schema", "json_schema": {"schema": schema}}


class ContextEdit(msgspec.Struct):
    type: str
    keep: Any = None


class ContextManagement(msgspec.Struct):
    edits: list[ContextEdit] | None = None


def check_context_management(given: JsonObject | None) -> None:
    """Allows only "keep all thinking"; any other edit would change the context that was sampled from."""
    edits = convert(given or {}, ContextManagement, "context_management").edits or ()
    for index, edit in enumerate(edits):
        if not edit.type.startswith("clear_thinking") or edit.keep != "all":
            message = "only clear_thinking with keep 'all' is supported"
            raise MessageError(message, field=f"context_management.edits[{index}]")
