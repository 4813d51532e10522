"""Google GenerateContent. Without ids, the k-th call of a function in one turn is `name#k`. Reasoning is sent as
`thought` parts if requested, and sealed in the `thoughtSignature` of the part after it: clients drop thoughts and keep
signatures."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from tokentrue.errors import MessageError
from tokentrue.gateway.dialects.base import (
    DecodedBody,
    Dialect,
    Encoder,
    Hint,
    HttpError,
    RequestHead,
    TextOf,
    arguments_object,
    arguments_text,
    assistant_message,
    base64_image,
    call_entry,
    check_choices,
    decode_json,
    encode,
    function_tool,
    is_cut,
    join_content,
    named_function,
    parse_json,
    require_object,
    sampling_from,
    sse,
    system_message,
    user_and_tool_messages,
)
from tokentrue.json_types import JsonMapping, JsonObject, JsonValue, is_array, is_object
from tokentrue.plain_json import convert, echo, join_path
from tokentrue.sessions.requests import constraints_from
from tokentrue.sessions.stages.generation import count_sampled, deltas_from_message
from tokentrue.types import Delta, Message, Reply, Sampling

SEALED = "sealed_reasoning"  # in a part of a turn: the reasoning in its signatures
PLAIN_RESULTS = ("output", "result", "error")  # SDKs wrap what is not an object in one
SCHEMAS = ("parameters", "responseSchema", "parametersJsonSchema", "responseJsonSchema")
OPAQUE = ("args", "response", "labels", "partMetadata", *SCHEMAS)  # fields whose keys are not the protocol's
KINDS = ("text", "inline_data", "function_call", "function_response")  # of a part
EMPTY_SCHEMA: JsonObject = {"type": "object", "properties": {}}
CHOICES = {"AUTO": "auto", "MODE_UNSPECIFIED": "auto", "NONE": "none", "ANY": "required"}
STATUSES = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ABORTED",
    422: "FAILED_PRECONDITION",
    429: "RESOURCE_EXHAUSTED",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
_SNAKE = re.compile(r"_([a-z])")


class GoogleOptions(msgspec.Struct, frozen=True):
    logprobs: bool
    thoughts: bool  # shown, and not only sealed


def response_base(head: RequestHead, node: str) -> JsonObject:
    return {"modelVersion": head.model, "responseId": node}


def build_candidate(index: int, parts: Sequence[JsonObject], end: JsonMapping) -> JsonObject:
    return {"content": {"role": "model", "parts": list(parts)}, "index": index, **end}


def candidate_end(head: RequestHead, reply: Reply, text_of: TextOf) -> JsonObject:
    end: JsonObject = {"finishReason": "MAX_TOKENS" if is_cut(reply) else "STOP"}
    if not head.options.logprobs:
        return end

    def entries(tokens: Sequence[tuple[int, float]]) -> list[JsonObject]:
        return [{"token": text_of((token,)), "tokenId": token, "logProbability": value} for token, value in tokens]

    done = reply.completion
    result: JsonObject = {"chosenCandidates": entries(list(zip(done.token_ids, done.logprobs, strict=True)))}
    if done.top_logprobs is not None:
        ranked = [sorted(top.items(), key=lambda pair: -pair[1]) for top in done.top_logprobs]
        result["topCandidates"] = [{"candidates": entries(top)} for top in ranked]
    mean = {"avgLogprobs": sum(done.logprobs) / len(done.logprobs)} if done.logprobs else {}
    return {**end, "logprobsResult": result, **mean}


def build_usage(replies: Sequence[Reply]) -> JsonObject:
    prompt, sampled = replies[0].prompt_tokens, count_sampled(replies)
    return {"promptTokenCount": prompt, "candidatesTokenCount": sampled, "totalTokenCount": prompt + sampled}


class Candidate:
    """Calls are sent when complete: the protocol has no partial arguments."""

    def __init__(self, dialect: Dialect, head: RequestHead) -> None:
        self._signer, self._shows_thoughts = dialect.signer, head.options.thoughts
        self._reasoning = ""  # that no part has sealed yet
        self._call: Delta | None = None  # the first delta of a call that is not complete
        self._arguments = ""

    def add(self, delta: Delta) -> list[JsonObject]:
        parts: list[JsonObject] = []
        if self._call is not None and delta.call != self._call.call:
            parts += self._close_call()
        if delta.reasoning:
            self._reasoning += delta.reasoning
            parts += [{"text": delta.reasoning, "thought": True}] if self._shows_thoughts else []
        if delta.content:
            parts.append(self._seal({"text": delta.content}))
        if delta.call is not None:
            self._call = self._call or delta
            self._arguments += delta.arguments
        return parts

    def end(self) -> list[JsonObject]:
        parts = self._close_call()
        return [*parts, self._seal({"text": ""})] if self._reasoning else parts

    def _close_call(self) -> list[JsonObject]:
        if self._call is None:
            return []
        call = {"id": self._call.call_id, "name": self._call.name, "args": arguments_object(self._arguments)}
        self._call, self._arguments = None, ""
        return [self._seal({"functionCall": call})]

    def _seal(self, part: JsonObject) -> JsonObject:
        if self._reasoning:
            part["thoughtSignature"], self._reasoning = self._signer.wrap_as_bytes(self._reasoning), ""
        return part


NO_PARTS: list[JsonObject] = [{"text": ""}]  # SDKs take a content without parts for an error


class GoogleEncoder(Encoder):
    """Each chunk is a whole response. SDKs parse comments as JSON, so a keep-alive is an empty line."""

    ping = b"\n"

    def __init__(self, dialect: Dialect, head: RequestHead, text_of: TextOf) -> None:
        super().__init__(dialect, head, text_of)
        self._candidates: dict[int, Candidate] = {}
        self._replies: list[Reply] = []

    def _candidate(self, index: int) -> Candidate:
        return self._candidates.setdefault(index, Candidate(self.dialect, self.head))

    def add(self, index: int, delta: Delta) -> bytes:
        parts = self._candidate(index).add(delta)
        return self._chunk(index, parts, {}) if parts else b""

    def end(self, index: int, reply: Reply) -> bytes:
        self._replies.append(reply)
        parts = self._candidate(index).end() or NO_PARTS
        end = candidate_end(self.head, reply, self.text_of)
        return self._chunk(index, parts, end, usageMetadata=build_usage(self._replies))

    def _chunk(self, index: int, parts: Sequence[JsonObject], end: JsonMapping, **usage: JsonObject) -> bytes:
        candidates = [build_candidate(index, parts, end)]
        return sse({"candidates": candidates, **response_base(self.head, self.node), **usage})

    def error(self, problem: HttpError) -> bytes:
        return encode(self.dialect.build_error(problem)) + b"\n\n"


class GoogleStruct(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    pass


class FunctionCall(GoogleStruct):
    name: str
    id: str = ""
    args: JsonObject = {}


class Blob(GoogleStruct):
    mime_type: str
    data: str
    display_name: Hint = None


class ResponsePart(GoogleStruct):
    inline_data: Blob


class FunctionResponse(GoogleStruct):
    name: str
    id: str = ""
    response: JsonObject = {}
    parts: list[ResponsePart] = []
    will_continue: Hint = None
    scheduling: Hint = None


class Part(GoogleStruct):
    text: str | None = None
    inline_data: Blob | None = None
    function_call: FunctionCall | None = None
    function_response: FunctionResponse | None = None
    thought: bool = False
    thought_signature: str = ""
    part_metadata: Hint = None
    media_resolution: Hint = None


class Content(msgspec.Struct):
    parts: Annotated[list[Part], msgspec.Meta(min_length=1)]
    role: str = "user"


class FunctionDeclaration(GoogleStruct):
    name: Annotated[str, msgspec.Meta(min_length=1)]
    description: str = ""
    parameters: JsonObject | None = None
    parameters_json_schema: JsonObject | None = None
    response: Hint = None
    response_json_schema: Hint = None
    behavior: Hint = None


class GoogleTool(GoogleStruct):
    """Other kinds of tool run on Google's servers."""

    function_declarations: list[FunctionDeclaration] = []


