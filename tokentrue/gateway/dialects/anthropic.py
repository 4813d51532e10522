"""Anthropic Messages: requests and `count_tokens`. Answers and events are in `anthropic_answers.py`.

Reasoning travels as thinking blocks with a signature: a block that comes back changed is refused, as the protocol's own
server would. Claude Code's billing block, which changes with every request and is no part of the prompt, is taken out
of the system prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, cast

import msgspec

from tokentrue.conversion import convert
from tokentrue.errors import MessageError
from tokentrue.gateway.dialects.anthropic_answers import AnthropicEncoder, build_error, build_message
from tokentrue.gateway.dialects.base import (
    CountingDialect,
    DecodedBody,
    RequestHead,
    TextOf,
    arguments_text,
    assistant_message,
    call_entry,
    decode_body,
    describe_item,
    echo,
    join_text,
    present,
    raw_items,
    user_and_tool_messages,
)
from tokentrue.gateway.dialects.signing import ReasoningSigner
from tokentrue.json_types import JsonObject
from tokentrue.sessions.constraints import constraints_from
from tokentrue.types import Message, Reply, Sampling

ROLES = ("user", "assistant", "system")
TEXT_BLOCKS = ("text",)
BILLING = "x-anthropic-billing-header:"


class MessagesHead(msgspec.Struct, forbid_unknown_fields=True):
    """Every top-level field but `messages`. Fields typed Any are hints: accepted, without effect on tokens."""

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


class AnthropicTool(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(min_length=1)]
    input_schema: JsonObject
    description: str | None = None
    type: Any = None


class Anthropic(CountingDialect):
    name: ClassVar[str] = "anthropic"

    def __init__(self, signer: ReasoningSigner) -> None:
        self._signer = signer

    def decode(self, body: bytes) -> DecodedBody:
        decoded = decode_body(body, MessagesBody)
        return DecodedBody(head=head_from_anthropic(decoded), items=raw_items(decoded.messages, self.items_key))

    def decode_count(self, body: bytes) -> DecodedBody:
        """The body of `count_tokens`: nothing will be sampled."""
        decoded = decode_body(body, CountBody)
        _, tools = constraints_from(
            choice_from_anthropic(decoded.tool_choice), None, tools_from_anthropic(decoded.tools)
        )
        head = RequestHead(model=decoded.model, tools=tools, leading_messages=leading_from(decoded.system))
        return DecodedBody(head=head, items=raw_items(decoded.messages, self.items_key))

    def build_count(self, tokens: int) -> JsonObject:
        return {"input_tokens": tokens}

    def parse_item(self, item: Any, path: str) -> tuple[Message, ...]:
        parsed: UserItem | AssistantItem | SystemItem = convert(item, UserItem | AssistantItem | SystemItem, path)  # pyright: ignore[reportArgumentType]
        content = parsed.content
        if isinstance(content, str):
            return ({"role": item["role"], "content": content},)
        if isinstance(parsed, AssistantItem):
            return (self._assistant(parsed.content, path),)
        if isinstance(parsed, SystemItem):
            return ({"role": "system", "content": "\n".join(block.text for block in parsed.content)},)
        return user_and_tool_messages(
            block.text if isinstance(block, TextBlock) else result_message(block, f"{path}.content[{index}]")
            for index, block in enumerate(content)
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
        return build_message(head, replies[0], self._signer)

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
    """In the terms of Chat Completions."""
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
    """Keeping all thinking is what happens here anyway; any other edit would change the context that was sampled
    from."""
    edits = convert(given or {}, ContextManagement, "context_management").edits or ()
    for index, edit in enumerate(edits):
        if not edit.type.startswith("clear_thinking") or edit.keep != "all":
            message = "only clear_thinking with keep 'all' is supported"
            raise MessageError(message, field=f"context_management.edits[{index}]")
