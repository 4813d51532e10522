"""The ASGI application: routes, the one place where errors become answers, and start-up and shutdown.

Invariant: `GENERATES` and `GOOGLE_STREAMS` are the whole list of generating paths, and each of them runs a recorded
turn. Any other path is refused.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

import orjson
from starlette.routing import Route, Router

from tokentrue.errors import JournalError
from tokentrue.gateway.admin.routes import admin_routes
from tokentrue.gateway.asgi import ClientGone, Receive, Scope, Send, WatchedSend, problem_headers, send_json
from tokentrue.gateway.auth import SessionAccess
from tokentrue.gateway.config import GatewayConfig
from tokentrue.gateway.dialects import (
    Anthropic,
    Dialect,
    Google,
    OpenAIChat,
    OpenAIResponses,
    PathFields,
    ReasoningSigner,
)
from tokentrue.gateway.dialects.base import Problem
from tokentrue.gateway.memory import release_freed_memory
from tokentrue.gateway.metrics.meter import MeteredProvider
from tokentrue.gateway.problems import HttpError, problem_from
from tokentrue.gateway.services import RendererFor, Services, build_services
from tokentrue.gateway.sessions import ignores_tools
from tokentrue.gateway.streaming import EventStream
from tokentrue.gateway.turns import STREAM, NotOpened, TurnHandler
from tokentrue.gateway.view import LoadPage, view_routes
from tokentrue.gateway.workers.forwarding import WorkerLinks
from tokentrue.protocols import EngineControl
from tokentrue.sessions.journal import Journal
from tokentrue.tracing import annotate, is_traced, stop_tracing, trace_request

LOG = logging.getLogger("tokentrue.gateway")
GENERATES: Mapping[str, str] = {
    "chat/completions": "openai_chat",
    "responses": "openai_responses",
    "messages": "anthropic",
}
# Google generates under models/{model}:{verb}.
GOOGLE_STREAMS: Mapping[str, bool] = {"generateContent": False, "streamGenerateContent": True}
GOOGLE_COUNTS = "countTokens"
COUNTS = "messages/count_tokens"
LISTS = "models"
VERSIONS = ("v1", "v1beta")  # of Google's API; every other dialect is under v1 alone
MODEL_PATH = re.compile(r"(?:/sessions/[^/]+)?/(v1|v1beta)/(.*)", re.DOTALL)
PURGE_EVERY_S = 3600.0
EVICT_EVERY_S = 15.0
UNSIGNED = ReasoningSigner(b"")  # errors carry no reasoning
EVERY_DIALECT: tuple[Dialect, ...] = (OpenAIChat(), OpenAIResponses(UNSIGNED), Anthropic(UNSIGNED), Google(UNSIGNED))
ERROR_DIALECTS: Mapping[str, Dialect] = {dialect.name: dialect for dialect in EVERY_DIALECT}


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
        view: LoadPage | None = None,
    ) -> None:
        self.services = build_services(
            config=config, renderer_for=renderer_for, provider=provider, journal=journal, workers=workers
        )
        model_requests = ModelRequests(self.services.config, TurnHandler(self.services), self.services)
        roots = [f"{root}/{version}" for root in ("", "/sessions/{session_id}") for version in VERSIONS]
        model_routes = [Route(f"{root}/{{operation:path}}", model_requests) for root in roots]
        pages = view_routes(self.services.keys, view) if view is not None else []
        self._router = Router(routes=[*model_routes, *pages, *admin_routes(self.services)], redirect_slashes=False)
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
        elif scope["type"] == "http" and is_traced() and MODEL_PATH.fullmatch(scope["path"]):
            watched = WatchedSend(send)
            with trace_request(f"{scope['method']} {dialect_name(scope['path'])}", scope["headers"]):
                await self._answer(scope, receive, watched)
                annotate(status=watched.status)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Every error of every request becomes an answer here, in the dialect of its path; inner handlers record or log
        it and raise it again."""
        dialect = ERROR_DIALECTS[dialect_name(scope["path"])]
        watched = WatchedSend(send)
        try:
            refuse_dot_segments(scope["path"])
            await self._router(scope, receive, watched)
        except ClientGone:
            self.services.metrics.errors.labels(dialect.name, "client_gone").inc()
        except asyncio.CancelledError:  # the server stops and has waited long enough for this request
            if not watched.started:
                stopping = HttpError(
                    503, "shutting_down", "the gateway is stopping; send this again", retry_after_s=1.0
                )
                await self._answer_problem(problem_from(stopping), dialect, scope, watched)
        except Exception as error:
            problem = problem_from(error)
            if problem.status == 500:
                LOG.error("a request failed", exc_info=error)
            elif isinstance(error, JournalError):
                LOG.error("%s", error)
            await self._answer_problem(problem, dialect, scope, watched)

    async def _answer_problem(self, problem: Problem, dialect: Dialect, scope: Scope, send: WatchedSend) -> None:
        """As the answer, or as the last event of a stream that has begun. An answer that is sent already stays as it
        is."""
        self.services.metrics.errors.labels(dialect.name, problem.code).inc()
        stream: EventStream | None = scope.get(STREAM)
        if not send.started:
            await send_json(send, problem.status, dialect.build_error(problem), *problem_headers(problem))
        elif stream is not None and not stream.ended:
            await stream.fail(problem)

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


