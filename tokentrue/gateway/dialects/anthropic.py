"""Anthropic Messages: requests and `count_tokens`. Answers and events are in `anthropic_answers.py`.

Reasoning travels as thinking blocks with a signature: a block that comes back changed is refused, as the protocol's own
server would. Claude Code's billing block, which changes with every request and is no part of the prompt, is taken out
of the system prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, cast

import msgspec

from tokentrue.errors import MessageError
from tokentrue.gateway.dialects.anthropic_answers import AnthropicEncoder, build_error, build_message
from tokentrue.gateway.dialects.base import (
    DecodedBody,
    RequestHead,
    TextOf,
    arguments_text,
    decode_body,
    describe_item,
    echo,
    join_text,
    object_of,
    raw_items,
    text_field,
)
from tokentrue.gateway.dialects.signing import ReasoningSigner
from tokentrue.gateway.dialects.tools import check_function
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


class Anthropic:
    name: ClassVar[str] = "anthropic"
    items_key = "messages"
    splits_turns = False

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
        fields = object_of(item, path)
        role, content = fields.get("role"), fields.get("content")
        if role == "assistant":
            return (self._assistant(content, path),)
        if role == "user":
            return tuple(user_messages(content, path))
        if role == "system":
            return ({"role": "system", "content": text_of_blocks(content, path)},)
        raise MessageError(f"role {echo(role)} is not supported; use 'user' or 'assistant'", field=f"{path}.role")

    def is_settled(self, item: Any) -> bool:
        return True

    def continues_turn(self, parts: Sequence[Message], part: Message) -> bool:
        return True

    def join_turn(self, parts: Sequence[Message]) -> Message:
        raise NotImplementedError("an Anthropic message is one item")

    def check_messages(self, messages: Sequence[Message]) -> None:
        """The protocol lets a last assistant message be continued, which would put words into the sampled turn."""
        if messages and messages[-1]["role"] == "assistant":
            message = (
                "the last message is the assistant's: prefilled answers are not supported; end with a user message"
            )
            raise MessageError(message, field=self.items_key)

    def _assistant(self, content: Any, path: str) -> Message:
        if isinstance(content, str):
            return {"role": "assistant", "content": content}
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[JsonObject] = []
        for where, kind, block in blocks_of(content, path):
            if kind == "text":
                texts.append(text_field(block, "text", where))
            elif kind == "thinking":
                thoughts.append(self._thought(block, where))
            elif kind == "tool_use":
                calls.append(call_from_block(block, where))
            else:
                raise MessageError(f"block of type {echo(kind)} is not supported in an assistant message", field=where)
        message: JsonObject = {"role": "assistant", "content": "".join(texts) if texts else None}
        if thoughts:
            message["reasoning_content"] = "".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        return message

    def _thought(self, block: JsonObject, where: str) -> str:
        text = text_field(block, "thinking", where)
        signature = block.get("signature", "")
        if not isinstance(signature, str) or not self._signer.holds(signature, text):
            raise MessageError(
                "the signature does not fit the thinking; send the block back as it came", field=f"{where}.signature"
            )
        return text

    def build_answer(self, head: RequestHead, replies: Sequence[Reply], text_of: TextOf) -> JsonObject:
        return build_message(head, replies[0], self._signer)

    def new_encoder(self, head: RequestHead, text_of: TextOf) -> AnthropicEncoder:
        return AnthropicEncoder(head, self._signer)

    build_error = staticmethod(build_error)


def head_from_anthropic(head: MessagesHead) -> RequestHead:
    check_context_management(head.context_management)
    tools = tools_from_anthropic(head.tools)
    extra, tools = constraints_from(
        choice_from_anthropic(head.tool_choice), format_from_config(head.output_config), tools
    )
    given = {"temperature": head.temperature, "top_p": head.top_p, "top_k": head.top_k}
    present: JsonObject = {name: value for name, value in given.items() if value is not None}
    return RequestHead(
        model=head.model,
        stream=bool(head.stream),
        sampling=Sampling(max_tokens=head.max_tokens, stop=tuple(head.stop_sequences or ()), extra=extra, **present),
        tools=tools,
        leading_messages=leading_from(head.system),
    )


def blocks_of(content: Any, path: str) -> list[tuple[str, Any, JsonObject]]:
    """Place, type and fields of each content block."""
    if not isinstance(content, list):
        raise MessageError("must be a string or a list of blocks", field=f"{path}.content")
    blocks: list[tuple[str, Any, JsonObject]] = []
    for index, block in enumerate(cast("list[Any]", content)):
        fields: JsonObject = cast("JsonObject", block) if isinstance(block, dict) else {}
        blocks.append((f"{path}.content[{index}]", fields.get("type"), fields))
    return blocks


def text_of_blocks(content: Any, path: str) -> str:
    text = join_text(content, TEXT_BLOCKS, f"{path}.content", glue="\n")
    if text is None:
        raise MessageError("must be a string or a list of blocks", field=f"{path}.content")
    return text


def leading_from(system: str | list[Any] | None) -> tuple[Message, ...]:
    if isinstance(system, list):
        system = [block for block in system if not is_billing(block)]
    text = join_text(system, TEXT_BLOCKS, "system", glue="\n\n")
    return ({"role": "system", "content": text},) if text else ()


def is_billing(block: Any) -> bool:
    text = cast("JsonObject", block).get("text") if isinstance(block, dict) else None
    return isinstance(text, str) and text.startswith(BILLING)


def user_messages(content: Any, path: str) -> list[Message]:
    """Tool results become tool messages, in order; the text between them becomes user messages."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    out: list[Message] = []
    texts: list[str] = []

    def flush() -> None:
        if texts:
            out.append({"role": "user", "content": "\n".join(texts)})
            texts.clear()

    for where, kind, block in blocks_of(content, path):
        if kind == "text":
            texts.append(text_field(block, "text", where))
        elif kind == "tool_result":
            flush()
            out.append(tool_message(block, where))
        else:
            raise MessageError(
                f"block of type {echo(kind)} is not supported; this gateway takes text and tool_result", field=where
            )
    flush()
    if not out:
        raise MessageError("must not be empty", field=f"{path}.content")
    return out