class FunctionCallingConfig(GoogleStruct):
    mode: str = "AUTO"
    allowed_function_names: list[str] = []


class ToolConfig(GoogleStruct):
    function_calling_config: FunctionCallingConfig | None = None
    retrieval_config: Hint = None


class ThinkingConfig(GoogleStruct):
    """Only `includeThoughts` has an effect."""

    include_thoughts: bool = False
    thinking_budget: Hint = None
    thinking_level: Hint = None


class GenerationConfig(GoogleStruct):
    candidate_count: int | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: float | None = None  # a whole number; clients write 40.0
    seed: int | None = None
    stop_sequences: list[str] = []
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    response_logprobs: bool = False
    logprobs: int | None = None
    response_mime_type: Literal["", "text/plain", "application/json"] | None = None
    response_schema: JsonObject | None = None
    response_json_schema: JsonObject | None = None
    response_modalities: list[Literal["TEXT"]] | None = None
    thinking_config: ThinkingConfig | None = None
    media_resolution: Hint = None


class GenerateHead(GoogleStruct):
    system_instruction: str | Content | None = None
    tools: list[GoogleTool] | None = None
    tool_config: ToolConfig | None = None
    generation_config: GenerationConfig | None = None
    model: Hint = None
    safety_settings: Hint = None
    labels: Hint = None
    service_tier: Hint = None
    store: Hint = None


