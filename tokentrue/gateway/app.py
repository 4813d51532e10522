"""The ASGI application. Generating paths go straight to `Turns`; everything else goes through a small Starlette router.

Invariant: the table below is the whole list of generating paths, and each leads through the corridor. Any other path is refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from starlette.applications import Starlette

from tokentrue.gateway.admin import Administration
from tokentrue.gateway.asgi import ClientGone, Receive, Scope, Send, read_body, send_json
from tokentrue.gateway.auth import Claim, Keys
from tokentrue.gateway.config import GatewayConfig
from tokentrue.gateway.dialects import Anthropic, Dialect, OpenAIChat, OpenAIResponses, Seal
from tokentrue.gateway.gate import Gate
from tokentrue.gateway.live import Registry
from tokentrue.gateway.memo import take_apart
from tokentrue.gateway.meter import Metered
from tokentrue.gateway.metrics import Metrics
from tokentrue.gateway.peers import Peers
from tokentrue.gateway.problems import Refused
from tokentrue.gateway.turns import Turns
from tokentrue.protocols import Provider, Renderer
from tokentrue.sessions.journal import Journal
from tokentrue.turn import Session

LOG = logging.getLogger("tokentrue.gateway")
GENERATES: Mapping[str, str] = {"chat/completions": "openai_chat", "responses": "openai_responses", "messages": "anthropic"}
COUNTS = "messages/count_tokens"
LISTS = "models"
PURGE_EVERY_S = 3600.0


class Gateway:
    """`renderer_for` gives the renderer of a history policy ("keep" or "template")."""

    def __init__(
        self,
        *,
        config: GatewayConfig,
        renderer_for: Callable[[str], Renderer],
        provider: Provider,
        journal: Journal,
        peers: Peers | None = None,
    ) -> None:
        self.config, self.journal, self.peers = config, journal, peers
        self._renderer_for = renderer_for
        self.provider = Metered(provider)
        self.keys = Keys(admin_key=config.admin_key)
        self.gate = Gate(config)
        self.metrics = Metrics()
        self.registry = Registry(self.open_session, config.limits, left=self.provider.forget)
        self.turns = Turns(config=config, registry=self.registry, gate=self.gate, metrics=self.metrics)
        self._purging: asyncio.Task[None] | None = None
        self._router = Starlette(routes=Administration(self).routes())
        seal = Seal(b"")  # only shapes errors here
        self._shapes: Mapping[str, Dialect] = {d.name: d for d in (OpenAIChat(), OpenAIResponses(seal), Anthropic(seal))}

    async def open_session(self, session_id: str) -> Session:
        record = await asyncio.to_thread(self.journal.get, session_id)
        renderer = self._renderer_for(record.history)
        return await Session.open(self.journal, session_id, renderer=renderer, provider=self.provider, limits=self.config.session_limits)

    def new_session(self, **settings: Any) -> Session:
        renderer = self._renderer_for(settings.get("history", self.config.history))
        return Session(renderer=renderer, provider=self.provider, journal=self.journal, limits=self.config.session_limits, **settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            named, operation = split(scope["path"])
            if operation is None:
                await self._router(scope, receive, send)
            else:
                await self._model_call(named, operation, scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _model_call(self, named: str | None, operation: str, scope: Scope, receive: Receive, send: Send) -> None:
        shape = self._shapes[GENERATES.get(operation, "anthropic" if operation == COUNTS else "openai_chat")]
        try:
            claim = self.keys.claim(scope["headers"], named)
            if self.peers is not None and await self.peers.forwarded(claim.session_id, scope, receive, send):
                return
            await self._dispatch(operation, claim, scope, receive, send)
        except ClientGone:
            return
        except Exception as error:
            await self.turns.refuse(shape, error, send)

    async def _dispatch(self, operation: str, claim: Claim, scope: Scope, receive: Receive, send: Send) -> None:
        expected = "GET" if operation == LISTS else "POST"
        if operation not in GENERATES and operation not in (COUNTS, LISTS):
            raise unknown_path()
        if scope["method"] != expected:
            raise Refused(405, "method_not_allowed", f"use {expected}")
        if operation in GENERATES:
            await self.turns.serve(GENERATES[operation], claim, scope, receive, send)
        elif operation == COUNTS:
            await self._count(claim, scope, receive, send)
        else:
            await self.turns.open(claim)
            await send_json(send, 200, models(self.config.model))

    async def _count(self, claim: Claim, scope: Scope, receive: Receive, send: Send) -> None:
        live = await self.turns.open(claim)
        dialect = live.dialects["anthropic"]
        assert isinstance(dialect, Anthropic)
        head, items, _ = take_apart(await read_body(scope, receive, self.config.limits.body_bytes), "messages")
        call = dialect.counting(head)
        messages = [*call.opening, *dialect.messages(items, call)]
        rendered = await asyncio.to_thread(live.session.renderer.render, messages, call.tools)
        await send_json(send, 200, {"input_tokens": len(rendered.token_ids)})

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                watch = getattr(self.provider.inner, "watch", None)
                if watch is not None:
                    watch()
                if self.peers is None or self.peers.me == 0:
                    self._purging = asyncio.create_task(self._purge_by_age())
                await send({"type": "lifespan.startup.complete"})
            else:
                await self.close()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _purge_by_age(self) -> None:
        while True:
            await self.purge_old()
            await asyncio.sleep(PURGE_EVERY_S)

    async def purge_old(self) -> list[str]:
        """Ended sessions past their age leave the journal and the memory."""
        gone = await self.journal.purge(older_than_s=self.config.purge_after_s)
        for session_id in gone:
            self.registry.forget(session_id)
        return gone

    async def close(self) -> None:
        """What is in flight has been cancelled or is over; the journal takes the last partial turns, then closes."""
        self.gate.close()
        if self._purging is not None:
            self._purging.cancel()
        if not await self.gate.drained(self.config.drain_s):
            LOG.warning("%d generations were still in flight when the gateway closed", self.gate.in_flight)
        if self.peers is not None:
            await self.peers.close()
        await self.provider.close()
        await asyncio.to_thread(self.journal.close)


def split(path: str) -> tuple[str | None, str | None]:
    """`/sessions/ID/v1/OP` and `/v1/OP`; operation None where the path is no model call."""
    if path.startswith("/v1/"):
        return None, path[4:].rstrip("/")
    if path.startswith("/sessions/"):
        session_id, slash, rest = path[10:].partition("/")
        if slash and rest.startswith("v1/"):
            return session_id, rest[3:].rstrip("/")
    return None, None


def unknown_path() -> Refused:
    return Refused(404, "unknown_path", "no such path; nothing here generates untracked")


def models(name: str) -> dict[str, Any]:
    """Both vendors' fields: OpenAI's list and Anthropic's page."""
    model = {"id": name, "object": "model", "type": "model", "created": 0, "owned_by": "tokentrue", "display_name": name}
    model["created_at"] = "1970-01-01T00:00:00Z"
    return {"object": "list", "data": [model], "has_more": False, "first_id": name, "last_id": name}
