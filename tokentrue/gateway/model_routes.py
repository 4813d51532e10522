"""Model requests: one table of paths defines the routes and the OpenAPI document; `ModelEndpoint` serves them.

A turn: check the key, read and parse the body, run the turn, reply in the dialect. Read `ModelEndpoint._serve` first.

Invariants: `OPERATIONS` lists all generating paths, and each runs a recorded turn; any other path below `/v1` and
`/v1beta` is refused. Keys are checked before bodies are read; no reply and no last event before the turn is durable; a
client that disconnects cancels its generation; every turn writes one log line and its metrics.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Literal
from urllib.parse import parse_qsl

import msgspec
import orjson
from starlette.routing import Route

from tokentrue.errors import EngineTimeout, MessageError, SessionElsewhere, SessionNotFound
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
    problem_from,
    read_body,
    send_json,
)
from tokentrue.gateway.auth import SessionAccess, invalid_key
from tokentrue.gateway.dialects import Anthropic, Dialect, Google, OpenAIChat, OpenAIResponses, RequestHead
from tokentrue.gateway.dialects.anthropic import CountBody, MessagesBody
from tokentrue.gateway.dialects.google import CountTokensBody, GenerateBody
from tokentrue.gateway.dialects.openai_chat import ChatBody
from tokentrue.gateway.dialects.openai_responses import ResponsesBody
from tokentrue.gateway.metrics import CLOCK, TurnClock
from tokentrue.gateway.services import Services
from tokentrue.gateway.sessions import SessionHandle
from tokentrue.json_types import JsonObject
from tokentrue.sessions.limits import count_chars, run_by_size
from tokentrue.tracing import annotate, is_traced, trace_request
from tokentrue.types import Reply, Sampling, TurnRequest

LOG = logging.getLogger("tokentrue.gateway")
SESSION_ROOT = "/sessions/{session_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One path: `path` is below `/v1`, in Starlette's syntax; `streams` is None if the body decides."""

    path: str
    dialect: type[Dialect]
    does: Literal["generate", "count", "list", "nothing"]
    summary: str = ""
    body: type[msgspec.Struct] | None = None
    streams: bool | None = None
    versions: Sequence[str] = ("v1",)

    @property
    def method(self) -> str:
        return "GET" if self.does == "list" else "POST"


_GOOGLE = Operation(path="", dialect=Google, does="generate", body=GenerateBody, versions=("v1beta", "v1"))
OPERATIONS: tuple[Operation, ...] = (
    Operation(
        path="chat/completions", dialect=OpenAIChat, does="generate", body=ChatBody, summary="OpenAI Chat Completions"
    ),
    Operation(
        path="responses", dialect=OpenAIResponses, does="generate", body=ResponsesBody, summary="OpenAI Responses"
    ),
    Operation(path="messages", dialect=Anthropic, does="generate", body=MessagesBody, summary="Anthropic Messages"),
    Operation(
        path="messages/count_tokens", dialect=Anthropic, does="count", body=CountBody, summary="Anthropic token count"
    ),
    Operation(path="models", dialect=OpenAIChat, does="list", summary="The model served here, and its adapters"),
    replace(_GOOGLE, path="models/{model:path}:generateContent", streams=False, summary="Google generateContent"),
    replace(
        _GOOGLE, path="models/{model:path}:streamGenerateContent", streams=True, summary="Google streamGenerateContent"
    ),
    replace(
        _GOOGLE,
        path="models/{model:path}:countTokens",
        does="count",
        body=CountTokensBody,
        summary="Google countTokens",
    ),
)
# The last routes: they decide the dialect of the error for an unknown path.
_UNKNOWN = (
    Operation(path="models/{model:path}:{verb}", dialect=Google, does="nothing"),
    Operation(path="{rest:path}", dialect=Google, does="nothing", versions=("v1beta",)),
    Operation(path="{rest:path}", dialect=OpenAIChat, does="nothing"),
)


def model_routes(services: Services) -> list[Route]:
    """Every operation with and without a session in the URL; a trailing slash is ignored."""
    return [
        Route(f"{root}/{version}/{operation.path}{end}", ModelEndpoint(operation, services))
        for operation in (*OPERATIONS, *_UNKNOWN)
        for version in operation.versions
        for root in ("", SESSION_ROOT)
        for end in ("", "/")
    ]


