"""Anthropic Messages. Reasoning is sent as signed thinking blocks; one that comes back changed is refused."""

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

from tokentrue.errors import MessageError
from tokentrue.gateway.dialects.base import (
    DecodedBody,
    Dialect,
    Encoder,
    Hint,
    HttpError,
    ReadImage,
    RequestHead,
    TextOf,
    arguments_object,
    arguments_text,
    assistant_message,
    base64_image,
    call_entry,
    decode_body,
    describe_item,
    encode,
    function_tool,
    image_part,
    is_cut,
    is_raw_arguments,
    join_parts,
    join_text,
    named_function,
    sampling_from,
    sse,
    system_message,
    user_and_tool_messages,
)
from tokentrue.json_types import JsonObject, JsonValue, is_object
from tokentrue.plain_json import convert, echo
from tokentrue.sessions.requests import constraints_from
from tokentrue.sessions.stages.generation import deltas_from_message
from tokentrue.types import Delta, Message, Reply

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
CHOICES = {"auto": "auto", "none": "none", "any": "required"}
ROLES = ("user", "assistant", "system")
TEXT_BLOCKS = ("text",)
BILLING = "x-anthropic-billing-header:"


def message_base(head: RequestHead, node: str) -> JsonObject:
    return {"id": f"msg_{node}", "type": "message", "role": "assistant", "model": head.model}


def message_end(head: RequestHead, reply: Reply) -> JsonObject:
    by = reply.completion.stopped_by
    if is_cut(reply):
        reason = "max_tokens"
    elif reply.message.get("tool_calls"):
        reason = "tool_use"
    else:
        reason = "stop_sequence" if isinstance(by, str) else "end_turn"
    usage = {"input_tokens": reply.prompt_tokens, "output_tokens": len(reply.completion.token_ids)}
    return {
        "stop_reason": reason,
        "stop_sequence": by if isinstance(by, str) and by in head.sampling.stop else None,
        "usage": {**usage, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0},
    }


def tool_use(call: Delta, arguments: JsonObject) -> JsonObject:
    return {"type": "tool_use", "id": call.call_id, "name": call.name, "input": arguments}


class AnthropicEncoder(Encoder):
    """Arguments are sent when complete: only then is it known whether they are an object."""

    ping = b'event: ping\ndata: {"type":"ping"}\n\n'
    _open: tuple[str, int | None] | None = None  # kind and call of the open block
    _index = -1  # of the newest block
    _text = ""  # its thinking or arguments so far

    def begin(self) -> bytes:
        end = {"stop_reason": None, "stop_sequence": None, "usage": {"input_tokens": 0, "output_tokens": 0}}
        message: JsonObject = {**message_base(self.head, self.node), "content": [], **end}
        return self._event("message_start", message=message) + self.ping

    def _event(self, kind: str, **body: JsonValue) -> bytes:
        return sse({"type": kind, **body}, kind)

    def add(self, index: int, delta: Delta) -> bytes:
        out = b""
        if delta.reasoning:
            out += self._enter("thinking", None, {"type": "thinking", "thinking": "", "signature": ""})
            self._text += delta.reasoning
            out += self._delta("thinking_delta", thinking=delta.reasoning)
        if delta.content:
            out += self._enter("text", None, {"type": "text", "text": ""})
            out += self._delta("text_delta", text=delta.content)
        if delta.call is not None:
            out += self._enter("tool_use", delta.call, tool_use(delta, {}))
            self._text += delta.arguments
        return out

    def _enter(self, kind: str, call: int | None, start: JsonObject) -> bytes:
        if self._open == (kind, call):
            return b""
        out = self._close()
        self._open, self._index, self._text = (kind, call), self._index + 1, ""
        return out + self._event("content_block_start", index=self._index, content_block=start)

    def _delta(self, kind: str, **body: str) -> bytes:
        return self._event("content_block_delta", index=self._index, delta={"type": kind, **body})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        out, (kind, _), self._open = b"", self._open, None
        if kind == "thinking":
            out += self._delta("signature_delta", signature=self.dialect.signer.sign(self._text))
        elif kind == "tool_use" and self._text:
            # The model's own text if that is an object.
            value = arguments_object(self._text)
            text = encode(value).decode() if is_raw_arguments(value) else self._text
            out += self._delta("input_json_delta", partial_json=text)
        return out + self._event("content_block_stop", index=self._index)

    def end(self, index: int, reply: Reply) -> bytes:
        end = message_end(self.head, reply)
        usage = end.pop("usage")
        return self._close() + self._event("message_delta", delta=end, usage=usage) + self._event("message_stop")

    def error(self, problem: HttpError) -> bytes:
        return sse(self.dialect.build_error(problem), "error")