def tool_message(block: JsonObject, where: str) -> Message:
    text = join_text(block.get("content"), TEXT_BLOCKS, f"{where}.content", glue="\n")
    message: JsonObject = {
        "role": "tool",
        "tool_call_id": text_field(block, "tool_use_id", where),
        "content": text or "",
    }
    if block.get("is_error"):
        message["is_error"] = True
    return message


def call_from_block(block: JsonObject, where: str) -> JsonObject:
    arguments = arguments_text(object_of(block.get("input"), f"{where}.input"))
    function = {"name": text_field(block, "name", where), "arguments": arguments}
    return {"id": text_field(block, "id", where), "type": "function", "function": function}


def tools_from_anthropic(tools: list[JsonObject] | None) -> tuple[JsonObject, ...] | None:
    if not tools:
        return None
    out: list[JsonObject] = []
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.get("type", "custom") not in ("custom", None):
            raise MessageError(
                f"tool type {echo(tool['type'])} runs on its vendor's servers and is not supported",
                field=f"{where}.type",
            )
        function = {
            "name": tool.get("name"),
            "description": tool.get("description") or "",
            "parameters": tool.get("input_schema"),
        }
        check_function(function, where)
        if not isinstance(function["parameters"], dict):
            raise MessageError("must be a JSON schema object", field=f"{where}.input_schema")
        out.append({"type": "function", "function": function})
    return tuple(out)


def choice_from_anthropic(choice: JsonObject | None) -> str | JsonObject | None:
    """In the terms of Chat Completions."""
    kind = (choice or {}).get("type", "auto")
    words = {"auto": "auto", "none": "none", "any": "required"}
    if kind == "tool":
        return {"type": "function", "function": {"name": (choice or {}).get("name")}}
    if not isinstance(kind, str) or kind not in words:
        raise MessageError(f"must be auto, any, tool or none, not {echo(kind)}", field="tool_choice.type")
    return words[kind]


def format_from_config(config: JsonObject | None) -> JsonObject | None:
    format_ = (config or {}).get("format")
    if format_ is None:
        return None
    schema = cast("JsonObject", format_).get("schema") if isinstance(format_, dict) else None
    if not isinstance(schema, dict):
        raise MessageError("must be of type json_schema, with a schema", field="output_config.format")
    return {"type": "json_schema", "json_schema": {"schema": cast("JsonObject", schema)}}


def check_context_management(head: JsonObject | None) -> None:
    """Keeping all thinking is what happens here anyway; any other edit would change the context that was sampled
    from."""
    edits = (head or {}).get("edits") or ()
    if not isinstance(edits, list | tuple):
        raise MessageError("must be a list", field="context_management.edits")
    for index, edit in enumerate(cast("Sequence[Any]", edits)):
        fields: JsonObject = cast("JsonObject", edit) if isinstance(edit, dict) else {}
        if not str(fields.get("type")).startswith("clear_thinking") or fields.get("keep") != "all":
            raise MessageError(
                "only clear_thinking with keep 'all' is supported", field=f"context_management.edits[{index}]"
            )
