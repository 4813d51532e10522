"""Pinned prompts: the first system prompt of a conversation stays, whatever the agent sends in its place later.

Some agents put a clock or a list of files into their system prompt: every turn then begins with other tokens and is a
separate conversation. With `pin=("system",)` a request that continues a recorded turn is read as if it began with the
system prompt of that turn. That is what the model is given and what is recorded and trained on; the node keeps what the
client sent instead (`replaced`).

Whether a turn is continued, the tools and all messages after the system prompt say. A request that continues none opens
a conversation with its own prompt: sub-agents and side requests keep theirs, also where they begin with the same
message. Only the record decides: a turn that was refused or failed leaves nothing behind, and a reopened session knows
the same prompts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeGuard, cast

from tokentrue.errors import ConfigError, MessageError
from tokentrue.plain_json import digest, freeze
from tokentrue.sessions.matching.conversations import check_list
from tokentrue.sessions.matching.match_keys import message_key, read_role
from tokentrue.sessions.matching.projections import find_changes
from tokentrue.sessions.tree import Node, Tree
from tokentrue.types import Message, Messages, Tools

PINNABLE = ("system",)
SYSTEM_ROLES = ("system", "developer")


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedRequest:
    """`messages` is what the model is given, `prompt` the system prompt that it begins with; `replaced` is the one that
    the client sent, where it is another."""

    messages: Messages
    prompt: tuple[Message, ...] = ()
    replaced: tuple[Message, ...] = ()


class PinnedPrompts:
    """The system prompts that the conversations of one session began with."""

    def __init__(self, pin: Sequence[str], tree: Tree) -> None:
        self._is_on = "system" in pin
        self._tree = tree
        self._roots: dict[bytes, list[Node]] = defaultdict(list)  # by their tools and first message
        for node in tree.in_order():
            self.add(node)

    def add(self, node: Node) -> None:
        """A committed turn that begins a conversation pins its prompt."""
        if not self._is_on or node.parent is not None:
            return
        messages = self._tree.given_messages(node)
        length = count_system(messages)
        if 0 < length < len(messages):
            self._roots[conversation_key(messages[length], node.tools)].append(node)

    def apply(self, messages: Messages, tools: Tools | None, *, retried: tuple[Message, ...] = ()) -> PinnedRequest:
        """`retried` is the prompt of the earlier request that has the key of this one."""
        if not self._is_on:
            return PinnedRequest(messages=messages)
        check_list(messages, "messages")
        check_list(tools or (), "tools")
        messages = list(messages)
        length = count_system(messages)
        if not 0 < length < len(messages):
            return PinnedRequest(messages=messages)
        sent = tuple(cast("Message", freeze(message, f"messages[{i}]")) for i, message in enumerate(messages[:length]))
        prompt = retried or self._find_prompt(sent, messages[length:], tools)
        replaced = () if sent == prompt else sent
        return PinnedRequest(messages=[*prompt, *messages[length:]], prompt=prompt, replaced=replaced)

    def prompt(self, node: Node) -> tuple[Message, ...]:
        """The prompt that the conversation of `node` began with."""
        messages = self._tree.given_messages(self._tree.path(node)[0])
        return tuple(messages[: count_system(messages)])

    def _find_prompt(self, sent: tuple[Message, ...], rest: Messages, tools: Tools | None) -> tuple[Message, ...]:
        """The prompt of the conversation that `rest` continues; `sent` where it continues none. Of several that it
        continues equally far, the one counts that was sent this very prompt; otherwise nothing tells which is meant,
        and a new conversation is better than the wrong one."""
        try:
            roots = self._roots.get(conversation_key(rest[0], tools), ())
            found = {root.id: self.prompt(root) for root in roots if self._end_of_replay(root, rest, 0)}
            if _has_several(found.values()):
                ends = {name: self._find_deepest(self._tree.nodes[name], rest) for name in found}
                furthest = max(end for _, end in ends.values())
                found = {name: prompt for name, prompt in found.items() if ends[name][1] == furthest}
                known = {name: found[name] for name in found if sent in (found[name], ends[name][0].replaced)}
                found = known or found
        except MessageError:  # malformed: the matcher names the field
            return sent
        return sent if not found or _has_several(found.values()) else next(iter(found.values()))

    def _find_deepest(self, root: Node, rest: Messages) -> tuple[Node, int]:
        """The last turn after `root` that `rest` replays, and how many of its messages lead through it."""
        best, waiting = (root, 0), [(root, 0)]
        while waiting:
            node, start = waiting.pop()
            end = self._end_of_replay(node, rest, start)
            best = max(best, (node, end), key=itemgetter(1))
            waiting += [(child, end) for child in self._tree.children.get(node.id, ()) if end]
        return best

    def _end_of_replay(self, node: Node, rest: Messages, start: int) -> int:
        """Where the messages of `node` end if `rest` has them from `start` on; 0 where it does not."""
        recorded = [*self._tree.given_messages(node), node.served]
        recorded = recorded if start else recorded[count_system(recorded) :]
        now = rest[start : start + len(recorded)]
        if len(now) < len(recorded) or not all(map(_is_replay, recorded, now)):
            return 0
        return start + len(recorded)


def _has_several(prompts: Iterable[tuple[Message, ...]]) -> bool:
    return len({digest(*prompt) for prompt in prompts}) > 1


def _is_replay(recorded: Message, now: Message) -> bool:
    if message_key(recorded) != message_key(now):
        return False
    return read_role(recorded) != "assistant" or find_changes(recorded, now) is not None


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
