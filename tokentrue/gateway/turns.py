"""One turn over HTTP: check the key, read and parse the body, run the turn, reply in the dialect. Read `serve` first.

Invariants: keys are checked before bodies are read; no reply and no last event before the turn is durable; a client
that disconnects cancels its generation; every turn writes one log line and its metrics.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TypeVar, cast

import orjson

from tokentrue.errors import EngineTimeout, MessageError, SessionElsewhere, SessionNotFound
from tokentrue.gateway.asgi import (
    STREAM,
    ClientGone,
    RawHeaders,
    Receive,
    Scope,
    Send,
    problem_from,
    read_body,
    send_json,
)
from tokentrue.gateway.auth import SessionAccess, invalid_key
from tokentrue.gateway.dialects import CountingDialect, Dialect, PathFields, RequestHead
from tokentrue.gateway.metrics.meter import CLOCK, EngineClock
from tokentrue.gateway.services import Services
from tokentrue.gateway.sessions import SessionHandle
from tokentrue.gateway.streaming import EventStream, cancel_on_disconnect
from tokentrue.sessions.limits import count_chars, run_by_size
from tokentrue.tracing import annotate
from tokentrue.types import Reply, TurnRequest

T = TypeVar("T")
LOG = logging.getLogger("tokentrue.gateway")


class TurnClock(EngineClock):
    def __init__(self) -> None:
        super().__init__()
        self.started = time.perf_counter()
        self.first_byte: float | None = None


class NotOpened(Exception):
    """Another gateway owns the session; nothing has been done for this request."""

    def __init__(self, elsewhere: SessionElsewhere) -> None:
        super().__init__(str(elsewhere))
        self.elsewhere = elsewhere


class TurnHandler:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def find(self, access: SessionAccess) -> SessionHandle:
        """Returns the session of an access. A wrong key does not reveal whether the session exists."""
        create = self._services.new_default_session if access.may_create else None
        try:
            handle = await self._services.sessions.open(access.session_id, create)
        except SessionElsewhere as error:
            raise NotOpened(error) from error
        except SessionNotFound:
            if access.key_hash is not None:
                raise invalid_key() from None
            raise
        access.check(handle.session.record.key_hash)
        return handle

    async def serve(
        self,
        name: str,
        access: SessionAccess,
        scope: Scope,
        receive: Receive,
        send: Send,
        in_path: PathFields | None = None,
    ) -> None:
        clock = TurnClock()
        CLOCK.set(clock)
        try:
            await self._serve(name, access, scope, receive, send, in_path, clock)
        except NotOpened:  # the gateway that owns the session serves it, and logs it
            raise
        except BaseException as error:
            log_failure(name, access.session_id, error, clock)
            raise

    async def _serve(
        self,
        name: str,
        access: SessionAccess,
        scope: Scope,
        receive: Receive,
        send: Send,
        in_path: PathFields | None,
        clock: TurnClock,
    ) -> None:
        with self._services.sessions.keep_loaded(await self.find(access)) as handle:
            dialect = handle.dialects[name]
            handle.check_open()
            head, request = await self._read(dialect, handle, scope, receive)
            if in_path is not None:
                head = replace(head, model=in_path.model, stream=in_path.stream)
            request = name_adapter(request, head.model, self._services)
            with handle.count_in_flight(), cancel_on_disconnect(receive):
                await self._services.admission.wait_for_resume()
                async with self._services.admission.admit(access.session_id):
                    if head.stream:
                        work = self._stream(handle, dialect, head, request, scope, send, clock)
                    else:
                        work = self._answer(handle, dialect, head, request, send)
                    replies = await self._run_in_time(work)
        self._record_turn(dialect, handle.session.id, head, replies, clock)

    async def _read(
        self, dialect: Dialect, handle: SessionHandle, scope: Scope, receive: Receive
    ) -> tuple[RequestHead, TurnRequest]:
        with self._services.bodies.reserve() as take:
            body = await read_body(scope, receive, self._services.config.limits.body_bytes, take)
            head, conversation = handle.parse(dialect, body)
            request_key = handle.find_request_key(scope, dialect, body)
        request = TurnRequest(
            messages=conversation,
            tools=conversation.tools,
            sampling=head.sampling,
            template_kwargs=head.template_kwargs,
            n=head.n,
            dialect=dialect.name,
            request_key=request_key,
            continues=head.last_node,
        )
        return head, request

    async def _run_in_time(self, work: Awaitable[T]) -> T:
        """Limits the total time of a turn, whatever the engine's timeouts and retries."""
        limit = self._services.config.limits.turn_s
        try:
            async with asyncio.timeout(limit):
                return await work
        except TimeoutError:
            raise EngineTimeout(f"the turn took longer than {limit:g} s (limits.turn_s)") from None

    async def _answer(
        self, handle: SessionHandle, dialect: Dialect, head: RequestHead, request: TurnRequest, send: Send
    ) -> Sequence[Reply]:
        replies = await handle.session.turn(request)
        answer = dialect.build_answer(head, replies, handle.session.renderer.decode)
        await send_json(send, 200, answer, *answer_headers(handle, replies[0]))
        return replies

    async def _stream(
        self,
        handle: SessionHandle,
        dialect: Dialect,
        head: RequestHead,
        request: TurnRequest,
        scope: Scope,
        send: Send,
        clock: TurnClock,
    ) -> Sequence[Reply]:
        stream = scope[STREAM] = EventStream(send, dialect.new_encoder(head, handle.session.renderer.decode))
        replies: list[Reply] = []
        with stream.keep_alive(self._services.config.keep_alive_s):
            async with aclosing(handle.session.stream_batches(request)) as batches:
                async for events in batches:
                    replies += [event.reply for event in events if event.reply is not None]
                    await stream.feed(events)
                    if clock.first_byte is None and stream.started:
                        clock.first_byte = time.perf_counter()
        await stream.finish()
        return replies

    async def count_tokens(self, name: str, access: SessionAccess, scope: Scope, receive: Receive, send: Send) -> None:
        with self._services.sessions.keep_loaded(await self.find(access)) as handle:
            dialect = cast("CountingDialect", handle.dialects[name])
            with self._services.bodies.reserve() as take:
                decoded = dialect.decode_count(
                    await read_body(scope, receive, self._services.config.limits.body_bytes, take)
                )
                conversation = handle.read_conversation(dialect, decoded)
            chars = count_chars(conversation) + count_chars(conversation.tools or ())
            handle.session.limits.check_text(chars)
            rendered = await run_by_size(handle.session.renderer.render, chars, conversation, conversation.tools)
            await send_json(send, 200, dialect.build_count(len(rendered.token_ids)))

    def _record_turn(
        self, dialect: Dialect, session_id: str, head: RequestHead, replies: Sequence[Reply], clock: TurnClock
    ) -> None:
        annotate(session=session_id, node=replies[0].node, tokens_in=replies[0].prompt_tokens, streamed=head.stream)
        now, first, metrics = time.perf_counter(), replies[0], self._services.metrics
        sampled = sum(len(reply.completion.token_ids) for reply in replies)
        metrics.note_turn(dialect.name, first, sampled, streamed=head.stream)
        added_s = (
            None if first.from_record else now - clock.started - clock.engine_s
        )  # a joined request waited for another's engine call
        if added_s is not None:
            metrics.added.labels(dialect.name).observe(added_s)
        metrics.turn_time.observe(now - clock.started)
        if clock.first_byte is not None:
            metrics.first.observe(clock.first_byte - clock.started)
        if LOG.isEnabledFor(logging.INFO):
            line = {
                "event": "turn",
                "session": session_id,
                "node": first.node,
                "dialect": dialect.name,
                "streamed": head.stream,
                "tokens_in": first.prompt_tokens,
                "tokens_new": first.given_tokens,
                "tokens_sampled": sampled,
                "added_ms": None if added_s is None else round(added_s * 1000, 3),
                "engine_ms": round(clock.engine_s * 1000, 3),
                "projection": first.projection,
                "fork": first.edge_reason,
                "replayed": first.from_record,
                "policy_version": first.completion.policy_version,
                "finish": first.completion.finish_reason,
            }
            LOG.info(orjson.dumps(line).decode())


