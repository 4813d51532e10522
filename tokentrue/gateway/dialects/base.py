"""Shared by the dialects: the records they parse to and build from, and errors that name a field.

Invariant: a field that is neither understood nor listed as a hint is refused by name; nothing is dropped silently.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Annotated, Any, ClassVar, Protocol, TypeVar, cast

import msgspec
import orjson

from tokentrue.errors import MessageError, SamplingError
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.plain_json import MAX_DEPTH, check_depth, complaint
from tokentrue.types import MAX_CHOICES, Finish, Message, Reply, Sampling, Tool, TurnEvent

S = TypeVar("S", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpProblem:
    """An error for a client: never contains a stack trace or conversation text."""

    status: int
    code: str
    message: str
    field: str | None = None
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuedResponse:
    """An earlier reply to continue (`previous_response_id`). `instructed`: that request had `instructions`."""

    node: str
    instructed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PathFields:
    model: str
    stream: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHead:
    """A request without its conversation. `leading_messages` precede it; `options`: what the shape of the reply depends
    on; `last_node`: the last recorded turn that the request names by id.
    """

    model: str
    stream: bool = False
    n: int = 1
    sampling: Sampling = field(default_factory=Sampling)
    tools: tuple[Tool, ...] | None = None
    template_kwargs: JsonMapping = field(default_factory=JsonObject)
    leading_messages: tuple[Message, ...] = ()
    options: Any = None
    continues: ContinuedResponse | None = None
    last_node: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedBody:
    """A request's head, and the raw bytes of each conversation item, not parsed yet."""

    head: RequestHead
    items: Sequence[msgspec.Raw]


class Encoder(Protocol):
    """Turns one streamed turn into the dialect's server-sent events."""

    ping: bytes

    def feed(self, event: TurnEvent) -> bytes:
        """Returns the events for one turn event; the last event of a choice also closes it."""
        ...

    def finish(self) -> bytes:
        """Returns the end of the stream, after every choice has its reply."""
        ...

    def error(self, problem: HttpProblem) -> bytes: ...


class TextOf(Protocol):
    """Returns the text of one token, for clients that request log-probabilities."""

    def __call__(self, token_ids: Sequence[int], /) -> str: ...


class Dialect(Protocol):
    """A wire format. `items_key`: the top-level array with the conversation; `splits_turns`: one assistant message
    arrives as several consecutive items, which `join_turn` merges; `refuses_prefill`: the protocol continues a last
    assistant message, which would put words into the sampled turn.
    """

    name: ClassVar[str]
    items_key: ClassVar[str] = "messages"
    splits_turns: ClassVar[bool] = False
    refuses_prefill: ClassVar[bool] = False

    def decode(self, body: bytes) -> DecodedBody: ...

    def parse_item(self, item: Any, path: str) -> tuple[Message, ...]:
        """Parses one conversation item to messages in the OpenAI shape; `path` names it in errors. For a settled item
        of a session, the result is always the same.
        """
        ...

    def is_settled(self, item: Any) -> bool:
        """False for an item of a turn that is not committed yet: its parse may still change."""
        return True

    def continues_turn(self, parts: Sequence[Message], part: Message) -> bool:
        """True if `part`, which directly follows the assistant's `parts`, belongs to the same turn."""
        return True

    def join_turn(self, parts: Sequence[Message]) -> Message:
        return join_assistant(parts)

    def build_answer(self, head: RequestHead, replies: Sequence[Reply], text_of: TextOf) -> JsonObject: ...

    def new_encoder(self, head: RequestHead, text_of: TextOf) -> Encoder: ...

    @staticmethod
    def build_error(problem: HttpProblem) -> JsonObject: ...


class CountingDialect(Dialect, Protocol):
    def decode_count(self, body: bytes) -> DecodedBody: ...

    def build_count(self, tokens: int) -> JsonObject: ...


# Foreign JSON, checked.
def decode_body(body: bytes, type_: type[S]) -> S:
    """Decodes a request body. Lone surrogates are refused: none enters the process."""
    try:
        decoded = msgspec.json.decode(body, type=type_)
    except msgspec.ValidationError as error:
        raise complaint(error, "", type_) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise MessageError(f"the body is not JSON: {str(error)[:100]}") from None
    _check_fields(decoded, "")
    return decoded


def _check_fields(record: msgspec.Struct, path: str) -> None:
    for name, value in msgspec.structs.asdict(record).items():
        if isinstance(value, msgspec.Struct):
            _check_fields(value, f"{path}{name}.")
        elif isinstance(value, (dict, list)) and not _is_raw(value):
            check_depth(value, path + name)


def _is_raw(value: Any) -> bool:
    """Raw items are parsed and checked one by one (`parse_json`)."""
    return isinstance(value, list) and isinstance(next(iter(cast("list[Any]", value)), None), msgspec.Raw)


