"""Pinned prompts: the first system prompt of a conversation stays, whatever the agent sends in its place later.

Some agents put a clock or a list of files into their system prompt: every turn then begins with other tokens and is a
conversation of its own. With `pin=("system",)` a later turn of the conversation is read as if it began with the first
system prompt. That is what the model is given and what is recorded and trained on; what the client sent instead stands
in the node (`replaced`).

A conversation is known by its tools and its first message after the system prompt, so sub-agents and side requests keep
their own. A committed turn pins its prompt for good, one in flight while it is: one that was refused or failed leaves
nothing behind, and a reopened session knows the same prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

from tokentrue.errors import ConfigError
from tokentrue.plain_json import digest, freeze
from tokentrue.sessions.matching.conversations import check_list
from tokentrue.sessions.matching.match_keys import message_key
from tokentrue.sessions.tree import Node, Tree
from tokentrue.types import Message, Messages, Tools

PINNABLE = ("system",)
SYSTEM_ROLES = ("system", "developer")


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedRequest:
    """`messages` is what the model is given, `prompt` the system prompt that it begins with; `replaced` is the one that
    the client sent, where it is another. `conversation` is empty where nothing can be pinned."""

    messages: Messages
    conversation: bytes = b""
    prompt: tuple[Message, ...] = ()
    replaced: tuple[Message, ...] = ()


class PinnedPrompts:
    """The first system prompt of every conversation of one session."""

    def __init__(self, pin: Sequence[str], tree: Tree) -> None:
        self._is_on = "system" in pin
        self._tree = tree
        self._first: dict[bytes, tuple[Message, ...]] = {}
        for node in tree.in_order():
            self.add(node)

    def add(self, node: Node) -> None:
        """Pins the prompt of a committed turn, if it is the first of its conversation."""
        if not self._is_on or node.parent is not None:
            return
        messages = self._tree.given_messages(node)
        length = count_system(messages)
        if 0 < length < len(messages):
            self._first.setdefault(conversation_key(messages[length], node.tools), tuple(messages[:length]))

    def apply(self, messages: Messages, tools: Tools | None, in_flight: Iterable[PinnedRequest]) -> PinnedRequest:
        """`in_flight` are the requests that are being answered, oldest first."""
        if not self._is_on:
            return PinnedRequest(messages=messages)
        check_list(messages, "messages")
        check_list(tools or (), "tools")
        messages = list(messages)
        length = count_system(messages)
        if not 0 < length < len(messages) or not is_mapping(messages[length]):
            return PinnedRequest(messages=messages)
        sent = tuple(cast("Message", freeze(message, f"messages[{i}]")) for i, message in enumerate(messages[:length]))
        conversation = conversation_key(messages[length], tools)
        started = (other.prompt for other in in_flight if other.conversation == conversation)
        prompt = self._first.get(conversation) or next(started, sent)
        replaced = () if sent == prompt else sent
        return PinnedRequest(
            messages=[*prompt, *messages[length:]], conversation=conversation, prompt=prompt, replaced=replaced
        )


def conversation_key(first: Message, tools: Tools | None) -> bytes:
    """`first` is the first message after the system prompt."""
    return digest(message_key(first), list(tools or ()))


def count_system(messages: Messages) -> int:
    """How many messages the system prompt at the beginning has."""
    for index, message in enumerate(cast("Sequence[Any]", messages)):
        if not is_mapping(message) or message.get("role") not in SYSTEM_ROLES:
            return index
    return len(messages)


def is_mapping(message: Any) -> TypeGuard[Message]:
    """A client may send anything; `Matcher.read` refuses what is no message."""
    return isinstance(message, Mapping)


def check_pin(pin: Iterable[str]) -> tuple[str, ...]:
    chosen = (pin,) if isinstance(pin, str) else tuple(dict.fromkeys(pin))
    for name in chosen:
        if name not in PINNABLE:
            raise ConfigError(f"pin: {name!r} cannot be pinned; choose from {', '.join(PINNABLE)}")
    return chosen
