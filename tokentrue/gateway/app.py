"""The ASGI application: routes, start-up and shutdown. Model requests are in `model_routes`."""

import asyncio
import ctypes
import sys
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route, Router
from starlette.types import ASGIApp

from tokentrue.gateway.admin import admin_routes
from tokentrue.gateway.asgi import LOG, HttpError, Receive, Scope, Send, WatchedSend, answer_errors, log_line
from tokentrue.gateway.auth import ApiKeys
from tokentrue.gateway.config import GatewayConfig
from tokentrue.gateway.dialects.openai_chat import OpenAIChat
from tokentrue.gateway.model_routes import model_routes
from tokentrue.gateway.services import RendererFor, Services
from tokentrue.gateway.serving.forwarding import Peers
from tokentrue.gateway.serving.processes import AdminState, share_admin_state
from tokentrue.gateway.sessions import ignores_tools
from tokentrue.protocols import EngineControl
from tokentrue.sessions.journal import Journal
from tokentrue.tracing import stop_tracing

LoadPage = Callable[[], ASGIApp]
CHALLENGE = 'Basic realm="tokentrue: any user name, the admin key as password", charset="UTF-8"'
PURGE_EVERY_S = 3600.0
EVICT_EVERY_S = 15.0


class Gateway:
    def __init__(
        self,
        *,
        config: GatewayConfig,
        renderer_for: RendererFor,
        provider: EngineControl,
        journal: Journal,
        peers: Peers | None = None,
        admin_state: AdminState | None = None,
        view: LoadPage | None = None,
    ) -> None:
        self.services = Services(
            config=config,
            renderer_for=renderer_for,
            provider=provider,
            journal=journal,
            peers=peers or Peers(),
            admin_state=admin_state or share_admin_state(),
        )
        self.config, self.provider = self.services.config, self.services.provider
        pages = view_routes(self.services.keys, view) if view is not None else []
        routes = [*model_routes(self.services), *pages, *admin_routes(self.services)]
        self._router = Router(routes=routes, redirect_slashes=False)
        self._background: list[asyncio.Task[None]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._run_lifespan(receive, send)
        elif scope["type"] == "http":
            errors = self.services.metrics.errors
            # `ModelEndpoint` answers errors in its own dialect.
            await answer_errors(self._route, scope, receive, WatchedSend(send), dialect=OpenAIChat, errors=errors)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A client or proxy could resolve them to a different path than the one whose key is checked.
        if not {".", ".."}.isdisjoint(scope["path"].replace("\\", "/").split("/")):
            raise HttpError(404, "unknown_path", "no such path: it has a dot segment")
        await self._router(scope, receive, send)

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
        self._background = [asyncio.create_task(self._purge_by_age()), asyncio.create_task(self._evict_idle())]

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
        purged = await self.services.journal.purge(older_than_s=self.config.purge_after_s)
        for session_id in purged:
            self.services.sessions.forget(session_id)
            log_line("purged", session=session_id, purge_after_s=self.config.purge_after_s)
        return purged

    async def close(self) -> None:
        admission = self.services.admission
        admission.close()
        for task in self._background:
            task.cancel()
        if not await admission.drain(self.config.drain_s):
            LOG.warning("%d generations were still in flight when the gateway closed", admission.in_flight)
        await self.services.peers.close()
        await self.provider.close()
        await asyncio.to_thread(self.services.journal.close)
        await asyncio.to_thread(stop_tracing)


def release_freed_memory() -> bool:
    # Encoding a text takes about a hundred times its size, in small blocks. glibc keeps what is freed of them in the
    # threads' arenas: the process stays as large as the sum of each thread's peak.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None  # musl has none
    return trim is not None and trim(0) == 1


def view_routes(keys: ApiKeys, load: LoadPage) -> list[BaseRoute]:
    async def redirect(request: Request) -> Response:
        return RedirectResponse("view/")

    return [Route("/", redirect), Route("/view", redirect), Mount("/view", AdminPage(keys, load))]


class AdminPage:
    """A read-only page. Browsers send no bearer token: this path accepts HTTP Basic, too. They repeat a password by
    themselves, so nothing here may change state."""

    def __init__(self, keys: ApiKeys, load: LoadPage) -> None:
        self._keys, self._load = keys, load
        self._page: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in {"GET", "HEAD"}:
            raise HttpError(405, "method_not_allowed", "use GET")
        try:
            self._keys.require_admin(scope["headers"], basic=True)
        except HttpError as error:
            refused = PlainTextResponse(f"{error}\n", error.status, headers={"www-authenticate": CHALLENGE})
            await refused(scope, receive, send)
            return
        if self._page is None:
            self._page = await asyncio.to_thread(self._load)
        await self._page(scope, receive, send)
