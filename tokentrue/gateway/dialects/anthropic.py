"""Anthropic Messages: requests, answers and events, and `count_tokens`.

Reasoning travels as thinking blocks under our seal: a block that comes back changed is refused, as the protocol's own server would.
Claude Code's billing block, which changes with every request and is no part of the prompt, is taken out of the system prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tokentrue.errors import MessageError
from tokentrue.gateway.dialects.base import (
    Call,
    Problem,
    Seal,
    TextOf,
    arguments_object,
    arguments_text,
    convert,
    encode,
    is_open,
    joined_text,
    shown,
)
from tokentrue.gateway.dialects.openai_chat import check_function, constraints
from tokentrue.types import Delta, Message, Reply, Sampling, TurnEvent

TEXT_BLOCKS = ("text",)
BILLING = "x-anthropic-billing-header:"
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    422: "invalid_request_error",
    409: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


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
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    metadata: Any = None
    service_tier: Any = None
    cache_control: Any = None
    thinking: Any = None
    output_config: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    speed: Any = None
    inference_geo: Any = None
    diagnostics: Any = None
    fallbacks: Any = None


class CountHead(msgspec.Struct, forbid_unknown_fields=True):
    model: str = ""
    system: str | list[Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Any = None
    output_config: Any = None
    context_management: Any = None
    cache_control: Any = None
    speed: Any = None


class Anthropic:
    name = "anthropic"
    items_key = "messages"

    def __init__(self, seal: Seal) -> None:
        self._seal = seal

    def call(self, head: dict[str, Any]) -> Call:
        asked = convert(head, MessagesHead)
        check_context_management(asked.context_management)
        tools = tools_from_anthropic(asked.tools)
        extra, tools = constraints(choice_from_anthropic(asked.tool_choice), format_from_config(asked.output_config), tools)
        given = {"temperature": asked.temperature, "top_p": asked.top_p, "top_k": asked.top_k}
        present: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return Call(
            model=asked.model,
            stream=bool(asked.stream),
            sampling=Sampling(max_tokens=asked.max_tokens, stop=tuple(asked.stop_sequences or ()), extra=extra, **present),
            tools=tools,
            opening=opening(asked.system),
        )

    def counting(self, head: dict[str, Any]) -> Call:
        """The call of `count_tokens`: nothing will be sampled."""
        asked = convert(head, CountHead)
        _, tools = constraints(choice_from_anthropic(asked.tool_choice), None, tools_from_anthropic(asked.tools))
        return Call(model=asked.model, tools=tools, opening=opening(asked.system))

    def messages(self, items: Sequence[Any], call: Call, *, start: int = 0) -> list[Message]:
        out: list[Message] = []
        for index, item in enumerate(items):
            path = f"messages[{start + index}]"
            if not isinstance(item, dict):
                raise MessageError("must be an object", field=path)
            role = item.get("role")
            if role == "assistant":
                out.append(self._assistant(item.get("content"), path))
            elif role == "user":
                out.extend(user_messages(item.get("content"), path))
            elif role == "system":
                out.append({"role": "system", "content": text_of_blocks(item.get("content"), path)})
            else:
                raise MessageError(f"role {shown(role)} is not supported; use 'user' or 'assistant'", field=f"{path}.role")
        return out

    def _assistant(self, content: Any, path: str) -> Message:
        if isinstance(content, str):
            return {"role": "assistant", "content": content}
        if not isinstance(content, list):
            raise MessageError("must be a string or a list of blocks", field=f"{path}.content")
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for index, block in enumerate(content):
            where = f"{path}.content[{index}]"
            kind = block.get("type") if isinstance(block, dict) else None
            if kind == "text":
                texts.append(string(block, "text", where))
            elif kind == "thinking":
                thoughts.append(self._thought(block, where))
            elif kind == "tool_use":
                calls.append(call_from_block(block, where))
            else:
                raise MessageError(f"block of type {shown(kind)} is not supported in an assistant message", field=where)
        message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts else None}
        if thoughts:
            message["reasoning_content"] = "".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        return message

    def _thought(self, block: dict[str, Any], where: str) -> str:
        text = string(block, "thinking", where)
        signature = block.get("signature", "")
        if not isinstance(signature, str) or not self._seal.holds(signature, text):
            raise MessageError("the signature does not fit the thinking; send the block back as it came", field=f"{where}.signature")
        return text

    def answer(self, call: Call, replies: Sequence[Reply], text_of: TextOf) -> dict[str, Any]:
        reply = replies[0]
        return {
            "id": f"msg_{reply.node}",
            "type": "message",
            "role": "assistant",
            "model": call.model,
            "content": self._blocks(reply.message),
            "stop_reason": stop_reason(reply),
            "stop_sequence": stop_sequence(call, reply),
            "usage": usage_of(reply),
        }

    def _blocks(self, message: Message) -> list[dict[str, Any]]:
        blocks: list[dict[str, Any]] = []
        thought = message.get("reasoning_content")
        if thought:
            blocks.append({"type": "thinking", "thinking": thought, "signature": self._seal.sign(thought)})
        if message.get("content"):
            blocks.append({"type": "text", "text": message["content"]})
        for call in message.get("tool_calls") or ():
            function = call["function"]
            blocks.append(
                {"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments_object(function["arguments"])}
            )
        return blocks

    def encoder(self, call: Call, text_of: TextOf) -> AnthropicEncoder:
        return AnthropicEncoder(call, self._seal)

    def error(self, problem: Problem) -> dict[str, Any]:
        kind = ERROR_TYPES.get(problem.status, "api_error" if problem.status >= 500 else "invalid_request_error")
        error = {"type": kind, "message": problem.message, "code": problem.code, "field": problem.field}
        return {"type": "error", "error": error}


def string(block: dict[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise MessageError("must be a string", field=f"{where}.{name}")
    return value


def text_of_blocks(content: Any, path: str) -> str:
    text = joined_text(content, TEXT_BLOCKS, f"{path}.content", glue="\n")
    if text is None:
        raise MessageError("must be a string or a list of blocks", field=f"{path}.content")
    return text


def opening(system: str | list[Any] | None) -> tuple[Message, ...]:
    if isinstance(system, list):
        system = [block for block in system if not is_billing(block)]
    text = joined_text(system, TEXT_BLOCKS, "system", glue="\n\n")
    return ({"role": "system", "content": text},) if text else ()


def is_billing(block: Any) -> bool:
    return isinstance(block, dict) and isinstance(block.get("text"), str) and block["text"].startswith(BILLING)


def user_messages(content: Any, path: str) -> list[Message]:
    """Tool results become tool messages, in order; the text between them becomes user messages."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    if not isinstance(content, list):
        raise MessageError("must be a string or a list of blocks", field=f"{path}.content")
    out: list[Message] = []
    texts: list[str] = []

    def flush() -> None:
        if texts:
            out.append({"role": "user", "content": "\n".join(texts)})
            texts.clear()

    for index, block in enumerate(content):
        where = f"{path}.content[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            texts.append(string(block, "text", where))
        elif kind == "tool_result":
            flush()
            out.append(tool_message(block, where))
        else:
            raise MessageError(f"block of type {shown(kind)} is not supported; this gateway takes text and tool_result", field=where)
    flush()
    if not out:
        raise MessageError("must not be empty", field=f"{path}.content")
    return out