class GenerateBody(GenerateHead, kw_only=True):
    contents: list[msgspec.Raw]


class CountTokensBody(GoogleStruct):
    contents: list[msgspec.Raw] | None = None
    generate_content_request: GenerateBody | None = None


class Google(Dialect):
    name = "google"
    items_key = "contents"
    count_key = "totalTokens"
    splits_turns = True
    refuses_prefill = True
    encoder = GoogleEncoder

    def decode(self, body: bytes) -> DecodedBody:
        return decode_contents(decode_fields(body))

    def decode_count(self, body: bytes) -> DecodedBody:
        fields = decode_fields(body)
        inner = fields.get("generateContentRequest")
        return decode_contents(fields if inner is None else decode_fields(bytes(inner)))

    def parse_item(self, item: JsonValue, path: str) -> tuple[Message, ...]:
        content = convert(camel_keys(item, path), Content, path)
        check_parts(content.parts, path)
        if content.role == "model":
            return (self._model_message(content.parts, path),)
        if content.role in ("user", "function"):
            parts = enumerate(content.parts)
            return user_and_tool_messages(user_part(part, f"{path}.parts[{index}]") for index, part in parts)
        message = f"role {echo(content.role)} is not supported; use 'user' or 'model'"
        raise MessageError(message, field=f"{path}.role")

    def _model_message(self, parts: Sequence[Part], path: str) -> Message:
        texts, thoughts, sealed, calls = list[str](), list[str](), list[str](), list[JsonObject]()
        for index, part in enumerate(parts):
            if part.function_response is not None or part.inline_data is not None:
                name = "inlineData" if part.function_response is None else "functionResponse"
                raise MessageError("belongs in a content of the user", field=f"{path}.parts[{index}].{name}")
            if (call := part.function_call) is not None:
                calls.append(call_entry(call.id, call.name, arguments_text(call.args)))
            elif part.text is not None:
                (thoughts if part.thought else texts).append(part.text)
            held = self.signer.unwrap_bytes(part.thought_signature)
            if held is not None:
                sealed.append(held)
        message = assistant_message(texts, thoughts, calls)
        return {**message, SEALED: "".join(sealed)} if sealed else message

    def join_turn(self, parts: Sequence[Message]) -> Message:
        """Restores the reasoning from the signatures; numbers calls without ids."""
        message: JsonObject = {**super().join_turn(parts)}
        shown, sealed = message.get("reasoning_content"), "".join(part.get(SEALED, "") for part in parts)
        if shown and sealed and shown != sealed:
            said = "thoughtSignature: does not fit the thoughts of its turn; send the parts back as they came"
            raise MessageError(said, field=self.items_key)
        if sealed:
            message["reasoning_content"] = sealed
        counts: Counter[str] = Counter()
        for index, call in enumerate(message.get("tool_calls", ())):
            if not call["id"]:
                name = call["function"]["name"]
                message["tool_calls"][index] = {**call, "id": f"{name}#{counts[name]}"}
                counts[name] += 1
        return message

    def build_answer(self, head: RequestHead, replies: Sequence[Reply], text_of: TextOf) -> JsonObject:
        candidates: list[JsonObject] = []
        for index, reply in enumerate(replies):
            candidate = Candidate(self, head)
            parts = [part for delta in deltas_from_message(reply.message) for part in candidate.add(delta)]
            parts += candidate.end()
            candidates.append(build_candidate(index, parts or NO_PARTS, candidate_end(head, reply, text_of)))
        return {"candidates": candidates, "usageMetadata": build_usage(replies), **response_base(head, replies[0].node)}

    @staticmethod
    def build_error(problem: HttpError) -> JsonObject:
        info = {
            "@type": "type.googleapis.com/google.rpc.ErrorInfo",
            "reason": problem.code,
            "domain": "tokentrue",
            "metadata": {"field": problem.field} if problem.field else {},
        }
        status = STATUSES.get(problem.status, "INTERNAL" if problem.status >= 500 else "INVALID_ARGUMENT")
        return {"error": {"code": problem.status, "message": str(problem), "status": status, "details": [info]}}


