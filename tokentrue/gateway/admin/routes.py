"""The routes of administration: which handler answers which path and method, and which need the admin key."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tokentrue.errors import SessionElsewhere
from tokentrue.gateway.admin.openapi import document
from tokentrue.gateway.admin.operations import OperationHandlers
from tokentrue.gateway.admin.routing import (
    Handler,
    PeerResponse,
    forward_to_owner,
    is_forwarded,
    json_response,
    request_body,
)
from tokentrue.gateway.admin.session_handlers import SessionHandlers
from tokentrue.gateway.problems import HttpError
from tokentrue.gateway.services import Services

METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
Guarded = tuple[Handler, bool]  # a handler, and whether it needs the admin key


def admin_routes(services: Services) -> list[Route]:
    sessions, operations = SessionHandlers(services), OperationHandlers(services)
    table: Mapping[str, Mapping[str, Guarded]] = {
        "/sessions": {"POST": (sessions.create, True), "GET": (sessions.list, True)},
        "/sessions/{session_id}": {"GET": (sessions.show, True), "DELETE": (sessions.delete, True)},
        "/sessions/{session_id}/key": {"POST": (sessions.renew_key, True)},
        "/sessions/{session_id}/reward": {"POST": (sessions.reward, True)},
        "/sessions/{session_id}/samples": {"GET": (sessions.samples, True)},
        "/admin/pause": {"POST": (operations.pause, True)},
        "/admin/resume": {"POST": (operations.resume, True)},
        "/admin/version": {"POST": (operations.note_version, True)},
        "/health": {"GET": (operations.health, False)},
        "/ready": {"GET": (operations.ready, False)},
        "/metrics": {"GET": (operations.metrics, False)},
        "/internal/metrics": {"GET": (operations.own_metrics, False)},
        "/openapi.json": {"GET": (show_document, False)},
        "/{path:path}": {},
    }
    return [build_route(services, path, methods) for path, methods in table.items()]


def build_route(services: Services, path: str, methods: Mapping[str, Guarded]) -> Route:
    async def endpoint(request: Request) -> Response:
        method = "GET" if request.method == "HEAD" else request.method
        is_foreign = path.startswith("/internal/") and not is_forwarded(request)
        if not methods or is_foreign:
            raise HttpError(404, "unknown_path", "no such path; GET /openapi.json lists them")
        if method not in methods:
            raise HttpError(405, "method_not_allowed", f"use {' or '.join(sorted(methods))}")
        handler, is_guarded = methods[method]
        if is_guarded:
            services.keys.require_admin(request.scope["headers"])
        session_id = request.path_params.get("session_id")
        forwarded = await forward_to_owner(services, request, session_id) if session_id is not None else None
        try:
            return forwarded or await handler(request)
        except SessionElsewhere as error:
            return PeerResponse(services.peers, error, await request_body(services, request))

    return Route(path, endpoint, methods=METHODS)


async def show_document(request: Request) -> Response:
    return json_response(200, document())
