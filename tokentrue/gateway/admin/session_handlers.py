"""Sessions, rewards and samples, for the administrator."""

from __future__ import annotations

import asyncio
import uuid

from starlette.requests import Request
from starlette.responses import Response

from tokentrue.errors import InputError
from tokentrue.gateway.admin.bodies import CreateSession, GiveReward, decode_admin
from tokentrue.gateway.admin.routing import (
    forward_to_owner,
    json_response,
    read_place,
    request_body,
    true_or_false,
    whole_number,
)
from tokentrue.gateway.auth import check_session_id, hash_key, new_session_key
from tokentrue.gateway.services import Services
from tokentrue.samples import Assembly, coverage_to_json, export_bytes, sample_to_json
from tokentrue.sessions.description import describe_record, describe_session

MOST_LISTED = 1000


class SessionHandlers:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def create(self, request: Request) -> Response:
        body = decode_admin(await request_body(self._services, request), CreateSession)
        session_id = check_session_id(body.session_id) if body.session_id is not None else self._new_id()
        forwarded = await forward_to_owner(self._services, request, session_id)
        if forwarded is not None:
            return forwarded
        key, config = new_session_key(session_id), self._services.config
        session = self._services.new_session(
            session_id=session_id,
            group=body.group,
            metadata=body.metadata,
            sampling=body.sampling,
            history=body.history or config.history,
            training=config.training if body.training is None else body.training,
            pin=config.pin if body.pin is None else body.pin,
            key_hash=hash_key(key),
        )
        await session.wait_created()
        self._services.sessions.add(session)
        return json_response(201, self._address(request, session_id, key))

    def _address(self, request: Request, session_id: str, key: str) -> dict[str, str]:
        own = f"{self._services.config.base_url or str(request.base_url).rstrip('/')}/sessions/{session_id}"
        return {
            "session_id": session_id,
            "api_key": key,
            "base_url": f"{own}/v1",
            "anthropic_base_url": own,
            "google_base_url": own,
        }

    async def renew_key(self, request: Request) -> Response:
        """For whoever resumes a session whose key is lost: a new key, under which the old one opens nothing."""
        session_id = request.path_params["session_id"]
        key = new_session_key(session_id)
        async with self._services.sessions.checkout(session_id) as handle:
            handle.check_open()
            await handle.session.replace_key(hash_key(key))
        return json_response(201, self._address(request, session_id, key))

    def _new_id(self) -> str:
        """An id that this worker owns, so that the request need not be forwarded."""
        workers = self._services.workers
        while True:
            session_id = uuid.uuid4().hex
            if workers is None or workers.owner(session_id) == workers.me:
                return session_id

    async def list(self, request: Request) -> Response:
        query = request.query_params
        offset, limit = (
            whole_number(query.get("offset", "0"), "offset"),
            whole_number(query.get("limit", "100"), "limit"),
        )
        if limit > MOST_LISTED:
            raise InputError(f"limit: at most {MOST_LISTED}")
        journal = self._services.journal
        state, group = query.get("state"), query.get("group")
        if state not in (None, "open", "ended"):
            raise InputError(f"state: must be open or ended, got {state!r}")
        after = read_place(query["after"]) if "after" in query else None
        records = await asyncio.to_thread(
            lambda: journal.sessions(offset=offset, limit=limit, state=state, group=group, after=after)
        )
        total = await asyncio.to_thread(lambda: journal.count(state=state, group=group))
        listed = [describe_record(record) for record in records]
        return json_response(200, {"sessions": listed, "total": total, "offset": offset, "limit": limit})

    async def show(self, request: Request) -> Response:
        async with self._services.sessions.checkout(request.path_params["session_id"]) as handle:
            session, coverage = handle.session, coverage_to_json(handle.coverage())
            return json_response(
                200, {**describe_session(session.record, session.tree, coverage), "in_flight": handle.in_flight}
            )

    async def delete(self, request: Request) -> Response:
        session_id = request.path_params["session_id"]
        purge = true_or_false(request.query_params.get("purge", "false"), "purge")
        async with self._services.sessions.checkout(session_id) as handle:
            await handle.session.end()
            state = handle.session.record.state
        if purge:
            await self._services.journal.delete(session_id)
            self._services.sessions.forget(session_id)
            state = "purged"
        return json_response(200, {"session_id": session_id, "state": state})

    async def reward(self, request: Request) -> Response:
        body = decode_admin(await request_body(self._services, request), GiveReward)
        async with self._services.sessions.checkout(request.path_params["session_id"]) as handle:
            await handle.session.reward(body.reward, leaf=body.leaf, metadata=body.metadata, group=body.group)
            return json_response(200, {"session_id": handle.session.id, "reward": body.reward, "leaf": body.leaf})

    async def samples(self, request: Request) -> Response:
        async with self._services.sessions.checkout(request.path_params["session_id"]) as handle:
            assembly = await handle.session.assembly()
        format_ = request.query_params.get("format", "json")
        if format_ != "json":
            content, media_type = await asyncio.to_thread(export_bytes, assembly.samples, format=format_[:40])
            return Response(content, media_type=media_type)
        return await asyncio.to_thread(samples_response, handle.session.id, assembly)


def samples_response(session_id: str, assembly: Assembly) -> Response:
    """Runs in a thread: samples are long."""
    samples = [sample_to_json(sample) for sample in assembly.samples]
    return json_response(
        200, {"session_id": session_id, "samples": samples, "coverage": coverage_to_json(assembly.coverage)}
    )
