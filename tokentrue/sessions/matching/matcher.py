"""Resolve a request against the record, changing nothing: `Continue(node, tail …) | Root(why …)`.

The whole list of messages is matched against the tree as it is now, in four steps:
1. chained loose keys find the nodes whose conversation may be a prefix of the request (deepest first);
2. every served turn on a candidate's path must be replayed exactly or with a known loss (`projections`);
3. every given message and the tools must be equal as JSON, or else render to the same ids;
4. among those that fit, the one is chosen that was served whole, has the fewest given messages spelled otherwise, then
   the fewest changes, is named by the request, was not asked again since, was not continued by this very request
   before, and is the newest, in this order; where several have equally few of both and none is named, the match is
   marked ambiguous.
Nothing is remembered from one request to the next but pure facts about its messages and the paths they replay
(`conversations`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tokentrue.errors import RenderError
from tokentrue.plain_json import digest
from tokentrue.protocols import Renderer
from tokentrue.sessions.matching.candidates import CandidateIndex
from tokentrue.sessions.matching.conversations import Conversation, ConversationReader, MessageFacts, PathFit
from tokentrue.sessions.matching.match_keys import CallRef, calls_of, tools_key
from tokentrue.sessions.matching.projections import find_changes, format_changes
from tokentrue.sessions.offload import count_chars, run_by_size
from tokentrue.sessions.tree import Given, Node, ServedRef, Tree, TurnKey, turn_key
from tokentrue.tracing import traced
from tokentrue.types import Message, Messages, Tools


@dataclass(frozen=True, slots=True, kw_only=True)
class Continue:
    """Continue after `node`; `tail` is what is new, its call ids being those that were served. `why` is None where
    nothing had continued `node` before."""

    node: Node
    tail: tuple[Message, ...]
    projection: str
    turn_key: TurnKey
    why: str | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """Nothing recorded can be continued token by token. `origin` is the node whose conversation it continues with other
    tokens, if any."""

    messages: tuple[Message, ...]
    given: tuple[Given, ...]
    turn_key: TurnKey
    why: str
    detail: str = ""
    origin: Node | None = None


Resolution = Continue | Root


class Matcher:
    """Resolves requests of one session. `reader` caches what it read of earlier requests; no result depends on that."""

    def __init__(self, tree: Tree, renderer: Renderer, *, reader: ConversationReader | None = None) -> None:
        self._tree, self._renderer = tree, renderer
        self._reader = reader or ConversationReader()
        self._index = CandidateIndex(tree)

    @property
    def cached_bytes(self) -> int:
        return self._reader.cached_bytes

    def add(self, node: Node) -> None:
        """`node` was added to the tree."""
        self._index.add(node)

    def read(self, messages: Messages, tools: Tools | None, *, are_final: bool = False) -> Conversation:
        """Copies, checks and keys a request; malformed messages are refused by field."""
        return self._reader.read(messages, tools, are_final=are_final)

    @traced("resolve")
    async def resolve(
        self, conversation: Conversation, in_flight: Mapping[TurnKey, int], *, named: str | None = None
    ) -> Resolution:
        """`in_flight` counts the turns that are being generated; `named` is the node that the request says it
        continues. Waits only where long histories must be rendered to be compared; turns that are committed meanwhile
        are not candidates."""
        found = await _Search(self._tree, self._index, self._renderer, conversation, in_flight, named).find_deepest()
        if found is None:
            return self._start_root(conversation, in_flight)
        node, fit, ambiguous, same_tools = found
        tail = restore_tail(self._tree, self._index, node, conversation)
        if not same_tools:
            detail = f"node {node.id} was sampled under other tools"
            return root_after(self._tree, node, tail, conversation.tools, in_flight, why="tools_changed", detail=detail)
        key = turn_key(node, tail, conversation.tools)
        why, detail = self._classify_edge(key, tail, in_flight)
        how = format_changes(tuple(sorted(fit.changes)), ambiguous=ambiguous)
        return Continue(node=node, tail=tail, projection=how, turn_key=key, why=why, detail=detail)

    def _classify_edge(
        self, key: TurnKey, tail: Sequence[Message], in_flight: Mapping[TurnKey, int]
    ) -> tuple[str | None, str]:
        node = key[0]
        if in_flight.get(key):
            return "parallel", "another request for this turn was in flight"
        if key in self._tree.answers:
            return "retry", f"turn asked again after node {self._tree.answers[key][-1].id}"
        if any(message.get("role") == "assistant" for message in tail):
            return "edited", f"messages after node {node} are not what was served"
        if any(parent == node for parent, _ in in_flight):
            return "parallel", f"another continuation of node {node} was in flight"
        if self._tree.followers.get(node):
            return "branch", f"node {node} had already been continued otherwise"
        return None, ""

    def _start_root(self, conversation: Conversation, in_flight: Mapping[TurnKey, int]) -> Root:
        messages = tuple(conversation.messages)
        root = Root(
            messages=messages, given=messages, turn_key=turn_key(None, messages, conversation.tools), why="first"
        )
        if not len(self._tree) and not in_flight:
            return root
        if repeated := _classify_repeat(self._tree, root, in_flight):
            return repeated
        why, detail = self._classify_root(conversation)
        return replace(root, why=why, detail=detail)

    def _classify_root(self, conversation: Conversation) -> tuple[str, str]:
        """Why nothing could be continued: the first message that no recorded conversation leads through says it."""
        passed = self._index.passed
        shared = next((i for i, key in enumerate(conversation.keys) if key not in passed), len(conversation.keys))
        if shared == 0:
            return "new_conversation", "shares no message with this session"
        before = passed[conversation.keys[shared - 1]]
        if any(facts.role == "assistant" for facts in conversation.facts):
            role = conversation.facts[min(shared, len(conversation.facts) - 1)].role
            return "edited", f"messages[{shared}] ({role}) is not what led to node {before.id}"
        if shared == len(conversation.keys) and digest(before.tools) != conversation.tools_digest:
            return "tools_changed", f"the same messages led to node {before.id} under other tools"
        return (
            "history_replaced",
            f"shares only its first {shared} message(s) with this session: a summary, or another task",
        )


class _Search:
    """One request against every candidate."""

    def __init__(
        self,
        tree: Tree,
        index: CandidateIndex,
        renderer: Renderer,
        conversation: Conversation,
        in_flight: Mapping[TurnKey, int],
        named: str | None,
    ) -> None:
        self._tree, self._index, self._renderer = tree, index, renderer
        self._conversation, self._in_flight, self._named = conversation, in_flight, named

    async def find_deepest(self) -> tuple[Node, PathFit, bool, bool] | None:
        """The node to continue, its fit, whether others fit as well, and whether the tools are the same."""
        for at in range(len(self._conversation.facts) - 1, -1, -1):
            if self._conversation.facts[at].role != "assistant":
                continue
            fits = [
                (node, fit)
                for node in self._index.ends.get(self._conversation.keys[at], ())
                if (fit := self._fit(node)) is not None
            ]
            fits = [(node, fit) for node, fit in fits if not fit.num_respelled or await self._renders_alike(node)]
            fits = [
                (node, fit) for node, fit in fits if node.outcome == "served"
            ] or fits  # a whole answer before one that broke off
            same = [(node, fit) for node, fit in fits if await self._has_same_tools(node)]
            if fits:
                return (*self._choose(same or fits), bool(same))
        return None

    def _choose(self, fits: Sequence[tuple[Node, PathFit]]) -> tuple[Node, PathFit, bool]:
        # Given messages first: two sub-agents may differ by a `name` that the template does not print, and be served
        # the same text.
        fewest = min(fit.num_respelled for _, fit in fits)
        fits = [(node, fit) for node, fit in fits if fit.num_respelled == fewest]
        best = min(fit.num_changes for _, fit in fits)
        equal = [(node, fit) for node, fit in fits if fit.num_changes == best]
        equal = [(node, fit) for node, fit in equal if node.id == self._named] or equal
        node, fit = (
            equal[0] if len(equal) == 1 else min(equal, key=self._rank)
        )  # ranking restores and hashes the new messages
        return node, fit, len(equal) > 1

    def _rank(self, item: tuple[Node, PathFit]) -> tuple[bool, bool, int]:
        node = item[0]
        replaced = any(other.started > node.seq for other in self._tree.answers_like(node))
        key = turn_key(node, restore_tail(self._tree, self._index, node, self._conversation), self._conversation.tools)
        return replaced, key in self._tree.answers or bool(self._in_flight.get(key)), -node.seq

    def _fit(self, node: Node) -> PathFit | None:
        """None where a turn on the path was edited. Siblings share the walk to their parent, as does the next
        request."""
        fits, parent = self._conversation.fits, self._tree.parent(node)
        if node.id not in fits:
            if parent is not None and parent.id not in fits:
                fits[parent.id] = self._fit_steps(PathFit(), self._tree.path(parent))
            before = PathFit() if parent is None else fits[parent.id]
            fits[node.id] = None if before is None else self._fit_steps(before, [node])
        return fits[node.id]

    def _fit_steps(self, before: PathFit, steps: Sequence[Node]) -> PathFit | None:
        facts, nodes = self._conversation.facts, self._tree.nodes
        num_changes, changes, num_respelled = before.num_changes, set(before.changes), before.num_respelled
        at = self._index.place(steps[0]).depth - len(steps[0].given) - 1
        for step in steps:
            for item in (*step.given, step.served):
                if item is step.served or isinstance(item, ServedRef):
                    found = find_changes(
                        nodes[item.node].served if isinstance(item, ServedRef) else item, facts[at].message
                    )
                    if found is None:
                        return None
                    num_changes += len(found)
                    changes.update(found)
                else:
                    num_respelled += not facts[at].repeats(item)
                at += 1
        return PathFit(depth=at, num_changes=num_changes, changes=frozenset(changes), num_respelled=num_respelled)

    async def _has_same_tools(self, node: Node) -> bool:
        if node.tools is self._conversation.tools or digest(node.tools) == self._conversation.tools_digest:
            return True
        if tools_key(node.tools) != tools_key(self._conversation.tools):
            return False
        recorded = self._tree.messages(node)[:-1]
        return await self._render_equal(node, recorded, node.tools, recorded, self._conversation.tools)

    async def _renders_alike(self, node: Node) -> bool:
        """Are the given messages on the path to `node`, as they are spelled now, rendered to the same ids as the
        recorded ones?"""
        recorded: list[Message] = []
        now: list[Message] = []
        for step in self._tree.path(node):
            for item, message in zip(
                (*step.given, ServedRef(step.id)), (*self._tree.given_messages(step), step.served), strict=True
            ):
                sent = message if isinstance(item, ServedRef) else self._conversation.facts[len(now)].message
                now.append({**sent, "tool_call_id": message["tool_call_id"]} if "tool_call_id" in message else sent)
                recorded.append(message)
        return await self._render_equal(node, recorded[:-1], node.tools, now[:-1], node.tools)

    async def _render_equal(
        self, node: Node, one: Messages, tools: Tools | None, other: Messages, other_tools: Tools | None
    ) -> bool:
        kwargs = dict(node.template_kwargs) or None

        def compare() -> bool:
            try:
                was = self._renderer.render(one, tools, template_kwargs=kwargs)
                now = self._renderer.render(other, other_tools, template_kwargs=kwargs)
            except RenderError:
                return False
            return was.token_ids == now.token_ids

        return await run_by_size(compare, count_chars(one) + count_chars(other))


def restore_tail(tree: Tree, index: CandidateIndex, node: Node, conversation: Conversation) -> tuple[Message, ...]:
    """What is new after `node`. Tool results get the call ids that were served: templates may print them, and the
    sampled tokens may hold them."""
    depth = index.place(node).depth
    new = enumerate(conversation.facts[depth:], depth)
    return tuple(_restore(tree, node, depth, facts, conversation.references[at]) for at, facts in new)


def _restore(tree: Tree, node: Node, depth: int, facts: MessageFacts, reference: CallRef | str | None) -> Message:
    if not isinstance(reference, tuple) or reference[0] >= depth:
        return facts.message  # no tool result, or one that answers a call of the tail itself
    calls = calls_of(node.served if reference[0] == depth - 1 else tree.messages(node)[reference[0]])
    served = calls[reference[1]].get("id") if reference[1] < len(calls) else None
    return facts.message if served in (None, facts.call_id) else {**facts.message, "tool_call_id": served}


def root_after(
    tree: Tree,
    node: Node,
    tail: Sequence[Message],
    tools: Tools | None,
    in_flight: Mapping[TurnKey, int],
    *,
    why: str,
    detail: str,
) -> Root:
    """The conversation to `node` and `tail`, rendered anew because of `why`. Served messages are given as references to
    their nodes."""
    given: list[Given] = []
    for step in tree.path(node):
        given += [*step.given, ServedRef(step.id)]
    given += tail
    root = Root(
        messages=(*tree.messages(node), *tail),
        given=tuple(given),
        turn_key=turn_key(None, tuple(given), tools),
        why=why,
        detail=detail,
        origin=node,
    )
    return _classify_repeat(tree, root, in_flight) or root


def _classify_repeat(tree: Tree, root: Root, in_flight: Mapping[TurnKey, int]) -> Root | None:
    if in_flight.get(root.turn_key):
        return replace(root, why="parallel", detail="another request for this turn was in flight")
    if root.turn_key in tree.answers:
        return replace(root, why="retry", detail=f"turn asked again after node {tree.answers[root.turn_key][-1].id}")
    return None
