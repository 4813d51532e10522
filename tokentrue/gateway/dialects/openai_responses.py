"""OpenAI Responses. Consecutive items of a model are one assistant message, unless their ids show that two turns served
them. The model sees a custom (free-form) tool as a function with one string, and tools of a namespace as
`namespace__name`."""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import msgspec
import orjson

from tokentrue.errors import MessageError
from tokentrue.gateway.dialects.base import (
    DecodedBody,
    Dialect,
    Encoder,
    FunctionTool,
    Hint,
    HttpError,
    OpenAIBody,
    RequestHead,
    TextOf,
    assistant_message,
    call_entry,
    decode_body,
    encode,
    function_tool,
    image_part,
    is_cut,
    join_parts,
    join_text,
    named_function,
    require_object,
    sampling_from,
    sse,
    system_message,
)
from tokentrue.gateway.dialects.openai_chat import OpenAIChat, reply_logprobs
from tokentrue.gateway.dialects.signing import ReasoningSigner
from tokentrue.json_types import JsonMapping, JsonObject, JsonValue, is_array
from tokentrue.plain_json import convert, echo
from tokentrue.sessions.requests import constraints_from
from tokentrue.sessions.stages.generation import deltas_from_message
from tokentrue.types import Delta, Message, Reply, TurnEvent

FindArguments = Callable[[str], Sequence[str]]
"""Returns the recorded arguments of the calls served under an id."""

UNSTORED = "resp_ns_"
STORED = "resp_"
INSTRUCTED = "_i"  # ends the id of a response that was made with `instructions`
TEXT_PARTS = ("input_text", "output_text", "text", "refusal")
REASONING_PARTS = ("reasoning_text", "summary_text", "text")
INCLUDES = ("message.output_text.logprobs", "reasoning.encrypted_content")
NO_CALL = Delta()
TURN = "turn"  # in a part of a message: the node that served it
_ITEM_ID = re.compile(r"(?:rs|msg|fc|ctc)_([0-9a-f]+)(?:_\d+)?")
_INPUT_OPENS = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_DECODABLE = re.compile(  # whole characters and escapes; both halves of a surrogate pair
    r'(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*"
)


@dataclass(frozen=True, slots=True)
class ServedTool:
    name: str
    namespace: str | None = None
    custom: bool = False


class ResponsesOptions(msgspec.Struct, frozen=True):
    stored: bool
    logprobs: bool
    served: Mapping[str, ServedTool]  # by the name that the model sees
    echo: JsonMapping  # the request's own settings, which every answer repeats


class CustomInput:
    """Decodes a custom tool's arguments as they are sampled; `feed` returns the text that is certain."""

    def __init__(self) -> None:
        self._text = ""
        self._place: int | None = None  # of the undecoded rest; None before the string

    def feed(self, arguments: str) -> str:
        self._text += arguments
        if self._place is None:
            opened = _INPUT_OPENS.match(self._text)
            if opened is None:
                return ""
            self._place = opened.end()
        found = _DECODABLE.match(self._text, self._place)
        assert found is not None
        self._place = found.end()
        return orjson.loads(f'"{found[0]}"') if found[0] else ""

    def finish(self) -> str:
        return self._text if self._place is None else ""


def custom_input(arguments: str) -> str:
    decoder = CustomInput()
    return decoder.feed(arguments) + decoder.finish()


@dataclass(slots=True, kw_only=True)
class OutputItem:
    kind: Literal["reasoning", "message", "call"]
    id: str
    index: int
    tool: ServedTool
    call: Delta  # that opened it
    pieces: list[str] = field(default_factory=list[str])  # reasoning, text, or arguments as the model wrote them
    logprobs: Sequence[JsonObject] = ()
    is_open: bool = True
    custom: CustomInput = field(default_factory=CustomInput)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def place(self) -> JsonObject:
        return {"item_id": self.id, "output_index": self.index}

    def build_part(self) -> JsonObject:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": list(self.logprobs)}

    def build(self, signer: ReasoningSigner, status: str) -> JsonObject:
        """`status`: "in_progress" for the item without its text. A call is incomplete if its arguments broke off."""
        is_new = status == "in_progress"
        if self.kind == "reasoning":
            item: JsonObject = {"type": "reasoning", "id": self.id, "summary": [], "status": status}
            sealed = {"content": [self.build_part()], "encrypted_content": signer.wrap(self.text)}
            return item if is_new else {**item, **sealed}
        if self.kind == "message":
            content = [] if is_new else [self.build_part()]
            return {"type": "message", "id": self.id, "role": "assistant", "status": status, "content": content}
        item = {"id": self.id, "call_id": self.call.call_id, "name": self.tool.name}
        if self.tool.namespace:
            item["namespace"] = self.tool.namespace
        if self.tool.custom:
            return {"type": "custom_tool_call", **item, "input": custom_input(self.text)}
        if not is_new:
            status = "completed" if is_json(self.text) else "incomplete"
        return {"type": "function_call", **item, "arguments": self.text, "status": status}


