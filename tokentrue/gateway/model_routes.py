"""Paths of model requests: one table defines the routes and the OpenAPI document.

Invariant: `OPERATIONS` lists all generating paths, and each runs a recorded turn. Any other path below `/v1` and
`/v1beta` is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal
from urllib.parse import parse_qsl

import msgspec
from starlette.routing import Route

from tokentrue.gateway.asgi import HttpError, Receive, Scope, Send, WatchedSend, answer_errors, send_json
from tokentrue.gateway.auth import SessionAccess
from tokentrue.gateway.dialects import Anthropic, Dialect, Google, OpenAIChat, OpenAIResponses, PathFields
from tokentrue.gateway.dialects.anthropic import CountBody, MessagesBody
from tokentrue.gateway.dialects.google import CountTokensBody, GenerateBody
from tokentrue.gateway.dialects.openai_chat import ChatBody
from tokentrue.gateway.dialects.openai_responses import ResponsesBody
from tokentrue.gateway.services import Services
from tokentrue.gateway.turns import NotOpened, TurnHandler
from tokentrue.json_types import JsonObject
from tokentrue.tracing import annotate, is_traced, trace_request

SESSION_ROOT = "/sessions/{session_id}"
GOOGLE_VERSIONS = ("v1beta", "v1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One path: `path` is below `/v1`, in Starlette's syntax; `streams` is None if the body decides."""

    path: str
    dialect: type[Dialect]
    does: Literal["generate", "count", "list", "nothing"]
    summary: str = ""
    body: type[msgspec.Struct] | None = None
    streams: bool | None = None
    versions: Sequence[str] = ("v1",)

    @property
    def method(self) -> str:
        return "GET" if self.does == "list" else "POST"


_GOOGLE = Operation(path="", dialect=Google, does="generate", body=GenerateBody, versions=GOOGLE_VERSIONS)
OPERATIONS: tuple[Operation, ...] = (
    Operation(
        path="chat/completions", dialect=OpenAIChat, does="generate", body=ChatBody, summary="OpenAI Chat Completions"
    ),
    Operation(
        path="responses", dialect=OpenAIResponses, does="generate", body=ResponsesBody, summary="OpenAI Responses"
    ),
    Operation(path="messages", dialect=Anthropic, does="generate", body=MessagesBody, summary="Anthropic Messages"),
    Operation(
        path="messages/count_tokens", dialect=Anthropic, does="count", body=CountBody, summary="Anthropic token count"
    ),
    Operation(path="models", dialect=OpenAIChat, does="list", summary="The model served here, and its adapters"),
    replace(_GOOGLE, path="models/{model:path}:generateContent", streams=False, summary="Google generateContent"),
    replace(
        _GOOGLE, path="models/{model:path}:streamGenerateContent", streams=True, summary="Google streamGenerateContent"
    ),
    replace(
        _GOOGLE,
        path="models/{model:path}:countTokens",
        does="count",
        body=CountTokensBody,
        summary="Google countTokens",
    ),
)
# The last routes: they decide the dialect of the error for an unknown path.
_UNKNOWN = (
    Operation(path="models/{model:path}:{verb}", dialect=Google, does="nothing"),
    Operation(path="{rest:path}", dialect=Google, does="nothing", versions=("v1beta",)),
    Operation(path="{rest:path}", dialect=OpenAIChat, does="nothing"),
)


def model_routes(services: Services) -> list[Route]:
    """Every operation with and without a session in the URL; a trailing slash is ignored."""
    turns = TurnHandler(services)
    return [
        Route(f"{root}/{version}/{operation.path}{end}", ModelEndpoint(operation, turns, services))
        for operation in (*OPERATIONS, *_UNKNOWN)
        for version in operation.versions
        for root in ("", SESSION_ROOT)
        for end in ("", "/")
    ]


class ModelEndpoint:
    """One operation as an ASGI application; sends errors in its dialect."""

    def __init__(self, operation: Operation, turns: TurnHandler, services: Services) -> None:
        self._operation, self._turns, self._services = operation, turns, services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not is_traced():
            await self._answer(scope, receive, send)
            return
        watched = WatchedSend(send)
        with trace_request(f"{scope['method']} {self._operation.dialect.name}", scope["headers"]):
            await self._answer(scope, receive, watched)
            annotate(status=watched.status)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await answer_errors(
            self._serve, scope, receive, send, dialect=self._operation.dialect, errors=self._services.metrics.errors
        )

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        services, in_path = self._services, scope["path_params"]
        in_url = parse_query(scope).get("key") if self._operation.dialect is Google else None
        access = services.keys.authenticate(scope["headers"], in_path.get("session_id"), in_url or None)
        if self._operation.does == "nothing" or in_path.get("model") == "":
            raise HttpError(404, "unknown_path", "no such path; docs/gateway.md lists the routes")
        if scope["method"] != self._operation.method:
            raise HttpError(405, "method_not_allowed", f"use {self._operation.method}")
        try:
            await self._run(access, scope, receive, send)
        except NotOpened as error:  # nothing of the body has been read
            await services.peers.forward(error.elsewhere, scope, receive, send)

    async def _run(self, access: SessionAccess, scope: Scope, receive: Receive, send: Send) -> None:
        operation, name = self._operation, self._operation.dialect.name
        if operation.does == "count":
            await self._turns.count_tokens(name, access, scope, receive, send)
        elif operation.does == "list":
            await self._turns.find(access)
            base = self._services.config.model
            await send_json(
                send, 200, list_models(base, *(f"{base}:{name}" for name in self._services.provider.adapters))
            )
        elif operation.streams is None:
            await self._turns.serve(name, access, scope, receive, send)
        else:
            if operation.streams and parse_query(scope).get("alt") != "sse":
                raise HttpError(400, "not_supported", "streams are server-sent events here; add ?alt=sse", field="alt")
            in_path = PathFields(model=scope["path_params"]["model"], stream=operation.streams)
            await self._turns.serve(name, access, scope, receive, send, in_path)


def parse_query(scope: Scope) -> dict[str, str]:
    return dict(parse_qsl(scope.get("query_string", b"").decode("latin-1")))


def list_models(*names: str) -> JsonObject:
    """Has the fields of both vendors: OpenAI's list and Anthropic's page."""
    kind = {
        "object": "model",
        "type": "model",
        "created": 0,
        "owned_by": "tokentrue",
        "created_at": "1970-01-01T00:00:00Z",
    }
    data = [{"id": name, **kind, "display_name": name} for name in names]
    return {"object": "list", "data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]}