def parse_json(raw: bytes, path: str, *, most_levels: int = MAX_DEPTH) -> Any:
    """Keeps all digits of integers: orjson rounds those beyond 64 bits."""
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise MessageError(f"is not JSON: {str(error)[:100]}", field=path) from None
    check_depth(value, path, most=most_levels)
    return value


def describe_item(*roles: str) -> msgspec.Meta:
    """OpenAPI metadata of a conversation item, which is decoded separately."""
    item: JsonObject = {"type": "object", "required": ["role"], "properties": {"role": {"enum": list(roles)}}}
    return msgspec.Meta(extra_json_schema=item)


def raw_items(items: Sequence[msgspec.Raw], key: str) -> Sequence[msgspec.Raw]:
    if not items:
        raise MessageError("must be a list with at least one item", field=key)
    return items


class FunctionTool(msgspec.Struct):
    """A tool definition in the terms of Chat Completions, as every dialect checks it."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    description: str | None = None
    parameters: JsonObject | None = None


def present(**given: Any) -> JsonObject:
    """Drops the fields that the client did not set."""
    return {name: value for name, value in given.items() if value is not None}


def check_choices(count: int | None, field: str) -> int:
    if count is not None and not 1 <= count <= MAX_CHOICES:
        raise SamplingError(f"{field} must be between 1 and {MAX_CHOICES}, got {count}")
    return count or 1


def assistant_message(texts: Sequence[str], thoughts: Sequence[str], calls: Sequence[JsonObject]) -> Message:
    message: JsonObject = {"role": "assistant", "content": "".join(texts) if texts else None}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = list(calls)
    return message


def join_assistant(parts: Sequence[Message]) -> Message:
    texts = [part["content"] for part in parts if part["content"] is not None]
    thoughts = [part["reasoning_content"] for part in parts if part.get("reasoning_content")]
    return assistant_message(texts, thoughts, [call for part in parts for call in part.get("tool_calls", ())])


def call_entry(call_id: str, name: str, arguments: str) -> JsonObject:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def user_and_tool_messages(parts: Iterable[str | Message]) -> tuple[Message, ...]:
    """Results stay tool messages, in order; the text between them becomes user messages."""
    out: list[Message] = []
    for is_text, group in groupby(parts, key=lambda part: isinstance(part, str)):
        found: list[Any] = list(group)
        out += [{"role": "user", "content": "\n".join(found)}] if is_text else found
    return tuple(out)


def require_object(value: Any, path: str) -> JsonObject:
    if not isinstance(value, dict):
        raise MessageError("must be an object", field=path)
    return cast("JsonObject", value)


def join_text(parts: Any, kinds: tuple[str, ...], path: str, *, glue: str) -> str | None:
    """Joins text parts to one string; refuses anything that is not text by name."""
    if parts is None or isinstance(parts, str):
        return parts
    if not isinstance(parts, list):
        raise MessageError(f"must be a string or a list of parts, not {type(parts).__name__}", field=path)
    texts: list[str] = []
    for index, part in enumerate(cast("list[Any]", parts)):
        texts.append(part if isinstance(part, str) else _part_text(part, kinds, f"{path}[{index}]"))
    return glue.join(texts)


def _part_text(part: Any, kinds: tuple[str, ...], where: str) -> str:
    fields: JsonObject = cast("JsonObject", part) if isinstance(part, dict) else {}
    kind = fields.get("type")
    if kind not in kinds:
        raise MessageError(
            f"part of type {echo(kind)} is not supported; this gateway takes {', '.join(sorted(kinds))}", field=where
        )
    text = fields.get("text", fields.get("refusal"))
    if not isinstance(text, str):
        raise MessageError("must be a string", field=f"{where}.text")
    return text


def echo(value: Any) -> str:
    return repr(value)[:40]


# Our own JSON, written.
def encode(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # an integer beyond 64 bits in arguments, or text of a session made in Python
        return json.dumps(value, separators=(",", ":")).encode()


LEVELS_AROUND_ARGUMENTS = 4
"""Most JSON levels around arguments in a message: Google's content, its parts, a part, the call."""


def arguments_object(text: str) -> JsonObject:
    """A call's arguments as a JSON object. A value that is no object, looks like this wrapping, or is nested too deeply
    to be sent back is wrapped whole as `_raw_arguments`.
    """
    try:
        most = MAX_DEPTH - LEVELS_AROUND_ARGUMENTS
        value: Any = parse_json(text.encode(), "arguments", most_levels=most) if text.strip() else {}
    except MessageError:
        value = text
    if not isinstance(value, dict) or is_raw_arguments(cast("JsonObject", value)):
        return {"_raw_arguments": text}
    return cast("JsonObject", value)


def is_raw_arguments(value: JsonObject) -> bool:
    return value.keys() == {"_raw_arguments"} and isinstance(value["_raw_arguments"], str)


def arguments_text(value: JsonObject) -> str:
    if is_raw_arguments(value):
        return value["_raw_arguments"]
    return encode(value).decode()


def is_cut(finish: Finish) -> bool:
    return finish is not Finish.STOP
