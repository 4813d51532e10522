"""A request's conversation as the matcher reads it: facts about each message, chained keys, and how it fits recorded
paths.

An agent sends its whole conversation with every turn. `ConversationReader` keeps the last eight of a session. Where a
request starts with the same message objects, unchanged (`gateway/message_cache` returns the same ones and never changes
them), what is known of them is used again, and only the rest is read. Everything kept is a pure function of the
messages and of immutable nodes, so no result changes (tests/turn/test_conversations.py compares it on and off for
random requests). Bounded in bytes; `session_limits.conversation_bytes = 0` switches it off. On and off in one run of
`benchmarks.gateway`: turn 128 2.6 and 5.3 times the bare proxy's time, 64 agents 278 and 211 turns per second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from operator import attrgetter, is_
from typing import Any, cast

from tokentrue.errors import MessageError
from tokentrue.plain_json import digest, dumps, freeze
from tokentrue.sessions.matching.match_keys import (
    START_KEY,
    CallRef,
    call_ids_of,
    candidate_key,
    chain_key,
    note_calls,
    read_role,
)
from tokentrue.types import Message, Messages, Tools

_KEPT = 8  # conversations of one session: parallel branches
_DIGEST_BYTES = 16
_FACTS_BYTES = 1000  # of what is known of one message, roughly, beside its text


class MessageFacts:
    """`message` is the session's own copy. `digest` names it exactly, `key` loosely."""

    __slots__ = ("_spelled", "call_id", "call_ids", "digest", "key", "message", "role", "size")

    def __init__(self, source: Message, index: int) -> None:
        field = f"messages[{index}]"
        role = read_role(source, field)
        message = cast("dict[str, Any]", freeze(source, field))
        call_id = message.get("tool_call_id")
        self.message, self.role = message, role
        self._spelled = dumps(message)
        self.key, self.digest, self.size = (
            candidate_key(message, field),
            digest(self._spelled),
            _FACTS_BYTES + 2 * len(self._spelled),
        )
        self.call_ids = call_ids_of(message)
        self.call_id = call_id if isinstance(call_id, str) and role != "assistant" else None

    def is_unchanged(self, source: Message) -> bool:
        """Whether the caller's object is still spelled as it was when it was read. Compared as JSON, too: to Python, 1
        and True are equal; in orjson's JSON, NaN and None are."""
        try:
            return self.message == source and dumps(source) == self._spelled
        except (TypeError, ValueError, RecursionError):  # no plain dictionary, or no JSON any more: it is read again
            return False

    def repeats(self, recorded: Message) -> bool:
        """Is this the given message `recorded`, to the letter? Call ids aside: where a result points is part of the
        key."""
        return self.message is recorded or dumps(_comparable(recorded)) == dumps(_comparable(self.message))


def _comparable(message: Message) -> dict[str, Any]:
    """Without what no template prints: cache marks, and the call id that is restored to the served one."""
    fields = {name: value for name, value in message.items() if name not in ("tool_call_id", "cache_control")}
    if isinstance(fields.get("content"), list):
        fields["content"] = [_without_cache_mark(part) for part in cast("list[Any]", fields["content"])]
    return fields


