"""An index from the loose key of a conversation, with and without its system prompt, to the recorded turns that end
there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokentrue.conversation.match_keys import (
    START_KEY,
    CallRef,
    call_ids_of,
    calls_of,
    candidate_key,
    chain_key,
    count_system,
    note_calls,
    read_role,
    reasoning_of,
    text_of,
    tools_key,
)
from tokentrue.plain_json import digest
from tokentrue.sessions.tree import Node, Tree
from tokentrue.types import Message


@dataclass(frozen=True, slots=True)
class Place:
    """The key of the conversation after a node's served message, and how many messages lead through it. `turns_key`
    leaves out the `num_system` messages of the system prompt. `tools` names the tools exactly, `loose_tools` whatever
    their order."""

    key: bytes
    depth: int
    turns_key: bytes
    num_system: int
    tools: bytes
    loose_tools: bytes


class CandidateIndex:
    """Grows with the tree: `add` every node after the tree has it."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._places: dict[str, Place] = {}
        self.ends: dict[bytes, list[Node]] = defaultdict(list)  # key after the served message -> nodes
        self.turns: dict[bytes, list[Node]] = defaultdict(list)  # the same without the system prompt
        # key after any message -> the first node whose conversation leads through it
        self.passed: dict[bytes, Node] = {}
        for node in tree.in_order():
            self.add(node)

    def place(self, node: Node) -> Place:
        return self._places[node.id]

    def add(self, node: Node) -> None:
        parent, given = self._tree.parent(node), self._tree.given_messages(node)
        before = self._root_place(given) if parent is None else self._places[parent.id]
        key, turns_key, depth, seen = before.key, before.turns_key, before.depth, dict[str, CallRef]()
        for message in given:
            own, reference = candidate_key(message), self._reference(message, parent, seen)
            key = chain_key(key, own, reference)
            turns_key = chain_turns(turns_key, own, reference, depth, before.num_system)
            note_calls(seen, depth, call_ids_of(message))
            self.passed.setdefault(key, node)
            depth += 1
        own, same_tools = candidate_key(node.served), parent is not None and node.tools is parent.tools
        place = self._places[node.id] = Place(
            key=chain_key(key, own, None),
            depth=depth + 1,
            turns_key=chain_turns(turns_key, own, None, depth, before.num_system),
            num_system=before.num_system,
            tools=before.tools if same_tools else digest(node.tools),
            loose_tools=before.loose_tools if same_tools else tools_key(node.tools),
        )
        if node.outcome == "served" or _shows_anything(node.served):
            self.ends[place.key].append(node)
            self.turns[place.turns_key].append(node)
        self.passed.setdefault(place.key, node)

    def _root_place(self, given: Sequence[Message]) -> Place:
        """Before the first message of a root."""
        return Place(
            key=START_KEY,
            depth=0,
            turns_key=START_KEY,
            num_system=count_system(map(read_role, given)),
            tools=b"",
            loose_tools=b"",
        )

    def _reference(self, message: Message, parent: Node | None, seen: Mapping[str, CallRef]) -> CallRef | str | None:
        """Where a tool result points: to a call of this node's own given messages, else to the nearest one on the path
        before it."""
        call_id = message.get("tool_call_id")
        if not isinstance(call_id, str) or read_role(message) == "assistant":
            return None
        return seen.get(call_id) or self._find_call(call_id, parent) or call_id

    def _find_call(self, call_id: str, node: Node | None) -> CallRef | None:
        while node is not None:
            index = self._places[node.id].depth - 1
            for message in (node.served, *reversed(self._tree.given_messages(node))):
                ids = call_ids_of(message)
                if call_id in ids:
                    return index, len(ids) - 1 - ids[::-1].index(call_id)
                index -= 1
            node = self._tree.parent(node)
        return None


def chain_turns(previous: bytes, key: bytes, reference: CallRef | str | None, index: int, num_system: int) -> bytes:
    """`chain_key` of a conversation without its system prompt: message `index` is counted from after it."""
    if index < num_system:
        return START_KEY
    if isinstance(reference, tuple):
        reference = reference[0] - num_system, reference[1]
    return chain_key(previous, key, reference)


def _shows_anything(served: Message) -> bool:
    """False for a turn that broke off before a client saw anything of it: no client can replay it, and its ids may be
    unreadable."""
    return bool(text_of(served.get("content")) or reasoning_of(served) or calls_of(served))
