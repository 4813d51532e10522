"""OpenAI Chat Completions. Reasoning is `reasoning_content` both ways; developer messages are system messages."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Literal

import msgspec

from tokentrue.errors import MessageError, SamplingError
from tokentrue.gateway.dialects.base import (
    DecodedBody,
    Dialect,
    Encoder,
    FunctionTool,
    Hint,
    HttpError,
    OpenAIBody,
    ReadImage,
    RequestHead,
    TextOf,
    call_entry,
    check_choices,
    decode_body,
    describe_item,
    encode,
    join_parts,
    require_object,
    sampling_from,
    sse,
)
from tokentrue.ids import TokenIds
from tokentrue.json_types import JsonObject, JsonValue
from tokentrue.plain_json import convert, echo
from tokentrue.sessions.requests import constraints_from
from tokentrue.sessions.stages.generation import chat_finish_reason, chat_usage
from tokentrue.types import Message, Reply, TurnEvent

ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
ROLES = ("system", "developer", "user", "assistant", "tool")  # a tuple: what is compared may be unhashable
TEXT_PARTS = ("text", "refusal")
IMAGE_PARTS: Mapping[str, ReadImage] = {"image_url": lambda part, path: {**part, "field": path}}


class ChatOptions(msgspec.Struct, frozen=True):
    logprobs: bool
    include_usage: bool
    return_token_ids: bool


def completion_base(head: RequestHead, node: str, kind: str) -> JsonObject:
    return {"id": f"chatcmpl-{node}", "object": kind, "created": int(time.time()), "model": head.model}


def choice_end(head: RequestHead, reply: Reply) -> JsonObject:
    end: JsonObject = {"finish_reason": chat_finish_reason(reply)}
    if head.options.return_token_ids:
        end["token_ids"] = list(reply.completion.token_ids)
    return end


def reply_logprobs(reply: Reply, text_of: TextOf) -> JsonObject:
    done = reply.completion
    return build_logprobs(done.token_ids, done.logprobs, done.top_logprobs, text_of)


def build_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[float], top: Sequence[Mapping[int, float]] | None, text_of: TextOf
) -> JsonObject:
    content: list[JsonObject] = []
    for index, (token, value) in enumerate(zip(token_ids, logprobs, strict=True)):
        entry = token_entry(token, value, text_of)
        ranked = sorted(top[index].items(), key=lambda pair: -pair[1]) if top else []
        entry["top_logprobs"] = [token_entry(other, other_value, text_of) for other, other_value in ranked]
        content.append(entry)
    return {"content": content, "refusal": None}


def token_entry(token: int, logprob: float, text_of: TextOf) -> JsonObject:
    text = text_of((token,))
    whole = "\ufffd" not in text  # half a character has no bytes to show
    return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace")) if whole else None}


class ChatEncoder(Encoder):
    """Log-probabilities are sent token by token; those with alternatives at the end, as engines report them."""

    def __init__(self, dialect: Dialect, head: RequestHead, text_of: TextOf) -> None:
        super().__init__(dialect, head, text_of)
        self._start = self._end = b""
        self._has_content: dict[int, bool] = {}  # of every choice that has begun
        self._replies: list[Reply] = []
        self._logprobs_late = bool(head.options.logprobs and head.sampling.top_logprobs)

    def feed(self, event: TurnEvent) -> bytes:
        out, index, added, delta = b"", event.index, event.delta, JsonObject()
        if index not in self._has_content:
            if not self._has_content:
                base = completion_base(self.head, event.node_id, "chat.completion.chunk")
                usage = {"usage": None} if self.head.options.include_usage else {}
                before, _, after = sse({**base, "choices": [], **usage}).rpartition(b'"choices":[]')
                self._start, self._end = before + b'"choices":[', b"]" + after
            self._has_content[index] = False
            out = self._chunk(index, {"role": "assistant", "content": None})
        if added is not None:
            if added.reasoning:
                delta["reasoning_content"] = added.reasoning
            if added.content:
                delta["content"] = added.content
                self._has_content[index] = True
            if added.call is not None:
                call: JsonObject = {"index": added.call, "function": {"arguments": added.arguments}}
                if added.call_id or added.name:
                    call |= {"id": added.call_id, "type": "function"}
                    call["function"]["name"] = added.name
                delta["tool_calls"] = [call]
        logprobs = None
        if self.head.options.logprobs and event.token_ids and not self._logprobs_late:
            logprobs = build_logprobs(event.token_ids, event.logprobs, None, self.text_of)
        if delta or logprobs:
            out += self._chunk(index, delta, logprobs=logprobs)
        if event.reply is not None:
            out += self.end(index, event.reply)
        return out

    def end(self, index: int, reply: Reply) -> bytes:
        self._replies.append(reply)
        is_empty = reply.message.get("content") == "" and not self._has_content[index]
        is_late = self._logprobs_late or (self.head.options.logprobs and reply.from_record)  # a record has no chunks
        logprobs = reply_logprobs(reply, self.text_of) if is_late else None
        delta = {"content": ""} if is_empty else {}
        return self._chunk(index, delta, logprobs=logprobs, **choice_end(self.head, reply))

    def _chunk(self, index: int, delta: JsonObject, *, logprobs: JsonObject | None = None, **end: JsonValue) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": None, "logprobs": logprobs, **end}
        return self._start + encode(choice) + self._end

    def finish(self) -> bytes:
        out = b""
        if self.head.options.include_usage:
            out = self._start + self._end.replace(b"null", encode(chat_usage(self._replies)))
        return out + b"data: [DONE]\n\n"


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class ChatBody(OpenAIBody, kw_only=True):
    messages: list[Annotated[msgspec.Raw, describe_item(*ROLES)]]
    stream_options: StreamOptions | None = None
    n: int | None = 1
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logprobs: bool | None = False
    response_format: JsonObject | None = None
    chat_template_kwargs: JsonObject | None = None
    return_token_ids: bool | None = False
    reasoning_effort: Hint = None
    verbosity: Hint = None
    metadata: Hint = None
    store: Hint = None
    modalities: list[Literal["text"]] | None = None


class TokensBody(ChatBody, kw_only=True):
    """The exact prompt; the messages say what it is."""

    tokens: Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]], msgspec.Meta(min_length=1)]


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str | JsonObject = ""


class ChatCall(msgspec.Struct):
    function: CalledFunction
    id: str = ""
    type: Literal["function"] = "function"


class AssistantFields(msgspec.Struct):
    reasoning_content: str | None = None
    tool_calls: list[ChatCall] | None = None
    function_call: None = None
    audio: None = None


class OpenAIChat(Dialect):
    name = "openai_chat"
    encoder = ChatEncoder

    def decode(self, body: bytes) -> DecodedBody:
        return self._decode(decode_body(body, ChatBody))

    def _decode(self, given: ChatBody) -> DecodedBody:
        for index, tool in enumerate(given.tools or ()):
            if tool.get("type") != "function":
                message = f"tool type {echo(tool.get('type'))} is not supported; use 'function'"
                raise MessageError(message, field=f"tools[{index}].type")
            convert(tool.get("function"), FunctionTool, f"tools[{index}].function")
        extra, tools = constraints_from(given.tool_choice, given.response_format, tuple(given.tools or ()) or None)
        count, limits = check_choices(given.n, "n"), {given.max_tokens, given.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise SamplingError("max_tokens and max_completion_tokens differ; send one of them")
        if given.top_logprobs is not None and not given.logprobs:
            raise MessageError("needs logprobs: true", field="top_logprobs")
        sampling = sampling_from(
            given,
            top_k=0 if given.top_k == -1 else given.top_k,  # vLLM and SGLang write "off" so
            max_tokens=next(iter(limits), None),
            stop=[given.stop] if isinstance(given.stop, str) else given.stop,
            extra=extra,
        )
        head = RequestHead(
            model=given.model,
            stream=bool(given.stream),
            n=count,
            sampling=sampling,
            tools=tools,
            template_kwargs=given.chat_template_kwargs or {},
            options=ChatOptions(
                logprobs=bool(given.logprobs),
                include_usage=bool(given.stream_options and given.stream_options.include_usage),
                return_token_ids=bool(given.return_token_ids),
            ),
        )
        return DecodedBody(head, given.messages)

    def parse_item(self, item: JsonValue, path: str) -> tuple[Message, ...]:
        """Keeps unknown fields: templates may use them."""
        message = dict(require_object(item, path))
        role = message.get("role")
        if role not in ROLES:
            known = ", ".join(sorted(ROLES))
            raise MessageError(f"role {echo(role)} is not supported; use one of {known}", field=f"{path}.role")
        glue = "" if role == "assistant" else "\n"
        content = message.get("content")
        message["content"] = join_parts(content, TEXT_PARTS, f"{path}.content", glue=glue, images=IMAGE_PARTS)
        if role == "developer":
            message["role"] = "system"
        if role == "assistant":
            if message.get("reasoning_content") is None and isinstance(message.get("reasoning"), str):
                message["reasoning_content"] = message["reasoning"]  # OpenRouter's and vLLM's name for it
            if not convert(message, AssistantFields, path).tool_calls:
                message.pop("tool_calls", None)
        elif message["content"] is None:
            raise MessageError("must be a string or a list of parts", field=f"{path}.content")
        if role == "tool" and not isinstance(message.get("tool_call_id"), str):
            raise MessageError("must name the call that this answers", field=f"{path}.tool_call_id")
        return (message,)

    def build_answer(self, head: RequestHead, replies: Sequence[Reply], text_of: TextOf) -> JsonObject:
        choices: list[JsonObject] = []
        for index, reply in enumerate(replies):
            said = reply.message
            message: JsonObject = {"role": "assistant", "content": said.get("content"), "refusal": None}
            if said.get("reasoning_content"):
                message["reasoning_content"] = said["reasoning_content"]
            if said.get("tool_calls"):
                message["tool_calls"] = [
                    call_entry(call["id"], call["function"]["name"], call["function"]["arguments"])
                    for call in said["tool_calls"]
                ]
            logprobs = reply_logprobs(reply, text_of) if head.options.logprobs else None
            choices.append({"index": index, "message": message, "logprobs": logprobs, **choice_end(head, reply)})
        answer = completion_base(head, replies[0].node, "chat.completion")
        if head.prompt_ids is not None:
            answer["prompt_token_ids"] = list(head.prompt_ids)
        return {**answer, "choices": choices, "usage": chat_usage(replies)}

    @staticmethod
    def build_error(problem: HttpError) -> JsonObject:
        kind = ERROR_TYPES.get(problem.status, "invalid_request_error" if problem.status < 500 else "server_error")
        return {"error": {"message": str(problem), "type": kind, "param": problem.field, "code": problem.code}}


class OpenAIChatTokens(OpenAIChat):
    name = "openai_tokens"

    def decode(self, body: bytes) -> DecodedBody:
        given = decode_body(body, TokensBody)
        head, items = self._decode(given)
        options = msgspec.structs.replace(head.options, return_token_ids=True)
        return DecodedBody(replace(head, options=options, prompt_ids=TokenIds(given.tokens)), items)
