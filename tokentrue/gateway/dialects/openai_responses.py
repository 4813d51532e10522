"""OpenAI Responses: requests. Replies and events are in `responses_answers.py`.

One model turn is several items here (reasoning, message, function calls); consecutive ones are one assistant message,
unless their ids show that two turns of this session served them. Reasoning is sent as `reasoning_text` and, sealed, as
`encrypted_content`, for clients that keep only the latter. The model sees a custom (free-form) tool as a function with
one string, and the tools of a namespace as `namespace__name`; calls are served in the client's form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, cast

import msgspec
import orjson

from tokentrue.errors import MessageError
from tokentrue.gateway.dialects.base import (
    ContinuedResponse,
    DecodedBody,
    Dialect,
    FunctionTool,
    RequestHead,
    TextOf,
    assistant_message,
    call_entry,
    decode_body,
    echo,
    encode,
    join_text,
    present,
    raw_items,
    require_object,
)
from tokentrue.gateway.dialects.openai_chat import build_error
from tokentrue.gateway.dialects.responses_answers import (
    INSTRUCTED,
    STORED,
    UNSTORED,
    ResponsesEncoder,
    ResponsesOptions,
    ServedTool,
    build_whole,
    custom_input,
)
from tokentrue.gateway.dialects.signing import ReasoningSigner
from tokentrue.json_types import JsonObject
from tokentrue.plain_json import convert
from tokentrue.sessions.constraints import constraints_from
from tokentrue.types import Message, Reply, Sampling

FindArguments = Callable[[str], Sequence[str]]
"""Returns the recorded arguments of the calls served under an id."""

TEXT_PARTS = ("input_text", "output_text", "text", "refusal")
REASONING_PARTS = ("reasoning_text", "summary_text", "text")
CALLS = ("function_call", "custom_tool_call")
OUTPUTS = ("function_call_output", "custom_tool_call_output")
TURN = "turn"  # on a part of an assistant message: the node of this session that served it
_ITEM_ID = re.compile(r"(?:rs|msg|fc|ctc)_([0-9a-f]+)(?:_\d+)?")
INCLUDES = {"reasoning.encrypted_content", "message.output_text.logprobs"}


class Reasoning(msgspec.Struct):
    effort: Any = None
    summary: Any = None


class TextConfig(msgspec.Struct, forbid_unknown_fields=True):
    format: JsonObject | None = None
    verbosity: Any = None


class ResponsesHead(msgspec.Struct, forbid_unknown_fields=True):
    """All top-level fields except `input`. Fields typed Any are hints: accepted, without effect on tokens."""

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
        """The node of the last item written by a model; None if its id is not of this session."""
        for raw in reversed(items):
            try:
                item = msgspec.json.decode(raw, type=ItemName)
            except (msgspec.DecodeError, UnicodeDecodeError):  # the parser reports what is wrong with it
                return None
            if not item.is_given:
                node = node_from_item_id(item.id)
                return node if node is not None and self._is_node(node) else None
        return None

    def parse_item(self, item: Any, path: str) -> tuple[Message, ...]:
        fields = require_object(item, path)
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
        """False if another node served `part`. A part without a node belongs to those before it."""
        before = [one[TURN] for one in parts if TURN in one]
        return not before or part.get(TURN, before[-1]) == before[-1]

    def build_answer(self, head: RequestHead, replies: Sequence[Reply], text_of: TextOf) -> JsonObject:
        return build_whole(head, replies[0], text_of, self._signer)

    def new_encoder(self, head: RequestHead, text_of: TextOf) -> ResponsesEncoder:
        return ResponsesEncoder(head, text_of, self._signer)

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


class ItemName(msgspec.Struct):
    """The fields of an item that identify its author; the rest, which may be long, is skipped."""

    id: Any = None
    role: Any = "assistant"
    type: Any = None

    @property
    def is_given(self) -> bool:
        return self.role != "assistant" or str(self.type).endswith("_output")


def node_from_item_id(item_id: object) -> str | None:
    """The node in an item's id, if the id has our form."""
    found = _ITEM_ID.fullmatch(item_id) if isinstance(item_id, str) else None
    return found[1] if found else None


def model_name(namespace: str | None, name: str) -> str:
    """The tool's name as the model sees it."""
    return f"{namespace}__{name}" if namespace else name


class CallItem(msgspec.Struct):
    name: str
    call_id: str
    arguments: str = ""
    input: str = ""
    namespace: Any = None


class OutputOfCall(msgspec.Struct):
    call_id: str
    output: Any


