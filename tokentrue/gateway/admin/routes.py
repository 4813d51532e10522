"""The routes of administration: which handler answers which path and method, and which need the admin key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tokentrue.errors import SessionElsewhere
from tokentrue.gateway.admin.bodies import CreateSession, GiveReward, Pause, Version
from tokentrue.gateway.admin.openapi import document
from tokentrue.gateway.admin.operations import OperationHandlers
from tokentrue.gateway.admin.routing import (
    AdminOperation,
    Handler,
    PeerResponse,
    forward_to_owner,
    is_forwarded,
    json_response,
    request_body,
)
from tokentrue.gateway.admin.session_handlers import MOST_LISTED, SessionHandlers
from tokentrue.gateway.problems import HttpError
from tokentrue.gateway.services import Services

METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
TEXT = {"type": "string"}
LISTED = {
    "offset": {"type": "integer", "minimum": 0},
    "limit": {"type": "integer", "minimum": 0, "maximum": MOST_LISTED},
    "state": {"enum": ["open", "ended"]},
    "group": TEXT,
    "after": {"type": "string", "description": "`created,session_id` of a listed session: those behind it"},
}


def admin_table(services: Services) -> dict[str, dict[str, AdminOperation]]:
    """Every path of administration, with what each method does there."""
    sessions, operations = SessionHandlers(services), OperationHandlers(services)
    one = "/sessions/{session_id}"

    async def show_document(request: Request) -> Response:
        return json_response(200, document(table))

    def open_to_all(handler: Handler, summary: str, **more: Any) -> dict[str, AdminOperation]:
        return {"GET": AdminOperation(handler=handler, summary=summary, needs_admin=False, **more)}

    table: dict[str, dict[str, AdminOperation]] = {
        "/sessions": {
            "POST": AdminOperation(
                handler=sessions.create, summary="Create a session", body=CreateSession, status="201"
            ),
            "GET": AdminOperation(handler=sessions.list, summary="List sessions, newest first", query=LISTED),
        },
        one: {
            "GET": AdminOperation(handler=sessions.show, summary="One session: its tree, coverage, state"),
            "DELETE": AdminOperation(
                handler=sessions.delete, summary="End a session", query={"purge": {"type": "boolean"}}
            ),
        },
        f"{one}/key": {
            "POST": AdminOperation(
                handler=sessions.renew_key, summary="A new API key for a session; the old one ends", status="201"
            )
        },
        f"{one}/reward": {"POST": AdminOperation(handler=sessions.reward, summary="Give a reward", body=GiveReward)},
        f"{one}/samples": {
            "GET": AdminOperation(handler=sessions.samples, summary="Training samples", query={"format": TEXT})
        },
        "/admin/pause": {"POST": AdminOperation(handler=operations.pause, summary="Hold generations back", body=Pause)},
        "/admin/resume": {"POST": AdminOperation(handler=operations.resume, summary="Let generations go on")},
        "/admin/version": {
            "POST": AdminOperation(
                handler=operations.note_version, summary="Note the engine's policy version", body=Version
            )
        },
        "/health": open_to_all(operations.health, "The process is alive"),
        "/ready": open_to_all(operations.ready, "The engine answers"),
        "/metrics": open_to_all(operations.metrics, "Prometheus metrics", media_type="text/plain"),
        "/internal/metrics": open_to_all(operations.own_metrics, "The metrics of one worker"),
        "/openapi.json": open_to_all(show_document, "This document"),
        "/{path:path}": {},
    }
    return table


def admin_routes(services: Services) -> list[Route]:
    return [build_route(services, path, methods) for path, methods in admin_table(services).items()]


def build_route(services: Services, path: str, methods: Mapping[str, AdminOperation]) -> Route:
    async def endpoint(request: Request) -> Response:
        method = "GET" if request.method == "HEAD" else request.method
        is_foreign = path.startswith("/internal/") and not is_forwarded(request)
        if not methods or is_foreign:
            raise HttpError(404, "unknown_path", "no such path; GET /openapi.json lists them")
        if method not in methods:
            raise HttpError(405, "method_not_allowed", f"use {' or '.join(sorted(methods))}")
        operation = methods[method]
        if operation.needs_admin:
            services.keys.require_admin(request.scope["headers"])
        session_id = request.path_params.get("session_id")
        forwarded = await forward_to_owner(services, request, session_id) if session_id is not None else None
        try:
            return forwarded or await operation.handler(request)
        except SessionElsewhere as error:
            return PeerResponse(services.peers, error, await request_body(services, request))

    return Route(path, endpoint, methods=METHODS)