def is_json(text: str) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True


class ResponsesEncoder(Encoder):
    def __init__(self, dialect: Dialect, head: RequestHead, text_of: TextOf) -> None:
        super().__init__(dialect, head, text_of)
        self._sequence = -1
        self._items: list[OutputItem] = []
        self.response: JsonObject = {}  # as the newest event has it

    def begin(self) -> bytes:
        options, is_instructed = self.head.options, bool(self.head.leading_messages)
        self.response = {
            "id": f"{STORED if options.stored else UNSTORED}{self.node}{INSTRUCTED if is_instructed else ''}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": self.head.model,
            "output": [],
            "usage": None,
            **options.echo,
        }
        return self._event("created", response=self.response) + self._event("in_progress", response=self.response)

    def _event(self, name: str, /, **body: JsonValue) -> bytes:
        self._sequence += 1
        kind = f"response.{name}" if name != "error" else name
        return sse({"type": kind, "sequence_number": self._sequence, **body}, kind)

    def add(self, index: int, delta: Delta) -> bytes:
        out = b""
        if delta.reasoning:
            out += self._enter("reasoning")
            out += self._append("reasoning_text.delta", delta.reasoning, content_index=0)
        if delta.content:
            out += self._enter("message")
            out += self._append("output_text.delta", delta.content, content_index=0, logprobs=[])
        if delta.call is not None:
            out += self._enter("call", delta)
            item = self._items[-1]
            if item.tool.custom:
                item.pieces.append(delta.arguments)
                out += self._custom_delta(item, item.custom.feed(delta.arguments))
            elif delta.arguments:
                out += self._append("function_call_arguments.delta", delta.arguments)
        return out

    def _enter(self, kind: Literal["reasoning", "message", "call"], call: Delta = NO_CALL) -> bytes:
        last = self._items[-1] if self._items else None
        if last is not None and last.is_open and (last.kind, last.call.call) == (kind, call.call):
            return b""
        # A message with log-probabilities stays open: those cover the whole turn.
        waits = self.head.options.logprobs
        out = b"".join(self._close(one, "completed") for one in self._items if not (waits and one.kind == "message"))
        index, tool = len(self._items), self.head.options.served.get(call.name) or ServedTool(call.name)
        suffix = "" if call.call is None else f"_{call.call}"
        if kind != "call" and any(one.kind == kind for one in self._items):  # the text of a call that broke off
            suffix = f"_{index}"
        mark = {"reasoning": "rs", "message": "msg", "call": "ctc" if tool.custom else "fc"}[kind]
        item = OutputItem(kind=kind, id=f"{mark}_{self.node}{suffix}", index=index, tool=tool, call=call)
        self._items.append(item)
        opening = item.build(self.dialect.signer, "in_progress")
        out += self._event("output_item.added", output_index=index, item=opening)
        if kind != "call":
            out += self._event("content_part.added", **item.place, content_index=0, part=item.build_part())
        return out

    def _append(self, name: str, text: str, /, **more: JsonValue) -> bytes:
        item = self._items[-1]
        item.pieces.append(text)
        return self._event(name, **item.place, delta=text, **more)

    def _custom_delta(self, item: OutputItem, text: str) -> bytes:
        return self._event("custom_tool_call_input.delta", **item.place, delta=text) if text else b""

    def _close(self, item: OutputItem, status: str) -> bytes:
        if not item.is_open:
            return b""
        item.is_open = False
        place, text, out = item.place, item.text, b""
        if item.kind != "call":
            part = item.build_part()
            done = {name: part[name] for name in ("text", "logprobs") if name in part}
            out += self._event(f"{part['type']}.done", **place, content_index=0, **done)
            out += self._event("content_part.done", **place, content_index=0, part=part)
        elif item.tool.custom:
            out += self._custom_delta(item, item.custom.finish())
            out += self._event("custom_tool_call_input.done", **place, input=custom_input(text))
        else:
            out += self._event("function_call_arguments.done", **place, name=item.tool.name, arguments=text)
        built = item.build(self.dialect.signer, status)
        return out + self._event("output_item.done", output_index=item.index, item=built)

    def end(self, index: int, reply: Reply) -> bytes:
        out, items = b"", self._items
        if all(item.kind == "reasoning" for item in items):  # an empty message, too, has an id that comes back
            out += self._enter("message")
        status, sampled = "incomplete" if is_cut(reply) else "completed", len(reply.completion.token_ids)
        logprobs: list[JsonObject] = []
        if self.head.options.logprobs:
            logprobs = reply_logprobs(reply, self.text_of)["content"]
        # Only the last item of a turn without calls has the turn's status. With calls the position says nothing: in a
        # whole reply, text sampled after a call precedes it.
        has_calls = any(item.kind == "call" for item in items)
        output: list[JsonObject] = []
        for item in items:
            if item.is_open and item.kind == "message":
                item.logprobs = logprobs
            item_status = status if item is items[-1] and not has_calls else "completed"
            out += self._close(item, item_status)
            output.append(item.build(self.dialect.signer, item_status))
        self.response |= {
            "status": status,
            "output": output,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": {
                "input_tokens": reply.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": reply.prompt_tokens + sampled,
            },
        }
        return out + self._event(status, response=self.response)

    def error(self, problem: HttpError) -> bytes:
        error = self.dialect.build_error(problem)["error"]
        if not self.node:
            return self._event("error", code=error["code"], message=error["message"], param=error["param"])
        failed = {"status": "failed", "error": {"code": "server_error", "message": error["message"]}}
        return self._event("failed", response={**self.response, **failed})


