"""Where recorded turns stand in their conversations: an index from the loose key of a conversation to the nodes that
end there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from tokentrue.sessions.matching.match_keys import (
    START_KEY,
    CallRef,
    call_ids_of,
    calls_of,
    candidate_key,
    chain_key,
    note_calls,
    read_role,
    reasoning_of,
    text_of,
)
from tokentrue.sessions.tree import Node, Tree
from tokentrue.types import Message


@dataclass(frozen=True, slots=True)
class Place:
    """The key of the conversation after a node's served message, and how many messages lead through it."""

    key: bytes
    depth: int


class CandidateIndex:
    """Grows with the tree: `add` every node after the tree has it."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._places: dict[str, Place] = {}
        self.ends: dict[bytes, list[Node]] = defaultdict(list)  # key after the served message -> nodes
        self.passed: dict[
            bytes, Node
        ] = {}  # key after any message -> the first node whose conversation leads through it
        for node in tree.in_order():
            self.add(node)

    def place(self, node: Node) -> Place:
        return self._places[node.id]

    def add(self, node: Node) -> None:
        parent = self._tree.parent(node)
        before = Place(START_KEY, 0) if parent is None else self._places[parent.id]
        key, depth, seen = before.key, before.depth, dict[str, CallRef]()
        for message in self._tree.given_messages(node):
            key = chain_key(key, candidate_key(message), self._reference(message, parent, seen))
            note_calls(seen, depth, call_ids_of(message))
            self.passed.setdefault(key, node)
            depth += 1
        place = self._places[node.id] = Place(chain_key(key, candidate_key(node.served), None), depth + 1)
        if node.outcome == "served" or _shows_anything(node.served):
            self.ends[place.key].append(node)
        self.passed.setdefault(place.key, node)

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


def _shows_anything(served: Message) -> bool:
    """False for a turn that broke off before a client saw anything of it: no client can replay it, and its ids may be
    unreadable."""
    return bool(text_of(served.get("content")) or reasoning_of(served) or calls_of(served))