# Items.
def message_from_item(
    item: JsonObject, path: str, signer: ReasoningSigner, find_arguments: FindArguments
) -> Message | None:
    """Returns a message or a part of an assistant message; None for reasoning without any text left."""
    kind = item.get("type") or ("message" if "role" in item else None)
    if kind == "reasoning":
        text = reasoning_text(item, path, signer)
        return assistant_message((), [text], ()) if text else None
    if kind in CALLS:
        return assistant_message((), (), [call_from_item(convert(item, CallItem, path), kind, find_arguments)])
    if kind == "message":
        return text_message(item, path)
    if kind in OUTPUTS:
        result = convert(item, OutputOfCall, path)
        text = join_text(result.output, TEXT_PARTS, f"{path}.output", glue="\n")
        if text is None:
            raise MessageError("must be text", field=f"{path}.output")
        return {"role": "tool", "tool_call_id": result.call_id, "content": text}
    raise MessageError(f"item of type {echo(kind)} is not supported", field=f"{path}.type")


def text_message(item: JsonObject, path: str) -> Message:
    role = item.get("role")
    if role not in ("user", "system", "developer", "assistant"):
        raise MessageError(f"role {echo(role)} is not supported", field=f"{path}.role")
    text = join_text(item.get("content"), TEXT_PARTS, f"{path}.content", glue="" if role == "assistant" else "\n")
    if text is None:
        raise MessageError("must be a string or a list of parts", field=f"{path}.content")
    return {"role": "system" if role == "developer" else role, "content": text}


def reasoning_text(item: JsonObject, path: str, signer: ReasoningSigner) -> str:
    sealed = item.get("encrypted_content")
    if item.get("content"):
        return join_text(item["content"], REASONING_PARTS, f"{path}.content", glue="") or ""
    if isinstance(sealed, str):
        return signer.unwrap(sealed) or ""
    return join_text(item.get("summary"), REASONING_PARTS, f"{path}.summary", glue="") or ""


def call_from_item(item: CallItem, kind: str, find_arguments: FindArguments) -> JsonObject:
    is_function = kind == "function_call"
    arguments = item.arguments if is_function else arguments_from_input(item.input, find_arguments(item.call_id))
    namespace = item.namespace if isinstance(item.namespace, str) else None
    return call_entry(item.call_id, model_name(namespace, item.name), arguments)


def arguments_from_input(said: str, recorded: Sequence[str]) -> str:
    """Inverse of `custom_input`. Arguments that broke off or contain more than the input are served as the input alone:
    the call's id finds them in the record.
    """
    found = (arguments for arguments in recorded if custom_input(arguments) == said)
    return next(found, None) or orjson.dumps({"input": said}).decode()


# Tools.
def tools_from_responses(tools: list[JsonObject] | None) -> tuple[tuple[JsonObject, ...] | None, dict[str, ServedTool]]:
    """Returns the tools as functions, and how calls of each are served."""
    out: list[JsonObject] = []
    served: dict[str, ServedTool] = {}
    for where, namespace, tool in flatten_namespaces(tools or ()):
        kind = tool.get("type")
        if kind not in ("function", "custom"):
            message = f"tool type {echo(kind)} is not supported; use 'function', 'custom' or 'namespace'"
            raise MessageError(message, field=f"{where}.type")
        given = convert(tool, FunctionTool, where)
        shown, described, parameters = (
            model_name(namespace, given.name),
            given.description or "",
            given.parameters or {},
        )
        if kind == "custom":
            described += describe_grammar(tool, where)
            parameters = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
        how = ServedTool(name=given.name, namespace=namespace, custom=kind == "custom")
        if served.setdefault(shown, how) != how:
            raise MessageError(f"another tool is shown to the model as {echo(shown)}, too", field=where)
        function = {"name": shown, "description": described, "parameters": parameters}
        out.append({"type": "function", "function": function})
    return (tuple(out) or None), served


def flatten_namespaces(tools: Sequence[JsonObject]) -> Iterator[tuple[str, str | None, JsonObject]]:
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.get("type") != "namespace":
            yield where, None, tool
            continue
        name, inner_tools = tool.get("name"), tool.get("tools")
        if not isinstance(name, str) or not isinstance(inner_tools, list):
            raise MessageError("a namespace needs a name and a list of tools", field=where)
        for place, inner in enumerate(cast("list[Any]", inner_tools)):
            yield f"{where}.tools[{place}]", name, cast("JsonObject", inner) if isinstance(inner, dict) else {}


class CustomFormat(msgspec.Struct):
    type: Literal["text", "grammar"]
    syntax: Any = None
    definition: Any = None


def describe_grammar(tool: JsonObject, where: str) -> str:
    format_ = convert(tool.get("format") or {"type": "text"}, CustomFormat, f"{where}.format")
    if format_.type == "text":
        return ""
    return f"\n\nThe input follows this {format_.syntax} grammar:\n{format_.definition}"


def choice_from_responses(choice: str | JsonObject | None) -> str | JsonObject | None:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") not in ("function", "custom"):
        raise MessageError(f"type {echo(choice.get('type'))} is not supported", field="tool_choice.type")
    return {"type": "function", "function": {"name": choice.get("name")}}
