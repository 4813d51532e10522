"""Sessions in memory, evicted when idle, too many or too large; never while in use, so a session has one live object."""

import asyncio
import hashlib
import hmac
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import count
from typing import cast

from tokentrue.conversation import ByteBudget, Conversation
from tokentrue.conversation.match_keys import count_system, read_role
from tokentrue.errors import (
    JournalError,
    LimitExceeded,
    MessageError,
    RenderError,
    SessionConflict,
    SessionElsewhere,
    SessionNotFound,
    TemplateError,
)
from tokentrue.gateway.asgi import HttpError, Scope, log_line, read_header
from tokentrue.gateway.config import GatewayLimits
from tokentrue.gateway.dialects.anthropic import Anthropic
from tokentrue.gateway.dialects.base import DecodedBody, Dialect, RequestHead, function_tool
from tokentrue.gateway.dialects.google import Google
from tokentrue.gateway.dialects.openai_chat import OpenAIChat, OpenAIChatTokens
from tokentrue.gateway.dialects.openai_responses import OpenAIResponses
from tokentrue.gateway.dialects.signing import ReasoningSigner
from tokentrue.json_types import JsonMapping
from tokentrue.protocols import Renderer
from tokentrue.sessions.images import add_parsed
from tokentrue.sessions.journal import Journal, SessionRecord, StoreSecret
from tokentrue.sessions.requests import SessionLimits
from tokentrue.turn import Session
from tokentrue.types import Coverage, Message, Refusal

NewSession = Callable[[str], Session]
REMEMBERED_BODIES = 256
TOKEN_BYTES = 48  # estimate per recorded token: id, log-probability, share of text and spans
NODE_BYTES = 4096


def fit_in_memory(session_limits: SessionLimits, limits: GatewayLimits) -> SessionLimits:
    """Half of `live_sessions_bytes` for one session: one in use cannot be evicted."""
    most = limits.live_sessions_bytes // 2 // TOKEN_BYTES
    return replace(session_limits, max_tokens=min(most, session_limits.max_tokens or most))


