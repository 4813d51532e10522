"""What the dialects share. Invariant: a field that is neither understood nor listed as a hint is refused by name."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from itertools import groupby
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar, cast

import msgspec
import orjson
from msgspec import Raw

from tokentrue.conversation import Conversations, own_source
from tokentrue.conversation.images import SENT
from tokentrue.conversation.reading import ParsedConversation, shorten_source
from tokentrue.errors import MessageError, SamplingError, TokenTrueError
from tokentrue.gateway.dialects.signing import ReasoningSigner
from tokentrue.ids import TokenIds
from tokentrue.json_types import JsonMapping, JsonObject, JsonValue
from tokentrue.plain_json import MAX_DEPTH, check_depth, complaint, echo
from tokentrue.records import record
from tokentrue.types import (
    MAX_CHOICES,
    PENALTIES,
    TRUNCATIONS,
    Delta,
    Finish,
    Message,
    Messages,
    Reply,
    Sampling,
    Tool,
    TurnEvent,
)

T = TypeVar("T")
BodyT = TypeVar("BodyT", bound=msgspec.Struct)
TextOf = Callable[[Sequence[int]], str]
"""Returns the text of one token, for clients that request log-probabilities."""
SAMPLING = ("temperature", *TRUNCATIONS, "seed", *PENALTIES, "top_logprobs", "max_tokens", "stop_token_ids")
Hint = Annotated[object, msgspec.Meta(extra_json_schema={"description": "accepted, without effect"})]
LEVELS_AROUND_ARGUMENTS = 4
"""Most JSON levels around arguments in a message: Google's content, its parts, a part, the call."""