class SchemaFormat(msgspec.Struct):
    schema: JsonObject


class OutputConfig(msgspec.Struct):
    format: SchemaFormat | None = None


class ContextEdit(msgspec.Struct):
    type: str
    keep: JsonValue = None


class ContextManagement(msgspec.Struct):
    edits: list[ContextEdit] | None = None


class CountBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    messages: list[Annotated[msgspec.Raw, describe_item(*ROLES)]]
    model: str = ""
    system: str | list[JsonValue] | None = None
    tools: list[JsonObject] | None = None
    tool_choice: JsonObject | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    thinking: Hint = None
    cache_control: Hint = None
    speed: Hint = None


class MessagesBody(CountBody, kw_only=True):
    model: str  # pyright: ignore[reportGeneralTypeIssues]
    max_tokens: int
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    metadata: Hint = None
    service_tier: Hint = None
    inference_geo: Hint = None
    diagnostics: Hint = None
    fallbacks: Hint = None


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
    content: JsonValue = None
    is_error: bool | None = None


class Base64Source(msgspec.Struct, tag_field="type", tag="base64", forbid_unknown_fields=True):
    media_type: str
    data: str


class UrlSource(msgspec.Struct, tag_field="type", tag="url", forbid_unknown_fields=True):
    url: str


class ImageBlock(msgspec.Struct, tag_field="type", tag="image", forbid_unknown_fields=True):
    source: Base64Source | UrlSource
    cache_control: Hint = None


class UserItem(msgspec.Struct, tag_field="role", tag="user"):
    content: str | Annotated[list[TextBlock | ToolResultBlock | ImageBlock], msgspec.Meta(min_length=1)]


class AssistantItem(msgspec.Struct, tag_field="role", tag="assistant"):
    content: str | list[TextBlock | ThinkingBlock | ToolUseBlock]


class SystemItem(msgspec.Struct, tag_field="role", tag="system"):
    content: str | list[TextBlock]


ITEM: JsonValue = UserItem | AssistantItem | SystemItem


class AnthropicTool(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(min_length=1)]
    input_schema: JsonObject
    description: str | None = None


