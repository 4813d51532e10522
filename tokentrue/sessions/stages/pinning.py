"""Pinned prompts: the first system prompt of a conversation stays, whatever the agent sends in its place later.

Some agents put a clock or a list of files into their system prompt: every turn then begins with other tokens and is a conversation of
its own. With `pin=("system",)` a later turn of the conversation is read as if it began with the first system prompt. That is what the
model is given and what is recorded and trained on; what the client sent instead stands in the node (`replaced`).

A conversation is known by its tools and its first message after the system prompt, so sub-agents and side requests keep their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from tokentrue.errors import ConfigError
from tokentrue.sessions.matching.match_keys import message_key
from tokentrue.sessions.plain_json import digest, freeze
from tokentrue.sessions.tree import Tree
from tokentrue.types import Message, Messages, Tools

PINNABLE = ("system",)
SYSTEM_ROLES = ("system", "developer")


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedRequest:
    """`messages` is what the model is given; `replaced` the system prompt that the client sent, where it is another."""

    messages: Messages
    replaced: tuple[Message, ...] = ()


class PinnedPrompts:
    """The first system prompt of every conversation of one session. Those of the record are known again after a restart."""

    def __init__(self, pin: Sequence[str], tree: Tree) -> None:
        self._is_on = "system" in pin
        self._first: dict[bytes, tuple[Message, ...]] = {}
        for node in tree.in_order() if self._is_on else ():
            if node.parent is None:
                messages = tree.given_messages(node)
                self._find(messages, count_system(messages), node.tools)

    def apply(self, messages: Messages, tools: Tools | None) -> PinnedRequest:
        length = count_system(messages) if self._is_on else 0
        if not 0 < length < len(messages):
            return PinnedRequest(messages=messages)
        first = self._find(messages, length, tools)
        sent = tuple(cast("Message", freeze(message, f"messages[{i}]")) for i, message in enumerate(messages[:length]))
        return PinnedRequest(messages=[*first, *messages[length:]], replaced=() if sent == first else sent)

    def _find(self, messages: Messages, length: int, tools: Tools | None) -> tuple[Message, ...]:
        """The pinned prompt of this conversation: the request's own where it is the first."""
        if not 0 < length < len(messages) or not is_mapping(messages[length]):
            return tuple(messages[:length])
        key = digest(message_key(messages[length]), list(tools or ()))
        if key not in self._first:
            self._first[key] = tuple(cast("Message", freeze(message, f"messages[{i}]")) for i, message in enumerate(messages[:length]))
        return self._first[key]


def count_system(messages: Messages) -> int:
    """How many messages the system prompt at the beginning has."""
    for index, message in enumerate(cast("Sequence[Any]", messages)):
        if not is_mapping(message) or message.get("role") not in SYSTEM_ROLES:
            return index
    return len(messages)


def is_mapping(message: Any) -> bool:
    """What a client sends need not be a message; whoever reads it next says so."""
    return isinstance(message, Mapping)


def check_pin(pin: Iterable[str]) -> tuple[str, ...]:
    chosen = (pin,) if isinstance(pin, str) else tuple(dict.fromkeys(pin))
    for name in chosen:
        if name not in PINNABLE:
            raise ConfigError(f"pin: {name!r} cannot be pinned; choose from {', '.join(PINNABLE)}")
    return chosen
