"""One turn over HTTP: whose it is → what is new → the corridor → the dialect's answer. Read `serve` first.

Invariants: no answer, and no terminal event, before the turn is durable; a client that goes away cancels its generation; every
turn leaves one log line and its metrics.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import orjson

from tokentrue.errors import SessionNotFound
from tokentrue.gateway.asgi import EVENTS, ClientGone, RawHeaders, Receive, Scope, Send, problem_headers, read_body, send_json
from tokentrue.gateway.auth import Claim, invalid_key
from tokentrue.gateway.config import GatewayConfig
from tokentrue.gateway.dialects import Dialect, Encoder, Problem
from tokentrue.gateway.gate import Gate
from tokentrue.gateway.live import Live, Registry
from tokentrue.gateway.memo import Body
from tokentrue.gateway.meter import CLOCK
from tokentrue.gateway.metrics import Metrics
from tokentrue.gateway.problems import problem_of
from tokentrue.types import Reply, TurnEvent, TurnRequest

LOG = logging.getLogger("tokentrue.gateway")
WATCH_AFTER_S = 0.2  # a turn faster than this is over before its client could leave


@dataclass(slots=True)
class Turn:
    """What one request has gathered on its way."""

    dialect: Dialect
    session_id: str
    started: float
    engine_s: float = 0.0
    streamed: bool = False
    fast: bool = False
    first_byte: float | None = None


class Turns:
    def __init__(self, *, config: GatewayConfig, registry: Registry, gate: Gate, metrics: Metrics) -> None:
        self._config, self._registry, self._gate, self._metrics = config, registry, gate, metrics

    async def open(self, claim: Claim) -> Live:
        """The session behind a claim; a key that fits nothing does not learn whether the session exists."""
        try:
            live = await self._registry.get(claim.session_id)
        except SessionNotFound:
            if claim.key_hash is not None:
                raise invalid_key() from None
            raise
        claim.check(live.session.record.key_hash)
        return live

    async def serve(self, name: str, claim: Claim, scope: Scope, receive: Receive, send: Send) -> None:
        live = await self.open(claim)
        dialect = live.dialects[name]
        turn = Turn(dialect, claim.session_id, time.perf_counter())
        try:
            await self._run(turn, live, scope, receive, send)
        except ClientGone:
            self._metrics.errors.labels(name, "client_gone").inc()
        except Exception as error:
            await self.refuse(dialect, error, send)

    async def refuse(self, dialect: Dialect, error: Exception, send: Send) -> None:
        problem = problem_of(error)
        if problem.status == 500:
            LOG.error("a request failed", exc_info=error)
        self._metrics.errors.labels(dialect.name, problem.code).inc()
        await send_json(send, problem.status, dialect.error(problem), *problem_headers(problem))

    async def _run(self, turn: Turn, live: Live, scope: Scope, receive: Receive, send: Send) -> None:
        raw = await read_body(scope, receive, self._config.limits.body_bytes)
        live.check_open()
        body, after, messages = live.take(turn.dialect, raw)
        request = TurnRequest(
            messages=messages,
            tools=body.call.tools,
            sampling=body.call.sampling,
            template_kwargs=body.call.template_kwargs,
            n=body.call.n,
            dialect=turn.dialect.name,
            after=after,
            request_key=live.request_key(scope, body),
        )
        turn.streamed, turn.fast = body.call.stream, body.after is not None
        CLOCK.set(turn)
        live.enter()
        try:
            await self._gate.admit()
            self._gate.enter()
            try:
                await (self._streamed if turn.streamed else self._whole)(turn, live, body, request, receive, send)
            finally:
                self._gate.leave()
        finally:
            live.leave()

    async def _whole(self, turn: Turn, live: Live, body: Body, request: TurnRequest, receive: Receive, send: Send) -> None:
        with Leaving(receive):
            replies = await live.session.turn(request)
        self._remember(turn, live, body, replies)
        answer = turn.dialect.answer(body.call, replies, live.session.renderer.decode)
        await send_json(send, 200, answer, *answer_headers(live, replies[0]))
        self._note_soon(turn, replies)

    async def _streamed(self, turn: Turn, live: Live, body: Body, request: TurnRequest, receive: Receive, send: Send) -> None:
        line = Line(send, turn.dialect.encoder(body.call, live.session.renderer.decode))
        replies: list[Reply] = []
        with Leaving(receive, line=line, every_s=self._config.keep_alive_s):
            try:
                async with aclosing(live.session.stream(request)) as events:
                    async for event in events:
                        if event.reply is not None:
                            replies.append(event.reply)
                        await line.feed(event)
                        if turn.first_byte is None and line.started:
                            turn.first_byte = time.perf_counter()
                self._remember(turn, live, body, replies)
                await line.finish()
                self._note_soon(turn, replies)
            except Exception as error:
                if not line.started:
                    raise
                problem = problem_of(error)
                if problem.status == 500:
                    LOG.error("a stream failed", exc_info=error)
                self._metrics.errors.labels(turn.dialect.name, problem.code).inc()
                await line.fail(problem)

    def _remember(self, turn: Turn, live: Live, body: Body, replies: Sequence[Reply]) -> None:
        """The bytes of a committed request: its continuation may follow at once."""
        if len(replies) == 1:
            live.remember(turn.dialect, body, replies[0].node)

    def _note_soon(self, turn: Turn, replies: Sequence[Reply]) -> None:
        """In the next round of the loop: what was sent in this one goes out at its end, and must not wait for our bookkeeping."""
        asyncio.get_running_loop().call_soon(self._note, turn, replies, time.perf_counter())

    def _note(self, turn: Turn, replies: Sequence[Reply], now: float) -> None:
        """The metrics and the log line of a committed turn."""
        first = replies[0]
        sampled = sum(len(reply.completion.token_ids) for reply in replies)
        metrics = self._metrics
        metrics.turns.labels(turn.dialect.name, turn.streamed).inc()
        if first.replayed:
            metrics.replays.inc()
        else:
            metrics.prompt_tokens.inc(first.prompt_tokens)
            metrics.given_tokens.inc(first.given_tokens)
            metrics.sampled_tokens.inc(sampled)
        if first.root not in (None, "first"):
            metrics.forks.labels(first.root).inc()
        if turn.fast:
            metrics.fast.inc()
        metrics.projections.labels(first.projection).inc()
        metrics.added.labels(turn.dialect.name).observe(now - turn.started - turn.engine_s)
        metrics.turn_time.observe(now - turn.started)
        if turn.first_byte is not None:
            metrics.first.observe(turn.first_byte - turn.started)
        if LOG.isEnabledFor(logging.INFO):
            # As LOG.info would, without looking for the caller's place in the source.
            LOG.handle(logging.LogRecord(LOG.name, logging.INFO, __file__, 0, log_line(turn, first, sampled, now), None, None))


def log_line(turn: Turn, reply: Reply, sampled: int, now: float) -> str:
    line = {
        "event": "turn",
        "session": turn.session_id,
        "node": reply.node,
        "dialect": turn.dialect.name,
        "streamed": turn.streamed,
        "tokens_in": reply.prompt_tokens,
        "tokens_new": reply.given_tokens,
        "tokens_sampled": sampled,
        "added_ms": round((now - turn.started - turn.engine_s) * 1000, 3),
        "engine_ms": round(turn.engine_s * 1000, 3),
        "projection": reply.projection,
        "fork": reply.root,
        "replayed": reply.replayed,
        "policy_version": reply.completion.policy_version,
        "finish": reply.completion.finish_reason,
    }
    return orjson.dumps(line).decode()


def answer_headers(live: Live, reply: Reply) -> RawHeaders:
    return [(b"x-tokentrue-session", live.session.id.encode()), (b"x-tokentrue-node", reply.node.encode())]


class Line:
    """An open event stream. The status is held back until the first token is there, so that early failures keep their status."""

    def __init__(self, send: Send, encoder: Encoder) -> None:
        self._send, self._encoder = send, encoder
        self._held = b""
        self.started = False
        self.last = time.monotonic()

    async def feed(self, event: TurnEvent) -> None:
        data = self._encoder.feed(event)
        if not self.started and not event.token_ids and event.delta is None and event.reply is None:
            self._held += data
            return
        await self._write(data)

    async def _write(self, data: bytes) -> None:
        if not self.started:
            self.started = True
            data, self._held = self._held + data, b""
            await self._send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        if data:
            self.last = time.monotonic()
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def keep_alive(self) -> None:
        await self._write(self._encoder.ping)

    async def finish(self) -> None:
        await self._write(self._encoder.finish())
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def fail(self, problem: Problem) -> None:
        await self._write(self._encoder.error(problem))
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


class Leaving:
    """Watches for a client that goes away, and cancels the enclosed work then; `ClientGone` comes out instead.

    It starts late: most turns are over, or have begun to answer, before it is needed. On a stream it also sends the keep-alives.
    """

    def __init__(self, receive: Receive, *, line: Line | None = None, every_s: float | None = None) -> None:
        self._receive, self._line, self._every_s = receive, line, every_s
        self._task: asyncio.Task[None] | None = None
        self._gone = False

    def __enter__(self) -> None:
        self._work = asyncio.current_task()
        self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER_S, self._start)

    def _start(self) -> None:
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            try:
                message = await asyncio.wait_for(self._receive(), self._every_s)
            except TimeoutError:
                assert self._line is not None and self._every_s is not None
                if time.monotonic() - self._line.last >= self._every_s:
                    await self._line.keep_alive()
                continue
            if message["type"] == "http.disconnect":
                self._gone = True
                assert self._work is not None
                self._work.cancel()
                return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
        if self._gone and isinstance(error, asyncio.CancelledError):
            assert self._work is not None
            self._work.uncancel()
            raise ClientGone from None