def tool_message(block: dict[str, Any], where: str) -> Message:
    text = joined_text(block.get("content"), TEXT_BLOCKS, f"{where}.content", glue="\n")
    message: dict[str, Any] = {"role": "tool", "tool_call_id": string(block, "tool_use_id", where), "content": text or ""}
    if block.get("is_error"):
        message["is_error"] = True
    return message


def call_from_block(block: dict[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(block.get("input"), dict):
        raise MessageError("must be an object", field=f"{where}.input")
    function = {"name": string(block, "name", where), "arguments": arguments_text(block["input"])}
    return {"id": string(block, "id", where), "type": "function", "function": function}


def tools_from_anthropic(tools: list[dict[str, Any]] | None) -> tuple[dict[str, Any], ...] | None:
    if not tools:
        return None
    out: list[dict[str, Any]] = []
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.get("type", "custom") not in ("custom", None):
            raise MessageError(f"tool type {shown(tool['type'])} runs on its vendor's servers and is not supported", field=f"{where}.type")
        function = {"name": tool.get("name"), "description": tool.get("description") or "", "parameters": tool.get("input_schema")}
        check_function(function, where)
        if not isinstance(function["parameters"], dict):
            raise MessageError("must be a JSON schema object", field=f"{where}.input_schema")
        out.append({"type": "function", "function": function})
    return tuple(out)


def choice_from_anthropic(choice: dict[str, Any] | None) -> str | dict[str, Any] | None:
    """In the words of Chat Completions."""
    kind = (choice or {}).get("type", "auto")
    words = {"auto": "auto", "none": "none", "any": "required"}
    if kind == "tool":
        return {"type": "function", "function": {"name": (choice or {}).get("name")}}
    if not isinstance(kind, str) or kind not in words:
        raise MessageError(f"must be auto, any, tool or none, not {shown(kind)}", field="tool_choice.type")
    return words[kind]


def format_from_config(config: dict[str, Any] | None) -> dict[str, Any] | None:
    format_ = (config or {}).get("format")
    if format_ is None:
        return None
    schema = format_.get("schema") if isinstance(format_, dict) else None
    if not isinstance(schema, dict):
        raise MessageError("must be of type json_schema, with a schema", field="output_config.format")
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def check_context_management(asked: dict[str, Any] | None) -> None:
    """Keeping all thinking is what happens here anyway; any other edit of the context would be a lie to the sampler."""
    for index, edit in enumerate((asked or {}).get("edits") or ()):
        if not isinstance(edit, dict) or not str(edit.get("type")).startswith("clear_thinking") or edit.get("keep") != "all":
            raise MessageError("only clear_thinking with keep 'all' is supported", field=f"context_management.edits[{index}]")


def stop_sequence(call: Call, reply: Reply) -> str | None:
    by = reply.completion.stopped_by
    return by if isinstance(by, str) and by in call.sampling.stop else None


def stop_reason(reply: Reply) -> str:
    if is_open(reply.completion.finish):
        return "max_tokens"
    if reply.message.get("tool_calls"):
        return "tool_use"
    return "stop_sequence" if isinstance(reply.completion.stopped_by, str) else "end_turn"


def usage_of(reply: Reply) -> dict[str, Any]:
    return {
        "input_tokens": reply.prompt_tokens,
        "output_tokens": len(reply.completion.token_ids),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


class AnthropicEncoder:
    """message_start, then one content block after the other (thinking with its signature, text, tool_use), message_delta, message_stop."""

    ping = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, call: Call, seal: Seal) -> None:
        self._call = call
        self._seal = seal
        self._index = -1
        self._open: tuple[str, int | None] | None = None  # kind of the open block, and its call
        self._thought = ""
        self._started = False

    def feed(self, event: TurnEvent) -> bytes:
        out = b"" if self._started else self._start(event.node)
        if event.delta is not None:
            out += self._delta(event.delta)
        if event.reply is not None:
            out += self._close() + self._end(event.reply)
        return out

    def _start(self, node: str) -> bytes:
        self._started = True
        message = {
            "id": f"msg_{node}",
            "type": "message",
            "role": "assistant",
            "model": self._call.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }
        return sse("message_start", {"message": message}) + self.ping

    def _delta(self, delta: Delta) -> bytes:
        out = b""
        if delta.reasoning:
            out += self._in(("thinking", None), {"type": "thinking", "thinking": "", "signature": ""})
            self._thought += delta.reasoning
            out += self._piece({"type": "thinking_delta", "thinking": delta.reasoning})
        if delta.content:
            out += self._in(("text", None), {"type": "text", "text": ""})
            out += self._piece({"type": "text_delta", "text": delta.content})
        if delta.call is not None:
            block = {"type": "tool_use", "id": delta.call_id, "name": delta.name, "input": {}}
            out += self._in(("tool_use", delta.call), block)
            if delta.arguments:
                out += self._piece({"type": "input_json_delta", "partial_json": delta.arguments})
        return out

    def _in(self, block: tuple[str, int | None], start: dict[str, Any]) -> bytes:
        if self._open == block:
            return b""
        out = self._close()
        self._index += 1
        self._open = block
        return out + sse("content_block_start", {"index": self._index, "content_block": start})

    def _piece(self, delta: dict[str, Any]) -> bytes:
        return sse("content_block_delta", {"index": self._index, "delta": delta})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        out = b""
        if self._open[0] == "thinking":
            out += self._piece({"type": "signature_delta", "signature": self._seal.sign(self._thought)})
            self._thought = ""
        self._open = None
        return out + sse("content_block_stop", {"index": self._index})

    def _end(self, reply: Reply) -> bytes:
        delta = {"stop_reason": stop_reason(reply), "stop_sequence": stop_sequence(self._call, reply)}
        return sse("message_delta", {"delta": delta, "usage": usage_of(reply)}) + sse("message_stop", {})

    def finish(self) -> bytes:
        return b""

    def error(self, problem: Problem) -> bytes:
        return b"event: error\ndata: " + encode(Anthropic(self._seal).error(problem)) + b"\n\n"


def sse(kind: str, body: dict[str, Any]) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + encode({"type": kind, **body}) + b"\n\n"