class ModelEndpoint:
    """One operation as an ASGI application; sends errors in its dialect."""

    def __init__(self, operation: Operation, services: Services) -> None:
        self._operation, self._services, self._dialect = operation, services, operation.dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not is_traced():
            await self._answer(scope, receive, send)
            return
        watched = WatchedSend(send)
        with trace_request(f"{scope['method']} {self._dialect.name}", scope["headers"]):
            await self._answer(scope, receive, watched)
            annotate(status=watched.status)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        errors = self._services.metrics.errors
        await answer_errors(self._serve, scope, receive, send, dialect=self._dialect, errors=errors)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        operation, services, in_path = self._operation, self._services, scope["path_params"]
        query = dict(parse_qsl(scope.get("query_string", b"").decode("latin-1")))
        in_url = query.get("key") if self._dialect is Google else None
        access = services.keys.authenticate(scope["headers"], in_path.get("session_id"), in_url)
        if operation.does == "nothing" or in_path.get("model") == "":
            raise HttpError(404, "unknown_path", "no such path; docs/gateway.md lists the routes")
        if scope["method"] != operation.method:
            raise HttpError(405, "method_not_allowed", f"use {operation.method}")
        if operation.streams and query.get("alt") != "sse":
            raise HttpError(400, "not_supported", "streams are server-sent events here; add ?alt=sse", field="alt")
        clock = TurnClock()
        CLOCK.set(clock)
        elsewhere = None
        try:
            try:
                handle = await self._find(access)
            except SessionElsewhere as error:
                elsewhere = error
            else:
                with services.sessions.pin(handle):
                    await self._run(handle, scope, receive, send, clock)
        except BaseException as error:
            if operation.does == "generate":
                self._log_failure(access.session_id, error, clock)
            raise
        if elsewhere is not None:  # nothing of the body has been read; the owner serves and logs it
            await services.peers.forward(elsewhere, scope, receive, send)

    async def _find(self, access: SessionAccess) -> SessionHandle:
        """Returns the session of an access. A wrong key does not reveal whether the session exists."""
        create = self._services.new_default_session if access.may_create else None
        try:
            handle = await self._services.sessions.open(access.session_id, create)
        except SessionNotFound:
            if access.key_hash is not None:
                raise invalid_key() from None
            raise
        access.check(handle.session.record.key_hash)
        return handle

    async def _run(self, handle: SessionHandle, scope: Scope, receive: Receive, send: Send, clock: TurnClock) -> None:
        dialect = handle.dialects[self._dialect.name]
        if self._operation.does == "list":
            base = self._services.config.model
            names = [base, *(f"{base}:{name}" for name in self._services.provider.adapters)]
            await send_json(send, 200, list_models(names))
        elif self._operation.does == "count":
            await self._count_tokens(handle, dialect, scope, receive, send)
        else:
            handle.check_open()
            head, request = await self._read(handle, dialect, scope, receive)
            admission = self._services.admission
            with handle.count_in_flight(), cancel_on_disconnect(receive):
                await admission.wait_for_resume()
                async with admission.admit(handle.session.id):
                    replies = await self._generate(handle, dialect, head, request, scope, send, clock)
            self._log_turn(handle.session.id, head, replies, clock)

    async def _count_tokens(
        self, handle: SessionHandle, dialect: Dialect, scope: Scope, receive: Receive, send: Send
    ) -> None:
        with self._services.bodies.reserve() as take:
            body = await read_body(scope, receive, self._services.config.limits.body_bytes, take)
            conversation = handle.read_conversation(dialect, dialect.decode_count(body))
        chars = count_chars(conversation) + count_chars(conversation.tools or ())
        handle.session.limits.check_text(chars)
        rendered = await run_by_size(handle.session.renderer.render, chars, conversation, conversation.tools)
        await send_json(send, 200, {dialect.count_key: len(rendered.token_ids)})

    async def _read(
        self, handle: SessionHandle, dialect: Dialect, scope: Scope, receive: Receive
    ) -> tuple[RequestHead, TurnRequest]:
        with self._services.bodies.reserve() as take:
            body = await read_body(scope, receive, self._services.config.limits.body_bytes, take)
            head, conversation = handle.parse(dialect, body)
            request_key = handle.find_request_key(scope, dialect, body)
        if self._operation.streams is not None:  # Google has both in the path
            head = replace(head, model=scope["path_params"]["model"], stream=self._operation.streams)
        request = TurnRequest(
            messages=conversation,
            tools=conversation.tools,
            sampling=self._name_adapter(head),
            template_kwargs=head.template_kwargs,
            n=head.n,
            dialect=dialect.name,
            request_key=request_key,
            continues=head.last_node,
        )
        return head, request

    def _name_adapter(self, head: RequestHead) -> Sampling:
        """Samples with an adapter if the model's name is `adapter` or `base:adapter`; any other name is the base."""
        loaded = self._services.provider.adapters
        name = head.model.removeprefix(f"{self._services.config.model}:")
        if name in loaded:
            return replace(head.sampling, extra={**head.sampling.extra, "adapter": name})
        if name != head.model:
            raise MessageError(f"adapter {name!r} is not loaded; loaded: {', '.join(loaded) or 'none'}", field="model")
        return head.sampling

    async def _generate(
        self,
        handle: SessionHandle,
        dialect: Dialect,
        head: RequestHead,
        request: TurnRequest,
        scope: Scope,
        send: Send,
        clock: TurnClock,
    ) -> Sequence[Reply]:
        session, limit = handle.session, self._services.config.limits.turn_s
        try:
            async with asyncio.timeout(limit):  # whatever the engine's timeouts and retries
                if not head.stream:
                    replies = await session.turn(request)
                    names = (b"x-tokentrue-session", session.id), (b"x-tokentrue-node", replies[0].node)
                    headers = [(name, value.encode()) for name, value in names]
                    await send_json(send, 200, dialect.build_answer(head, replies, session.renderer.decode), *headers)
                    return replies
                stream = scope[STREAM] = EventStream(send, dialect.new_encoder(head, session.renderer.decode))
                streamed: list[Reply] = []
                with stream.keep_alive(self._services.config.keep_alive_s):
                    async with aclosing(session.stream_batches(request)) as batches:
                        async for events in batches:
                            streamed += [event.reply for event in events if event.reply is not None]
                            await stream.feed(events)
                            if clock.first_byte is None and stream.started:
                                clock.first_byte = time.perf_counter()
                await stream.end()
                return streamed
        except TimeoutError:
            raise EngineTimeout(f"the turn took longer than {limit:g} s (limits.turn_s)") from None

    def _log_turn(self, session_id: str, head: RequestHead, replies: Sequence[Reply], clock: TurnClock) -> None:
        first, sampled = replies[0], sum(len(reply.completion.token_ids) for reply in replies)
        annotate(session=session_id, node=first.node, tokens_in=first.prompt_tokens, streamed=head.stream)
        added_s = self._services.metrics.note_turn(self._dialect.name, first, sampled, clock, streamed=head.stream)
        log_line(
            "turn",
            session=session_id,
            node=first.node,
            dialect=self._dialect.name,
            streamed=head.stream,
            tokens_in=first.prompt_tokens,
            tokens_new=first.given_tokens,
            tokens_sampled=sampled,
            added_ms=None if added_s is None else round(added_s * 1000, 3),
            engine_ms=round(clock.engine_s * 1000, 3),
            projection=first.projection,
            fork=first.edge_reason,
            replayed=first.from_record,
            policy_version=first.completion.policy_version,
            finish=first.completion.finish_reason,
        )

    def _log_failure(self, session_id: str, error: BaseException, clock: TurnClock) -> None:
        gone = isinstance(error, ClientGone | asyncio.CancelledError)
        problem = None if gone else problem_from(error)
        log_line(
            "turn_failed",
            session=session_id,
            dialect=self._dialect.name,
            status=None if problem is None else problem.status,
            code="client_gone" if problem is None else problem.code,
            total_ms=round((time.perf_counter() - clock.started) * 1000, 3),
            engine_ms=round(clock.engine_s * 1000, 3),
        )


def log_line(event: str, **fields: Any) -> None:
    if LOG.isEnabledFor(logging.INFO):
        LOG.info(orjson.dumps({"event": event, **fields}).decode())


def list_models(names: Sequence[str]) -> JsonObject:
    """Has the fields of both vendors: OpenAI's list and Anthropic's page."""
    kind = {
        "object": "model",
        "type": "model",
        "created": 0,
        "owned_by": "tokentrue",
        "created_at": "1970-01-01T00:00:00Z",
    }
    data = [{"id": name, **kind, "display_name": name} for name in names]
    return {"object": "list", "data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]}