class Reasoning(msgspec.Struct):
    effort: Hint = None
    summary: Hint = None


class TextConfig(msgspec.Struct, forbid_unknown_fields=True):
    format: JsonObject | None = None
    verbosity: Hint = None


NEVER = msgspec.Meta(extra_json_schema={"enum": [False]})  # msgspec before 0.22 knows no Literal[False]


class ResponsesBody(OpenAIBody, kw_only=True):
    input: str | list[msgspec.Raw]
    instructions: str | None = None
    store: bool | None = True
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    text: TextConfig | None = None
    include: list[str] | None = None
    truncation: Literal["disabled"] | None = None
    background: Annotated[bool, NEVER] | None = None
    reasoning: Reasoning | None = None
    metadata: dict[str, str] | None = None
    stream_options: Hint = None
    client_metadata: Hint = None
    max_tool_calls: None = None

    def echoed_settings(self) -> JsonObject:
        same = ("instructions", "max_output_tokens", "previous_response_id", "temperature", "top_p")
        return {
            **{name: getattr(self, name) for name in same},
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "tools": self.tools or [],
            "tool_choice": self.tool_choice or "auto",
            "text": {"format": (self.text and self.text.format) or {"type": "text"}},
            "truncation": "disabled",
        }


class ItemName(msgspec.Struct):
    id: object = None
    role: object = "assistant"
    type: object = None


class CallItem(msgspec.Struct):
    name: str
    call_id: str
    arguments: str = ""
    input: str = ""
    namespace: str | None = None


class OutputOfCall(msgspec.Struct):
    call_id: str
    output: JsonValue


class InputImage(msgspec.Struct, forbid_unknown_fields=True):
    image_url: str
    type: Hint = None
    detail: Hint = None
    file_id: None = None
    prompt_cache_breakpoint: Hint = None


def read_image(part: JsonObject, path: str) -> JsonObject:
    return image_part(convert(part, InputImage, path).image_url, f"{path}.image_url")


def read_content(value: JsonValue, path: str, *, glue: str) -> str | list[JsonObject]:
    content = join_parts(value, TEXT_PARTS, path, glue=glue, images={"input_image": read_image})
    if content is None:
        raise MessageError("must be a string or a list of parts", field=path)
    return content


class CustomFormat(msgspec.Struct):
    type: Literal["text", "grammar"]
    syntax: str | None = None
    definition: str | None = None