def answer_headers(handle: SessionHandle, reply: Reply) -> RawHeaders:
    return [(b"x-tokentrue-session", handle.session.id.encode()), (b"x-tokentrue-node", reply.node.encode())]


def name_adapter(request: TurnRequest, model: str, services: Services) -> TurnRequest:
    """Samples with an adapter if the model's name is `adapter` or `base:adapter`; any other name is the base model."""
    loaded, base = services.provider.adapters, services.config.model
    name = model.removeprefix(f"{base}:")
    if name not in loaded:
        if name != model:
            raise MessageError(f"adapter {name!r} is not loaded; loaded: {', '.join(loaded) or 'none'}", field="model")
        return request
    return replace(request, sampling=replace(request.sampling, extra={**request.sampling.extra, "adapter": name}))


def log_failure(dialect: str, session_id: str, error: BaseException, clock: TurnClock) -> None:
    gone = isinstance(error, ClientGone | asyncio.CancelledError)
    problem = None if gone else problem_from(error)
    line = {
        "event": "turn_failed",
        "session": session_id,
        "dialect": dialect,
        "status": None if problem is None else problem.status,
        "code": "client_gone" if problem is None else problem.code,
        "total_ms": round((time.perf_counter() - clock.started) * 1000, 3),
        "engine_ms": round(clock.engine_s * 1000, 3),
    }
    LOG.info(orjson.dumps(line).decode())