def _without_cache_mark(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    return {name: value for name, value in cast("dict[str, Any]", part).items() if name != "cache_control"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PathFit:
    """How the first `depth` messages of a request fit the path to a node: what changed in the served messages that it
    sends back, and how many given messages are spelled otherwise."""

    depth: int = 0
    num_changes: int = 0
    changes: frozenset[str] = frozenset()
    num_respelled: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A request's messages and tools as the session's own copies, with the chained key after each message."""

    facts: Sequence[MessageFacts] = ()
    sources: Sequence[Message] = ()  # the caller's objects
    messages: Sequence[Message] = ()  # the session's own copies
    keys: Sequence[bytes] = ()
    references: Sequence[CallRef | str | None] = ()  # of tool results: the call each one answers
    calls: dict[str, CallRef] = field(default_factory=dict[str, CallRef])  # the last call of each id
    message_digests: bytes = b""  # end to end
    size: int = 0  # bytes in memory, an estimate
    tools: Tools | None = None
    tools_digest: bytes = b""
    fits: dict[str, PathFit | None] = field(
        default_factory=dict[str, "PathFit | None"]
    )  # by node, filled in by the matcher

    @property
    def digest(self) -> bytes:
        """Names messages and tools exactly."""
        return digest(self.message_digests, self.tools_digest)

    def count_shared(self, messages: Messages, *, are_final: bool) -> int:
        """How many of the first messages are the same objects as here, and as they were when they were read."""
        same = sum(takewhile(bool, map(is_, self.sources, messages)))
        if are_final:
            return same
        return sum(takewhile(bool, map(MessageFacts.is_unchanged, self.facts, messages[:same])))

    def calls_before(self, depth: int) -> dict[str, CallRef]:
        """`calls` of the first `depth` messages."""
        if depth == len(self.facts):
            return dict(self.calls)
        calls: dict[str, CallRef] = {}
        for index, facts in enumerate(self.facts[:depth]):
            note_calls(calls, index, facts.call_ids)
        return calls

    def fits_before(self, depth: int) -> dict[str, PathFit | None]:
        """The fits of the deepest nodes that end within the first `depth` messages; the path to a deeper node goes
        through one of them."""
        known = {name: fit for name, fit in self.fits.items() if fit is not None and fit.depth <= depth}
        deepest = max((fit.depth for fit in known.values()), default=0)
        return {name: fit for name, fit in known.items() if fit.depth == deepest}


class ConversationReader:
    """See the module."""

    def __init__(self, limit_bytes: int = 32 << 20) -> None:
        self._limit_bytes = limit_bytes
        self._kept: list[Conversation] = []  # newest first
        self._tools: tuple[list[Any] | None, bytes] = (None, digest(None))

    def read(self, messages: Messages, tools: Tools | None, *, are_final: bool = False) -> Conversation:
        """Copies, checks and keys a request; malformed messages are refused by field. Message objects that the caller
        never changes are final; others are compared with what was read of them."""
        check_list(messages, "messages")
        if not messages:
            raise MessageError("at least one message is needed", field="messages")
        messages = list(messages)
        base, shared = self.find_base(messages, are_final=are_final)
        _check_objects(messages, "messages", first=shared)
        added = [MessageFacts(message, index) for index, message in enumerate(messages[shared:], shared)]
        keys, references, calls = list(base.keys[:shared]), list(base.references[:shared]), base.calls_before(shared)
        key = keys[-1] if keys else START_KEY
        for index, facts in enumerate(added, shared):
            reference = None if facts.call_id is None else calls.get(facts.call_id, facts.call_id)
            key = chain_key(key, facts.key, reference)
            note_calls(calls, index, facts.call_ids)
            keys.append(key)
            references.append(reference)
        copy, tools_digest = self._copy_tools(tools)
        conversation = Conversation(
            facts=[*base.facts[:shared], *added],
            sources=messages,
            messages=[*base.messages[:shared], *(facts.message for facts in added)],
            keys=keys,
            references=references,
            calls=calls,
            message_digests=base.message_digests[: shared * _DIGEST_BYTES] + b"".join(facts.digest for facts in added),
            size=sum(map(attrgetter("size"), (*base.facts[:shared], *added))),
            tools=copy,
            tools_digest=tools_digest,
            fits=base.fits_before(shared),
        )
        self._keep(conversation, base if shared == len(base.facts) else None)
        return conversation

    @property
    def cached_bytes(self) -> int:
        return sum(kept.size for kept in self._kept)

    def find_base(self, messages: Messages, *, are_final: bool = False) -> tuple[Conversation, int]:
        """The kept conversation that shares the most first messages, and how many."""
        best, most = Conversation(), 0
        for kept in self._kept:
            shared = kept.count_shared(messages, are_final=are_final)
            if shared > most:
                best, most = kept, shared
            if shared == len(kept.facts):
                break
        return best, most

    def _keep(self, conversation: Conversation, replaced: Conversation | None) -> None:
        newest = [conversation, *(kept for kept in self._kept if kept is not replaced)][:_KEPT]
        sizes = accumulate(kept.size for kept in newest)
        self._kept = [kept for kept, size in zip(newest, sizes, strict=True) if size <= self._limit_bytes]

    def _copy_tools(self, tools: Tools | None) -> tuple[list[Any] | None, bytes]:
        """The session's own copy of the tools, and their exact digest. The same object while they are spelled alike."""
        copy: list[Any] | None = None
        if tools:
            check_list(tools, "tools")
            tools = list(tools)
            _check_objects(tools, "tools")
            copy = cast("list[Any]", freeze(tools, "tools"))
        name = digest(copy)
        if not self._limit_bytes or name != self._tools[1]:
            self._tools = (copy, name)
        return self._tools


def check_list(values: Any, field: str) -> None:
    """Refuses what is no list of anything."""
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        raise MessageError(f"must be a list of objects, got {type(values).__name__}", field=field)


def _check_objects(values: Sequence[Any], field: str, *, first: int = 0) -> None:
    """From index `first` on."""
    for index, value in enumerate(values[first:], first):
        if not isinstance(value, (dict, Mapping)):
            raise MessageError(f"must be an object, got {type(value).__name__}", field=f"{field}[{index}]")
