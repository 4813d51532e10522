"""Resolves a request against the record without changing it: `Continue(node, tail …) | Root(edge_reason …)`.

The whole list of messages is matched against the current tree, in four steps:
1. chained loose keys find the nodes whose conversation may be a prefix of the request (deepest first);
2. every served turn on a candidate's path must be replayed exactly or with a known loss (`find_changes`);
3. every given message and the tools must be equal as JSON, or else render to the same ids;
4. candidates that fit are ranked: served whole, fewest given messages written differently, fewest changes, named by the
   request, not asked again since, not continued by this very request before, newest. If several are equal in both
   counts and none is named, the match is marked ambiguous.

An agent may alternate between tool sets or system prompts (plan and act, a sub-agent with fewer tools). A request
then rejoins the deepest turn under its own tools and system prompt. The later turns were sampled elsewhere: steps 1
to 4 find them under any tools (or, if equal to the letter, under any system prompt), and they become references to
their nodes. The only state kept between requests is how exactly their messages fit a path (`KnownFits`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tokentrue.conversation import Conversation
from tokentrue.conversation.match_keys import START_KEY, CallRef, calls_of, count_system, tools_key
from tokentrue.errors import RenderError
from tokentrue.plain_json import digest
from tokentrue.protocols import Renderer
from tokentrue.sessions.limits import count_chars, run_by_size
from tokentrue.sessions.matching.candidates import CandidateIndex, chain_turns, find_changes, format_changes
from tokentrue.sessions.tree import Given, Node, ServedRef, Tree, TurnKey, turn_key
from tokentrue.tracing import traced
from tokentrue.types import Message, Messages, Tools

_MAX_KNOWN_FITS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Continue:
    """Continues after `node` with the new messages `tail`, whose call ids are those that were served. `edge_reason`
    is None if nothing had continued `node` before. `origin` is the last turn of the tail that was sampled elsewhere."""

    node: Node
    tail: tuple[Given, ...]
    projection: str
    turn_key: TurnKey
    edge_reason: str | None = None
    detail: str = ""
    origin: Node | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """Nothing recorded can be continued token by token. `origin` is the node whose conversation it continues with
    other tokens, if any."""

    messages: tuple[Message, ...]
    given: tuple[Given, ...]
    turn_key: TurnKey
    edge_reason: str
    detail: str = ""
    origin: Node | None = None


Resolution = Continue | Root


@dataclass(frozen=True, slots=True, kw_only=True)
class PathFit:
    """How the first `depth` messages of a request fit the path to a node: the changes in replayed served messages,
    and the number of given messages that are written differently."""

    depth: int = 0
    num_changes: int = 0
    changes: frozenset[str] = frozenset()
    num_respelled: int = 0


class KnownFits:
    """Recent fits by node and exact messages: the next request of a conversation compares only what it adds."""

    def __init__(self) -> None:
        self._fits: OrderedDict[tuple[str, bytes], PathFit] = OrderedDict()

    def get(self, node: Node, depth: int, conversation: Conversation) -> PathFit | None:
        return self._fits.get((node.id, conversation.name_first(depth)))

    def put(self, node: Node, fit: PathFit, conversation: Conversation) -> None:
        self._fits[node.id, conversation.name_first(fit.depth)] = fit
        while len(self._fits) > _MAX_KNOWN_FITS:
            self._fits.popitem(last=False)


class Matcher:
    def __init__(self, tree: Tree, renderer: Renderer) -> None:
        self._tree, self._renderer = tree, renderer
        self._index, self._fits = CandidateIndex(tree), KnownFits()

    def add(self, node: Node) -> None:
        """Call it after `node` was added to the tree."""
        self._index.add(node)

    @traced("resolve")
    async def resolve(
        self, conversation: Conversation, in_flight: Mapping[TurnKey, int], *, named: str | None = None
    ) -> Resolution:
        """`in_flight` counts the turns being generated; `named` is the node that the request says it continues.
        Awaits only if long histories must be rendered to be compared; turns committed meanwhile are not candidates."""
        search = _Search(self._tree, self._index, self._renderer, self._fits, conversation, in_flight, named)
        found = await search.find_deepest()
        if found is None:
            return self._start_root(conversation, in_flight)
        tail = build_tail(self._tree, self._index, found, conversation)
        if not found.same_tools:
            detail = f"node {found.node.id} was sampled under other tools"
            return root_after(
                self._tree, found.node, tail, conversation.tools, in_flight, edge_reason="tools_changed", detail=detail
            )
        key = turn_key(found.node, tail, conversation.tools)
        edge_reason, detail = self._classify_edge(found.node.id, key, tail, in_flight)
        elsewhere = found.elsewhere
        parts = [found] if elsewhere is None else [found, elsewhere]
        changes = frozenset[str]().union(*(part.fit.changes for part in parts))
        return Continue(
            node=found.node,
            tail=tail,
            projection=format_changes(tuple(sorted(changes)), ambiguous=any(part.ambiguous for part in parts)),
            turn_key=key,
            edge_reason=edge_reason,
            detail=detail,
            origin=None if elsewhere is None else elsewhere.node,
        )

    def _classify_edge(
        self, node: str, key: TurnKey, tail: Sequence[Given], in_flight: Mapping[TurnKey, int]
    ) -> tuple[str | None, str]:
        copies = sum(isinstance(item, ServedRef) for item in tail)
        if in_flight.get(key):
            return "parallel", "another request for this turn was in flight"
        if key in self._tree.answers:
            return "retry", f"turn asked again after node {self._tree.answers[key][-1].id}"
        if any(not isinstance(item, ServedRef) and item.get("role") == "assistant" for item in tail):
            return "edited", f"messages after node {node} are not what was served"
        if copies:
            return "rejoined", f"after node {node}, {copies} turn(s) sampled under other tools or another system prompt"
        if any(parent == node for parent, _ in in_flight):
            return "parallel", f"another continuation of node {node} was in flight"
        if self._tree.followers.get(node):
            return "branch", f"node {node} had already been continued otherwise"
        return None, ""

    def _start_root(self, conversation: Conversation, in_flight: Mapping[TurnKey, int]) -> Root:
        messages = tuple(conversation)
        root = Root(
            messages=messages,
            given=messages,
            turn_key=turn_key(None, messages, conversation.tools),
            edge_reason="first",
        )
        if not len(self._tree) and not in_flight:
            return root
        if repeated := _classify_repeat(self._tree, root, in_flight):
            return repeated
        edge_reason, detail = self._classify_root(conversation)
        return replace(root, edge_reason=edge_reason, detail=detail)

    def _classify_root(self, conversation: Conversation) -> tuple[str, str]:
        """Judged by the first message that no recorded conversation contains."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """`elsewhere` is a deeper turn of the same conversation, sampled under other tools or another system prompt."""

    node: Node
    fit: PathFit
    ambiguous: bool
    same_tools: bool = True
    elsewhere: Match | None = None


class _Search:
    def __init__(
        self,
        tree: Tree,
        index: CandidateIndex,
        renderer: Renderer,
        known: KnownFits,
        conversation: Conversation,
        in_flight: Mapping[TurnKey, int],
        named: str | None,
    ) -> None:
        self._tree, self._index, self._renderer = tree, index, renderer
        self._known, self._fits = known, dict[str, PathFit | None]()  # of this request, by node
        self._conversation, self._in_flight, self._named = conversation, in_flight, named

    async def find_deepest(self) -> Match | None:
        """Under the request's own tools if possible."""
        other: Match | None = None
        for at in range(len(self._conversation.facts) - 1, -1, -1):
            if self._conversation.facts[at].role != "assistant":
                continue
            found = await self._find_at(at, other)
            if found is not None and found.same_tools:
                return self._find_elsewhere(found)
            other = other or found
        return other

    async def _find_at(self, at: int, other: Match | None) -> Match | None:
        """Once `other` is found, turns under other tools are ignored."""
        nodes = self._index.ends.get(self._conversation.keys[at], ())
        if other is not None:
            nodes = [node for node in nodes if self._may_have_same_tools(node)]
        fits = [(node, fit) for node in nodes if (fit := self._fit(node)) is not None]
        fits = [(node, fit) for node, fit in fits if not fit.num_respelled or await self._renders_alike(node)]
        # Prefer a complete answer to one that broke off.
        fits = [(node, fit) for node, fit in fits if node.outcome == "served"] or fits
        same = [(node, fit) for node, fit in fits if await self._has_same_tools(node)]
        if other is None:
            return self._choose(same or fits, same_tools=bool(same)) if fits else None
        if not same:
            return None
        # Of equal nodes, prefer the one whose conversation leads to `other`.
        passed = self._tree.conversation(other.node)
        same = [(node, fit) for node, fit in same if ServedRef(node.id) in passed] or same
        return self._choose(same, other=other)

    def _find_elsewhere(self, found: Match) -> Match:
        """Finds later turns under other system prompts, where nothing else may differ."""
        facts = self._conversation.facts
        first = (found.elsewhere or found).fit.depth
        if all(facts[at].role != "assistant" for at in range(first, len(facts))):
            return found
        num_system = count_system(read.role for read in facts)
        key, ends = START_KEY, list[bytes]()
        for at, read in enumerate(facts):
            key = chain_turns(key, read.key, self._conversation.references[at], at, num_system)
            if at >= first and read.role == "assistant":
                ends.append(key)
        for key in reversed(ends):
            fits = [
                (node, fit)
                for node in self._index.turns.get(key, ())
                if (fit := self._fit_turns(node, num_system, found.node)) is not None
            ]
            if fits:
                ranks = [self._rank_elsewhere(item, found.node) for item in fits]
                best = min(ranks)
                node, fit = fits[ranks.index(best)]
                ambiguous = node.id != self._named and sum(rank[:3] == best[:3] for rank in ranks) > 1
                elsewhere = Match(node=node, fit=fit, ambiguous=ambiguous, same_tools=False)
                return replace(found, elsewhere=elsewhere)
        return found

    def _fit_turns(self, node: Node, num_system: int, joined: Node) -> PathFit | None:
        """Fits the request and the conversation of `node`, each after its system prompt; None unless all given
        messages are identical."""
        items = self._tree.conversation(node)[self._index.place(node).num_system :]
        # Under the first prompt of a kind, the turns to `joined` are the client's copies of what was served: they may be
        # written differently from this request, which fits `joined` itself.
        served = self._tree.conversation(joined)[num_system:]
        for at, (item, known) in enumerate(zip(items, served, strict=False)):
            if isinstance(known, ServedRef) and not isinstance(item, ServedRef):
                if find_changes(self._tree.nodes[known.node].served, item) is None:
                    return None
                items[at] = known
        fit = self._fit_items(PathFit(depth=num_system), items)
        return None if fit is None or fit.num_respelled else fit

    def _rank_elsewhere(self, item: tuple[Node, PathFit], joined: Node) -> tuple[bool, bool, int, bool, int]:
        node, fit = item
        passes = ServedRef(joined.id) in self._tree.conversation(node)
        return node.outcome != "served", not passes, fit.num_changes, node.id != self._named, -node.seq

    def _choose(
        self, fits: Sequence[tuple[Node, PathFit]], *, same_tools: bool = True, other: Match | None = None
    ) -> Match:
        # Given messages first: two sub-agents may differ by a `name` that the template does not print, and be served
        # the same text.
        fewest = min(fit.num_respelled for _, fit in fits)
        fits = [(node, fit) for node, fit in fits if fit.num_respelled == fewest]
        best = min(fit.num_changes for _, fit in fits)
        equal = [(node, fit) for node, fit in fits if fit.num_changes == best]
        equal = [(node, fit) for node, fit in equal if node.id == self._named] or equal
        matches = [
            Match(node=node, fit=fit, ambiguous=len(equal) > 1, same_tools=same_tools, elsewhere=other)
            for node, fit in equal
        ]
        # Ranking restores and hashes the new messages.
        return matches[0] if len(matches) == 1 else min(matches, key=self._rank)

    def _rank(self, match: Match) -> tuple[bool, bool, int]:
        node, tools = match.node, self._conversation.tools
        replaced = any(other.started > node.seq for other in self._tree.answers_like(node))
        key = turn_key(node, build_tail(self._tree, self._index, match, self._conversation), tools)
        return replaced, key in self._tree.answers or bool(self._in_flight.get(key)), -node.seq

    def _fit(self, node: Node) -> PathFit | None:
        """None if a turn on the path was edited. Fits are cached: siblings, and the next request, reuse their
        parent's."""
        fits, parent = self._fits, self._tree.parent(node)
        if node.id not in fits:
            if parent is not None and parent.id not in fits:
                depth = self._index.place(parent).depth
                known = self._known.get(parent, depth, self._conversation)
                fits[parent.id] = known or self._fit_items(PathFit(), self._tree.conversation(parent))
            before = PathFit() if parent is None else fits[parent.id]
            fit = None if before is None else self._fit_items(before, (*node.given, ServedRef(node.id)))
            if fit is not None:
                self._known.put(node, fit, self._conversation)
            fits[node.id] = fit
        return fits[node.id]

    def _fit_items(self, before: PathFit, items: Sequence[Given]) -> PathFit | None:
        facts, nodes = self._conversation.facts, self._tree.nodes
        num_changes, changes, num_respelled = before.num_changes, set(before.changes), before.num_respelled
        for at, item in enumerate(items, before.depth):
            if isinstance(item, ServedRef):
                found = find_changes(nodes[item.node].served, facts[at].message)
                if found is None:
                    return None
                num_changes += len(found)
                changes.update(found)
            else:
                num_respelled += not facts[at].repeats(item)
        return PathFit(
            depth=before.depth + len(items),
            num_changes=num_changes,
            changes=frozenset(changes),
            num_respelled=num_respelled,
        )

    def _may_have_same_tools(self, node: Node) -> bool:
        """False if the tools differ in more than their order."""
        place = self._index.place(node)
        return place.tools == self._conversation.tools_digest or place.loose_tools == self._loose_tools

    async def _has_same_tools(self, node: Node) -> bool:
        if self._index.place(node).tools == self._conversation.tools_digest:
            return True
        if not self._may_have_same_tools(node):
            return False
        recorded = self._tree.messages(node)[:-1]
        return await self._render_equal(node, recorded, node.tools, recorded, self._conversation.tools)

    @cached_property
    def _loose_tools(self) -> bytes:
        return tools_key(self._conversation.tools)

    async def _renders_alike(self, node: Node) -> bool:
        """True if the given messages on the path, as written in this request, render to the recorded ids."""
        recorded, now = self._tree.messages(node), list[Message]()
        for item, message in zip(self._tree.conversation(node), recorded, strict=True):
            sent = message if isinstance(item, ServedRef) else self._conversation.facts[len(now)].message
            now.append({**sent, "tool_call_id": message["tool_call_id"]} if "tool_call_id" in message else sent)
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