class HttpError(TokenTrueError):
    """An error for a client: never contains a stack trace or conversation text."""

    def __init__(
        self, status: int, code: str, message: str, *, field: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.field, self.retry_after_s = status, code, field, retry_after_s


@record
class RequestHead:
    """A request's body without its conversation. `options`: what the reply's shape depends on. `continues`: the node
    whose recorded conversation precedes the items of the body (`previous_response_id`), without its `instructions` if
    `was_instructed`; `last_node`: the last recorded turn that the request names, which becomes
    `TurnRequest.continues`."""

    model: str
    stream: bool = False
    n: int = 1
    sampling: Sampling = field(default_factory=Sampling)
    tools: tuple[Tool, ...] | None = None
    template_kwargs: JsonMapping = field(default_factory=JsonObject)
    leading_messages: tuple[Message, ...] = ()
    options: Any = None
    continues: str | None = None
    was_instructed: bool = False
    last_node: str | None = None
    prompt_ids: TokenIds | None = None


class DecodedBody(NamedTuple):
    head: RequestHead
    items: Sequence[Raw]


class Encoder:
    ping: ClassVar[bytes] = b": keep-alive\n\n"

    def __init__(self, dialect: "Dialect", head: RequestHead, text_of: TextOf) -> None:
        self.dialect, self.head, self.text_of = dialect, head, text_of
        self.node = ""  # of the first choice, once the stream has begun

    def feed(self, event: TurnEvent) -> bytes:
        out = b""
        if not self.node:
            self.node = event.node_id
            out = self.begin()
        if event.delta is not None:
            out += self.add(event.index, event.delta)
        if event.reply is not None:
            out += self.end(event.index, event.reply)
        return out

    def begin(self) -> bytes:
        return b""

    def add(self, index: int, delta: Delta) -> bytes:
        raise NotImplementedError

    def end(self, index: int, reply: Reply) -> bytes:
        raise NotImplementedError

    def finish(self) -> bytes:
        return b""

    def error(self, problem: HttpError) -> bytes:
        return sse(self.dialect.build_error(problem))


class Dialect:
    """`splits_turns`: one assistant message is several consecutive items; `refuses_prefill`: the protocol continues a
    last assistant message, which would put words into the sampled turn."""

    name: ClassVar[str]
    items_key: ClassVar[str] = "messages"
    count_key: ClassVar[str] = ""  # of the answer to a request for the number of tokens
    splits_turns: ClassVar[bool] = False
    refuses_prefill: ClassVar[bool] = False
    encoder: ClassVar[type[Encoder]]

    def __init__(self, signer: ReasoningSigner) -> None:
        self.signer = signer

    def decode(self, body: bytes) -> DecodedBody:
        raise NotImplementedError

    def decode_count(self, body: bytes) -> DecodedBody:
        raise NotImplementedError

    def parse_item(self, item: JsonValue, path: str) -> tuple[Message, ...]:
        """To messages in the OpenAI shape; `path` names the item in errors."""
        raise NotImplementedError

    def is_settled(self, item: JsonValue) -> bool:
        """False if its turn is not committed yet: its parse may still change."""
        return True

    def continues_turn(self, parts: Sequence[Message], part: Message) -> bool:
        """True if `part`, after the assistant's `parts`, belongs to the same turn."""
        return True

    def join_turn(self, parts: Sequence[Message]) -> Message:
        texts = [part["content"] for part in parts if part["content"] is not None]
        thoughts = [part["reasoning_content"] for part in parts if part.get("reasoning_content")]
        return assistant_message(texts, thoughts, [call for part in parts for call in part.get("tool_calls", ())])

    def build_answer(self, head: RequestHead, replies: Sequence[Reply], text_of: TextOf) -> JsonObject:
        raise NotImplementedError

    @staticmethod
    def build_error(problem: HttpError) -> JsonObject:
        raise NotImplementedError

    def parse_conversation(
        self, decoded: DecodedBody, earlier: Conversations, *, history: Messages = ()
    ) -> ParsedConversation:
        """`history` precedes the items. An assistant turn of several items is shared with an earlier request only if
        all are equal."""
        if not decoded.items:
            raise MessageError("must be a list with at least one item", field=self.items_key)
        all_sources = [*map(own_source, history), *map(shorten_source, decoded.items)]
        base = earlier.find(self.name, all_sources)
        messages, known = list(base), len(base.sources)
        ends, turn = list[int | None](), list[Message]()  # turn: assistant items of one turn
        for message in history[known:]:
            messages.append(message)
            ends.append(len(messages))
        is_settled, first_new = True, max(0, known - len(history))
        for index, item in enumerate(decoded.items[first_new:], first_new):
            path = f"{self.items_key}[{index}]"
            value = parse_json(bytes(item), path)
            parsed = self.parse_item(value, path)
            is_settled = is_settled and self.is_settled(value)
            first = len(messages)
            for message in parsed:
                is_part = self.splits_turns and message["role"] == "assistant"
                if turn and not (is_part and self.continues_turn(turn, message)):
                    messages.append(self.join_turn(turn))
                    turn = []
                (turn if is_part else messages).append(message)
            pair_results(messages, first)
            ends.append(len(messages) if is_settled and not turn else None)
        if turn:
            messages.append(self.join_turn(turn))
        if self.refuses_prefill and len(messages) > len(history) and messages[-1]["role"] == "assistant":
            said = "the last one is the model's: prefilled answers are not supported; end with the user's"
            raise MessageError(said, field=self.items_key)
        added, sources = messages[len(base) :], [Raw(bytes(source)) for source in all_sources[known:]]  # not the body
        return ParsedConversation(base=base, messages=added, sources=sources, ends=ends, tools=decoded.head.tools)


def pair_results(messages: list[Message], first: int) -> None:
    """A result without a call id (Google) gets that of its function's first unanswered call."""
    for index in range(first, len(messages)):
        if messages[index]["role"] != "tool" or "tool_call_id" in messages[index]:
            continue
        turn = next((place for place in range(index, -1, -1) if messages[place]["role"] == "assistant"), 0)
        answered = Counter(message["tool_call_id"] for message in messages[turn:] if "tool_call_id" in message)
        result = dict(messages[index])
        name = result.pop("name")
        found = f"{name}#{answered.total()}"  # no unanswered call is left
        for call in messages[turn].get("tool_calls", ()):
            if answered[call["id"]]:
                answered[call["id"]] -= 1
            elif call["function"]["name"] == name:
                found = call["id"]
                break
        messages[index] = {"role": "tool", "tool_call_id": found, **result}


# Foreign JSON, checked.
def decode_json(data: bytes, type_: type[T], path: str = "") -> T:
    try:
        return msgspec.json.decode(data, type=type_)
    except msgspec.ValidationError as error:
        raise complaint(error, path, type_) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        said = "is not JSON" if path else "the body is not JSON"
        raise MessageError(f"{said}: {str(error)[:100]}", field=path or None) from None


def decode_body(body: bytes, type_: type[BodyT]) -> BodyT:
    """Lone surrogates are refused: none enters the process."""
    decoded = decode_json(body, type_)
    check_fields(decoded, "")
    return decoded


def check_fields(record: msgspec.Struct, path: str) -> None:
    for name, value in msgspec.structs.asdict(record).items():
        if isinstance(value, msgspec.Struct):
            check_fields(value, f"{path}{name}.")
        # Raw items are parsed and checked one by one (`parse_json`).
        elif isinstance(value, (dict, list)) and not isinstance(next(iter(value), None), Raw):  # pyright: ignore[reportUnknownArgumentType]
            check_depth(value, path + name)


def parse_json(raw: bytes, path: str, *, most_levels: int = MAX_DEPTH) -> JsonValue:
    """Keeps all digits of integers: orjson rounds those beyond 64 bits."""
    value = decode_json(raw, object, path)
    check_depth(value, path, most=most_levels)
    return value


def describe_item(*roles: str) -> msgspec.Meta:
    item: JsonObject = {"type": "object", "required": ["role"], "properties": {"role": {"enum": list(roles)}}}
    return msgspec.Meta(extra_json_schema=item)


class OpenAIBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str = ""
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    tools: list[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    user: Hint = None
    safety_identifier: Hint = None
    prompt_cache_key: Hint = None
    prompt_cache_retention: Hint = None
    service_tier: Hint = None


def require_object(value: object, path: str) -> JsonObject:
    if not isinstance(value, dict):
        raise MessageError("must be an object", field=path)
    return cast("JsonObject", value)


def sampling_from(given: msgspec.Struct, **renamed: Any) -> Sampling:
    fields: JsonObject = {name: getattr(given, name, None) for name in SAMPLING} | renamed
    for name in ("stop", "stop_token_ids"):
        fields[name] = tuple(fields.get(name) or ())
    return Sampling(**{name: value for name, value in fields.items() if value is not None})


def check_choices(count: int | None, field: str) -> int:
    if count is not None and not 1 <= count <= MAX_CHOICES:
        raise SamplingError(f"{field} must be between 1 and {MAX_CHOICES}, got {count}")
    return count or 1


class FunctionTool(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(min_length=1)]
    description: str | None = None
    parameters: JsonObject | None = None


def function_tool(name: str, description: str | None, parameters: JsonObject) -> JsonObject:
    return {"type": "function", "function": {"name": name, "description": description or "", "parameters": parameters}}


def named_function(name: JsonValue) -> JsonObject:
    return {"type": "function", "function": {"name": name}}


def system_message(text: str | None) -> tuple[Message, ...]:
    return ({"role": "system", "content": text},) if text else ()


def assistant_message(texts: Sequence[str], thoughts: Sequence[str], calls: Sequence[JsonObject]) -> Message:
    message: JsonObject = {"role": "assistant", "content": "".join(texts) if texts else None}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = list(calls)
    return message


def call_entry(call_id: str, name: str, arguments: str) -> JsonObject:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def user_and_tool_messages(parts: Iterable[str | Message]) -> tuple[Message, ...]:
    out: list[Message] = []
    for is_result, group in groupby(parts, key=lambda part: isinstance(part, dict) and "role" in part):
        found: list[JsonValue] = list(group)
        out += found if is_result else [{"role": "user", "content": join_content(found, glue="\n")}]
    return tuple(out)


def image_part(url: str, path: str) -> JsonObject:
    return {"type": SENT, SENT: {"url": url}, "field": path}


def base64_image(media_type: str, data: str, path: str) -> JsonObject:
    return image_part(f"data:{media_type};base64,{data}", path)


def join_content(parts: Sequence[str | JsonObject], *, glue: str) -> str | list[JsonObject]:
    out: list[JsonObject] = []
    for is_text, group in groupby(parts, key=lambda part: isinstance(part, str)):
        found: list[JsonValue] = list(group)
        if is_text and len(found) == len(parts):
            return glue.join(found)
        out += [{"type": "text", "text": glue.join(found)}] if is_text else found
    return out or ""


ReadImage = Callable[[JsonObject, str], JsonObject]
"""Converts a dialect's image part; the second argument is its path."""


def join_text(parts: JsonValue, kinds: tuple[str, ...], path: str, *, glue: str) -> str | None:
    return cast("str | None", join_parts(parts, kinds, path, glue=glue, images={}))


def join_parts(
    parts: JsonValue, kinds: tuple[str, ...], path: str, *, glue: str, images: Mapping[str, ReadImage]
) -> str | list[JsonObject] | None:
    if parts is None or isinstance(parts, str):
        return parts
    if not isinstance(parts, list):
        raise MessageError(f"must be a string or a list of parts, not {type(parts).__name__}", field=path)
    out: list[str | JsonObject] = []
    for index, part in enumerate(cast("list[JsonValue]", parts)):
        text, at = part, f"{path}[{index}]"
        if not isinstance(part, str):
            fields = cast("JsonObject", part) if isinstance(part, dict) else {}
            kind = fields.get("type")
            if isinstance(kind, str) and kind in images:
                out.append(images[kind](fields, at))
                continue
            if kind not in kinds:
                known = ", ".join(sorted((*kinds, *images)))
                raise MessageError(f"part of type {echo(kind)} is not supported; this gateway takes {known}", field=at)
            text = fields.get("text", fields.get("refusal"))
        if not isinstance(text, str):
            raise MessageError("must be a string", field=f"{at}.text")
        out.append(text)
    return join_content(out, glue=glue)


def encode(value: JsonValue) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # an integer beyond 64 bits in arguments, or text of a session made in Python
        return json.dumps(value, separators=(",", ":")).encode()


def sse(data: JsonObject, event: str = "") -> bytes:
    name = f"event: {event}\n".encode() if event else b""
    return name + b"data: " + encode(data) + b"\n\n"


def arguments_object(text: str) -> JsonObject:
    """What is no object, looks like this wrapping, or is nested too deeply to come back is wrapped."""
    try:
        most = MAX_DEPTH - LEVELS_AROUND_ARGUMENTS
        value: JsonValue = parse_json(text.encode(), "arguments", most_levels=most) if text.strip() else {}
    except MessageError:
        value = text
    if not isinstance(value, dict) or is_raw_arguments(found := cast("JsonObject", value)):
        return {"_raw_arguments": text}
    return found


def is_raw_arguments(value: JsonObject) -> bool:
    return value.keys() == {"_raw_arguments"} and isinstance(value["_raw_arguments"], str)


def arguments_text(value: JsonObject) -> str:
    return value["_raw_arguments"] if is_raw_arguments(value) else encode(value).decode()


def is_cut(reply: Reply) -> bool:
    return reply.completion.finish is not Finish.STOP
