"""Everything but model calls: sessions, rewards, samples, administration, health, metrics, the OpenAPI document."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tokentrue.errors import EngineError, InputError
from tokentrue.gateway.asgi import ClientGone, problem_headers, read_body
from tokentrue.gateway.auth import checked_session_id, hashed, new_session_key
from tokentrue.gateway.dialects import OpenAIChat
from tokentrue.gateway.dialects.administration import CreateSession, GiveReward, Pause, Version, parsed
from tokentrue.gateway.dialects.base import encode
from tokentrue.gateway.live import Live
from tokentrue.gateway.metrics import CONTENT_TYPE, engine_families, page
from tokentrue.gateway.openapi import document
from tokentrue.gateway.peers import FROM_PEER, Peers
from tokentrue.gateway.problems import Refused, problem_of
from tokentrue.gateway.views import record_json, session_json
from tokentrue.samples import Assembly, coverage_to_json, exported, sample_to_json

if TYPE_CHECKING:
    from tokentrue.gateway.app import Gateway

LOG = logging.getLogger("tokentrue.gateway")
Handler = Callable[[Request], Awaitable[Response]]
READY_S = 5.0
LONGEST_DRAIN_S = 600.0
MOST_LISTED = 1000


class Administration:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def routes(self) -> list[Route]:
        table: list[tuple[str, str, Handler, bool]] = [  # path, method, handler, needs the admin key
            ("/sessions", "POST", self.create, True),
            ("/sessions", "GET", self.listed, True),
            ("/sessions/{session_id}", "GET", self.shown, True),
            ("/sessions/{session_id}", "DELETE", self.deleted, True),
            ("/sessions/{session_id}/reward", "POST", self.rewarded, True),
            ("/sessions/{session_id}/samples", "GET", self.samples, True),
            ("/admin/pause", "POST", self.pause, True),
            ("/admin/resume", "POST", self.resume, True),
            ("/admin/version", "POST", self.version, True),
            ("/health", "GET", self.health, False),
            ("/ready", "GET", self.ready, False),
            ("/metrics", "GET", self.metrics, False),
            ("/openapi.json", "GET", self.openapi, False),
            ("/internal/metrics", "GET", self.own_metrics, False),
        ]
        methods: dict[str, dict[str, tuple[Handler, bool]]] = {}
        for path, method, handler, guarded in table:
            methods.setdefault(path, {})[method] = (handler, guarded)
        routes = [self._route(path, by_method) for path, by_method in methods.items()]
        return [*routes, self._route("/{path:path}", {})]

    def _route(self, path: str, by_method: Mapping[str, tuple[Handler, bool]]) -> Route:
        every = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]

        async def endpoint(request: Request) -> Response:
            try:
                return await self._answer(request, by_method)
            except Exception as error:
                return refusal(error)

        return Route(path, endpoint, methods=every)

    async def _answer(self, request: Request, by_method: Mapping[str, tuple[Handler, bool]]) -> Response:
        method = "GET" if request.method == "HEAD" else request.method
        from_elsewhere = request.url.path.startswith("/internal/") and not request.scope.get(FROM_PEER)
        if not by_method or from_elsewhere:
            raise Refused(404, "unknown_path", "no such path; GET /openapi.json lists them")
        if method not in by_method:
            raise Refused(405, "method_not_allowed", f"use {' or '.join(sorted(by_method))}")
        handler, guarded = by_method[method]
        if guarded:
            self._gateway.keys.require_admin(request.scope["headers"])
        return await self._at_owner(request) or await handler(request)

    async def _at_owner(self, request: Request) -> Response | None:
        """A question about one session is its owner's to answer."""
        peers, session_id = self._gateway.peers, request.path_params.get("session_id")
        if peers is None or session_id is None or peers.owner(session_id) == peers.me or request.scope.get(FROM_PEER):
            return None
        return _Forwarded(peers, peers.owner(session_id), await self._body(request))

    async def _body(self, request: Request) -> bytes:
        if not hasattr(request.state, "raw"):
            request.state.raw = await read_body(request.scope, request.receive, self._gateway.config.limits.body_bytes)
        return request.state.raw

    async def _live(self, request: Request) -> Live:
        return await self._gateway.registry.get(request.path_params["session_id"])

    # Sessions.
    async def create(self, request: Request) -> Response:
        raw = await self._body(request)
        asked = parsed(raw, CreateSession)
        peers = self._gateway.peers
        session_id = checked_session_id(asked.session_id) if asked.session_id is not None else self._fresh_id()
        if peers is not None and peers.owner(session_id) != peers.me and not request.scope.get(FROM_PEER):
            return _Forwarded(peers, peers.owner(session_id), raw)
        key = new_session_key(session_id)
        config = self._gateway.config
        session = self._gateway.new_session(
            session_id=session_id,
            group=asked.group,
            metadata=asked.metadata,
            sampling=asked.sampling,
            history=asked.history or config.history,
            training=config.training if asked.training is None else asked.training,
            key_hash=hashed(key),
        )
        await session.ready()
        self._gateway.registry.add(session)
        root = self._root(request)
        own = f"{root}/sessions/{session_id}"
        return answer(201, {"session_id": session_id, "api_key": key, "base_url": f"{own}/v1", "anthropic_base_url": own})

    def _root(self, request: Request) -> str:
        return self._gateway.config.base_url or str(request.base_url).rstrip("/")

    def _fresh_id(self) -> str:
        """An id that this worker owns, so that the session is at home where it was asked for."""
        peers = self._gateway.peers
        while True:
            session_id = uuid.uuid4().hex
            if peers is None or peers.owner(session_id) == peers.me:
                return session_id

    async def listed(self, request: Request) -> Response:
        query = request.query_params
        offset, limit = whole(query.get("offset", "0"), "offset"), whole(query.get("limit", "100"), "limit")
        if limit > MOST_LISTED:
            raise InputError(f"limit: at most {MOST_LISTED}")
        journal = self._gateway.journal
        state, group = query.get("state"), query.get("group")
        records = await asyncio.to_thread(lambda: journal.sessions(offset=offset, limit=limit, state=state, group=group))
        total = await asyncio.to_thread(journal.count)
        return answer(200, {"sessions": [record_json(record) for record in records], "total": total, "offset": offset, "limit": limit})

    async def shown(self, request: Request) -> Response:
        live = await self._live(request)
        return answer(200, session_json(live.session, live.coverage(), in_flight=live.in_flight))

    async def deleted(self, request: Request) -> Response:
        session_id = request.path_params["session_id"]
        if request.query_params.get("purge", "false").lower() in {"true", "1"}:
            await self._gateway.journal.delete(session_id)
            self._gateway.registry.forget(session_id)
            return answer(200, {"session_id": session_id, "state": "purged"})
        live = await self._live(request)
        await live.session.end()
        return answer(200, {"session_id": session_id, "state": live.session.record.state})

    async def rewarded(self, request: Request) -> Response:
        asked = parsed(await self._body(request), GiveReward)
        asked.check()
        live = await self._live(request)
        await live.session.reward(asked.reward, leaf=asked.leaf, metadata=asked.metadata)
        return answer(200, {"session_id": live.session.id, "reward": asked.reward, "leaf": asked.leaf})

    async def samples(self, request: Request) -> Response:
        live = await self._live(request)
        made = await live.session.assembly()
        format_ = request.query_params.get("format", "json")
        if format_ != "json":
            content, media_type = await asyncio.to_thread(exported, made.samples, format=format_[:40])
            return Response(content, media_type=media_type)
        return await asyncio.to_thread(samples_answer, live.session.id, made)

    # Administration: every worker does it, whoever was asked.
    async def pause(self, request: Request) -> Response:
        asked = parsed(await self._body(request), Pause)
        if asked.drain and asked.abort:
            raise InputError("drain and abort: what is broken off stays in flight until resume; choose one")
        gateway = self._gateway
        gateway.gate.pause()
        gateway.provider.pause()
        gateway.metrics.paused.set(1)
        aborted = await gateway.provider.interrupt() if asked.abort else 0
        drained = (
            await gateway.gate.drained(min(max(asked.timeout_s, 0.0), LONGEST_DRAIN_S)) if asked.drain else gateway.gate.in_flight == 0
        )
        own = {"paused": True, "drained": drained, "in_flight": gateway.gate.in_flight}
        others = await self._everywhere(request)
        own["in_flight"] += sum(other["in_flight"] for other in others)
        if asked.abort:
            own["aborted"] = aborted + sum(other["aborted"] for other in others)
        own["drained"] = drained and all(other["drained"] for other in others)
        return answer(200, own)

    async def resume(self, request: Request) -> Response:
        gateway = self._gateway
        gateway.provider.resume()
        gateway.gate.resume()
        gateway.metrics.paused.set(0)
        await self._everywhere(request)
        return answer(200, {"paused": False, "in_flight": gateway.gate.in_flight})

    async def version(self, request: Request) -> Response:
        asked = parsed(await self._body(request), Version)
        if asked.version < 0:
            raise InputError("version: must be a whole number from 0 up")
        self._gateway.provider.version = asked.version
        self._gateway.metrics.version.set(asked.version)
        await self._everywhere(request)
        return answer(200, {"version": asked.version})

    async def _everywhere(self, request: Request) -> list[Any]:
        peers = self._gateway.peers
        if peers is None or request.scope.get(FROM_PEER):
            return []
        headers = {k: v for k, v in request.headers.items() if k in {"authorization", "x-api-key", "content-type"}}
        answers = await peers.ask_all("POST", request.url.path, await self._body(request), headers)
        if any(other is None for other in answers):
            raise Refused(503, "worker_restarting", "a worker does not answer; send this again", retry_after_s=1.0)
        return answers

    # Health.
    async def health(self, request: Request) -> Response:
        return answer(200, {"status": "ok"})

    async def ready(self, request: Request) -> Response:
        gateway = self._gateway
        if gateway.gate.closing:
            raise Refused(503, "shutting_down", "the gateway is shutting down")
        try:
            facts = await asyncio.wait_for(gateway.provider.health(), READY_S)
        except (EngineError, TimeoutError) as error:
            raise Refused(503, "engine_unreachable", f"the engine does not answer: {str(error)[:200]}", retry_after_s=5.0) from None
        peers = gateway.peers
        if peers is not None and not request.scope.get(FROM_PEER):
            answers = await peers.ask_all("GET", "/ready")
            if any(other is None for other in answers):
                raise Refused(503, "worker_not_ready", "a worker is not ready", retry_after_s=1.0)
        return answer(200, {"status": "ready", "paused": gateway.gate.paused, "engine": dict(facts)})

    async def _measure(self) -> list[dict[str, Any]]:
        gateway = self._gateway
        metrics = gateway.metrics
        metrics.in_flight.set(gateway.gate.in_flight)
        metrics.sessions.set(len(gateway.registry))
        sampled, trained, untrained = await gateway.registry.totals()
        metrics.trained.labels("sampled").set(sampled)
        metrics.trained.labels("trained").set(trained)
        for why, tokens in untrained.items():
            metrics.untrained.labels(why).set(tokens)
        return [*metrics.snapshot(), *engine_families(gateway.provider.inner)]

    async def metrics(self, request: Request) -> Response:
        snapshots = [await self._measure()]
        if self._gateway.peers is not None:
            snapshots += [other for other in await self._gateway.peers.ask_all("GET", "/internal/metrics") if other is not None]
        return Response(page(snapshots), headers={"content-type": CONTENT_TYPE.decode()})

    async def own_metrics(self, request: Request) -> Response:
        return answer(200, await self._measure())

    async def openapi(self, request: Request) -> Response:
        return answer(200, document())


class _Forwarded(Response):
    """An answer that another worker gives."""

    def __init__(self, peers: Peers, worker: int, body: bytes) -> None:
        super().__init__()
        self._peers, self._worker, self._raw = peers, worker, body

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await self._peers.forward(self._worker, scope, self._raw, receive, send)
        except ClientGone:
            return
        except Refused as error:
            await refusal(error)(scope, receive, send)


def samples_answer(session_id: str, made: Assembly) -> Response:
    """Long: for a thread."""
    shown = [sample_to_json(sample) for sample in made.samples]
    return answer(200, {"session_id": session_id, "samples": shown, "coverage": coverage_to_json(made.coverage)})


def answer(status: int, value: Any) -> Response:
    return Response(encode(value), status_code=status, media_type="application/json")


def refusal(error: Exception) -> Response:
    problem = problem_of(error)
    if problem.status == 500:
        LOG.error("a request failed", exc_info=error)
    headers = {k.decode(): v.decode() for k, v in problem_headers(problem)}
    return Response(encode(OpenAIChat().error(problem)), status_code=problem.status, headers=headers, media_type="application/json")


def whole(text: str, name: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        raise InputError(f"{name}: must be a whole number from 0 up")
    return int(text)
