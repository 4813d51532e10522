"""Administration. `ADMIN` defines the routes and the OpenAPI document."""

from __future__ import annotations

import asyncio
import re
import shutil
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import orjson
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tokentrue.errors import EngineError, InputError, SessionElsewhere
from tokentrue.gateway.asgi import HttpError, Receive, Scope, Send, read_body
from tokentrue.gateway.auth import SESSION_ID, check_session_id, hash_key, new_session_key
from tokentrue.gateway.dialects.base import decode_body, encode
from tokentrue.gateway.metrics import CONTENT_TYPE, build_page, engine_families
from tokentrue.gateway.model_routes import OPERATIONS, SESSION_ROOT, Body
from tokentrue.gateway.services import Services
from tokentrue.gateway.serving.forwarding import count_forwards
from tokentrue.gateway.sessions import SessionHandle
from tokentrue.json_types import JsonObject, read_table
from tokentrue.plain_json import convert
from tokentrue.records import record
from tokentrue.samples import Assembly, coverage_to_json, export_bytes, sample_to_json
from tokentrue.sessions.description import describe_record, describe_session

READY_S = 5.0
LONGEST_DRAIN_S = 600.0
# A client chose these bytes: no browser may run them.
IMAGE_HEADERS = {
    "x-content-type-options": "nosniff",
    "content-security-policy": "default-src 'none'; sandbox",
    "cache-control": "private, max-age=31536000, immutable",
}


class AdminBody(msgspec.Struct, forbid_unknown_fields=True):
    pass


class CreateSession(AdminBody):
    session_id: str | None = None
    group: str | None = None
    metadata: JsonObject = {}
    sampling: JsonObject = {}
    history: Literal["keep", "template"] | None = None
    training: bool | None = None
    pin: list[str] | None = None
    side_requests: Literal["leave_out", "train"] | None = None


class GiveReward(AdminBody):
    reward: float
    leaf: str | None = None
    metadata: JsonObject = {}
    group: str | None = None


class Pause(AdminBody):
    """`drain`: reply when nothing is in flight, or after `timeout_s`. `abort`: interrupt what is sampled; it
    continues after resume."""

    drain: bool = False
    abort: bool = False
    timeout_s: float = 60.0


class Version(AdminBody):
    version: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class ListQuery(msgspec.Struct):
    offset: Annotated[int, msgspec.Meta(ge=0, le=10**12)] = 0
    limit: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 100
    state: Literal["open", "ended"] | None = None
    group: str | None = None
    after: Annotated[str, msgspec.Meta(description="`created,session_id` of a listed session: those behind it")] = ""


class DeleteQuery(msgspec.Struct):
    purge: bool = False


class SamplesQuery(msgspec.Struct):
    format: str = "json"