class ModelRequests:
    """The endpoint of every `/v1/…` and `/v1beta/…` path, with or without a session in the URL."""

    def __init__(self, config: GatewayConfig, turns: TurnHandler, services: Services) -> None:
        self._config, self._turns, self._services = config, turns, services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parameters: Mapping[str, str] = scope["path_params"]
        in_url = url_key(scope) if dialect_name(scope["path"]) == "google" else None
        access = self._services.keys.authenticate(scope["headers"], parameters.get("session_id"), in_url)
        workers: WorkerLinks | None = self._services.workers
        if workers is not None and not workers.is_owner(access.session_id, scope):
            await workers.forward(access.session_id, scope, receive, send)
        else:
            try:
                await self._dispatch(parameters["operation"].rstrip("/"), access, scope, receive, send)
            except NotOpened as error:  # nothing of the body has been read
                await self._services.peers.forward(error.elsewhere, scope, receive, send)

    async def _dispatch(
        self, operation: str, access: SessionAccess, scope: Scope, receive: Receive, send: Send
    ) -> None:
        model, verb = google_call(operation)
        in_google = dialect_name(scope["path"]) == "google"
        known = (
            verb in GOOGLE_STREAMS or verb == GOOGLE_COUNTS
            if in_google
            else operation in GENERATES or operation in (COUNTS, LISTS)
        )
        if not known:
            raise HttpError(404, "unknown_path", "no such path; docs/gateway.md lists the routes")
        expected = "GET" if operation == LISTS else "POST"
        if scope["method"] != expected:
            raise HttpError(405, "method_not_allowed", f"use {expected}")
        if verb in GOOGLE_STREAMS:
            in_path = PathFields(model=model, stream=GOOGLE_STREAMS[verb])
            check_streamed_as_events(in_path, scope)
            await self._turns.serve("google", access, scope, receive, send, in_path)
        elif verb == GOOGLE_COUNTS:
            await self._turns.count_tokens("google", access, scope, receive, send)
        elif operation in GENERATES:
            await self._turns.serve(GENERATES[operation], access, scope, receive, send)
        elif operation == COUNTS:
            await self._turns.count_tokens("anthropic", access, scope, receive, send)
        else:
            await self._turns.find(access)
            base = self._config.model
            await send_json(
                send, 200, list_models(base, *(f"{base}:{name}" for name in self._services.provider.adapters))
            )


def refuse_dot_segments(path: str) -> None:
    """A path that a client or a proxy on the way could resolve to another one than the one whose key is checked."""
    if not {".", ".."}.isdisjoint(path.replace("\\", "/").split("/")):
        raise HttpError(404, "unknown_path", "no such path: it has a dot segment")


def dialect_name(path: str) -> str:
    """The dialect in which a path's errors are answered; OpenAI's for every path that is no model request."""
    found = MODEL_PATH.fullmatch(path)
    version, operation = found.groups() if found else ("", "")
    operation = operation.rstrip("/")
    if version == "v1beta" or google_call(operation)[1]:
        return "google"
    return GENERATES.get(operation, "anthropic" if operation == COUNTS else "openai_chat")


def google_call(operation: str) -> tuple[str, str]:
    """Model and verb of `models/{model}:{verb}`; an empty verb where the path is not of that form."""
    model, colon, verb = operation.removeprefix("models/").rpartition(":")
    return (model, verb) if colon and model and operation.startswith("models/") else ("", "")


def url_key(scope: Scope) -> str | None:
    """Google's clients may send their key as `?key=`."""
    return dict(parse_qsl(scope.get("query_string", b"").decode("latin-1"))).get("key") or None


def check_streamed_as_events(in_path: PathFields, scope: Scope) -> None:
    if in_path.stream and ("alt", "sse") not in parse_qsl(scope.get("query_string", b"").decode("latin-1")):
        raise HttpError(400, "not_supported", "streams are server-sent events here; add ?alt=sse", field="alt")


def list_models(*names: str) -> dict[str, Any]:
    """Both vendors' fields: OpenAI's list and Anthropic's page."""
    kind = {
        "object": "model",
        "type": "model",
        "created": 0,
        "owned_by": "tokentrue",
        "created_at": "1970-01-01T00:00:00Z",
    }
    data = [{"id": name, **kind, "display_name": name} for name in names]
    return {"object": "list", "data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]}
