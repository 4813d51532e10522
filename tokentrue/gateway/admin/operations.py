"""Pause, resume and policy version around a weight update; health, readiness and metrics. Every worker takes part,
whoever was asked."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tokentrue.errors import EngineError, InputError
from tokentrue.gateway.admin.bodies import Pause, Version, decode_admin
from tokentrue.gateway.admin.routing import is_forwarded, json_response, request_body
from tokentrue.gateway.metrics.registry import CONTENT_TYPE, build_page, engine_families
from tokentrue.gateway.problems import HttpError
from tokentrue.gateway.services import Services
from tokentrue.json_types import JsonObject
from tokentrue.sessions.journal import is_postgres

READY_S = 5.0
LONGEST_DRAIN_S = 600.0


class OperationHandlers:
    def __init__(self, services: Services) -> None:
        self._services = services

    # Weight updates.
    async def pause(self, request: Request) -> Response:
        body = decode_admin(await request_body(self._services, request), Pause)
        if body.drain and body.abort:
            raise InputError("drain and abort: what is broken off stays in flight until resume; choose one")
        services, admission = self._services, self._services.admission
        services.set_paused(True)
        aborted = await services.provider.inner.interrupt() if body.abort else 0
        drain_s = min(max(body.timeout_s, 0.0), LONGEST_DRAIN_S)
        drained = await admission.drain(drain_s) if body.drain else admission.in_flight == 0
        others = await self._ask_others(request)
        answer: JsonObject = {
            "paused": True,
            "drained": drained and all(other["drained"] for other in others),
            "in_flight": admission.in_flight + sum(other["in_flight"] for other in others),
        }
        if body.abort:
            answer["aborted"] = aborted + sum(other["aborted"] for other in others)
        return json_response(200, answer)

    async def resume(self, request: Request) -> Response:
        services = self._services
        services.set_paused(False)
        await self._ask_others(request)
        return json_response(200, {"paused": False, "in_flight": services.admission.in_flight})

    async def note_version(self, request: Request) -> Response:
        body = decode_admin(await request_body(self._services, request), Version)
        body.check()
        self._services.set_version(body.version)
        await self._ask_others(request)
        return json_response(200, {"version": body.version})

    async def _ask_others(self, request: Request) -> list[Any]:
        workers = self._services.workers
        if workers is None or is_forwarded(request):
            return []
        headers = {k: v for k, v in request.headers.items() if k in {"authorization", "x-api-key", "content-type"}}
        answers = await workers.ask_all("POST", request.url.path, await request_body(self._services, request), headers)
        if any(other is None for other in answers):
            raise HttpError(503, "worker_restarting", "a worker does not answer; send this again", retry_after_s=1.0)
        return answers

    # Health.
    async def health(self, request: Request) -> Response:
        return json_response(200, {"status": "ok"})

    async def ready(self, request: Request) -> Response:
        services = self._services
        if services.admission.closing:
            raise HttpError(503, "shutting_down", "the gateway is shutting down")
        try:
            facts = await asyncio.wait_for(services.provider.health(), READY_S)
        except (EngineError, TimeoutError) as error:
            raise HttpError(
                503, "engine_unreachable", f"no engine answers: {str(error)[:200]}", retry_after_s=5.0
            ) from None
        await self._check_disk()
        if services.workers is not None and not is_forwarded(request):
            answers = await services.workers.ask_all("GET", "/ready")
            if any(other is None for other in answers):
                raise HttpError(503, "worker_not_ready", "a worker is not ready", retry_after_s=1.0)
        return json_response(200, {"status": "ready", "paused": services.admission.paused, "engine": dict(facts)})

    async def _check_disk(self) -> None:
        store = self._services.journal.target
        path = store.removeprefix("sqlite:")
        _ = self._services.journal.lease_number  # raises while the database does not answer
        if path in ("memory", ":memory:") or is_postgres(store):
            return
        free = (await asyncio.to_thread(shutil.disk_usage, Path(path).resolve().parent)).free
        if free < self._services.config.limits.free_disk_bytes:
            message = f"the disk of the journal is full: {free} bytes are left (limits.free_disk_bytes)"
            raise HttpError(503, "disk_full", message, retry_after_s=10.0)

    # Metrics.
    async def metrics(self, request: Request) -> Response:
        snapshots = [await self._measure()]
        if self._services.workers is not None:
            snapshots += [
                other for other in await self._services.workers.ask_all("GET", "/internal/metrics") if other is not None
            ]
        return Response(build_page(snapshots), headers={"content-type": CONTENT_TYPE})

    async def own_metrics(self, request: Request) -> Response:
        return json_response(200, await self._measure())

    async def _measure(self) -> list[JsonObject]:
        services, metrics = self._services, self._services.metrics
        metrics.in_flight.set(services.admission.in_flight)
        metrics.sessions.set(len(services.sessions))
        metrics.session_bytes.set(services.sessions.memory_bytes)
        totals = await services.sessions.totals()
        metrics.trained.labels("sampled").set(totals.sampled)
        metrics.trained.labels("trained").set(totals.trained)
        for why, tokens in totals.untrained.items():
            metrics.untrained.labels(why).set(tokens)
        return [*metrics.snapshot(), *engine_families(services.provider.inner)]