@record
class AdminRequest:
    services: Services
    request: Request
    raw_body: bytes
    body: Any
    query: Any

    @property
    def session_id(self) -> str:
        return self.request.path_params["session_id"]

    @property
    def is_forwarded(self) -> bool:
        return count_forwards(self.request.scope) > 0

    def checkout(self) -> AbstractAsyncContextManager[SessionHandle]:
        return self.services.sessions.checkout(self.session_id)

    async def create(self) -> JsonObject:
        body: CreateSession = self.body
        services = self.services
        session_id = check_session_id(body.session_id) if body.session_id is not None else uuid.uuid4().hex
        while body.session_id is None and not services.peers.is_own(session_id):  # do not forward the request
            session_id = uuid.uuid4().hex
        services.peers.require_own(session_id)
        key = new_session_key(session_id)
        settings: JsonObject = {name: getattr(body, name) for name in body.__struct_fields__ if name != "session_id"}
        session = services.new_session(session_id, key_hash=hash_key(key), **settings)
        await session.wait_created()
        services.sessions.add(session)
        return self._show_key(session_id, key)

    def _show_key(self, session_id: str, key: str) -> JsonObject:
        own = f"{self.services.config.base_url or str(self.request.base_url).rstrip('/')}/sessions/{session_id}"
        urls = {"base_url": f"{own}/v1", "anthropic_base_url": own, "google_base_url": own}
        return {"session_id": session_id, "api_key": key, **urls}

    async def renew_key(self) -> JsonObject:
        key = new_session_key(self.session_id)
        async with self.checkout() as handle:
            handle.check_open()
            await handle.session.replace_key(hash_key(key))
        return self._show_key(self.session_id, key)

    async def list(self) -> JsonObject:
        query: ListQuery = self.query
        journal, after = self.services.journal, None
        if query.after:
            created, _, session_id = query.after.partition(",")
            try:
                after = float(created), session_id
            except ValueError:
                raise InputError(f"after: must be `created,session_id`, got {query.after!r}") from None
        chosen: JsonObject = {"state": query.state, "group": query.group}
        page: JsonObject = {"offset": query.offset, "limit": query.limit}
        records = await asyncio.to_thread(journal.sessions, after=after, **page, **chosen)
        total = await asyncio.to_thread(journal.count, **chosen)
        return {"sessions": [describe_record(record) for record in records], "total": total, **page}

    async def show(self) -> JsonObject:
        async with self.checkout() as handle:
            session, coverage = handle.session, coverage_to_json(handle.coverage())
            return {**describe_session(session.record, session.tree, coverage), "in_flight": handle.in_flight}

    async def delete(self) -> JsonObject:
        async with self.checkout() as handle:
            await handle.session.end()
            state = handle.session.record.state
        if self.query.purge:
            await self.services.journal.delete(self.session_id)
            self.services.sessions.forget(self.session_id)
            state = "purged"
        return {"session_id": self.session_id, "state": state}

    async def reward(self) -> JsonObject:
        body: GiveReward = self.body
        async with self.checkout() as handle:
            await handle.session.reward(body.reward, leaf=body.leaf, metadata=body.metadata, group=body.group)
        return {"session_id": self.session_id, "reward": body.reward, "leaf": body.leaf}

    async def samples(self) -> Response:
        async with self.checkout() as handle:
            assembly = await handle.session.assembly()
        # In a thread: building samples takes long.
        return await asyncio.to_thread(samples_response, self.session_id, assembly, self.query.format[:40])

    async def image(self) -> Response:
        journal = self.services.journal
        access = self.services.keys.authenticate(self.request.headers.raw, self.session_id)
        with access.hide_session():
            access.check((await asyncio.to_thread(journal.get, self.session_id)).key_hash)
        name = self.request.path_params["sha256"]
        data, media_type = await asyncio.to_thread(journal.read_image, self.session_id, name)
        return Response(data, media_type=media_type, headers=IMAGE_HEADERS)

    # Weight updates: the worker that gets the request applies it to all workers.
    async def pause(self) -> JsonObject:
        body: Pause = self.body
        if body.drain and body.abort:
            raise InputError("drain and abort: what is broken off stays in flight until resume; choose one")
        services, admission = self.services, self.services.admission
        services.set_paused(True)
        aborted = await services.provider.inner.interrupt() if body.abort else 0
        drain_s = min(max(body.timeout_s, 0.0), LONGEST_DRAIN_S)
        drained = await admission.drain(drain_s) if body.drain else admission.in_flight == 0
        others = await self._ask_others()
        answer: JsonObject = {
            "paused": True,
            "drained": drained and all(other["drained"] for other in others),
            "in_flight": admission.in_flight + sum(other["in_flight"] for other in others),
        }
        if body.abort:
            answer["aborted"] = aborted + sum(other["aborted"] for other in others)
        return answer

    async def resume(self) -> JsonObject:
        self.services.set_paused(False)
        await self._ask_others()
        return {"paused": False, "in_flight": self.services.admission.in_flight}

    async def note_version(self) -> JsonObject:
        self.services.set_version(self.body.version)
        await self._ask_others()
        return {"version": self.body.version}

    async def _ask_others(self) -> list[JsonObject]:
        if self.is_forwarded:
            return []
        headers = {k: v for k, v in self.request.headers.items() if k in {"authorization", "x-api-key", "content-type"}}
        answers = await self.services.peers.ask_workers("POST", self.request.url.path, self.raw_body, headers)
        if None in answers:
            raise HttpError(503, "worker_restarting", "a worker does not answer; send this again", retry_after_s=1.0)
        return [orjson.loads(answer) for answer in answers if answer is not None]

    async def health(self) -> JsonObject:
        return {"status": "ok"}

    async def ready(self) -> JsonObject:
        services = self.services
        if services.admission.closing:
            raise HttpError(503, "shutting_down", "the gateway is shutting down")
        try:
            facts = await asyncio.wait_for(services.provider.health(), READY_S)
        except (EngineError, TimeoutError) as error:
            message = f"no engine answers: {str(error)[:200]}"
            raise HttpError(503, "engine_unreachable", message, retry_after_s=5.0) from None
        await self._check_disk()
        if not self.is_forwarded and None in await services.peers.ask_workers("GET", "/ready"):
            raise HttpError(503, "worker_not_ready", "a worker is not ready", retry_after_s=1.0)
        return {"status": "ready", "paused": services.admission.paused, "engine": dict(facts)}

    async def _check_disk(self) -> None:
        journal = self.services.journal
        _ = journal.lease_number  # raises if the database is unreachable
        if journal.folder is None:
            return
        free = (await asyncio.to_thread(shutil.disk_usage, journal.folder)).free
        if free < self.services.config.limits.free_disk_bytes:
            message = f"the disk of the journal is full: {free} bytes are left (limits.free_disk_bytes)"
            raise HttpError(503, "disk_full", message, retry_after_s=10.0)

    async def metrics(self) -> Response:
        services = self.services
        others = [] if self.is_forwarded else await services.peers.ask_workers("GET", "/metrics")
        services.metrics.measure(services.admission, services.sessions, await services.sessions.totals())
        families = [*services.metrics.registry.collect(), *engine_families(services.provider.inner)]
        for page in others:
            families += text_string_to_metric_families((page or b"").decode())
        return Response(build_page(families), headers={"content-type": CONTENT_TYPE})

    async def show_document(self) -> JsonObject:
        return openapi_document()