def build_tail(tree: Tree, index: CandidateIndex, match: Match, conversation: Conversation) -> tuple[Given, ...]:
    """The new messages after `match.node`: recorded messages and references up to `match.elsewhere`, then the
    request's own."""
    # Tool results get the call ids that were served: templates may print them, and sampled tokens may contain them.
    depth = index.place(match.node).depth
    recorded: list[Given] = []
    if match.elsewhere is not None:
        path = tree.conversation(match.elsewhere.node)
        recorded = path[len(path) - match.elsewhere.fit.depth + depth :]  # system prompts may differ in length
    sent = conversation[depth + len(recorded) :]
    answered = tree.resolve(recorded)
    return tuple(
        _restore(tree, match.node, depth, answered, item, reference)
        for item, reference in zip((*recorded, *sent), conversation.references[depth:], strict=True)
    )


def _restore(
    tree: Tree, node: Node, depth: int, recorded: Sequence[Message], item: Given, reference: CallRef | str | None
) -> Given:
    """`recorded` holds the messages from index `depth` on that were recorded elsewhere."""
    if isinstance(item, ServedRef) or not isinstance(reference, tuple) or reference[0] >= depth + len(recorded):
        return item  # no tool result, or one that answers a call of the request's own messages
    at, position = reference
    if at == depth - 1:
        calls = calls_of(node.served)
    else:
        calls = calls_of(recorded[at - depth] if at >= depth else tree.messages(node)[at])
    served = calls[position].get("id") if position < len(calls) else None
    return item if served in (None, item.get("tool_call_id")) else {**item, "tool_call_id": served}


def root_after(
    tree: Tree,
    node: Node,
    tail: Sequence[Given],
    tools: Tools | None,
    in_flight: Mapping[TurnKey, int],
    *,
    edge_reason: str,
    detail: str,
    origin: Node | None = None,
) -> Root:
    """Renders the conversation again; served messages become references."""
    given = (*tree.conversation(node), *tail)
    root = Root(
        messages=(*tree.messages(node), *tree.resolve(tail)),
        given=given,
        turn_key=turn_key(None, given, tools),
        edge_reason=edge_reason,
        detail=detail,
        origin=origin or node,
    )
    return _classify_repeat(tree, root, in_flight) or root


def _classify_repeat(tree: Tree, root: Root, in_flight: Mapping[TurnKey, int]) -> Root | None:
    if in_flight.get(root.turn_key):
        return replace(root, edge_reason="parallel", detail="another request for this turn was in flight")
    if root.turn_key in tree.answers:
        return replace(
            root, edge_reason="retry", detail=f"turn asked again after node {tree.answers[root.turn_key][-1].id}"
        )
    return None