class OpenAIResponses(Dialect):
    name = "openai_responses"
    items_key = "input"
    splits_turns = True
    encoder = ResponsesEncoder
    build_error = staticmethod(OpenAIChat.build_error)

    def __init__(
        self,
        signer: ReasoningSigner,
        find_arguments: FindArguments = lambda _: (),
        is_node: Callable[[str], bool] = lambda _: False,
    ) -> None:
        super().__init__(signer)
        self._find_arguments, self._is_node = find_arguments, is_node

    def decode(self, body: bytes) -> DecodedBody:
        given = decode_body(body, ResponsesBody)
        if isinstance(given.input, str):
            items: Sequence[msgspec.Raw] = [msgspec.Raw(encode({"role": "user", "content": given.input}))]
        else:
            items = given.input
        head = head_from_responses(given)
        return DecodedBody(replace(head, last_node=self._find_last_node(items) or head.continues), items)

    def _find_last_node(self, items: Sequence[msgspec.Raw]) -> str | None:
        for raw in reversed(items):
            try:
                item = msgspec.json.decode(raw, type=ItemName)
            except (msgspec.DecodeError, UnicodeDecodeError):  # the parser reports what is wrong with it
                return None
            if item.role == "assistant" and not str(item.type).endswith("_output"):
                return self._own_node(item.id)
        return None

    def _own_node(self, item_id: object) -> str | None:
        node = node_from_item_id(item_id)
        return node if node is not None and self._is_node(node) else None

    def parse_item(self, item: JsonValue, path: str) -> tuple[Message, ...]:
        fields = require_object(item, path)
        message = self._message(fields, path)
        if message is None:
            return ()
        if message["role"] == "assistant" and (node := self._own_node(fields.get("id"))) is not None:
            return ({**message, TURN: node},)
        return (message,)

    def _message(self, item: JsonObject, path: str) -> Message | None:
        """None for reasoning without any text left."""
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "reasoning":
            text = self._reasoning(item, path)
            return assistant_message((), [text], ()) if text else None
        if kind in ("function_call", "custom_tool_call"):
            call = convert(item, CallItem, path)
            arguments = call.arguments if kind == "function_call" else self._arguments(call)
            name = model_name(call.namespace, call.name)
            return assistant_message((), (), [call_entry(call.call_id, name, arguments)])
        if kind == "message":
            role = item.get("role")
            if role not in ("user", "system", "developer", "assistant"):
                raise MessageError(f"role {echo(role)} is not supported", field=f"{path}.role")
            content = read_content(item.get("content"), f"{path}.content", glue="" if role == "assistant" else "\n")
            return {"role": "system" if role == "developer" else role, "content": content}
        if kind in ("function_call_output", "custom_tool_call_output"):
            result = convert(item, OutputOfCall, path)
            content = read_content(result.output, f"{path}.output", glue="\n")
            return {"role": "tool", "tool_call_id": result.call_id, "content": content}
        raise MessageError(f"item of type {echo(kind)} is not supported", field=f"{path}.type")

    def _reasoning(self, item: JsonObject, path: str) -> str:
        sealed = item.get("encrypted_content")
        if not item.get("content") and isinstance(sealed, str):
            return self.signer.unwrap(sealed) or ""
        key = "content" if item.get("content") else "summary"
        return join_text(item.get(key), REASONING_PARTS, f"{path}.{key}", glue="") or ""

    def _arguments(self, call: CallItem) -> str:
        """Inverse of `custom_input`. Arguments that broke off or contain more are found in the record by the
        call's id."""
        recorded = self._find_arguments(call.call_id)
        found = (arguments for arguments in recorded if custom_input(arguments) == call.input)
        return next(found, None) or orjson.dumps({"input": call.input}).decode()

    def is_settled(self, item: JsonValue) -> bool:
        node, call_id = node_from_item_id(item.get("id")), item.get("call_id")
        is_custom = item.get("type") == "custom_tool_call"
        return (node is None or self._is_node(node)) and (not is_custom or bool(self._find_arguments(call_id)))

    def continues_turn(self, parts: Sequence[Message], part: Message) -> bool:
        before = [one[TURN] for one in parts if TURN in one]
        return not before or part.get(TURN, before[-1]) == before[-1]

    def build_answer(self, head: RequestHead, replies: Sequence[Reply], text_of: TextOf) -> JsonObject:
        reply, encoder = replies[0], ResponsesEncoder(self, head, text_of)
        for delta in deltas_from_message(reply.message):
            encoder.feed(TurnEvent(node_id=reply.node, delta=delta))
        encoder.feed(TurnEvent(reply=reply))
        return encoder.response