def samples_response(session_id: str, assembly: Assembly, format_: str) -> Response:
    if format_ != "json":
        content, media_type = export_bytes(assembly.samples, format=format_)
        return Response(content, media_type=media_type)
    samples, coverage = [sample_to_json(sample) for sample in assembly.samples], coverage_to_json(assembly.coverage)
    content = encode({"session_id": session_id, "samples": samples, "coverage": coverage})
    return Response(content, media_type="application/json")


class AdminOperation(NamedTuple):
    path: str
    handler: Callable[..., Awaitable[Response | JsonObject]]
    summary: str
    method: str = "GET"
    needs_admin: bool = True
    body: Body = None
    query: Body = None
    status: int = 200
    media_type: str = "application/json"


IMAGE, KEY = f"{SESSION_ROOT}/images/{{sha256}}", "A new API key for a session; the old one ends"
OF_IMAGE = "The file of an image; the session's key suffices"
ADMIN = (
    AdminOperation("/sessions", AdminRequest.create, "Create a session", "POST", body=CreateSession, status=201),
    AdminOperation("/sessions", AdminRequest.list, "List sessions, newest first", query=ListQuery),
    AdminOperation(SESSION_ROOT, AdminRequest.show, "One session: its tree, coverage, state"),
    AdminOperation(SESSION_ROOT, AdminRequest.delete, "End a session", "DELETE", query=DeleteQuery),
    AdminOperation(f"{SESSION_ROOT}/key", AdminRequest.renew_key, KEY, "POST", status=201),
    AdminOperation(f"{SESSION_ROOT}/reward", AdminRequest.reward, "Give a reward", "POST", body=GiveReward),
    AdminOperation(f"{SESSION_ROOT}/samples", AdminRequest.samples, "Training samples", query=SamplesQuery),
    AdminOperation(IMAGE, AdminRequest.image, OF_IMAGE, needs_admin=False, media_type="image/*"),
    AdminOperation("/admin/pause", AdminRequest.pause, "Hold generations back", "POST", body=Pause),
    AdminOperation("/admin/resume", AdminRequest.resume, "Let generations continue", "POST"),
    AdminOperation("/admin/version", AdminRequest.note_version, "Note the policy version", "POST", body=Version),
    AdminOperation("/health", AdminRequest.health, "The process is alive", needs_admin=False),
    AdminOperation("/ready", AdminRequest.ready, "The engine answers", needs_admin=False),
    AdminOperation("/metrics", AdminRequest.metrics, "Prometheus metrics", needs_admin=False, media_type="text/plain"),
    AdminOperation("/openapi.json", AdminRequest.show_document, "This document", needs_admin=False),
)


