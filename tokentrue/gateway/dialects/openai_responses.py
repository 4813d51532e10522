"""OpenAI Responses: requests, answers, and how items become messages. Its events are in `responses_events.py`.

One model turn is several items here (reasoning, message, function calls); consecutive ones are one assistant message. Reasoning
travels as `reasoning_text` and, sealed, as `encrypted_content`: it survives clients that keep only the latter. A custom
(free-form) tool is shown to the model as a function with one string, and served back as a custom tool call; a namespace's
tools are shown under both names, and served back with their namespace.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
import orjson

from tokentrue.errors import MessageError
from tokentrue.gateway.dialects.base import Call, Problem, Seal, TextOf, convert, is_open, joined_text, shown
from tokentrue.gateway.dialects.openai_chat import OpenAIChat, check_function, constraints, logprobs_of
from tokentrue.gateway.dialects.responses_events import ResponsesEncoder
from tokentrue.gateway.dialects.responses_items import Served, call_item, message_item, reasoning_item, shown_name
from tokentrue.types import Message, Reply, Sampling

TEXT_PARTS = ("input_text", "output_text", "text", "refusal")
REASONING_PARTS = ("reasoning_text", "summary_text", "text")
INCLUDES = {"reasoning.encrypted_content", "message.output_text.logprobs"}
UNSTORED = "resp_ns_"
STORED = "resp_"


class Reasoning(msgspec.Struct):
    effort: Any = None
    summary: Any = None


class TextConfig(msgspec.Struct, forbid_unknown_fields=True):
    format: dict[str, Any] | None = None
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
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
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


class ResponsesOptions(msgspec.Struct, frozen=True):
    stored: bool
    logprobs: bool
    served: Mapping[str, Served]  # tools whose calls are not plain function calls
    echo: Mapping[str, Any]  # the request's own settings, which every answer repeats


class OpenAIResponses:
    name = "openai_responses"
    items_key = "input"

    def __init__(self, seal: Seal) -> None:
        self._seal = seal

    def call(self, head: dict[str, Any]) -> Call:
        asked = convert(head, ResponsesHead)
        for index, name in enumerate(asked.include or ()):
            if name not in INCLUDES:
                raise MessageError(f"{shown(name)} is not supported; known: {', '.join(sorted(INCLUDES))}", field=f"include[{index}]")
        tools, served = tools_from_responses(asked.tools)
        extra, tools = constraints(choice_from_responses(asked.tool_choice), format_from_text(asked.text), tools)
        given = {"temperature": asked.temperature, "top_p": asked.top_p, "top_logprobs": asked.top_logprobs}
        given["max_tokens"] = asked.max_output_tokens
        present: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return Call(
            model=asked.model,
            stream=bool(asked.stream),
            sampling=Sampling(extra=extra, **present),
            tools=tools,
            opening=({"role": "system", "content": asked.instructions},) if asked.instructions else (),
            continues=node_of(asked.previous_response_id),
            options=ResponsesOptions(
                stored=asked.store is not False,
                logprobs="message.output_text.logprobs" in (asked.include or ()),
                served=served,
                echo=echo_of(asked),
            ),
        )

    def messages(self, items: Sequence[Any], call: Call, *, start: int = 0) -> list[Message]:
        out: list[dict[str, Any]] = []
        turn: dict[str, Any] | None = None  # the assistant message that consecutive items are building
        for index, item in enumerate(items):
            path = f"input[{start + index}]"
            if not isinstance(item, dict):
                raise MessageError("must be an object", field=path)
            kind = item.get("type") or ("message" if "role" in item else None)
            if kind in ("reasoning", "function_call", "custom_tool_call") or (kind == "message" and item.get("role") == "assistant"):
                if turn is None:
                    turn = {"role": "assistant", "content": None}
                    out.append(turn)
                self._add(turn, kind, item, path)
            else:
                turn = None
                out.append(given_message(kind, item, path))
        return [message for message in out if message["role"] != "assistant" or len(message) > 2 or message["content"] is not None]

    def _add(self, turn: dict[str, Any], kind: str | None, item: dict[str, Any], path: str) -> None:
        if kind == "reasoning":
            text = self._reasoning(item, path)
            if text:
                turn["reasoning_content"] = turn.get("reasoning_content", "") + text
        elif kind == "message":
            text = joined_text(item.get("content"), TEXT_PARTS, f"{path}.content", glue="")
            if text is None:
                raise MessageError("must be a string or a list of parts", field=f"{path}.content")
            turn["content"] = (turn["content"] or "") + text
        else:
            turn.setdefault("tool_calls", []).append(call_from_item(kind, item, path))

    def _reasoning(self, item: dict[str, Any], path: str) -> str:
        sealed = item.get("encrypted_content")
        if item.get("content"):
            return joined_text(item["content"], REASONING_PARTS, f"{path}.content", glue="") or ""
        if isinstance(sealed, str):
            return self._seal.unwrap(sealed) or ""
        return joined_text(item.get("summary"), REASONING_PARTS, f"{path}.summary", glue="") or ""

    def answer(self, call: Call, replies: Sequence[Reply], text_of: TextOf) -> dict[str, Any]:
        return response_of(call, replies[0], self._seal, text_of)

    def encoder(self, call: Call, text_of: TextOf) -> ResponsesEncoder:
        def whole(reply: Reply) -> dict[str, Any]:
            return response_of(call, reply, self._seal, text_of)

        return ResponsesEncoder(
            opened=lambda node: response_base(call, node, status="in_progress"),
            whole=whole,
            served=call.options.served,
            seal=self._seal,
            error=self.error,
        )

    def error(self, problem: Problem) -> dict[str, Any]:
        return OpenAIChat().error(problem)


def node_of(response_id: str | None) -> str | None:
    if response_id is None:
        return None
    if response_id.startswith(UNSTORED):
        raise MessageError("that response was made with store: false and cannot be continued by id", field="previous_response_id")
    if not response_id.startswith(STORED):
        raise MessageError("is not a response of this gateway", field="previous_response_id")
    return response_id.removeprefix(STORED)


def echo_of(asked: ResponsesHead) -> dict[str, Any]:
    return {
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "metadata": asked.metadata or {},
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": asked.previous_response_id,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "tools": asked.tools or [],
        "tool_choice": asked.tool_choice or "auto",
        "text": {"format": (asked.text and asked.text.format) or {"type": "text"}},
        "truncation": "disabled",
    }


def tools_from_responses(tools: list[dict[str, Any]] | None) -> tuple[tuple[dict[str, Any], ...] | None, dict[str, Served]]:
    """As functions, and how a call of each is to be served. A tool in a namespace is shown to the model as `namespace__name`."""
    out: list[dict[str, Any]] = []
    served: dict[str, Served] = {}
    for where, namespace, tool in flattened(tools or ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == "function":
            function = {"name": tool.get("name"), "description": tool.get("description") or "", "parameters": tool.get("parameters") or {}}
        elif kind == "custom":
            function = custom_function(tool, where)
        else:
            raise MessageError(f"tool type {shown(kind)} is not supported; use 'function', 'custom' or 'namespace'", field=f"{where}.type")
        check_function(function, where)
        name = function["name"]
        function["name"] = shown_name(namespace, name)
        if kind == "custom" or namespace:
            served[function["name"]] = Served(name=name, namespace=namespace, custom=kind == "custom")
        out.append({"type": "function", "function": function})
    return (tuple(out) or None), served


def flattened(tools: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str | None, Any]]:
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.get("type") != "namespace":
            yield where, None, tool
            continue
        if not isinstance(tool.get("name"), str) or not isinstance(tool.get("tools"), list):
            raise MessageError("a namespace needs a name and a list of tools", field=where)
        for place, inner in enumerate(tool["tools"]):
            yield f"{where}.tools[{place}]", tool["name"], inner


def custom_function(tool: dict[str, Any], where: str) -> dict[str, Any]:
    format_ = tool.get("format") or {"type": "text"}
    if not isinstance(format_, dict) or format_.get("type") not in ("text", "grammar"):
        raise MessageError("must be text or grammar", field=f"{where}.format.type")
    described = tool.get("description") or ""
    if not isinstance(tool.get("name"), str) or not isinstance(described, str):
        raise MessageError("must be a string", field=f"{where}.name")
    if format_["type"] == "grammar":
        described += f"\n\nThe input follows this {format_.get('syntax')} grammar:\n{format_.get('definition')}"
    schema = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    return {"name": tool["name"], "description": described, "parameters": schema}


def choice_from_responses(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") not in ("function", "custom"):
        raise MessageError(f"type {shown(choice.get('type'))} is not supported", field="tool_choice.type")
    return {"type": "function", "function": {"name": choice.get("name")}}


def format_from_text(text: TextConfig | None) -> dict[str, Any] | None:
    """Responses flattens what Chat Completions nests under `json_schema`."""
    format_ = text.format if text else None
    if format_ is None or format_.get("type") != "json_schema":
        return format_
    return {"type": "json_schema", "json_schema": {name: value for name, value in format_.items() if name != "type"}}


def given_message(kind: str | None, item: dict[str, Any], path: str) -> dict[str, Any]:
    if kind == "message":
        role = item.get("role")
        if role not in ("user", "system", "developer"):
            raise MessageError(f"role {shown(role)} is not supported", field=f"{path}.role")
        text = joined_text(item.get("content"), TEXT_PARTS, f"{path}.content", glue="\n")
        if text is None:
            raise MessageError("must be a string or a list of parts", field=f"{path}.content")
        return {"role": "user" if role == "user" else "system", "content": text}
    if kind in ("function_call_output", "custom_tool_call_output"):
        text = joined_text(item.get("output"), TEXT_PARTS, f"{path}.output", glue="\n")
        if text is None or not isinstance(item.get("call_id"), str):
            raise MessageError("needs a call_id and an output of text", field=path)
        return {"role": "tool", "tool_call_id": item["call_id"], "content": text}
    raise MessageError(f"item of type {shown(kind)} is not supported", field=f"{path}.type")


def call_from_item(kind: str | None, item: dict[str, Any], path: str) -> dict[str, Any]:
    said = item.get("arguments" if kind == "function_call" else "input")
    if not isinstance(said, str) or not isinstance(item.get("name"), str) or not isinstance(item.get("call_id"), str):
        raise MessageError("needs a name, a call_id and its arguments as text", field=path)
    arguments = said if kind == "function_call" else orjson.dumps({"input": said}).decode()
    namespace = item.get("namespace")
    name = shown_name(namespace if isinstance(namespace, str) else None, item["name"])
    return {"id": item["call_id"], "type": "function", "function": {"name": name, "arguments": arguments}}


def response_base(call: Call, node: str, *, status: str) -> dict[str, Any]:
    return {
        "id": (STORED if call.options.stored else UNSTORED) + node,
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": None,
        "model": call.model,
        "output": [],
        "usage": None,
        **call.options.echo,
    }


def response_of(call: Call, reply: Reply, seal: Seal, text_of: TextOf) -> dict[str, Any]:
    cut = is_open(reply.completion.finish)
    response = response_base(call, reply.node, status="incomplete" if cut else "completed")
    response["output"] = items_of(call, reply, seal, text_of, status="incomplete" if cut else "completed")
    response["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
    sampled = len(reply.completion.token_ids)
    response["usage"] = {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.prompt_tokens + sampled,
    }
    return response


def items_of(call: Call, reply: Reply, seal: Seal, text_of: TextOf, *, status: str) -> list[dict[str, Any]]:
    message, node = reply.message, reply.node
    items: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        items.append(reasoning_item(node, message["reasoning_content"], seal, status=status))
    if message.get("content"):
        logprobs: list[dict[str, Any]] = []
        if call.options.logprobs:
            done = reply.completion
            logprobs = logprobs_of(done.token_ids, done.logprobs, done.top_logprobs, text_of)["content"]
        items.append(message_item(node, message["content"], logprobs, status=status))
    for index, made in enumerate(message.get("tool_calls") or ()):
        items.append(call_item(made, f"{node}_{index}", call.options.served, status=status))
    return items