class SessionHandle:
    def __init__(self, session: Session, limits: GatewayLimits, budget: ByteBudget, secret: StoreSecret) -> None:
        self.session = session
        self.users = 0  # requests that hold it
        self.lease_number = 0  # the journal's, when the session was opened
        self.counted_bytes = 0  # its part of the registry's memory_bytes
        self.in_flight = 0
        self.last_used = time.monotonic()
        signer = build_signer(session.record, secret)
        responses = OpenAIResponses(signer, session.tree.find_arguments, session.tree.nodes.__contains__)
        others = (kind(signer) for kind in (OpenAIChat, OpenAIChatTokens, Anthropic, Google))
        self.dialects: Mapping[str, Dialect] = {dialect.name: dialect for dialect in (responses, *others)}
        session.conversations.budget = budget  # caches nothing before it is in use
        self._limits = limits
        self._request_numbers: OrderedDict[str, int] = OrderedDict()  # by a body's digest, of its last request
        self._coverage: tuple[int, Coverage] | None = None  # (session revision, coverage)
        self._has_warned = False  # of answers that replace each other

    async def parse(self, dialect: Dialect, body: bytes) -> tuple[RequestHead, Conversation]:
        decoded = dialect.decode(body)
        conversation, head = await self.read_conversation(dialect, decoded), decoded.head
        tool_choice = head.sampling.extra.get("tool_choice")
        if tool_choice is not None:  # enforced by a tag in this model's call format
            is_named = isinstance(tool_choice, Mapping)
            name = cast("JsonMapping", tool_choice)["function"]["name"] if is_named else None
            tag = self.session.renderer.call_tag(head.tools or (), name=name)
            if isinstance(tag, Refusal):
                raise MessageError(f"cannot be enforced: {tag.detail}", field="tool_choice")
            head = replace(head, sampling=replace(head.sampling, extra={**head.sampling.extra, "tool_choice": tag}))
        if head.tools and ignores_tools(self.session.renderer):
            cure = "leave them out, or use another template"
            raise TemplateError(f"this model's chat template ignores tools: the model would not see them; {cure}")
        return head, conversation

    async def read_conversation(self, dialect: Dialect, decoded: DecodedBody) -> Conversation:
        head, most = decoded.head, self._limits.messages
        if len(decoded.items) > most:
            raise LimitExceeded(f"{len(decoded.items)} messages; at most {most} are taken (limits.messages)")
        history = list(head.leading_messages)
        if head.continues is not None:
            node = self.session.tree.nodes.get(head.continues)
            if node is None:
                raise MessageError("no such response in this session", field="previous_response_id")
            before = self.session.tree.messages(node)
            if node.replaced:  # by a pinned prompt; the instructions are in what the client sent
                before = [*node.replaced, *before[count_system(map(read_role, before)) :]]
            history += before[1 if head.was_instructed else 0 :]  # `instructions` are never carried over
        conversations = self.session.conversations
        return await add_parsed(conversations, dialect.parse_conversation(decoded, conversations, history=history))

    def find_request_key(self, scope: Scope, dialect: Dialect, body: bytes) -> str | None:
        """Shared only with retries: the client's `Idempotency-Key`, or, for SDKs that send
        `x-stainless-retry-count`, the body's digest and a counter."""
        given = read_header(scope["headers"], b"idempotency-key")
        retries = read_header(scope["headers"], b"x-stainless-retry-count")
        if given:
            return f"key:{given}"  # the session, which has the record, checks whether it names this request
        if retries is None:
            return None
        # With the dialect: some bodies are valid in several dialects, with different replies.
        digest = hashlib.blake2b(body, digest_size=16, person=dialect.name.encode()).hexdigest()
        numbers, answered = self._request_numbers, self.session.tree.nodes_by_key
        if retries == "0" or digest not in numbers:
            recorded = next(number for number in count() if not answered.get(f"{digest}#{number}"))
            numbers[digest] = recorded if retries == "0" else max(0, recorded - 1)  # a retry after a restart
            numbers.move_to_end(digest)
            if len(numbers) > REMEMBERED_BODIES:
                numbers.popitem(last=False)
        return f"{digest}#{numbers[digest]}"

    def warn_of_retries(self, node_id: str) -> None:
        tree = self.session.tree
        node = tree.nodes.get(node_id)
        if self._has_warned or node is None:
            return
        if any(one.seq < node.started and not tree.followers.get(one.id) for one in tree.answers_like(node)):
            self._has_warned = True
            said = "one prompt was sent twice, its first answer is not trained; ask with n, or open a session for each"
            log_line("retried", logging.WARNING, session=self.session.id, message=said)

    @contextmanager
    def count_in_flight(self) -> Generator[None]:
        if self.in_flight >= self._limits.in_flight_per_session:
            message = f"{self.in_flight} generations of this session are in flight"
            raise HttpError(429, "too_many_in_flight", message, retry_after_s=1.0)
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def check_open(self) -> None:
        self.session.check_open()
        record, oldest_s = self.session.record, self._limits.session_age_s
        if time.time() - record.created > oldest_s:
            raise SessionConflict(f"session {record.id!r} is older than {oldest_s:g} s (limits.session_age_s)")

    @property
    def memory_bytes(self) -> int:
        recorded = NODE_BYTES * len(self.session.tree) + TOKEN_BYTES * self.session.recorded_tokens
        return recorded + self.session.conversations.used

    def coverage(self) -> Coverage:
        if self._coverage is None or self._coverage[0] != self.session.revision:
            self._coverage = (self.session.revision, self.session.coverage())
        return self._coverage[1]


def build_signer(record: SessionRecord, secret: StoreSecret) -> ReasoningSigner:
    """Sessions older than the store's secret were signed with a hash that their client can compute."""
    of_session = hmac.digest(secret.value, record.id.encode(), hashlib.sha256)
    guessable = (record.first_key_hash or record.key_hash or record.id).encode()
    return ReasoningSigner(of_session, *([guessable] if record.created < secret.created else []))


@lru_cache(maxsize=8)
def ignores_tools(renderer: Renderer) -> bool:
    asked: list[Message] = [{"role": "user", "content": "x"}]
    tools = [function_tool("probe", "", {"type": "object", "properties": {}})]
    try:
        return renderer.render(asked, tools).token_ids == renderer.render(asked).token_ids
    except RenderError:
        return False  # the request's own rendering reports the error


@dataclass(slots=True)
class CoverageTotals:
    sampled: int = 0
    trained: int = 0
    untrained: Counter[str] = field(default_factory=Counter[str])

    def add(self, coverage: Coverage, sign: int = 1) -> None:
        self.sampled += sign * coverage.sampled
        self.trained += sign * coverage.trained
        for why, tokens in coverage.untrained_by_reason.items():
            self.untrained[why] += sign * tokens


