"""Google GenerateContent: requests. Contents are in `contents.py`, tools in `tools.py`, answers and events in
`answers.py`.

The path names the model and whether the answer is streamed: `TurnHandler` puts both into the head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeVar

import msgspec

from tokentrue.errors import MessageError, SamplingError
from tokentrue.gateway.dialects.base import (
    DecodedBody,
    RequestHead,
    TextOf,
    complaint,
    object_of,
    parse_json,
    raw_items,
)
from tokentrue.gateway.dialects.google.answers import GoogleEncoder, GoogleOptions, build_error, build_response
from tokentrue.gateway.dialects.google.contents import camel_keys, join_model_turn, messages_from_content, system_text
from tokentrue.gateway.dialects.google.tools import choice_from_google, schema_of, tools_from_google
from tokentrue.gateway.dialects.signing import ReasoningSigner
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.sessions.constraints import constraints_from
from tokentrue.types import MAX_CHOICES, Message, Reply, Sampling

S = TypeVar("S", bound=msgspec.Struct)
ITEMS = "contents"


class ThinkingConfig(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    """Only `includeThoughts` has an effect: whether reasoning is shown or only sealed."""

    include_thoughts: bool | None = False
    thinking_budget: Any = None
    thinking_level: Any = None


class GenerationConfig(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    """Fields typed Any are hints: accepted, without effect on tokens."""

    candidate_count: int | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: float | None = None  # a whole number; clients write 40.0
    seed: int | None = None
    stop_sequences: list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    response_logprobs: bool | None = False
    logprobs: int | None = None
    response_mime_type: Literal["", "text/plain", "application/json"] | None = None
    response_schema: JsonObject | None = None
    response_json_schema: JsonObject | None = None
    response_modalities: list[Literal["TEXT"]] | None = None
    thinking_config: JsonObject | None = None
    media_resolution: Any = None


class GenerateHead(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    """Every top-level field but `contents`."""

    system_instruction: str | JsonObject | None = None
    tools: list[JsonObject] | None = None
    tool_config: JsonObject | None = None
    generation_config: JsonObject | None = None
    model: Any = None
    safety_settings: Any = None
    labels: Any = None
    service_tier: Any = None
    store: Any = None


class GenerateBody(GenerateHead, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """The whole body, as the OpenAPI document shows it; `decode_contents` also takes keys in snake_case."""

    contents: list[msgspec.Raw]
    generation_config: GenerationConfig | None = None  # pyright: ignore[reportIncompatibleVariableOverride]


class CountTokensBody(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    contents: list[msgspec.Raw] | None = None
    generate_content_request: GenerateBody | None = None


class Google:
    name: ClassVar[str] = "google"
    items_key = ITEMS
    splits_turns = True

    def __init__(self, signer: ReasoningSigner) -> None:
        self._signer = signer

    def decode(self, body: bytes) -> DecodedBody:
        head, items = decode_contents(body)
        return DecodedBody(head=head_from_google(head), items=items)

    def decode_count(self, body: bytes) -> DecodedBody:
        """The body of `countTokens`: contents, or a whole request under `generateContentRequest`. Nothing will be
        sampled."""
        fields = camel_keys(decode_fields(body), "")
        if "generateContentRequest" in fields:
            body = bytes(fields["generateContentRequest"])
        head, items = decode_contents(body)
        tools = tools_from_google(head.tools)
        _, tools = constraints_from(choice_from_google(head.tool_config, tools), None, tools)
        return DecodedBody(head=RequestHead(model="", tools=tools, leading_messages=leading_from(head)), items=items)

    def build_count(self, tokens: int) -> JsonObject:
        return {"totalTokens": tokens}

    def parse_item(self, item: Any, path: str) -> tuple[Message, ...]:
        return messages_from_content(item, path, self._signer)

    def is_settled(self, item: Any) -> bool:
        return True

    def continues_turn(self, parts: Sequence[Message], part: Message) -> bool:
        return True

    def join_turn(self, parts: Sequence[Message]) -> Message:
        return join_model_turn(parts)

    def check_messages(self, messages: Sequence[Message]) -> None:
        """The protocol's models continue a last content of their own, which would put words into the sampled turn."""
        if messages and messages[-1]["role"] == "assistant":
            raise MessageError(
                "the last content is the model's: prefilled answers are not supported; end with the user's", field=ITEMS
            )

    def build_answer(self, head: RequestHead, replies: Sequence[Reply], text_of: TextOf) -> JsonObject:
        return build_response(head, replies, text_of, self._signer)

    def new_encoder(self, head: RequestHead, text_of: TextOf) -> GoogleEncoder:
        return GoogleEncoder(head, text_of, self._signer)

    build_error = staticmethod(build_error)


