"""Facts about messages, memoised by object identity: key, digest, call ids, and how it differs from what was served.

All of them are pure functions of the message, so the memo changes no answer (tests/turn/test_memo.py compares it on and off for random
requests). An entry holds its message and a copy of it: a caller that changed the object in place is noticed by comparing the two.
Off (`MessageMemo(enabled=False)`), a request costs the hashing of its whole history instead of a lookup per message.
"""

from __future__ import annotations

from typing import Any, cast

from tokentrue.sessions.matching.match_keys import CallRef, call_ids_of, chain_key, message_key, read_role
from tokentrue.sessions.matching.projections import find_losses
from tokentrue.sessions.plain_json import digest, dumps, freeze
from tokentrue.types import Message, Tools

_LIMIT = 16_384


class MessageFacts:
    """`message` is the session's own copy. `exact` names it exactly, `key` loosely."""

    __slots__ = ("_chained", "_losses", "_repeats", "call_id", "call_ids", "exact", "key", "message", "role", "source")

    def __init__(self, source: Message, index: int) -> None:
        field = f"messages[{index}]"
        role = read_role(source, field)
        message = cast("dict[str, Any]", freeze(source, field))
        call_id = message.get("tool_call_id")
        self.source, self.message, self.role = source, message, role
        self.key, self.exact = message_key(message), digest(message)
        self.call_ids = call_ids_of(message)
        self.call_id = call_id if isinstance(call_id, str) and role != "assistant" else None
        self._losses: dict[int, tuple[Message, tuple[str, ...] | None]] = {}
        self._repeats: dict[int, tuple[Message, bool]] = {}
        self._chained: tuple[bytes, CallRef | str | None, bytes] = (b"?", None, b"")

    def chain_after(self, previous: bytes, reference: CallRef | str | None) -> bytes:
        """The key of a conversation that this message follows."""
        if self._chained[0] != previous or self._chained[1] != reference:
            self._chained = (previous, reference, chain_key(previous, self.key, reference))
        return self._chained[2]

    def repeats(self, recorded: Message) -> bool:
        """Is this the given message `recorded`, to the letter? Call ids aside: where a result points is part of the key."""
        if self.message is recorded:
            return True
        known = self._repeats.get(id(recorded))
        if known is None or known[0] is not recorded:
            known = self._repeats[id(recorded)] = (recorded, dumps(_comparable(recorded)) == dumps(_comparable(self.message)))
        return known[1]

    def losses_of(self, served: Message) -> tuple[str, ...] | None:
        """`find_losses` of this message as a replay of `served`."""
        known = self._losses.get(id(served))
        if known is None or known[0] is not served:
            known = self._losses[id(served)] = (served, find_losses(served, self.message))
        return known[1]


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


class MessageMemo:
    """See the module. Cleared as a whole when it is full: an entry costs a few microseconds to make again."""

    def __init__(self, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self._facts: dict[int, MessageFacts] = {}
        self._tools: tuple[Tools | None, list[Any] | None, bytes] = (None, None, digest(None))

    def facts(self, message: Message, index: int) -> MessageFacts:
        known = self._facts.get(id(message))
        if known is not None and known.source is message and known.message == message:
            return known
        facts = MessageFacts(message, index)
        if self._enabled:
            if len(self._facts) >= _LIMIT:
                self._facts.clear()
            self._facts[id(message)] = facts
        return facts

    def tools(self, tools: Tools | None) -> tuple[list[Any] | None, bytes]:
        """The session's own copy of the last tool set, and its exact digest."""
        source, copy, name = self._tools
        if not self._enabled or source is not tools or copy != tools:
            copy = cast("list[Any]", freeze(list(tools), "tools")) if tools else None
            name = digest(copy)
            self._tools = (tools, copy, name)
        return copy, name