def camel_case(name: str) -> str:
    return _SNAKE.sub(lambda match: match[1].upper(), name)


def camel_keys(value: JsonValue, path: str) -> JsonValue:
    if is_array(value):
        return [camel_keys(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if not is_object(value):
        return value
    out: JsonObject = {}
    for name, item in value.items():
        camel = camel_case(name)
        if camel in out:
            raise MessageError(f"is given twice, as {camel} and in snake_case", field=join_path(path, name))
        if item is not None:
            out[camel] = item if camel in OPAQUE else camel_keys(item, join_path(path, name))
    return out


def decode_fields(body: bytes) -> dict[str, msgspec.Raw]:
    return camel_keys(decode_json(body, dict[str, msgspec.Raw]), "")


def decode_contents(fields: dict[str, msgspec.Raw]) -> DecodedBody:
    items = decode_json(bytes(fields.pop("contents", b"[]")), list[msgspec.Raw], "contents")
    named = {name: parse_json(bytes(value), name) for name, value in fields.items()}
    given = convert(camel_keys(named, ""), GenerateHead)
    config = given.generation_config or GenerationConfig()
    tools = tools_from_google(given.tools)
    extra, tools = constraints_from(choice_from_google(given.tool_config, tools), format_from_config(config), tools)
    thoughts = config.thinking_config is not None and config.thinking_config.include_thoughts
    head = RequestHead(
        model="",
        n=check_choices(config.candidate_count, "generationConfig.candidateCount"),
        sampling=sampling_from_config(config, extra),
        tools=tools,
        leading_messages=leading_from(given.system_instruction),
        options=GoogleOptions(logprobs=config.response_logprobs, thoughts=thoughts),
    )
    return DecodedBody(head, items)


def leading_from(system: str | Content | None) -> tuple[Message, ...]:
    if isinstance(system, Content):
        check_parts(system.parts, "systemInstruction")
        texts = [part.text for part in system.parts if part.text is not None]
        if len(texts) < len(system.parts):
            raise MessageError("must be text", field="systemInstruction.parts")
        system = "\n\n".join(texts)
    return system_message(system)


def sampling_from_config(config: GenerationConfig, extra: JsonMapping) -> Sampling:
    if config.logprobs is not None and not config.response_logprobs:
        raise MessageError("needs responseLogprobs: true", field="generationConfig.logprobs")
    if config.top_k is not None and not config.top_k.is_integer():
        raise MessageError("must be a whole number", field="generationConfig.topK")
    return sampling_from(
        config,
        top_k=None if config.top_k is None else int(config.top_k),
        top_logprobs=config.logprobs,
        max_tokens=config.max_output_tokens,
        stop=config.stop_sequences,
        extra=extra,
    )


def format_from_config(config: GenerationConfig) -> JsonObject | None:
    schema = choose_schema(config.response_schema, config.response_json_schema, "generationConfig", "response")
    if config.response_mime_type != "application/json":
        if schema is not None:
            raise MessageError("needs responseMimeType application/json", field="generationConfig.responseSchema")
        return None
    if schema is None:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "response", "schema": schema}}


def check_parts(parts: Sequence[Part], path: str) -> None:
    for index, part in enumerate(parts):
        held = [camel_case(name) for name in KINDS if getattr(part, name) is not None]
        if len(held) > 1:
            message = f"holds {' and '.join(held)}; a part has one of them"
            raise MessageError(message, field=f"{path}.parts[{index}]")
        if not held and not part.thought_signature:
            known = ", ".join(map(camel_case, KINDS))
            raise MessageError(f"must have one of {known}", field=f"{path}.parts[{index}]")


