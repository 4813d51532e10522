"""Pinned prompts: the first system prompt of a conversation stays, whatever the agent sends in its place later.

Some agents put a clock or a list of files into their system prompt: every turn then begins with other tokens and is a conversation of
its own. With `pin=("system",)` a later turn of the conversation is read as if it began with the first system prompt. That is what the
model is given and what is recorded and trained on; what the client sent instead stands in the node (`replaced`).

A conversation is known by its tools and its first message after the system prompt, so sub-agents and side requests keep their own. Only
a committed turn pins its prompt: one that was refused or failed leaves nothing behind, and a reopened session knows the same prompts.

Openings of one conversation that are in flight together are each given the prompt that they sent, since none is pinned yet. Each then keeps
its own, so that every turn continues the ids that it was served: a retry is read with the prompt of the turn that its key names, a later
turn with that of the opening whose replies it holds. What tells no opening apart gets the prompt that was committed first, unless it brings
one of the others itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard, cast

from tokentrue.errors import ConfigError
from tokentrue.plain_json import digest, freeze
from tokentrue.sessions.matching.conversations import check_list
from tokentrue.sessions.matching.match_keys import candidate_key, message_key
from tokentrue.sessions.singleflight import InFlightTurn
from tokentrue.sessions.tree import Node, Tree
from tokentrue.types import Message, Messages, Tools, TurnRequest

Prompt: TypeAlias = tuple[Message, ...]
"""The system messages at the beginning of a conversation."""

PINNABLE = ("system",)
SYSTEM_ROLES = ("system", "developer")


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedRequest:
    """`messages` is what the model is given, beginning with `prompt`; `replaced` is the system prompt that the client sent, where it is
    another. `conversation` is empty where nothing can be pinned."""

    messages: Messages
    conversation: bytes = b""
    prompt: Prompt = ()
    replaced: Prompt = ()


@dataclass(frozen=True, slots=True)
class _Place:
    """Of a node: the prompt of its conversation, and the chained key of the messages after it, up to what the node served."""

    prompt: Prompt
    key: bytes


class PinnedPrompts:
    """The first system prompt of every conversation of one session, or of every opening where several were in flight together."""

    def __init__(self, pin: Sequence[str], tree: Tree) -> None:
        self._is_on = "system" in pin
        self._tree = tree
        self._prompts: dict[bytes, list[Prompt]] = {}  # conversation -> prompts, in the order of their commits
        self._places: dict[str, _Place] = {}
        self._replied: dict[bytes, list[Prompt]] = {}  # chained key after a served message -> prompts under which it was served
        for node in tree.in_order():
            self.add(node)

    def add(self, node: Node) -> None:
        """Pins the prompt of a committed turn, if it is the first of its conversation, and notes which prompt its reply belongs to."""
        if not self._is_on:
            return
        messages = self._tree.given_messages(node)
        before = self._places.get(node.parent or "")
        if node.parent is None and 0 < (length := count_system(messages)) < len(messages):
            before = _Place(tuple(messages[:length]), conversation_key(messages[length], node.tools))
            _add_once(self._prompts, before.key, before.prompt)
            messages = messages[length:]
        if before is not None:
            *_, key = chain_keys(before.key, (*messages, node.served))
            self._places[node.id] = _Place(before.prompt, key)
            _add_once(self._replied, key, before.prompt)

    def apply(self, request: TurnRequest, in_flight: Collection[InFlightTurn]) -> PinnedRequest:
        if not self._is_on:
            return PinnedRequest(messages=request.messages)
        check_list(request.messages, "messages")
        check_list(request.tools or (), "tools")
        messages = list(request.messages)
        length = count_system(messages)
        if not 0 < length < len(messages) or not is_mapping(messages[length]):
            return PinnedRequest(messages=messages)
        sent = tuple(cast("Message", freeze(message, f"messages[{i}]")) for i, message in enumerate(messages[:length]))
        conversation = conversation_key(messages[length], request.tools)
        known = [*self._prompts.get(conversation, ()), *(turn.prompt for turn in in_flight if turn.conversation == conversation)]
        named = [prompt for prompt in self._find_named(request, in_flight) if prompt in known]
        prompt = named[0] if named else self._choose(conversation, sent, messages[length:], known)
        replaced = () if sent == prompt else sent
        return PinnedRequest(messages=[*prompt, *messages[length:]], conversation=conversation, prompt=prompt, replaced=replaced)

    def _find_named(self, request: TurnRequest, in_flight: Collection[InFlightTurn]) -> list[Prompt]:
        """Of the turn that the request's key names, recorded or in flight, then of the node that it says it continues."""
        recorded = () if request.request_key is None else self._tree.nodes_by_key.get(request.request_key, ())
        joined = [turn.prompt for turn in in_flight if request.request_key in turn.request_keys]
        places = [self._places.get(name) for name in (*(node.id for node in recorded), request.continues or "")]
        return [*joined, *(place.prompt for place in places if place is not None)]

    def _choose(self, conversation: bytes, sent: Prompt, messages: Messages, known: Sequence[Prompt]) -> Prompt:
        """`known` are the prompts of this conversation, those that were committed first."""
        pinned = self._prompts.get(conversation)
        if pinned is None:
            return sent
        if any(prompt != pinned[0] for prompt in known):
            copied = (cast("Message", freeze(message, f"messages[{i}]")) for i, message in enumerate(messages, len(sent)))
            replied = [self._replied[key] for key in chain_keys(conversation, copied, len(sent)) if key in self._replied]
            chosen = replied[-1] if replied else known
            return next((prompt for prompt in chosen if prompt == sent), chosen[0])
        return pinned[0]


def _add_once(prompts: dict[bytes, list[Prompt]], key: bytes, prompt: Prompt) -> None:
    found = prompts.setdefault(key, [])
    if prompt not in found:
        found.append(prompt)


def chain_keys(start: bytes, messages: Iterable[Message], offset: int = 0) -> Iterator[bytes]:
    """A loose key after each message, of everything from `start` to it. `offset` is the first one's place in its request."""
    for index, message in enumerate(messages, offset):
        start = digest(start, candidate_key(message, f"messages[{index}]"))
        yield start


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
