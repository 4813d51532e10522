"""The record of one session: a forest of immutable nodes, each of which stores only what it adds. Checked when a node
is added: `prompt_ids(node) == prompt_ids(parent) + sampled_ids(parent) + given_ids(node)`, bit for bit, one
log-probability per sampled id, and `prompt_digest` is the SHA-256 of those prompt ids."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import astuple, dataclass, field
from hashlib import sha256
from typing import Any, Literal

from tokentrue.conversation.images import find_references
from tokentrue.errors import SessionConflict, TokenContractError
from tokentrue.ids import EMPTY, HashState, TokenIds
from tokentrue.json_types import JsonObject
from tokentrue.plain_json import digest, dumps
from tokentrue.records import record
from tokentrue.types import (
    Attempt,
    Finish,
    ImageRun,
    Message,
    PastMessages,
    PromptSpan,
    RoutedExperts,
    Sampling,
    SamplingMask,
    TemplateKwargs,
    Tools,
    VersionSpan,
    shift_images,
)

Outcome = Literal["served", "disconnected", "engine_failed", "deleted", "placeholder"]
"""served: the generation completed (`Node.served` is the message, whatever the outcome). disconnected: all callers
left, or the turn's deadline passed. engine_failed: this choice, or another one of its turn, failed. deleted: the
session was ended meanwhile. placeholder: the model sampled a token that only the place of an image may have."""

TurnKey = tuple[str | None, bytes]
"""(parent, digest of the given messages): nodes with the same key answer exactly the same turn."""


@dataclass(frozen=True, slots=True)
class ServedRef:
    """A given message that repeats what `node` served. In a root it is rendered again; after a parent the sampled ids
    are repeated unchanged, trained only at `node`."""

    node: str


Given = Message | ServedRef


@record
class Node:
    """One choice of one turn. `seq` is the commit order, `started` the tree's `committed_seq` when its request was
    resolved: `a` was over before `b` began if and only if `a.seq < b.started`. `edge_reason`: why it is no plain
    continuation."""

    id: str
    seq: int
    started: int
    parent: str | None
    given: tuple[Given, ...]
    given_ids: TokenIds
    given_spans: tuple[PromptSpan, ...]
    sampled_ids: TokenIds
    logprobs: array[float]
    versions: tuple[VersionSpan, ...]
    finish: Finish
    served: Message
    chain: bytes
    prompt_length: int
    prompt_digest: bytes  # SHA-256 of the recorded prompt ids; the provider's prompt had the same (`_sent_digest`)
    stopped_by: int | str | None = None
    attempts: tuple[Attempt, ...] = ()  # of tool calls that did not parse
    dialect: str = "openai_chat"
    model: str | None = None  # as requested; None if the request named none, or an older release recorded it
    projection: str = "root"
    edge_reason: str | None = None
    detail: str = ""
    replaced: tuple[Message, ...] = ()  # the client's system prompt, where a pinned one replaced it
    origin: str | None = None  # the node whose conversation it continues with other tokens: as a root, or on `parent`
    outcome: Outcome = "served"
    tools: Tools | None = None
    template_kwargs: TemplateKwargs = field(default_factory=JsonObject)
    sampling: Sampling = field(default_factory=Sampling)
    request_key: str | None = None
    joined_keys: tuple[str, ...] = ()  # request keys of equal requests that joined this one in flight
    request_digest: str | None = None
    choice: int = 0
    created: float = 0.0
    routed_experts: RoutedExperts | None = None  # from the parent's last token to this turn's last input
    sampling_mask: SamplingMask | None = None  # one row per sampled token
    top_logprobs: tuple[Mapping[int, float], ...] | None = None
    fingerprint: str | None = None
    images: tuple[ImageRun, ...] = ()  # in the given ids, counted from their start

    @property
    def length(self) -> int:
        return self.prompt_length + len(self.sampled_ids)

    @property
    def shifted_images(self) -> list[ImageRun]:
        """Counted from the start of the conversation."""
        return shift_images(self.images, self.prompt_length - len(self.given_ids))

    @property
    def copies(self) -> list[tuple[int, int, str]]:
        """(start, end, node id) of given ids that repeat what another node sampled."""
        if self.parent is None:  # a root renders served messages again
            return []
        return [
            (span.start, span.end, item.node)
            for span in self.given_spans
            if span.message is not None and isinstance(item := self.given[span.message], ServedRef)
        ]


@dataclass(frozen=True, slots=True)
class _Path:
    node: str
    ids: TokenIds
    messages: PastMessages


TOKEN_IDS = "token_ids"  # the projection of a turn whose caller sent the ids of its prompt


def turn_key(
    parent: Node | None, given: tuple[Given, ...], tools: Tools | None, given_ids: TokenIds | None = None
) -> TurnKey:
    """The parent and every message given after it (of a root, also the tools), or the ids that a caller sent."""
    if given_ids is not None:
        return None if parent is None else parent.id, digest(given_ids.tobytes())
    items = [{"served": item.node} if isinstance(item, ServedRef) else item for item in given]
    return (None, digest(items, tools)) if parent is None else (parent.id, digest(items))


class Tree:
    def __init__(self, *, template: str, tokenizer: str) -> None:
        self.template, self.tokenizer = template, tokenizer
        self.nodes: dict[str, Node] = {}
        self.children: dict[str | None, list[Node]] = defaultdict(list)
        self.followers: dict[str, list[Node]] = defaultdict(list)  # children, and nodes that have this one as `origin`
        self.answers: dict[TurnKey, list[Node]] = defaultdict(list)
        self.nodes_by_key: dict[str, list[Node]] = defaultdict(list)  # request key -> its served nodes
        self.next_seq = 0
        # Checked and being written: seq -> node and the SHA-256 of its prompt.
        self._reserved: dict[int, tuple[Node, HashState]] = {}
        self._turn_keys: dict[str, TurnKey] = {}
        self._hashes: dict[str, HashState] = {}  # node -> SHA-256 state over its prompt and sampled ids
        self._arguments: dict[str, list[str]] = defaultdict(list)  # id of a served call -> its arguments
        self._start = start_link(template=template, tokenizer=tokenizer)
        self._newest = _Path("", EMPTY, PastMessages())  # the last one requested: its children begin with it

    def __len__(self) -> int:
        return len(self.nodes)

    def reserve(self, nodes: Sequence[Node]) -> None:
        self._reserved |= {node.seq: (node, self.check(node)) for node in nodes}
        self.next_seq += len(nodes)

    def release(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            self._reserved.pop(node.seq, None)

    @property
    def committed_seq(self) -> int:
        """Every node with a smaller `seq` is in the tree."""
        return min(self._reserved, default=self.next_seq)

    def get(self, node_id: str) -> Node:
        if node_id not in self.nodes:
            raise SessionConflict(f"no node {node_id!r} in this session")
        return self.nodes[node_id]

    def parent(self, node: Node) -> Node | None:
        return None if node.parent is None else self.nodes[node.parent]

    def path(self, node: Node | None) -> list[Node]:
        found: list[Node] = []
        while node is not None:
            found.append(node)
            node = self.parent(node)
        return found[::-1]

    def predecessors(self, node: Node) -> list[str]:
        return [name for name in (node.parent, node.origin) if name is not None]

    def conversation(self, node: Node) -> list[Given]:
        """Up to and including what `node` served; sampled messages as references."""
        return [item for step in self.path(node) for item in (*step.given, ServedRef(step.id))]

    def full_ids(self, node: Node | None) -> TokenIds:
        return EMPTY if node is None else self._full_path(node).ids

    def prompt_ids(self, node: Node) -> TokenIds:
        return self.full_ids(node)[: node.prompt_length]

    def images(self, node: Node | None) -> tuple[ImageRun, ...]:
        """All up to the end of `node`, counted from the start of the conversation."""
        return tuple(run for step in self.path(node) for run in step.shifted_images)

    def expand(self, given: Iterable[Given]) -> list[Message]:
        return [self.nodes[item.node].served if isinstance(item, ServedRef) else item for item in given]

    def given_messages(self, node: Node) -> list[Message]:
        return self.expand(node.given)

    def messages(self, node: Node | None) -> PastMessages:
        """Up to and including what `node` served, as recorded."""
        return PastMessages() if node is None else self._full_path(node).messages

    def _full_path(self, node: Node) -> _Path:
        """Walks back to the root or the cached path: the next turn costs only what it adds."""
        known, steps, at = self._newest, list[Node](), node
        while at.id != known.node:
            steps.append(at)
            if at.parent is None:
                known = _Path("", EMPTY, PastMessages())
                break
            at = self.nodes[at.parent]
        if not steps:
            return known
        steps.reverse()
        ids = TokenIds.concat([known.ids, *(ids for step in steps for ids in (step.given_ids, step.sampled_ids))])
        ids.sha256()  # later prompts hash only what they add
        added = [message for step in steps for message in (*self.given_messages(step), step.served)]
        self._newest = _Path(node.id, ids, known.messages.followed_by(added))
        return self._newest

    def find_prefix(self, ids: TokenIds) -> Node | None:
        """The newest of the longest conversations that `ids` begin with; whole answers before broken ones."""
        found: dict[int, list[Node]] = defaultdict(list)
        for node in self.nodes.values():
            if node.length < len(ids):  # something must be given before the next answer
                found[node.length].append(node)
        best: list[Node] = []
        state, at = sha256(), 0
        for length in sorted(found):
            state.update(ids[at:length].tobytes())
            at, digest = length, state.digest()
            best = [node for node in found[length] if self._hashes[node.id].digest() == digest] or best
        return max(best, key=lambda node: (node.outcome == "served", node.seq), default=None)

    def find_arguments(self, call_id: str) -> Sequence[str]:
        return self._arguments.get(call_id, ())

    def answers_like(self, node: Node) -> list[Node]:
        return self.answers[self._turn_keys[node.id]]

    def link(self, node: Node) -> bytes:
        parent = self.parent(node)
        return next_link(
            self._start if parent is None else parent.chain,
            given_ids=node.given_ids,
            sampled_ids=node.sampled_ids,
            logprobs=node.logprobs,
            versions=node.versions,
            images=node.images,
        )

    def hash_prompt(self, parent: Node | None, given_ids: TokenIds) -> HashState:
        state = sha256() if parent is None else self._hashes[parent.id].copy()
        state.update(given_ids.tobytes())
        return state

    def check(self, node: Node) -> HashState:
        """Returns the SHA-256 state of the prompt."""
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
            raise TokenContractError(
                f"node {node.id}: {len(node.sampled_ids)} sampled ids, {len(node.logprobs)} log-probabilities"
            )
        check_images(node)
        state = self.hash_prompt(parent, node.given_ids)
        if node.prompt_digest != state.digest():
            raise TokenContractError(f"node {node.id}: the engine was given other ids than the record holds")
        if node.chain != self.link(node):
            raise TokenContractError(f"node {node.id}: the certificate does not fit what is recorded")
        return state

    def add(self, node: Node) -> None:
        # A reserved node was checked already, and the tree never changes what it was checked against.
        reserved, state = self._reserved.pop(node.seq, (None, None))
        if state is None or reserved is not node:
            state = self.check(node)
        state.update(node.sampled_ids.tobytes())
        self._hashes[node.id] = state
        self.nodes[node.id] = node
        self.children[node.parent].append(node)
        for before in self.predecessors(node):
            self.followers[before].append(node)
        ids = node.given_ids if node.projection == TOKEN_IDS else None
        key = self._turn_keys[node.id] = turn_key(self.parent(node), node.given, node.tools, ids)
        self.answers[key].append(node)
        self.next_seq = max(self.next_seq, node.seq + 1)
        for call in node.served.get("tool_calls") or ():
            self._arguments[call["id"]].append(call["function"]["arguments"])
        if node.outcome == "served":
            for request_key in (node.request_key, *node.joined_keys):
                if request_key is not None:
                    self.nodes_by_key[request_key].append(node)

    def add_key(self, request_key: str, node_ids: Sequence[str]) -> None:
        self.nodes_by_key[request_key] = [self.get(node_id) for node_id in node_ids]

    def snapshot(self) -> Tree:
        """For another thread to read while this tree grows."""
        copied = copy(self)
        copied.nodes = dict(self.nodes)
        for name in ("children", "followers", "answers", "nodes_by_key"):
            index: Mapping[Any, list[Node]] = getattr(self, name)
            setattr(copied, name, defaultdict(list[Node], {key: list(found) for key, found in index.items()}))
        return copied

    def in_order(self) -> list[Node]:
        return sorted(self.nodes.values(), key=lambda node: node.seq)

    def last_activity(self) -> dict[str, int]:
        newest = {node.id: node.seq for node in self.nodes.values()}
        for node in reversed(self.in_order()):
            for before in self.predecessors(node):
                newest[before] = max(newest[before], newest[node.id])
        return newest


# The certificate's hash chain: one SHA-256 per node over its parent's and everything that a trainer computes with. Ids
# are little-endian int32, log-probabilities float64: one flipped bit anywhere breaks every later link.
_START = b"tokentrue certificate 1"


def start_link(*, template: str, tokenizer: str) -> bytes:
    state = sha256(_START)
    for name in (template, tokenizer):
        data = name.encode()
        state.update(len(data).to_bytes(4, "little") + data)
    return state.digest()


def next_link(
    previous: bytes,
    *,
    given_ids: TokenIds,
    sampled_ids: TokenIds,
    logprobs: array[float],
    versions: Sequence[VersionSpan],
    images: Sequence[ImageRun] = (),
) -> bytes:
    lengths = len(given_ids).to_bytes(8, "little") + len(sampled_ids).to_bytes(8, "little")
    parts = [previous, lengths, given_ids.tobytes(), sampled_ids.tobytes(), logprobs.tobytes()]
    parts += [b"%d,%d,%d;" % (span.start, span.end, span.version) for span in versions]
    if images:
        parts.append(b"images" + dumps(list(map(astuple, images))))
    return sha256(b"".join(parts)).digest()


def check_images(node: Node) -> None:
    end = 0
    for run in node.images:
        if run.start < end or not run.count:
            raise TokenContractError(f"node {node.id}: images overlap at given token {run.start}")
        end = run.start + run.count
    if end > len(node.given_ids):
        raise TokenContractError(f"node {node.id}: an image ends at {end} of {len(node.given_ids)} given tokens")
    messages = (item for item in node.given if not isinstance(item, ServedRef))
    if [part["sha256"] for part in find_references(messages)] != [run.sha256 for run in node.images]:
        raise TokenContractError(f"node {node.id}: the images in the prompt are not those of its messages")


def format_digest(digest: bytes) -> str:
    return f"sha256:{digest.hex()}"
