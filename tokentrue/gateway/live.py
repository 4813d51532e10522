"""Sessions in memory: opened from the journal when first asked for, let go when idle and too many.

A live session adds to the corridor's `Session` what only HTTP needs: its key, the bytes of its last requests, its dialects (whose
seal is this session's own), and the names of retried requests.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from tokentrue.errors import LimitExceeded, MessageError, SessionConflict
from tokentrue.gateway.asgi import Scope, header
from tokentrue.gateway.config import Limits
from tokentrue.gateway.dialects import Anthropic, Call, Dialect, OpenAIChat, OpenAIResponses, Seal
from tokentrue.gateway.memo import Body, Memory, body_of
from tokentrue.gateway.problems import Refused
from tokentrue.turn import Session
from tokentrue.types import Coverage, Message, Refusal

Opener = Callable[[str], Awaitable[Session]]


class Live:
    def __init__(self, session: Session, limits: Limits) -> None:
        self.session = session
        self.used = time.monotonic()
        self.in_flight = 0
        seal = Seal((session.record.key_hash or session.id).encode())
        every: tuple[Dialect, ...] = (OpenAIChat(), OpenAIResponses(seal), Anthropic(seal))
        self.dialects: Mapping[str, Dialect] = {dialect.name: dialect for dialect in every}
        self._memories: dict[str, Memory] = {}
        self._limits = limits
        self._idempotent: OrderedDict[str, str] = OrderedDict()
        self._coverage: tuple[int, Coverage] | None = None

    def take(self, dialect: Dialect, raw: bytes) -> tuple[Body, str | None, list[Message]]:
        """The request, the node it follows where that is certain, and its messages from there on (else all of them).

        Only the appended bytes are parsed where the rest is known.
        """
        memory = self._memories.get(dialect.name)
        body = memory.appended(raw) if memory is not None else None
        if body is not None:
            messages = dialect.messages(body.items, body.call, start=body.start)
            if messages and messages[0]["role"] == "assistant":
                self._check_length(body)
                return body, body.after, messages
        body = self._enforced(body_of(raw, dialect.items_key, dialect.call))
        self._check_length(body)
        messages = dialect.messages(body.items, body.call)
        if body.call.continues is not None:
            return body, *self._continued(body.call, messages)
        return body, None, [*body.call.opening, *messages]

    def _enforced(self, body: Body) -> Body:
        """A call that must be made (`tool_choice`), in the words of this session's model."""
        choice = body.call.sampling.extra.get("tool_choice")
        if choice is None:
            return body
        name = choice["function"]["name"] if isinstance(choice, Mapping) else None
        call_tag = getattr(self.session.renderer, "call_tag", None)
        unknown = Refusal(why="no_call_form", detail="this renderer knows no call format")
        tag = call_tag(body.call.tools, name=name) if call_tag is not None else unknown
        if isinstance(tag, Refusal):
            raise MessageError(f"cannot be enforced: {tag.detail}", field="tool_choice")
        sampling = replace(body.call.sampling, extra={**body.call.sampling.extra, "tool_choice": tag})
        return body._replace(call=replace(body.call, sampling=sampling))

    def _check_length(self, body: Body) -> None:
        if body.total > self._limits.messages:
            raise LimitExceeded(f"{body.total} messages; at most {self._limits.messages} are taken (limits.messages)")

    def _continued(self, call: Call, new: list[Message]) -> tuple[str | None, list[Message]]:
        """The conversation behind an earlier answer, then `new`. A system prompt sent anew replaces the recorded one."""
        node = self.session.tree.nodes.get(call.continues or "")
        if node is None:
            raise MessageError("no such response in this session", field="previous_response_id")
        history = self.session.tree.messages(node)
        system = tuple(history[:1]) if history[0]["role"] == "system" else ()
        if not call.opening or [m["content"] for m in system] == [m["content"] for m in call.opening]:
            return node.id, [node.served, *new]
        return None, [*call.opening, *history[len(system) :], *new]

    def remember(self, dialect: Dialect, body: Body, node: str) -> None:
        self._memories.setdefault(dialect.name, Memory()).remember(body, node)

    def request_key(self, scope: Scope, body: Body) -> str:
        """A name for this request that its retry will share and that another request with the same body will not."""
        given = header(scope, b"idempotency-key")
        if given:
            return self._given_key(given, body)
        number = self._requests_like(body.digest)
        retried = header(scope, b"x-stainless-retry-count")
        if retried and retried != "0" and number:
            return f"{body.digest}#{number - 1}"
        return f"{body.digest}#{number}"

    def _given_key(self, given: str, body: Body) -> str:
        if self._idempotent.setdefault(given, body.digest) != body.digest:
            raise Refused(409, "idempotency_conflict", "this Idempotency-Key was used for another body; choose a new one")
        while len(self._idempotent) > 256:
            self._idempotent.popitem(last=False)
        return f"key:{given}"

    def _requests_like(self, digest: str) -> int:
        """How many recorded requests of this session had this very body."""
        number = 0
        while self.session.tree.keyed.get(f"{digest}#{number}"):
            number += 1
        return number

    def enter(self) -> None:
        """A generation begins, if there is room for it; whoever enters leaves."""
        if self.in_flight >= self._limits.in_flight_per_session:
            raise Refused(429, "too_many_in_flight", f"{self.in_flight} generations of this session are in flight", retry_after_s=1.0)
        self.in_flight += 1

    def leave(self) -> None:
        self.in_flight -= 1
        self.used = time.monotonic()

    def check_open(self) -> None:
        record = self.session.record
        if record.state != "open":
            raise SessionConflict(f"session {record.id!r} has ended; its samples stay readable")
        if time.time() - record.created > self._limits.session_age_s:
            raise SessionConflict(f"session {record.id!r} is older than {self._limits.session_age_s:g} s (limits.session_age_s)")

    @property
    def counted(self) -> bool:
        return self._coverage is not None and self._coverage[0] == len(self.session.tree)

    def coverage(self) -> Coverage:
        """Kept until the record grows."""
        size = len(self.session.tree)
        if self._coverage is None or self._coverage[0] != size:
            self._coverage = (size, self.session.coverage())
        return self._coverage[1]