def head_from_responses(given: ResponsesBody) -> RequestHead:
    if given.background:
        raise MessageError("must be false", field="background")
    for index, name in enumerate(given.include or ()):
        if name not in INCLUDES:
            known = ", ".join(INCLUDES)
            raise MessageError(f"{echo(name)} is not supported; known: {known}", field=f"include[{index}]")
    tools, served = tools_from_responses(given.tools)
    choice, format_ = given.tool_choice, given.text.format if given.text else None
    if isinstance(choice, dict):
        if choice.get("type") not in ("function", "custom"):
            raise MessageError(f"type {echo(choice.get('type'))} is not supported", field="tool_choice.type")
        choice = named_function(choice.get("name"))
    if format_ is not None and format_.get("type") == "json_schema":  # flat here, nested in Chat Completions
        flat = {name: value for name, value in format_.items() if name != "type"}
        format_ = {"type": "json_schema", "json_schema": flat}
    extra, tools = constraints_from(choice, format_, tools)
    continued = given.previous_response_id or ""
    if continued.startswith(UNSTORED):
        said = "that response was made with store: false and cannot be continued by id"
        raise MessageError(said, field="previous_response_id")
    if given.previous_response_id is not None and not continued.startswith(STORED):
        raise MessageError("is not a response of this gateway", field="previous_response_id")
    return RequestHead(
        model=given.model,
        stream=bool(given.stream),
        sampling=sampling_from(given, max_tokens=given.max_output_tokens, extra=extra),
        tools=tools,
        leading_messages=system_message(given.instructions),
        continues=continued.removeprefix(STORED).removesuffix(INSTRUCTED) if continued else None,
        was_instructed=continued.endswith(INSTRUCTED),
        options=ResponsesOptions(
            stored=given.store is not False,
            logprobs="message.output_text.logprobs" in (given.include or ()),
            served=served,
            echo=given.echoed_settings(),
        ),
    )


def node_from_item_id(item_id: object) -> str | None:
    found = _ITEM_ID.fullmatch(item_id) if isinstance(item_id, str) else None
    return found[1] if found else None


def model_name(namespace: str | None, name: str) -> str:
    return f"{namespace}__{name}" if namespace else name


def tools_from_responses(tools: list[JsonObject] | None) -> tuple[tuple[JsonObject, ...] | None, dict[str, ServedTool]]:
    out: list[JsonObject] = []
    served: dict[str, ServedTool] = {}
    for where, namespace, tool in flatten_namespaces(tools or ()):
        kind = tool.get("type")
        if kind not in ("function", "custom"):
            message = f"tool type {echo(kind)} is not supported; use 'function', 'custom' or 'namespace'"
            raise MessageError(message, field=f"{where}.type")
        given = convert(tool, FunctionTool, where)
        shown, described, parameters = model_name(namespace, given.name), given.description or "", given.parameters
        if kind == "custom":
            format_ = convert(tool.get("format") or {"type": "text"}, CustomFormat, f"{where}.format")
            if format_.type == "grammar":
                described += f"\n\nThe input follows this {format_.syntax} grammar:\n{format_.definition}"
            parameters = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
        how = ServedTool(given.name, namespace, custom=kind == "custom")
        if served.setdefault(shown, how) != how:
            raise MessageError(f"another tool is shown to the model as {echo(shown)}, too", field=where)
        out.append(function_tool(shown, described, parameters or {}))
    return (tuple(out) or None), served


def flatten_namespaces(tools: Sequence[JsonObject]) -> Iterator[tuple[str, str | None, JsonObject]]:
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.get("type") != "namespace":
            yield where, None, tool
            continue
        name, inner_tools = tool.get("name"), tool.get("tools")
        if not isinstance(name, str) or not is_array(inner_tools):
            raise MessageError("a namespace needs a name and a list of tools", field=where)
        for place, inner in enumerate(inner_tools):
            yield f"{where}.tools[{place}]", name, inner if isinstance(inner, dict) else {}
