"""The OpenAPI document, built from the route tables and the structs of bodies."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec
from starlette.responses import Response

from tokentrue.gateway.auth import SESSION_ID
from tokentrue.gateway.model_routes import OPERATIONS, SESSION_ROOT
from tokentrue.json_types import JsonObject

SCHEMAS = "#/components/schemas/"
ERRORS = ("400", "401", "403", "404", "405", "409", "413", "422", "429", "502", "503", "504")
ERROR: JsonObject = {"description": "refused", "content": {"application/json": {"schema": {"$ref": f"{SCHEMAS}Error"}}}}
EVENTS: JsonObject = {"name": "alt", "in": "query", "required": True, "schema": {"enum": ["sse"]}}
PATTERNS = {
    "session_id": f"^{SESSION_ID.pattern}$",
    "model": "^[A-Za-z0-9._-]+$",
    "sha256": "^[0-9a-f]{64}$",
}  # of names in paths
PAGE: JsonObject = {
    "summary": "The viewer, a web page; takes the admin key as the password of HTTP Basic, too",
    "responses": {
        "200": {"description": "the page", "content": {"text/html": {"schema": {}}}},
        "307": {"description": "the page is at /view/"},
        "401": {"description": "send the admin key", "content": {"text/plain": {"schema": {}}}},
        "403": {"description": "this needs the admin key", "content": {"text/plain": {"schema": {}}}},
        "405": {"description": "use GET"},
    },
}


@dataclass(frozen=True, slots=True)
class AdminOperation:
    path: str
    handler: Callable[..., Awaitable[Response | JsonObject]]
    summary: str
    method: str = "GET"
    needs_admin: bool = True
    body: type[msgspec.Struct] | None = None
    query: type[msgspec.Struct] | None = None
    status: int = 200
    media_type: str = "application/json"


def document(admin: Sequence[AdminOperation]) -> JsonObject:
    from tokentrue import __version__

    bodies = dict.fromkeys(each.body for each in (*OPERATIONS, *admin) if each.body is not None)
    _, schemas = msgspec.json.schema_components(bodies, ref_template=SCHEMAS + "{name}")
    schemas["Error"] = {"type": "object", "required": ["error"], "properties": {"error": {"type": "object"}}}
    paths: dict[str, JsonObject] = {"/view": {"get": PAGE}}
    for operation in OPERATIONS:
        streams = operation.does == "generate" and operation.streams is not False
        kinds = ["application/json", *(["text/event-stream"] if streams else [])]
        query = [EVENTS] if operation.streams else []
        for root, who in (("", "the key names the session"), (SESSION_ROOT, "the URL names the session")):
            path = f"{root}/{operation.versions[0]}/{operation.path.replace(':path}', '}')}"
            shown = describe(path, f"{operation.summary}; {who}", operation.body, kinds, query)
            paths[path] = {operation.method.lower(): shown}
    for each in admin:
        fields: JsonObject = {}
        if each.query is not None:
            fields = msgspec.json.schema(each.query)["$defs"][each.query.__name__]["properties"]
        query = [{"name": name, "in": "query", "schema": schema} for name, schema in fields.items()]
        shown = describe(each.path, each.summary, each.body, [each.media_type], query, status=each.status)
        paths.setdefault(each.path, {})[each.method.lower()] = shown
    described = "Token-in, token-out model calls for agents."
    return {
        "openapi": "3.1.0",
        "info": {"title": "tokentrue gateway", "version": __version__, "description": described},
        "paths": paths,
        "components": {"securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}, "schemas": schemas},
        "security": [{"bearer": []}],
    }


def describe(
    path: str,
    summary: str,
    body: type[msgspec.Struct] | None,
    media_types: Iterable[str],
    query: Iterable[JsonObject],
    *,
    status: int = 200,
) -> JsonObject:
    good: JsonObject = {"description": summary, "content": {kind: {"schema": {}} for kind in media_types}}
    described: JsonObject = {"summary": summary, "responses": {str(status): good, **dict.fromkeys(ERRORS, ERROR)}}
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "pattern": PATTERNS[name]}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    if parameters := [*in_path, *query]:
        described["parameters"] = parameters
    if body is not None:
        content = {"application/json": {"schema": {"$ref": SCHEMAS + body.__name__}}}
        described["requestBody"] = {"required": True, "content": content}
    return described
