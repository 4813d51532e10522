"""The ASGI application: its routes, and start-up and shutdown. Model requests are in `model_routes`."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import sys

import orjson
from starlette.routing import Router

from tokentrue.gateway.admin.routes import admin_routes
from tokentrue.gateway.asgi import Receive, Scope, Send, answer_errors
from tokentrue.gateway.config import GatewayConfig
from tokentrue.gateway.dialects import OpenAIChat
from tokentrue.gateway.metrics.meter import MeteredProvider
from tokentrue.gateway.model_routes import model_routes
from tokentrue.gateway.problems import HttpError
from tokentrue.gateway.services import RendererFor, build_services
from tokentrue.gateway.sessions import ignores_tools
from tokentrue.gateway.view import LoadPage, view_routes
from tokentrue.gateway.workers.admin_state import AdminState
from tokentrue.gateway.workers.forwarding import WorkerLinks
from tokentrue.protocols import EngineControl
from tokentrue.sessions.journal import Journal
from tokentrue.tracing import stop_tracing

LOG = logging.getLogger("tokentrue.gateway")
PURGE_EVERY_S = 3600.0
EVICT_EVERY_S = 15.0


class Gateway:
    """`renderer_for` gives the renderer of a history policy ("keep" or "template"); `view` makes the page under
    `/view`."""

    def __init__(
        self,
        *,
        config: GatewayConfig,
        renderer_for: RendererFor,
        provider: EngineControl,
        journal: Journal,
        workers: WorkerLinks | None = None,
        admin_state: AdminState | None = None,
        view: LoadPage | None = None,
    ) -> None:
        self.services = build_services(
            config=config,
            renderer_for=renderer_for,
            provider=provider,
            journal=journal,
            workers=workers,
            admin_state=admin_state,
        )
        pages = view_routes(self.services.keys, view) if view is not None else []
        self._router = Router(
            routes=[*model_routes(self.services), *pages, *admin_routes(self.services)], redirect_slashes=False
        )
        self._background: list[asyncio.Task[None]] = []

    @property
    def config(self) -> GatewayConfig:
        return self.services.config

    @property
    def provider(self) -> MeteredProvider:
        return self.services.provider

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._run_lifespan(receive, send)
        elif scope["type"] == "http":
            await answer_errors(
                self._route, scope, receive, send, dialect=OpenAIChat, errors=self.services.metrics.errors
            )
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        refuse_dot_segments(scope["path"])
        await self._router(scope, receive, send)

    # Start-up and shutdown.
    async def _run_lifespan(self, receive: Receive, send: Send) -> None:
        try:
            while (await receive())["type"] == "lifespan.startup":
                self.start()
                await send({"type": "lifespan.startup.complete"})
        except asyncio.CancelledError:  # a second Ctrl-C ends the event loop; committed turns are in the journal
            return
        await self.close()
        await send({"type": "lifespan.shutdown.complete"})

    def start(self) -> None:
        self.provider.inner.watch()
        if ignores_tools(self.services.renderer_for(self.config.history)):
            LOG.warning("the chat template of this model ignores tools: requests with tools are refused")
        workers = self.services.workers
        if workers is None or workers.me == 0:
            self._background.append(asyncio.create_task(self._purge_by_age()))
        self._background.append(asyncio.create_task(self._evict_idle()))

    async def _purge_by_age(self) -> None:
        while True:
            await self.purge_old()
            await asyncio.sleep(PURGE_EVERY_S)

    async def _evict_idle(self) -> None:
        while True:
            await asyncio.sleep(EVICT_EVERY_S)
            self.services.sessions.evict_idle()
            await asyncio.to_thread(release_freed_memory)

    async def purge_old(self) -> list[str]:
        """Ended sessions past their age leave the journal and the memory; each leaves a log line."""
        purged = await self.services.journal.purge(older_than_s=self.config.purge_after_s)
        for session_id in purged:
            self.services.sessions.forget(session_id)
            line = {"event": "purged", "session": session_id, "purge_after_s": self.config.purge_after_s}
            LOG.info(orjson.dumps(line).decode())
        return purged

    async def close(self) -> None:
        """Waits for what is in flight; the journal takes the last turns, then closes."""
        admission = self.services.admission
        admission.close()
        for task in self._background:
            task.cancel()
        if not await admission.drain(self.config.drain_s):
            LOG.warning("%d generations were still in flight when the gateway closed", admission.in_flight)
        if self.services.workers is not None:
            await self.services.workers.close()
        await self.services.peers.close()
        await self.provider.close()
        await asyncio.to_thread(self.services.journal.close)
        await asyncio.to_thread(stop_tracing)


def refuse_dot_segments(path: str) -> None:
    """A path that a client or a proxy on the way could resolve to another one than the one whose key is checked."""
    if not {".", ".."}.isdisjoint(path.replace("\\", "/").split("/")):
        raise HttpError(404, "unknown_path", "no such path: it has a dot segment")


def release_freed_memory() -> bool:
    """Takes milliseconds, without the interpreter's lock. False where the C library has no such function, or had
    nothing to return."""
    # A text takes about a hundred times its size while it is encoded, in many small blocks. glibc keeps what is freed
    # of them in the arenas of the threads that ran: a process stays as large as the largest moment of each thread.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None  # musl has none
    return trim is not None and trim(0) == 1
