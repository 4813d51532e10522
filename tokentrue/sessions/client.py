"""An in-process OpenAI client of a session. `await client(messages, tools=None)` returns a `Reply`."""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Protocol

from tokentrue.errors import InputError, SamplingError
from tokentrue.json_types import JsonMapping, JsonObject, is_array, is_object
from tokentrue.sessions.requests import constraints_from
from tokentrue.sessions.stages.generation import chat_finish_reason, chat_usage
from tokentrue.types import PENALTIES, TRUNCATIONS, Messages, Reply, Sampling, Tools, TurnEvent, TurnRequest

_SAMPLING = {"temperature", "seed", *TRUNCATIONS, *PENALTIES}
_IGNORED = {
    "model", "user", "metadata", "store", "timeout", "stream_options", "parallel_tool_calls", "logprobs",
    "extra_headers", "reasoning_effort", "verbosity", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "service_tier",
}  # fmt: skip


class Turns(Protocol):
    async def turn(self, request: TurnRequest) -> tuple[Reply, ...]: ...

    def stream(self, request: TurnRequest) -> AsyncGenerator[TurnEvent]: ...


class Fields(SimpleNamespace):
    def __getitem__(self, name: str) -> Any:
        return self.__dict__[name]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the answer has no field {name!r}; it has {', '.join(self.__dict__)}")

    def get(self, name: str, default: Any = None) -> Any:
        return self.__dict__.get(name, default)

    def model_dump(self, *, exclude_none: bool = False, **_: Any) -> JsonObject:
        return _plain(self, exclude_none)


def _plain(value: Any, exclude_none: bool) -> Any:
    if isinstance(value, Fields):
        return {k: _plain(v, exclude_none) for k, v in value.__dict__.items() if not (exclude_none and v is None)}
    return [_plain(item, exclude_none) for item in value] if is_array(value) else value


def _fields(value: Any) -> Any:
    if is_object(value):
        return Fields(**{name: _fields(item) for name, item in value.items()})
    return [_fields(item) for item in value] if is_array(value) else value


class InProcessClient:
    def __init__(self, session: Turns) -> None:
        self._session = session

    @property
    def chat(self) -> "InProcessClient":
        return self

    @property
    def completions(self) -> "InProcessClient":
        return self

    async def __call__(self, messages: Messages, tools: Tools | None = None, **settings: Any) -> Reply:
        return (await self._session.turn(_request({"messages": messages, "tools": tools, **settings})))[0]

    async def create(self, *, stream: bool = False, **body: Any) -> Any:
        request = _request(body)
        shared = {"model": str(body.get("model", "tokentrue")), "created": int(time.time())}
        if stream:
            return _chunks(self._session.stream(request), shared)
        return _completion(await self._session.turn(request), shared)


def _request(body: JsonMapping) -> TurnRequest:
    sent: JsonObject = {**body, "extra_body": None, **(body.get("extra_body") or {})}
    given: JsonObject = {name: value for name, value in sent.items() if value is not None and name not in _IGNORED}
    sampling = {name: given.pop(name) for name in _SAMPLING & set(given)}
    limits = {given.pop(name) for name in ("max_completion_tokens", "max_tokens") if name in given}
    if len(limits) > 1:
        raise SamplingError("max_tokens and max_completion_tokens differ; send one of them")
    stop = given.pop("stop", ())
    tools = tuple(given.pop("tools", ())) or None
    extra, tools = constraints_from(given.pop("tool_choice", None), given.pop("response_format", None), tools)
    if (whole := given.pop("sampling", None)) is None:
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        top = int(given.pop("top_logprobs", 0))
        whole = Sampling(**sampling, max_tokens=next(iter(limits), None), stop=stops, top_logprobs=top)
    if extra:
        whole = replace(whole, extra={**whole.extra, **extra})
    kwargs: JsonObject = given.pop("template_kwargs", {})
    request = TurnRequest(
        messages=[_message(message) for message in given.pop("messages")],
        tools=tools,
        sampling=whole,
        template_kwargs=given.pop("chat_template_kwargs", None) or kwargs,
        n=int(given.pop("n", 1)),
        model=None if sent.get("model") is None else str(sent["model"]),
    )
    if given:
        raise InputError(f"not supported by the in-process client: {', '.join(sorted(given))}")
    return request


def _message(message: Any) -> Any:
    dump: Callable[..., Any] | None = getattr(message, "model_dump", None)
    return message if dump is None else dump(exclude_none=True)


def _completion(replies: tuple[Reply, ...], shared: JsonObject) -> Fields:
    choices = [
        {
            "index": index,
            "message": {"content": None, "tool_calls": None, **reply.message},
            "finish_reason": chat_finish_reason(reply),
            "logprobs": None,
        }
        for index, reply in enumerate(replies)
    ]
    named = {"id": replies[0].node, "object": "chat.completion", **shared}
    return _fields({**named, "choices": choices, "usage": chat_usage(replies)})


async def _chunks(events: AsyncGenerator[TurnEvent], shared: JsonObject) -> AsyncIterator[Fields]:
    async with aclosing(events):
        async for event in events:
            delta: JsonObject = {"role": None, "content": None, "tool_calls": None}
            if (added := event.delta) is not None:
                delta |= {"content": added.content or None, "reasoning_content": added.reasoning or None}
                if added.call is not None:
                    function = {"name": added.name or None, "arguments": added.arguments}
                    call = {"index": added.call, "id": added.call_id or None, "type": "function", "function": function}
                    delta["tool_calls"] = [call]
            elif event.reply is None:
                if event.token_ids:
                    continue
                delta["role"] = "assistant"
            finish = None if event.reply is None else chat_finish_reason(event.reply)
            choice = {"index": event.index, "delta": delta, "finish_reason": finish}
            yield _fields({"id": event.node_id, "object": "chat.completion.chunk", **shared, "choices": [choice]})
