"""Model requests. Invariants: only paths of `OPERATIONS` generate, and each runs a recorded turn; keys are checked
before bodies are read; no reply and no last event before the turn is durable; every turn writes one log line."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing, nullcontext
from dataclasses import replace
from typing import Literal, NamedTuple
from urllib.parse import parse_qsl

import msgspec
from starlette.routing import Route

from tokentrue.errors import EngineTimeout, MessageError, SessionElsewhere
from tokentrue.gateway.asgi import (
    STREAM,
    ClientGone,
    EventStream,
    HttpError,
    Receive,
    Scope,
    Send,
    WatchedSend,
    answer_errors,
    cancel_on_disconnect,
    log_line,
    problem_from,
    send_json,
)
from tokentrue.gateway.auth import SessionAccess
from tokentrue.gateway.dialects.anthropic import Anthropic, CountBody, MessagesBody
from tokentrue.gateway.dialects.base import Dialect, RequestHead
from tokentrue.gateway.dialects.google import CountTokensBody, GenerateBody, Google
from tokentrue.gateway.dialects.openai_chat import ChatBody, OpenAIChat, OpenAIChatTokens, TokensBody
from tokentrue.gateway.dialects.openai_responses import OpenAIResponses, ResponsesBody
from tokentrue.gateway.metrics import CLOCK, TurnClock
from tokentrue.gateway.services import Services
from tokentrue.gateway.sessions import SessionHandle
from tokentrue.json_types import JsonObject
from tokentrue.sessions.requests import count_chars, run_by_size
from tokentrue.sessions.stages.generation import count_sampled
from tokentrue.tracing import annotate, is_traced, trace_request
from tokentrue.turn import Session
from tokentrue.types import Reply, TurnRequest

SESSION_ROOT = "/sessions/{session_id}"
Body = type[msgspec.Struct] | None
Replies = Sequence[Reply]


class Operation(NamedTuple):
    path: str
    dialect: type[Dialect]
    does: Literal["generate", "count", "list", "nothing"]
    summary: str = ""
    body: Body = None
    streams: bool | None = None
    versions: Sequence[str] = ("v1",)

    @property
    def method(self) -> str:
        return "GET" if self.does == "list" else "POST"


_GOOGLE = Operation("", Google, "generate", body=GenerateBody, versions=("v1beta", "v1"))
_MODEL = "models/{model:path}"
OPERATIONS = (
    Operation("chat/completions", OpenAIChat, "generate", "OpenAI Chat Completions", ChatBody),
    Operation("chat/completions/tokens", OpenAIChatTokens, "generate", "Ids in, ids out", TokensBody),
    Operation("responses", OpenAIResponses, "generate", "OpenAI Responses", ResponsesBody),
    Operation("messages", Anthropic, "generate", "Anthropic Messages", MessagesBody),
    Operation("messages/count_tokens", Anthropic, "count", "Anthropic token count", CountBody),
    Operation("models", OpenAIChat, "list", "The model served here, and its adapters"),
    _GOOGLE._replace(path=f"{_MODEL}:generateContent", streams=False, summary="Google generateContent"),
    _GOOGLE._replace(path=f"{_MODEL}:streamGenerateContent", streams=True, summary="Google streamGenerateContent"),
    _GOOGLE._replace(path=f"{_MODEL}:countTokens", does="count", summary="Google countTokens", body=CountTokensBody),
)
# The last routes: they decide the dialect of the error for an unknown path.
_UNKNOWN = (
    Operation(_MODEL + ":{verb}", Google, "nothing"),
    Operation("{rest:path}", Google, "nothing", versions=("v1beta",)),
    Operation("{rest:path}", OpenAIChat, "nothing"),
)


def model_routes(services: Services) -> list[Route]:
    return [
        Route(f"{root}/{version}/{operation.path}{end}", ModelEndpoint(operation, services))
        for operation in (*OPERATIONS, *_UNKNOWN)
        for version in operation.versions
        for root in ("", SESSION_ROOT)
        for end in ("", "/")
    ]


class ModelEndpoint:
    def __init__(self, operation: Operation, services: Services) -> None:
        self._operation, self._services, self._dialect = operation, services, operation.dialect

    async def __call__(self, scope: Scope, receive: Receive, send: WatchedSend) -> None:
        name, errors = f"{scope['method']} {self._dialect.name}", self._services.metrics.errors
        with trace_request(name, scope["headers"]) if is_traced() else nullcontext():
            await answer_errors(self._serve, scope, receive, send, dialect=self._dialect, errors=errors)
            annotate(status=send.status)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        operation, services, in_path = self._operation, self._services, scope["path_params"]
        query = dict(parse_qsl(scope.get("query_string", b"").decode("latin-1")))
        in_url = query.get("key") if self._dialect is Google else None
        access = services.keys.authenticate(scope["headers"], in_path.get("session_id"), in_url)
        if operation.does == "nothing" or in_path.get("model") == "":
            raise HttpError(404, "unknown_path", "no such path; GET /openapi.json lists them")
        if scope["method"] != operation.method:
            raise HttpError(405, "method_not_allowed", f"use {operation.method}")
        if operation.streams and query.get("alt") != "sse":
            raise HttpError(400, "not_supported", "streams are server-sent events here; add ?alt=sse", field="alt")
        request = ModelRequest(services, operation, scope, receive, send)
        try:
            with services.sessions.keep_loaded(await self._find(access)) as handle:
                await request.run(handle)
        except BaseException as error:
            # Before `run` nothing of the body has been read: the owner serves and logs the request.
            if isinstance(error, SessionElsewhere) and not request.is_running:
                await services.peers.forward(error, scope, receive, send)
                return
            if operation.does == "generate":
                request.log_failure(access.session_id, error)
            raise

    async def _find(self, access: SessionAccess) -> SessionHandle:
        create = self._services.new_session if access.may_create else None
        with access.hide_session():
            handle = await self._services.sessions.open(access.session_id, create)
        access.check(handle.session.record.key_hash)
        return handle


class ModelRequest:
    """One request, whose key has been checked. Read `run` first."""

    is_running = False  # True once `run` was called, also after its end

    def __init__(self, services: Services, operation: Operation, scope: Scope, receive: Receive, send: Send) -> None:
        self._services, self._operation = services, operation
        self._scope, self._receive, self._send = scope, receive, send
        self._clock = TurnClock()
        CLOCK.set(self._clock)

    async def run(self, handle: SessionHandle) -> None:
        self.is_running = True
        services, session, dialect = self._services, handle.session, handle.dialects[self._operation.dialect.name]
        if self._operation.does == "list":
            base = services.config.model
            names = [base, *(f"{base}:{name}" for name in services.provider.adapters)]
            await send_json(self._send, 200, list_models(names))
            return
        if self._operation.does == "count":
            async with services.bodies.read(self._scope, self._receive, services.config.limits.body_bytes) as body:
                conversation = await handle.read_conversation(dialect, dialect.decode_count(body))
            chars = count_chars(conversation) + count_chars(conversation.tools or ())
            session.limits.check_text(chars)
            rendered = await run_by_size(session.renderer.render, chars, conversation, conversation.tools)
            await send_json(self._send, 200, {dialect.count_key: len(rendered.token_ids)})
            return
        handle.check_open()
        head, request = await self._read(handle, dialect)
        limit = services.config.limits.turn_s
        with handle.count_in_flight(), cancel_on_disconnect(self._receive):
            await services.admission.wait_for_resume()
            async with services.admission.admit(session.id):
                try:
                    async with asyncio.timeout(limit):  # whatever the engine's timeouts and retries
                        replies = await (self._stream if head.stream else self._answer)(session, dialect, head, request)
                except TimeoutError:
                    raise EngineTimeout(f"the turn took longer than {limit:g} s (limits.turn_s)") from None
        self._log_turn(session.id, head, replies)
        handle.warn_of_retries(replies[0].node)

    async def _read(self, handle: SessionHandle, dialect: Dialect) -> tuple[RequestHead, TurnRequest]:
        services, scope = self._services, self._scope
        async with services.bodies.read(scope, self._receive, services.config.limits.body_bytes) as body:
            head, conversation = await handle.parse(dialect, body)
            request_key = handle.find_request_key(scope, dialect, body)
        if self._operation.streams is not None:  # Google has both in the path
            head = replace(head, model=scope["path_params"]["model"], stream=self._operation.streams)
        # An adapter samples if the model's name is `adapter` or `base:adapter`; any other name is the base model.
        sampling, loaded = head.sampling, services.provider.adapters
        adapter = head.model.removeprefix(f"{services.config.model}:")
        if adapter in loaded:
            sampling = replace(sampling, extra={**sampling.extra, "adapter": adapter})
        elif adapter != head.model:
            message = f"adapter {adapter!r} is not loaded; loaded: {', '.join(loaded) or 'none'}"
            raise MessageError(message, field="model")
        request = TurnRequest(
            messages=conversation,
            tools=conversation.tools,
            sampling=sampling,
            template_kwargs=head.template_kwargs,
            n=head.n,
            dialect=dialect.name,
            model=head.model or None,
            request_key=request_key,
            continues=head.last_node,
            prompt_ids=head.prompt_ids,
        )
        return head, request

    async def _answer(self, session: Session, dialect: Dialect, head: RequestHead, request: TurnRequest) -> Replies:
        replies = await session.turn(request)
        if getattr(head.options, "return_token_ids", False):
            head = replace(head, prompt_ids=session.tree.prompt_ids(session.tree.get(replies[0].node)))
        answer = dialect.build_answer(head, replies, session.renderer.decode)
        names = (b"x-tokentrue-session", session.id.encode()), (b"x-tokentrue-node", replies[0].node.encode())
        await send_json(self._send, 200, answer, *names)
        return replies

    async def _stream(self, session: Session, dialect: Dialect, head: RequestHead, request: TurnRequest) -> Replies:
        replies, encoder = list[Reply](), dialect.encoder(dialect, head, session.renderer.decode)
        stream = self._scope[STREAM] = EventStream(self._send, encoder)
        with stream.keep_alive(self._services.config.keep_alive_s):
            async with aclosing(session.stream_batches(request)) as batches:
                async for events in batches:
                    replies += [event.reply for event in events if event.reply is not None]
                    await stream.feed(events)
                    if self._clock.first_byte is None and stream.started:
                        self._clock.first_byte = time.perf_counter()
        await stream.end()
        return replies

    def _log_turn(self, session_id: str, head: RequestHead, replies: Replies) -> None:
        first, sampled, name = replies[0], count_sampled(replies), self._operation.dialect.name
        annotate(session=session_id, node=first.node, tokens_in=first.prompt_tokens, streamed=head.stream)
        added_s = self._services.metrics.note_turn(name, first, sampled, self._clock, streamed=head.stream)
        added_ms = None if added_s is None else round(added_s * 1000, 3)
        log_line(
            "turn", session=session_id, node=first.node, dialect=name, streamed=head.stream,
            tokens_in=first.prompt_tokens, tokens_new=first.given_tokens, tokens_sampled=sampled,
            added_ms=added_ms, engine_ms=self._clock.engine_ms, projection=first.projection, fork=first.edge_reason,
            replayed=first.from_record, policy_version=first.completion.policy_version,
            finish=first.completion.finish_reason,
        )  # fmt: skip

    def log_failure(self, session_id: str, error: BaseException) -> None:
        said: JsonObject = {"status": None, "code": "client_gone", "message": None, "field": None}
        if not isinstance(error, ClientGone | asyncio.CancelledError):
            problem = problem_from(error)
            said = {"status": problem.status, "code": problem.code, "message": str(problem), "field": problem.field}
        total_ms, name = round((time.perf_counter() - self._clock.started) * 1000, 3), self._operation.dialect.name
        times: JsonObject = {"total_ms": total_ms, "engine_ms": self._clock.engine_ms}
        log_line("turn_failed", session=session_id, dialect=name, **said, **times)


def list_models(names: Sequence[str]) -> JsonObject:
    kind = {"object": "model", "type": "model", "created": 0, "owned_by": "tokentrue"}
    data = [{"id": name, **kind, "created_at": "1970-01-01T00:00:00Z", "display_name": name} for name in names]
    return {"object": "list", "data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]}
