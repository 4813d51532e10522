"""One turn over HTTP: whose it is → what is new → the corridor → the dialect's answer. Read `serve` first.

Invariants: no answer, and no terminal event, before the turn is durable; a client that goes away cancels its generation; every
turn leaves one log line and its metrics.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

import orjson

from tokentrue.errors import SessionNotFound
from tokentrue.gateway.asgi import ClientGone, RawHeaders, Receive, Scope, Send, problem_headers, read_body, send_json
from tokentrue.gateway.auth import Claim, invalid_key
from tokentrue.gateway.client import Leaving, Line, Watching
from tokentrue.gateway.config import GatewayConfig
from tokentrue.gateway.dialects import Dialect
from tokentrue.gateway.gate import Gate
from tokentrue.gateway.live import Live, Registry
from tokentrue.gateway.memo import Body
from tokentrue.gateway.meter import CLOCK
from tokentrue.gateway.metrics import Metrics
from tokentrue.gateway.problems import problem_of
from tokentrue.sessions.spare_time import afterwards
from tokentrue.types import Reply, TurnRequest

LOG = logging.getLogger("tokentrue.gateway")


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
        self._watching = Watching()

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
        with Leaving(self._watching, receive):
            replies = await live.session.turn(request)
        self._remember(turn, live, body, replies)
        answer = turn.dialect.answer(body.call, replies, live.session.renderer.decode)
        await send_json(send, 200, answer, *answer_headers(live, replies[0]))
        self._note_soon(turn, replies)

    async def _streamed(self, turn: Turn, live: Live, body: Body, request: TurnRequest, receive: Receive, send: Send) -> None:
        line = Line(send, turn.dialect.encoder(body.call, live.session.renderer.decode))
        replies: list[Reply] = []
        with Leaving(self._watching, receive, line=line, every_s=self._config.keep_alive_s):
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
        """What was sent in this round of the loop goes out at its end, and must not wait for our bookkeeping."""
        afterwards(partial(self._note, turn, replies, time.perf_counter()))

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
