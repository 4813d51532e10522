"""An index from a conversation's loose key, with and without its system prompt, to the recorded turns that end
there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokentrue.conversation.match_keys import (
    START_KEY,
    CallRef,
    call_ids_of,
    calls_of,
    candidate_key,
    chain_key,
    count_system,
    name_and_arguments,
    note_calls,
    read_role,
    reasoning_of,
    repeats_arguments,
    text_of,
    tools_key,
)
from tokentrue.plain_json import digest
from tokentrue.sessions.tree import Node, Tree
from tokentrue.types import Message


@dataclass(frozen=True, slots=True)
class Place:
    """The key of the conversation after a node's served message, and its number of messages. `turns_key` excludes
    the `num_system` messages of the system prompt. `tools` identifies the tools exactly, `loose_tools` in any order."""

    key: bytes
    depth: int
    turns_key: bytes
    num_system: int
    tools: bytes
    loose_tools: bytes


class CandidateIndex:
    """Call `add` for every node after it was added to the tree."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._places: dict[str, Place] = {}
        self.ends: dict[bytes, list[Node]] = defaultdict(list)  # key after the served message -> nodes
        self.turns: dict[bytes, list[Node]] = defaultdict(list)  # the same without the system prompt
        # key after any message -> the first node whose conversation contains it
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
        return Place(
            key=START_KEY,
            depth=0,
            turns_key=START_KEY,
            num_system=count_system(map(read_role, given)),
            tools=b"",
            loose_tools=b"",
        )

    def _reference(self, message: Message, parent: Node | None, seen: Mapping[str, CallRef]) -> CallRef | str | None:
        """The call that a tool result answers: one in this node's given messages, else the nearest one earlier on
        the path."""
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
    """`chain_key` without the system prompt: message indices are counted from after it."""
    if index < num_system:
        return START_KEY
    if isinstance(reference, tuple):
        reference = reference[0] - num_system, reference[1]
    return chain_key(previous, key, reference)


def _shows_anything(served: Message) -> bool:
    """False for a turn that ended before a client saw any of it: it cannot be replayed, and its ids may not decode."""
    return bool(text_of(served.get("content")) or reasoning_of(served) or calls_of(served))


_KNOWN = ("role", "content", "reasoning_content", "reasoning", "tool_calls")
_TAGS = ("think", "thinking", "thought")


def find_changes(served: Message, replayed: Message) -> tuple[str, ...] | None:
    """Compares a message that a client sent back with the one that was served. Returns the changes, sorted, if it is a
    known lossy projection; `()` if nothing visible differs; None if it is an edit.

    The changes that harnesses are known to cause: `reasoning_dropped`, `reasoning_inlined`, `call_ids`, `arguments`,
    `parts`, `empty_content`, `whitespace`, `extra_fields`. A wrong match is worse than a fork, so a replay that
    *adds* to what was served (new reasoning, one more call) is an edit too. The served text is never split: a think
    tag in it is text that the model wrote. Only the replay is searched for the served reasoning, inlined before the
    served text.
    """
    if served is replayed:
        return ()
    text, calls = _text_changes(served, replayed), _call_changes(served, replayed)
    if text is None or calls is None:
        return None
    return tuple(sorted(text | calls | _extra_changes(replayed)))


def _text_changes(served: Message, replayed: Message) -> set[str] | None:
    was, now = text_of(served.get("content")), text_of(replayed.get("content"))
    thought, given = reasoning_of(served), reasoning_of(replayed)
    if given.strip() and given.strip() != thought.strip():
        return None
    changes: set[str] = set()
    if isinstance(replayed.get("content"), (list, tuple)) and not isinstance(served.get("content"), (list, tuple)):
        changes.add("parts")
    if was.strip() == now.strip():
        if thought.strip() and not given.strip():
            changes.add("reasoning_dropped")
        elif thought != given:
            changes.add("whitespace")
        return changes | _content_changes(served.get("content"), replayed.get("content"), was, now, changes)
    inlined = _find_inlined(now, thought=thought.strip(), text=was.strip())
    if inlined is None:
        return None
    if thought.strip() and not inlined and not given.strip():
        return changes | {"reasoning_dropped", "whitespace"}  # an empty block before the text
    return changes | {"reasoning_inlined"}


def _find_inlined(replayed: str, *, thought: str, text: str) -> str | None:
    """The reasoning before `text` in a replay: `thought`, or "" for an empty block; None if neither is there."""
    for block, rest in _inlined_blocks(replayed.strip()):
        if rest.strip() == text and block.strip() in ("", thought):
            return block.strip()
    for block, rest in _split_at(replayed.strip(), "</think>"):  # the opening tag was part of the prompt
        if thought and rest.strip() == text and block.strip() == thought:
            return thought
    return None


def _inlined_blocks(replayed: str) -> Iterator[tuple[str, str]]:
    for tag in _TAGS:
        if replayed.startswith(f"<{tag}>"):
            yield from _split_at(replayed[len(tag) + 2 :], f"</{tag}>")


def _split_at(text: str, mark: str) -> Iterator[tuple[str, str]]:
    at = text.find(mark)
    while at >= 0:
        yield text[:at], text[at + len(mark) :]
        at = text.find(mark, at + 1)


def _content_changes(served: Any, replayed: Any, was: str, now: str, changes: set[str]) -> set[str]:
    if not was and not now:
        return {"empty_content"} if served != replayed and "parts" not in changes else set()
    return {"whitespace"} if was != now else set()


def _call_changes(served: Message, replayed: Message) -> set[str] | None:
    was, now = calls_of(served), calls_of(replayed)
    if len(was) != len(now):
        return None
    changes: set[str] = set()
    for one, other in zip(was, now, strict=True):
        (name, arguments), (name_now, arguments_now) = name_and_arguments(one), name_and_arguments(other)
        if name != name_now:
            return None
        if arguments != arguments_now or type(arguments) is not type(arguments_now) or not isinstance(arguments, str):
            if not repeats_arguments(arguments, arguments_now):
                return None
            if arguments != arguments_now:
                changes.add("arguments")
        if one.get("id") != other.get("id"):
            changes.add("call_ids")
    return changes


def _extra_changes(replayed: Message) -> set[str]:
    for key, value in replayed.items():
        if key not in _KNOWN and value not in (None, [], ""):
            return {"extra_fields"}
    return set()


def format_changes(changes: tuple[str, ...], *, ambiguous: bool = False) -> str:
    """`"exact"`, or the changes joined by `+`, marked if the choice between siblings is ambiguous."""
    names = list(changes) or ["exact"]
    return "+".join([*names, "ambiguous"] if ambiguous else names)
