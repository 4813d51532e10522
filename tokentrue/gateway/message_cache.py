"""An accelerator with one switch: an agent sends its whole conversation again with every turn, and each message that it has sent before
is found here by its exact bytes instead of being parsed, validated and normalised again.

A key is everything that decides the value: the dialect and the raw bytes of the item (or of the consecutive items that make up one
assistant turn). The same bytes give the same message object, which nobody may change, so that the matcher can remember what it knows of
it by identity. Nothing else of a body is remembered. `limits.message_cache_bytes = 0` switches it off.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from tokentrue.gateway.dialects import Dialect
from tokentrue.gateway.dialects.base import parse_json
from tokentrue.types import Message

ENTRY_BYTES = 1000  # of the parsed message's own objects, roughly, beside its text
COPIES = 2  # the raw bytes and the parsed text


class CacheBudget:
    """Bytes that all message caches of this process hold together."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0


class MessageCache:
    """The messages of one session, least recently used first. Bounded in bytes, per session and with all others of the process."""

    def __init__(self, limit: int, budget: CacheBudget) -> None:
        self._limit, self._budget = limit, budget
        self._entries: OrderedDict[tuple[str, bytes], tuple[Message, ...]] = OrderedDict()
        self.used = 0

    def parse_items(self, dialect: Dialect, items: Sequence[bytes]) -> list[Message]:
        """The conversation that `items` spell out, in the OpenAI shape."""
        out: list[Message] = []
        turn: list[tuple[bytes, Message]] = []  # consecutive assistant items of one turn

        def flush() -> None:
            if turn:
                out.append(self._join_turn(dialect, turn))
                turn.clear()

        for index, raw in enumerate(items):
            for message in self._parse_item(dialect, raw, f"{dialect.items_key}[{index}]"):
                if dialect.splits_turns and message["role"] == "assistant":
                    turn.append((raw, message))
                else:
                    flush()
                    out.append(message)
        flush()
        dialect.check_messages(out)
        return out

    def _parse_item(self, dialect: Dialect, raw: bytes, path: str) -> tuple[Message, ...]:
        return self._get((dialect.name, raw), lambda: dialect.parse_item(parse_json(raw, path), path))

    def _join_turn(self, dialect: Dialect, turn: Sequence[tuple[bytes, Message]]) -> Message:
        key = (f"{dialect.name}:turn", b"\0".join(raw for raw, _ in turn))
        return self._get(key, lambda: (dialect.join_turn([message for _, message in turn]),))[0]

    def _get(self, key: tuple[str, bytes], make: Callable[[], tuple[Message, ...]]) -> tuple[Message, ...]:
        known = self._entries.get(key)
        if known is not None:
            self._entries.move_to_end(key)
            return known
        made = make()
        self._put(key, made)
        return made

    def _put(self, key: tuple[str, bytes], made: tuple[Message, ...]) -> None:
        size = entry_bytes(key)
        if size > self._limit:
            return
        while self._entries and self.used + size > self._limit:
            self._drop_oldest()
        while self._entries and self._budget.used + size > self._budget.limit:
            self._drop_oldest()
        if self._budget.used + size > self._budget.limit:
            return
        self._entries[key] = made
        self.used += size
        self._budget.used += size

    def _drop_oldest(self) -> None:
        key, _ = self._entries.popitem(last=False)
        size = entry_bytes(key)
        self.used -= size
        self._budget.used -= size

    def clear(self) -> None:
        while self._entries:
            self._drop_oldest()


def entry_bytes(key: tuple[str, bytes]) -> int:
    return COPIES * len(key[1]) + ENTRY_BYTES
