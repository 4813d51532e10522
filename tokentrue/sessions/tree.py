"""The record of one session: a forest of immutable nodes, each of which stores only what it adds.

A node is one sampled turn with the messages given before it. Invariants, checked when a node is added:
`prompt_ids(node) == prompt_ids(parent) + sampled_ids(parent) + given_ids(node)`, bit for bit, and one log-probability per sampled id.
Nothing is ever changed or removed; a failed turn was never here.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from tokentrue.errors import SessionConflict, TokenContractError
from tokentrue.sessions import chain
from tokentrue.sessions.keys import CallRef, base_key, calls_of, next_key, role_of
from tokentrue.types import (
    Attempt,
    Finish,
    JoinedIds,
    Message,
    PromptSpan,
    RoutedExperts,
    Sampling,
    TemplateKwargs,
    Tools,
    VersionSpan,
    starts_with,
    whole_of,
)

_CACHED_BRANCHES = 2


@dataclass(frozen=True, slots=True)
class ServedRef:
    """A given message that replays what node `node` served: kept as a name, so that a re-rooted history is not stored twice."""

    node: str


Given: TypeAlias = Message | ServedRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One sampled turn. `seq` is the order of commits, `started` the next `seq` when its request was resolved: `a` was over before
    `b` began if and only if `a.seq < b.started`. `why` is the reason on the edge (None: it simply went on)."""

    id: str
    seq: int
    started: int
    parent: str | None
    given: tuple[Given, ...]
    given_ids: array[int]
    given_spans: tuple[PromptSpan, ...]
    sampled_ids: array[int]
    logprobs: array[float]
    versions: tuple[VersionSpan, ...]
    finish: Finish
    served: Message
    chain: bytes
    prompt_length: int
    stopped_by: int | str | None = None
    attempts: tuple[Attempt, ...] = ()  # of tool calls that did not parse
    dialect: str = "openai_chat"
    projection: str = "root"
    why: str | None = None
    detail: str = ""
    origin: str | None = None  # the node that a re-rendered root continues in meaning, though not in tokens
    outcome: Literal["served", "disconnected"] = "served"
    tools: Tools | None = None
    template_kwargs: TemplateKwargs = field(default_factory=dict[str, Any])
    sampling: Sampling = field(default_factory=Sampling)
    request_key: str | None = None
    request_digest: str | None = None
    choice: int = 0
    created: float = 0.0
    routed_experts: RoutedExperts | None = None
    top_logprobs: tuple[Mapping[int, float], ...] | None = None
    fingerprint: str | None = None

    @property
    def length(self) -> int:
        """Tokens from the start of the conversation to the end of what was sampled."""
        return self.prompt_length + len(self.sampled_ids)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a node stands in the conversation: keys before and after its served message, and how many messages lead through it."""

    before: bytes
    after: bytes
    depth: int


class Tree:
    """Nodes by id, and the indexes that matching needs. Only `add` changes it."""

    def __init__(self, *, template: str, tokenizer: str) -> None:
        self.template, self.tokenizer = template, tokenizer
        self.nodes: dict[str, Node] = {}
        self.children: dict[str | None, list[Node]] = defaultdict(list)
        self.followers: dict[str | None, list[Node]] = defaultdict(list)  # children, and roots that continue a node in meaning
        self.ends: dict[bytes, list[Node]] = defaultdict(list)  # key after the served message -> nodes
        self.asked: dict[tuple[str | None, bytes], list[Node]] = defaultdict(list)  # (parent, key before it) -> attempts at one turn
        self.passed: dict[bytes, Node] = {}  # key after any message -> the first node whose conversation leads through it
        self.tool_sets: dict[bytes, Tools | None] = {}
        self.keyed: dict[str, list[Node]] = defaultdict(list)  # request key -> its nodes
        self.next_seq = 0
        self._places: dict[str, Place] = {}
        self._ids: OrderedDict[str, array[int]] = OrderedDict()
        self._talks: OrderedDict[str, list[Message]] = OrderedDict()
        self._start = chain.start(template=template, tokenizer=tokenizer)

    def __len__(self) -> int:
        return len(self.nodes)

    def reserve_seq(self) -> int:
        self.next_seq += 1
        return self.next_seq - 1

    def get(self, node_id: str) -> Node:
        if node_id not in self.nodes:
            raise SessionConflict(f"no node {node_id!r} in this session")
        return self.nodes[node_id]

    def parent(self, node: Node) -> Node | None:
        return None if node.parent is None else self.nodes[node.parent]

    def path(self, node: Node | None) -> list[Node]:
        """Root first."""
        found: list[Node] = []
        while node is not None:
            found.append(node)
            node = self.parent(node)
        return found[::-1]

    def place(self, node: Node) -> Place:
        return self._places[node.id]

    def full_ids(self, node: Node) -> array[int]:
        """Prompt and sampled ids of `node`, not to be changed. Cached for the newest branches: the next turn costs a copy, not a walk."""
        if node.id in self._ids:
            self._ids.move_to_end(node.id)
            return self._ids[node.id]
        missing: list[Node] = []
        cursor: Node | None = node
        while cursor is not None and cursor.id not in self._ids:
            missing.append(cursor)
            cursor = self.parent(cursor)
        ids = array("i", self._ids[cursor.id] if cursor is not None else ())
        for step in reversed(missing):
            ids += step.given_ids
            ids += step.sampled_ids
        self._remember(node, ids)
        return ids

    def prompt_ids(self, node: Node) -> array[int]:
        return self.full_ids(node)[: node.prompt_length]

    def _remember(self, node: Node, ids: array[int]) -> None:
        if node.parent is not None:
            self._ids.pop(node.parent, None)  # the child's array holds the parent's
        self._ids[node.id] = ids
        while len(self._ids) > _CACHED_BRANCHES:
            self._ids.popitem(last=False)

    def _remember_talk(self, node: Node, messages: list[Message]) -> None:
        self._talks[node.id] = messages
        if node.parent is not None:
            self._talks.pop(node.parent, None)
        while len(self._talks) > _CACHED_BRANCHES:
            self._talks.popitem(last=False)

    def given_messages(self, node: Node) -> list[Message]:
        return [self.nodes[item.node].served if isinstance(item, ServedRef) else item for item in node.given]

    def messages(self, node: Node | None) -> list[Message]:
        """The conversation up to and including what `node` served, as recorded (not as some client replayed it). Do not change it."""
        if node is None:
            return []
        steps: list[Node] = []
        cursor: Node | None = node
        while cursor is not None and cursor.id not in self._talks:
            steps.append(cursor)
            cursor = self.parent(cursor)
        if not steps:
            return self._talks[node.id]
        found = list(self._talks[cursor.id]) if cursor is not None else []
        for step in reversed(steps):
            found += self.given_messages(step)
            found.append(step.served)
        self._remember_talk(node, found)
        return found

    def link(self, node: Node) -> bytes:
        """The certificate's link for `node`, computed from what it holds."""
        parent = self.parent(node)
        previous = self._start if parent is None else parent.chain
        return chain.link(previous, given_ids=node.given_ids, sampled_ids=node.sampled_ids, logprobs=node.logprobs, versions=node.versions)

    def start_link(self, parent: Node | None) -> bytes:
        return self._start if parent is None else parent.chain

    def check(self, node: Node) -> None:
        """Everything that must hold before `node` may enter the record, but for what the engine was given: see `check_prompt`."""
        if node.id in self.nodes:
            raise SessionConflict(f"node {node.id} is already in the record")
        if node.parent is not None and node.parent not in self.nodes:
            raise SessionConflict(f"parent {node.parent} of node {node.id} is not in the record")
        parent = self.parent(node)
        before = 0 if parent is None else parent.length
        if node.prompt_length != before + len(node.given_ids):
            parts = f"{before} recorded and {len(node.given_ids)} given"
            raise TokenContractError(f"node {node.id}: prompt of {node.prompt_length} ids, but {parts}")
        if len(node.sampled_ids) != len(node.logprobs):
            raise TokenContractError(f"node {node.id}: {len(node.sampled_ids)} sampled ids, {len(node.logprobs)} log-probabilities")

    def check_prompt(self, prompt_ids: array[int] | JoinedIds, parent: Node | None, given_ids: array[int]) -> None:
        """What the engine is given is, bit for bit, what is recorded and what was given behind it."""
        prefix = array("i") if parent is None else self.full_ids(parent)
        if isinstance(prompt_ids, JoinedIds):
            same = prompt_ids.before is prefix or prompt_ids.before == prefix
        else:
            same = starts_with(prompt_ids, prefix)
        if not same or prompt_ids[len(prefix) :] != given_ids:
            recorded = prefix + given_ids
            pairs = enumerate(zip(recorded, prompt_ids, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), min(len(recorded), len(prompt_ids)))
            after = "a new root" if parent is None else f"node {parent.id}"
            raise TokenContractError(f"after {after}: the prompt leaves the recorded ids at token {at}")

    def load(self, node: Node) -> None:
        """Add a node that comes from outside: everything about it is checked, its certificate included."""
        self.check(node)
        if node.chain != self.link(node):
            raise TokenContractError(f"node {node.id}: the certificate does not fit what is recorded")
        self.add(node)

    def add(self, node: Node, prompt_ids: array[int] | JoinedIds | None = None) -> None:
        """The only write, of a node that was checked. `prompt_ids`, where the caller has them, become the cached branch."""
        parent = self.parent(node)
        if parent is None:
            key, depth = base_key(node.tools), 0
            self.tool_sets.setdefault(key, node.tools)
        else:
            key, depth = self._places[parent.id].after, self._places[parent.id].depth
        calls = CallIds(self, parent)
        for message in self.given_messages(node):
            key = next_key(key, message, calls.reference(message))
            calls.saw(depth, message)
            self.passed.setdefault(key, node)
            depth += 1
        place = Place(key, next_key(key, node.served, None), depth + 1)
        self.nodes[node.id] = node
        self._places[node.id] = place
        self.children[node.parent].append(node)
        self.followers[node.parent or node.origin].append(node)
        self.ends[place.after].append(node)
        self.asked[node.parent, place.before].append(node)
        self.passed.setdefault(place.after, node)
        self.next_seq = max(self.next_seq, node.seq + 1)
        if node.request_key is not None and node.outcome == "served":
            self.keyed[node.request_key].append(node)
        if prompt_ids is not None:
            self._remember(node, whole_of(prompt_ids) + node.sampled_ids)

    def snapshot(self) -> Tree:
        """As it is now, for another thread to read while this one grows."""
        copy = Tree(template=self.template, tokenizer=self.tokenizer)
        copy.nodes, copy._places, copy.passed, copy.next_seq = dict(self.nodes), dict(self._places), dict(self.passed), self.next_seq
        copy.tool_sets = dict(self.tool_sets)
        for name in ("children", "followers", "ends", "asked", "keyed"):
            index: dict[Any, list[Node]] = getattr(copy, name)
            index.update((key, list(found)) for key, found in getattr(self, name).items())
        return copy

    def in_order(self) -> list[Node]:
        return sorted(self.nodes.values(), key=lambda node: node.seq)

    def last_activity(self) -> dict[str, int]:
        """For each node the newest `seq` among all that followed it."""
        newest = {node.id: node.seq for node in self.nodes.values()}
        for node in reversed(self.in_order()):
            before = node.parent or node.origin
            if before is not None:
                newest[before] = max(newest[before], newest[node.id])
        return newest


class CallIds:
    """Resolves tool-call ids to positions in the conversation: those seen in this request first, then those served on the path."""

    def __init__(self, tree: Tree, parent: Node | None, seen: Mapping[str, CallRef] | None = None) -> None:
        self._tree, self._parent = tree, parent
        self.seen: dict[str, CallRef] = dict(seen or {})

    def saw(self, index: int, message: Message) -> None:
        if message.get("role") != "assistant":
            return
        for position, call in enumerate(calls_of(message)):
            if isinstance(call.get("id"), str):
                self.seen[call["id"]] = (index, position)

    def reference(self, message: Message) -> CallRef | str | None:
        call_id = message.get("tool_call_id")
        if not isinstance(call_id, str) or role_of(message) == "assistant":
            return None
        return self.seen.get(call_id) or self._on_path(call_id) or call_id

    def _on_path(self, call_id: str) -> CallRef | None:
        node = self._parent
        while node is not None:
            index = self._tree.place(node).depth - 1
            for message in (node.served, *reversed(self._tree.given_messages(node))):
                for position, call in enumerate(calls_of(message) if message.get("role") == "assistant" else ()):
                    if call.get("id") == call_id:
                        return (index, position)
                index -= 1
            node = self._tree.parent(node)
        return None