class Anthropic(Dialect):
    name = "anthropic"
    count_key = "input_tokens"
    refuses_prefill = True
    encoder = AnthropicEncoder

    def decode(self, body: bytes) -> DecodedBody:
        given = decode_body(body, MessagesBody)
        for index, edit in enumerate((given.context_management and given.context_management.edits) or ()):
            # Any other edit would change the context that was sampled from.
            if not edit.type.startswith("clear_thinking") or edit.keep != "all":
                message = "only clear_thinking with keep 'all' is supported"
                raise MessageError(message, field=f"context_management.edits[{index}]")
        extra, tools = read_tools(given)
        sampling = sampling_from(given, stop=given.stop_sequences, extra=extra)
        leading, stream = leading_from(given.system), bool(given.stream)
        head = RequestHead(model=given.model, stream=stream, sampling=sampling, tools=tools, leading_messages=leading)
        return DecodedBody(head, given.messages)

    def decode_count(self, body: bytes) -> DecodedBody:
        given = decode_body(body, CountBody)
        _, tools = read_tools(given)
        head = RequestHead(model=given.model, tools=tools, leading_messages=leading_from(given.system))
        return DecodedBody(head, given.messages)

    def parse_item(self, item: JsonValue, path: str) -> tuple[Message, ...]:
        parsed: UserItem | AssistantItem | SystemItem = convert(item, ITEM, path)
        if isinstance(parsed.content, str):
            return ({"role": item["role"], "content": parsed.content},)
        if isinstance(parsed, SystemItem):
            return ({"role": "system", "content": "\n".join(block.text for block in parsed.content)},)
        if isinstance(parsed, UserItem):
            return user_and_tool_messages(
                part_from_block(block, f"{path}.content[{index}]") for index, block in enumerate(parsed.content)
            )
        texts, thoughts, calls = list[str](), list[str](), list[JsonObject]()
        for index, block in enumerate(parsed.content):
            if isinstance(block, TextBlock):
                texts.append(block.text)
            elif isinstance(block, ToolUseBlock):
                calls.append(call_entry(block.id, block.name, arguments_text(block.input)))
            elif self.signer.holds(block.signature, block.thinking):
                thoughts.append(block.thinking)
            else:
                message = "the signature does not fit the thinking; send the block back as it came"
                raise MessageError(message, field=f"{path}.content[{index}].signature")
        return (assistant_message(texts, thoughts, calls),)

    def build_answer(self, head: RequestHead, replies: Sequence[Reply], text_of: TextOf) -> JsonObject:
        reply, blocks = replies[0], list[JsonObject]()
        for delta in deltas_from_message(reply.message):
            if thought := delta.reasoning:
                blocks.append({"type": "thinking", "thinking": thought, "signature": self.signer.sign(thought)})
            if delta.content:
                blocks.append({"type": "text", "text": delta.content})
            if delta.call is not None:
                blocks.append(tool_use(delta, arguments_object(delta.arguments)))
        return {**message_base(head, reply.node), "content": blocks, **message_end(head, reply)}

    @staticmethod
    def build_error(problem: HttpError) -> JsonObject:
        kind = ERROR_TYPES.get(problem.status, "api_error" if problem.status >= 500 else "invalid_request_error")
        error = {"type": kind, "message": str(problem), "code": problem.code, "field": problem.field}
        return {"type": "error", "error": error}


def part_from_block(block: TextBlock | ToolResultBlock | ImageBlock, where: str) -> str | Message:
    if isinstance(block, TextBlock):
        return block.text
    return result_message(block, where) if isinstance(block, ToolResultBlock) else image_from_block(block, where)


def image_from_block(block: ImageBlock, where: str) -> JsonObject:
    source = block.source
    if isinstance(source, UrlSource):
        return image_part(source.url, f"{where}.source.url")
    return base64_image(source.media_type, source.data, f"{where}.source")


IMAGE_BLOCKS: Mapping[str, ReadImage] = {
    "image": lambda part, path: image_from_block(convert(part, ImageBlock, path), path)
}


def result_message(block: ToolResultBlock, where: str) -> Message:
    content = join_parts(block.content, TEXT_BLOCKS, f"{where}.content", glue="\n", images=IMAGE_BLOCKS)
    message: JsonObject = {"role": "tool", "tool_call_id": block.tool_use_id, "content": content or ""}
    return {**message, "is_error": True} if block.is_error else message


def leading_from(system: str | list[JsonValue] | None) -> tuple[Message, ...]:
    if isinstance(system, list):
        system = [block for block in system if not has_billing(block)]
    return system_message(join_text(system, TEXT_BLOCKS, "system", glue="\n\n"))


def has_billing(block: JsonValue) -> bool:
    return is_object(block) and str(block.get("text")).startswith(BILLING)


def read_tools(given: CountBody) -> tuple[JsonObject, tuple[JsonObject, ...] | None]:
    tools: list[JsonObject] = []
    for index, declared in enumerate(given.tools or ()):
        if declared.get("type", "custom") not in ("custom", None):
            message = f"tool type {echo(declared['type'])} runs on its vendor's servers and is not supported"
            raise MessageError(message, field=f"tools[{index}].type")
        tool = convert(declared, AnthropicTool, f"tools[{index}]")
        tools.append(function_tool(tool.name, tool.description, tool.input_schema))
    asked = given.tool_choice or {}
    kind = asked.get("type", "auto")
    if kind != "tool" and (not isinstance(kind, str) or kind not in CHOICES):
        raise MessageError(f"must be auto, any, tool or none, not {echo(kind)}", field="tool_choice.type")
    choice = named_function(asked.get("name")) if kind == "tool" else CHOICES[kind]
    format_ = given.output_config.format if given.output_config else None
    asked_format = None if format_ is None else {"type": "json_schema", "json_schema": {"schema": format_.schema}}
    return constraints_from(choice, asked_format, tuple(tools) or None)