def user_part(part: Part, where: str) -> str | Message:
    if part.function_call is not None:
        raise MessageError("belongs in a content of the model", field=f"{where}.functionCall")
    if (blob := part.inline_data) is not None:
        return base64_image(blob.mime_type, blob.data, f"{where}.inlineData")
    result = part.function_response
    if result is None:
        if part.text is None:
            raise MessageError("must be a string", field=f"{where}.text")
        return part.text
    # Without an id it has the name of its function: `pair_results` finds the call.
    message: JsonObject = {"role": "tool", **({"tool_call_id": result.id} if result.id else {"name": result.name})}
    images = [
        base64_image(blob.mime_type, blob.data, f"{where}.functionResponse.parts[{index}].inlineData")
        for index, blob in enumerate(part.inline_data for part in result.parts)
    ]
    text = [result_text(result.response)] if result.response or not images else []
    message["content"] = join_content([*text, *images], glue="\n")
    return {**message, "is_error": True} if result.response.keys() == {"error"} else message


def result_text(response: JsonObject) -> str:
    if len(response) == 1 and next(iter(response)) in PLAIN_RESULTS:
        value = next(iter(response.values()))
        return value if isinstance(value, str) else encode(value).decode()
    return encode(response).decode()


# Tools, in the terms of Chat Completions.
def tools_from_google(tools: Sequence[GoogleTool] | None) -> tuple[JsonObject, ...] | None:
    out: list[JsonObject] = []
    for index, tool in enumerate(tools or ()):
        for place, declared in enumerate(tool.function_declarations):
            where = f"tools[{index}].functionDeclarations[{place}]"
            schema = choose_schema(declared.parameters, declared.parameters_json_schema, where, "parameters")
            out.append(function_tool(declared.name, declared.description, schema or EMPTY_SCHEMA))
    return tuple(out) or None


def choose_schema(
    openapi: JsonObject | None, json_schema: JsonObject | None, where: str, kind: str
) -> JsonObject | None:
    name = kind if kind == "parameters" else f"{kind}Schema"
    if openapi is not None and json_schema is not None:
        raise MessageError(f"send {name} or {kind}JsonSchema, not both", field=f"{where}.{kind}JsonSchema")
    return json_schema if openapi is None else json_schema_from_openapi(openapi, f"{where}.{name}")


def json_schema_from_openapi(value: JsonValue, where: str) -> JsonObject:
    """Types in lower case, `nullable` as a second type, counts, which JSON may write as strings, as numbers."""
    schema = {camel_case(name): item for name, item in require_object(value, where).items()}
    out: JsonObject = {}
    for name, item in schema.items():
        at = f"{where}.{name}"
        if name == "type":
            out["type"] = [str(item).lower(), "null"] if schema.get("nullable") is True else str(item).lower()
        elif name == "items":
            out[name] = json_schema_from_openapi(item, at)
        elif name in ("anyOf", "prefixItems") and is_array(item):
            out[name] = [json_schema_from_openapi(one, at) for one in item]
        elif name in ("properties", "defs", "$defs"):
            inner = require_object(item, at).items()
            out[name] = {key: json_schema_from_openapi(one, f"{at}.{key}") for key, one in inner}
        elif name.startswith(("min", "max")) and isinstance(item, str) and item.isdigit():
            out[name] = int(item)
        elif name not in ("propertyOrdering", "nullable"):
            out[name] = item
    return out


def choice_from_google(config: ToolConfig | None, tools: Sequence[JsonObject] | None) -> str | JsonObject | None:
    if config is None:
        return None
    calling = config.function_calling_config or FunctionCallingConfig()
    where, mode, allowed = "toolConfig.functionCallingConfig", calling.mode.upper(), calling.allowed_function_names
    if mode not in CHOICES:
        raise MessageError(f"{echo(mode)} cannot be enforced; use AUTO, ANY or NONE", field=f"{where}.mode")
    if not allowed or set(allowed) == {tool["function"]["name"] for tool in tools or ()}:
        return CHOICES[mode]
    if mode != "ANY" or len(allowed) != 1:
        raise MessageError("name one function under mode ANY, or all of them", field=f"{where}.allowedFunctionNames")
    return named_function(allowed[0])