class SessionRegistry:
    def __init__(
        self, open_session: Callable[[str], Awaitable[Session]], limits: GatewayLimits, journal: Journal
    ) -> None:
        self._open_session, self._limits, self._journal = open_session, limits, journal
        self._secret = journal.read_secret("reasoning")
        self._live: OrderedDict[str, SessionHandle] = OrderedDict()
        self._opening: dict[str, asyncio.Task[SessionHandle]] = {}
        self._budget = ByteBudget(limits.message_caches_bytes)
        self.memory_bytes = 0  # estimate for all sessions in memory
        # Of evicted sessions, minus what reloaded ones had: with that of live sessions it is the total since start.
        self._evicted_coverage = CoverageTotals()

    def __len__(self) -> int:
        return len(self._live)

    def get_loaded(self, session_id: str) -> SessionHandle | None:
        return self._live.get(session_id)

    @asynccontextmanager
    async def checkout(self, session_id: str) -> AsyncGenerator[SessionHandle]:
        with self.keep_loaded(await self.open(session_id)) as handle:
            yield handle

    @contextmanager
    def keep_loaded(self, handle: SessionHandle) -> Generator[SessionHandle]:
        """Call it right after `open`, without an await in between."""
        handle.users += 1
        try:
            yield handle
        except (JournalError, SessionElsewhere):  # the journal may hold more by now
            if self._live.get(handle.session.id) is handle:
                self.forget(handle.session.id)
            raise
        finally:
            handle.users -= 1
            handle.last_used = time.monotonic()
            if self._live.get(handle.session.id) is handle:
                held = handle.memory_bytes
                self.memory_bytes += held - handle.counted_bytes
                handle.counted_bytes = held
            self._make_room()

    async def open(self, session_id: str, create: NewSession | None = None) -> SessionHandle:
        while True:
            handle = self._live.get(session_id)
            if handle is not None and handle.lease_number == self._journal.lease_number:
                self._live.move_to_end(session_id)
                return handle
            self.forget(session_id)  # another gateway may have owned the session meanwhile
            opening = self._opening.get(session_id)
            if opening is None:
                opening = self._opening[session_id] = asyncio.create_task(self._load(session_id, create))
                opening.add_done_callback(lambda _: self._opening.pop(session_id, None))
            await asyncio.shield(opening)

    async def _load(self, session_id: str, create: NewSession | None) -> SessionHandle:
        lease_number = self._journal.lease_number
        try:
            session = await self._reopen(session_id)
        except SessionNotFound:
            if create is None:
                raise
            session = create(session_id)
            try:
                await session.wait_created()
            except SessionConflict:  # created since, by another gateway or by POST /sessions
                if (live := self._live.get(session_id)) is not None:
                    return live
                session = await self._reopen(session_id)
        return self.add(session, lease_number)

    async def _reopen(self, session_id: str) -> Session:
        session = await self._open_session(session_id)
        self._evicted_coverage.add(await asyncio.to_thread(session.coverage), -1)
        return session

    def add(self, session: Session, lease_number: int | None = None) -> SessionHandle:
        handle = self._live[session.id] = SessionHandle(session, self._limits, self._budget, self._secret)
        handle.lease_number = self._journal.lease_number if lease_number is None else lease_number
        return handle

    def forget(self, session_id: str) -> None:
        handle = self._live.pop(session_id, None)
        if handle is not None:
            self._evicted_coverage.add(handle.coverage())
            self.memory_bytes -= handle.counted_bytes
            handle.session.conversations.close()

    def evict_idle(self) -> None:
        oldest = time.monotonic() - self._limits.idle_session_s
        for handle in list(self._live.values()):
            if not handle.users and handle.last_used < oldest:
                self.forget(handle.session.id)

    def _make_room(self) -> None:
        limits, unused = self._limits, (handle for handle in list(self._live.values()) if not handle.users)
        while len(self._live) > limits.live_sessions or self.memory_bytes > limits.live_sessions_bytes:
            if (handle := next(unused, None)) is None:
                return
            self.forget(handle.session.id)

    async def totals(self) -> CoverageTotals:
        for handle in list(self._live.values()):
            await asyncio.sleep(0)  # let other requests run
            handle.coverage()
        found = replace(self._evicted_coverage, untrained=self._evicted_coverage.untrained.copy())
        for handle in self._live.values():
            found.add(handle.coverage())
        return found