def decode_fields(body: bytes) -> Mapping[str, msgspec.Raw]:
    try:
        return msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError as error:
        raise complaint(str(error), "") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise MessageError(f"the body is not JSON: {str(error)[:100]}") from None


def decode_contents(body: bytes) -> tuple[GenerateHead, Sequence[msgspec.Raw]]:
    fields = camel_keys(decode_fields(body), "")
    try:
        items = msgspec.json.decode(bytes(fields.pop(ITEMS, b"[]")), type=list[msgspec.Raw])
    except msgspec.ValidationError as error:
        raise complaint(str(error), ITEMS) from None
    head = {name: parse_json(bytes(value), name) for name, value in fields.items()}
    return convert(head, GenerateHead, ""), raw_items(items, ITEMS)


def convert(value: Any, type_: type[S], path: str) -> S:
    try:
        return msgspec.convert(value, type_)
    except msgspec.ValidationError as error:
        raise complaint(str(error), path) from None


def leading_from(head: GenerateHead) -> tuple[Message, ...]:
    text = system_text(head.system_instruction, "systemInstruction") if head.system_instruction else ""
    return ({"role": "system", "content": text},) if text else ()


def head_from_google(head: GenerateHead) -> RequestHead:
    where = "generationConfig"
    config = convert(camel_keys(head.generation_config or {}, where), GenerationConfig, where)
    thinking = convert(
        camel_keys(config.thinking_config or {}, f"{where}.thinkingConfig"), ThinkingConfig, f"{where}.thinkingConfig"
    )
    tools = tools_from_google(head.tools)
    extra, tools = constraints_from(choice_from_google(head.tool_config, tools), format_from_config(config), tools)
    return RequestHead(
        model="",
        n=check_candidates(config.candidate_count),
        sampling=sampling_from_config(config, extra),
        tools=tools,
        leading_messages=leading_from(head),
        options=GoogleOptions(logprobs=bool(config.response_logprobs), thoughts=bool(thinking.include_thoughts)),
    )


def check_candidates(count: int | None) -> int:
    if count is not None and not 1 <= count <= MAX_CHOICES:
        raise SamplingError(f"generationConfig.candidateCount must be between 1 and {MAX_CHOICES}, got {count}")
    return count or 1


def sampling_from_config(config: GenerationConfig, extra: JsonMapping) -> Sampling:
    if config.logprobs is not None and not config.response_logprobs:
        raise MessageError("needs responseLogprobs: true", field="generationConfig.logprobs")
    if config.top_k is not None and not float(config.top_k).is_integer():
        raise MessageError("must be a whole number", field="generationConfig.topK")
    given = {
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": None if config.top_k is None else int(config.top_k),
        "seed": config.seed,
        "presence_penalty": config.presence_penalty,
        "frequency_penalty": config.frequency_penalty,
        "top_logprobs": config.logprobs,
        "max_tokens": config.max_output_tokens,
    }
    present: JsonObject = {name: value for name, value in given.items() if value is not None}
    return Sampling(**present, stop=tuple(config.stop_sequences or ()), extra=extra)


def format_from_config(config: GenerationConfig) -> JsonObject | None:
    fields = {"responseSchema": config.response_schema, "responseJsonSchema": config.response_json_schema}
    schema = schema_of(fields, "responseSchema", "responseJsonSchema", "generationConfig")
    if config.response_mime_type != "application/json":
        if schema is not None:
            raise MessageError("needs responseMimeType application/json", field="generationConfig.responseSchema")
        return None
    if schema is None:
        return {"type": "json_object"}
    return {
        "type": "json_schema",
        "json_schema": {"name": "response", "schema": object_of(schema, "generationConfig.responseSchema")},
    }