def admin_routes(services: Services) -> list[Route]:
    routes: dict[str, dict[str, AdminOperation]] = {}
    for operation in ADMIN:
        routes.setdefault(operation.path, {})[operation.method] = operation
    return [Route(path, AdminEndpoint(services, each)) for path, each in (*routes.items(), ("/{path:path}", {}))]


class AdminEndpoint:
    def __init__(self, services: Services, methods: Mapping[str, AdminOperation]) -> None:
        self._services, self._methods = services, methods

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services, request = self._services, Request(scope, receive)
        method = "GET" if request.method == "HEAD" else request.method
        if not self._methods:
            raise HttpError(404, "unknown_path", "no such path; GET /openapi.json lists them")
        if (operation := self._methods.get(method)) is None:
            raise HttpError(405, "method_not_allowed", f"use {' or '.join(sorted(self._methods))}")
        if operation.needs_admin:
            services.keys.require_admin(scope["headers"])
        raw = await read_body(scope, receive, services.config.limits.body_bytes) if method == "POST" else b""
        body = decode_body(raw if raw.strip() else b"{}", operation.body) if operation.body is not None else None
        query = convert(dict(request.query_params), operation.query, strict=False) if operation.query else None
        asked = AdminRequest(services=services, request=request, raw_body=raw, body=body, query=query)
        try:
            response = await operation.handler(asked)
        except SessionElsewhere as error:
            await services.peers.forward(error, scope, receive, send, raw)
            return
        if not isinstance(response, Response):
            response = Response(encode(response), status_code=operation.status, media_type="application/json")
        await response(scope, receive, send)


# The OpenAPI document.
SCHEMAS = "#/components/schemas/"
ERRORS = ("400", "401", "403", "404", "405", "409", "413", "422", "429", "502", "503", "504")
ERROR: JsonObject = {"description": "refused", "content": {"application/json": {"schema": {"$ref": f"{SCHEMAS}Error"}}}}
EVENTS: JsonObject = {"name": "alt", "in": "query", "required": True, "schema": {"enum": ["sse"]}}
PATTERNS = {"session_id": f"^{SESSION_ID.pattern}$", "model": "^[A-Za-z0-9._-]+$", "sha256": "^[0-9a-f]{64}$"}


def openapi_document() -> JsonObject:
    from tokentrue import __version__

    document = read_table(__file__, "openapi.json")
    document["info"]["version"] = __version__
    bodies = dict.fromkeys(each.body for each in (*OPERATIONS, *ADMIN) if each.body is not None)
    document["components"]["schemas"] |= msgspec.json.schema_components(bodies, ref_template=SCHEMAS + "{name}")[1]
    paths: dict[str, JsonObject] = document["paths"]
    for operation in OPERATIONS:
        streams = operation.does == "generate" and operation.streams is not False
        kinds = ["application/json", *(["text/event-stream"] if streams else [])]
        query = [EVENTS] if operation.streams else []
        for root, who in (("", "key"), (SESSION_ROOT, "URL")):
            path = f"{root}/{operation.versions[0]}/{operation.path.replace(':path}', '}')}"
            summary = f"{operation.summary}; the {who} names the session"
            paths[path] = {operation.method.lower(): describe_operation(path, summary, operation.body, kinds, query)}
    for each in ADMIN:
        fields: JsonObject = {}
        if each.query is not None:
            fields = msgspec.json.schema(each.query)["$defs"][each.query.__name__]["properties"]
        query = [{"name": name, "in": "query", "schema": schema} for name, schema in fields.items()]
        shown = describe_operation(each.path, each.summary, each.body, [each.media_type], query, status=each.status)
        paths.setdefault(each.path, {})[each.method.lower()] = shown
    return document


def describe_operation(
    path: str, summary: str, body: Body, media_types: Iterable[str], query: Iterable[JsonObject], *, status: int = 200
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