class Registry:
    def __init__(self, open_session: Opener, limits: Limits, *, left: Callable[[str], None] = lambda _: None) -> None:
        """`left` is told of every session that leaves the memory."""
        self._open_session, self._left = open_session, left
        self._limits = limits
        self._live: OrderedDict[str, Live] = OrderedDict()
        self._opening: dict[str, asyncio.Future[Live]] = {}
        self._gone: dict[str, Any] = {"sampled": 0, "trained": 0, "untrained": {}}

    def __len__(self) -> int:
        return len(self._live)

    def known(self, session_id: str) -> Live | None:
        return self._live.get(session_id)

    async def get(self, session_id: str) -> Live:
        live = self._live.get(session_id)
        if live is not None:
            self._live.move_to_end(session_id)
            return live
        waiting = self._opening.get(session_id)
        if waiting is None:
            waiting = asyncio.ensure_future(self._load(session_id))
            self._opening[session_id] = waiting
            waiting.add_done_callback(lambda _: self._opening.pop(session_id, None))
        return await asyncio.shield(waiting)

    async def _load(self, session_id: str) -> Live:
        return self.add(await self._open_session(session_id))

    def add(self, session: Session) -> Live:
        live = Live(session, self._limits)
        self._live[session.id] = live
        self._make_room()
        return live

    def forget(self, session_id: str) -> None:
        self._live.pop(session_id, None)
        self._left(session_id)

    def _make_room(self) -> None:
        """The longest unused idle ones go; the journal has them."""
        if len(self._live) <= self._limits.live_sessions:
            return
        for session_id, live in list(self._live.items()):
            if len(self._live) <= self._limits.live_sessions:
                return
            if not live.in_flight:
                self._count_gone(live)
                del self._live[session_id]
                self._left(session_id)

    def _count_gone(self, live: Live) -> None:
        coverage = live.coverage()
        self._gone["sampled"] += coverage.sampled
        self._gone["trained"] += coverage.trained
        for span in coverage.untrained:
            self._gone["untrained"][span.why] = self._gone["untrained"].get(span.why, 0) + span.tokens

    async def totals(self) -> tuple[int, int, dict[str, int]]:
        """Sampled, trained and untrained by reason, over every session seen since the start; turns are let through in between."""
        sampled, trained, untrained = self._gone["sampled"], self._gone["trained"], dict(self._gone["untrained"])
        for live in list(self._live.values()):
            if not live.counted:
                await asyncio.sleep(0)
            coverage = live.coverage()
            sampled += coverage.sampled
            trained += coverage.trained
            for span in coverage.untrained:
                untrained[span.why] = untrained.get(span.why, 0) + span.tokens
        return sampled, trained, untrained
