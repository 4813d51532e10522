"""What the handlers of administration share: the record of an operation, bodies, JSON answers, and forwarding to the worker that owns a session."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokentrue.errors import InputError, SessionElsewhere
from tokentrue.gateway.asgi import read_body
from tokentrue.gateway.dialects.base import encode
from tokentrue.gateway.services import Services
from tokentrue.gateway.workers.forwarding import FROM_WORKER, WorkerLinks
from tokentrue.gateway.workers.peers import PeerLinks
from tokentrue.json_types import JsonMapping, JsonObject

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminOperation:
    """What one path and method does. `query`: the schema of each query parameter."""

    handler: Handler
    summary: str
    needs_admin: bool = True
    body: type[msgspec.Struct] | None = None
    query: Mapping[str, JsonMapping] = field(default_factory=JsonObject)
    status: str = "200"
    media_type: str = "application/json"


def json_response(status: int, value: Any) -> Response:
    return Response(encode(value), status_code=status, media_type="application/json")


async def request_body(services: Services, request: Request) -> bytes:
    """Read once, kept for forwarding."""
    if not hasattr(request.state, "raw_body"):
        request.state.raw_body = await read_body(request.scope, request.receive, services.config.limits.body_bytes)
    return request.state.raw_body


def is_forwarded(request: Request) -> bool:
    return bool(request.scope.get(FROM_WORKER))


class ForwardedResponse(Response):
    """An answer that the owner of a session gives."""

    def __init__(self, workers: WorkerLinks, session_id: str, body: bytes) -> None:
        super().__init__()
        self._workers, self._session_id, self._raw = workers, session_id, body

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._workers.forward(self._session_id, scope, receive, send, self._raw)


class PeerResponse(Response):
    """An answer that another gateway gives."""

    def __init__(self, peers: PeerLinks, elsewhere: SessionElsewhere, body: bytes) -> None:
        super().__init__()
        self._peers, self._elsewhere, self._raw = peers, elsewhere, body

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._peers.forward(self._elsewhere, scope, receive, send, self._raw)


async def forward_to_owner(services: Services, request: Request, session_id: str) -> Response | None:
    """None where this worker is the owner."""
    workers = services.workers
    if workers is None or workers.is_owner(session_id, request.scope):
        return None
    return ForwardedResponse(workers, session_id, await request_body(services, request))


def true_or_false(text: str, name: str) -> bool:
    known = {"true": True, "1": True, "false": False, "0": False}
    if text.lower() not in known:
        raise InputError(f"{name}: must be true or false")
    return known[text.lower()]


def read_place(text: str) -> tuple[float, str]:
    """`created,session_id` of a listed session."""
    created, _, session_id = text.partition(",")
    try:
        return float(created), session_id
    except ValueError:
        raise InputError(f"after: must be `created,session_id` of a listed session, got {text!r}") from None


def whole_number(text: str, name: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        raise InputError(f"{name}: must be a whole number from 0 up")
    return int(text)
