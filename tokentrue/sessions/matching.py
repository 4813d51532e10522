"""Finds the recorded turn that a request continues, without changing the record.

The whole list of messages is matched against the tree, in four steps:
1. chained loose keys (`CandidateIndex`) find nodes whose conversation may be a prefix of the request, deepest first;
2. every served turn on the path must be replayed exactly or with a known loss (`find_changes`);
3. every given message and the tools must be equal as JSON, or else render to the same ids;
4. candidates that fit are ranked: served whole, fewest given messages written differently, fewest changes, named by the
request, not asked again since, not continued by this very request before, newest. If several are equal in both counts
and none is named, the match is marked ambiguous.

An agent may alternate between tool sets or system prompts. A request then rejoins the deepest turn under its own
ones. Later turns were sampled elsewhere: steps 1 to 4 find them under any tools (or, if equal to the letter, any
system prompt), and they become references."""

from collections import OrderedDict, defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

from tokentrue.conversation import Conversation
from tokentrue.conversation.match_keys import (
    START_KEY,
    CallRef,
    call_ids_of,
    calls_of,
    candidate_key,
    chain_key,
    count_system,
    find_changes,
    format_changes,
    note_calls,
    read_role,
    reasoning_of,
    text_of,
    tools_key,
)
from tokentrue.errors import EngineContractError, MessageError, RenderError, TokenizerError
from tokentrue.ids import TokenIds
from tokentrue.plain_json import digest
from tokentrue.protocols import Renderer
from tokentrue.records import record
from tokentrue.sessions.requests import count_chars, run_by_size
from tokentrue.sessions.tree import TOKEN_IDS, Given, Node, ServedRef, Tree, TurnKey, turn_key
from tokentrue.tracing import traced
from tokentrue.types import Message, Messages, Tools

_MAX_KNOWN_FITS = 64


@record
class Resolution:
    """A request continues `parent` with the new messages `given`, whose call ids are those that were served; or, if
    `parent` is None, `given` is the whole conversation.

    `projection` names how the replayed history differs from what was served: "exact", "reasoning_dropped+whitespace",
    …; "root" for a new root, "token_ids" if the caller sent ids. `edge_reason` is None if nothing had continued
    `parent` before. `origin` is the node whose conversation is continued with other tokens: of a root, or the last turn
    of `given` that was sampled elsewhere."""

    parent: Node | None
    given: tuple[Given, ...]
    turn_key: TurnKey
    started: int  # no time: the tree's `committed_seq` when the request was resolved
    projection: str = "root"
    edge_reason: str | None = None
    detail: str = ""
    origin: Node | None = None


@record
class PathFit:
    """How the first `depth` messages of a request fit the path to a node. `num_changes`: of replayed served messages;
    `num_respelled`: given messages that are written differently."""

    depth: int = 0
    num_changes: int = 0
    changes: frozenset[str] = frozenset()
    num_respelled: int = 0


@record
class Match:
    """`elsewhere`: a deeper turn of the same conversation, sampled under other tools or another system prompt."""

    node: Node
    fit: PathFit
    ambiguous: bool
    same_tools: bool = True
    elsewhere: "Match | None" = None


class Matcher:
    def __init__(self, tree: Tree, renderer: Renderer) -> None:
        self.tree, self.renderer, self.index = tree, renderer, CandidateIndex(tree)
        self.pending: list[TurnKey] = []
        # By node and exact messages: the next request compares only what it adds.
        self.fits: OrderedDict[tuple[str, bytes], PathFit] = OrderedDict()

    @contextmanager
    def hold(self, key: TurnKey) -> Generator[None]:
        """The turn is in flight: another request for it is parallel."""
        self.pending.append(key)
        try:
            yield
        finally:
            self.pending.remove(key)

    @traced("resolve")
    async def resolve(self, conversation: Conversation, *, named: str | None = None) -> Resolution:
        """`named`: the node that the request says it continues. Awaits only if long histories must be rendered; turns
        committed meanwhile may be missed."""
        started = self.tree.committed_seq  # what is committed while this awaits was not over when it began
        search = _Search(self, conversation, named)
        found = await search.find_deepest()
        if found is None:
            given = tuple(conversation)
            key = turn_key(None, given, conversation.tools)
            return self._build(None, given, key, self._classify_root(conversation), started)
        tail = search.build_tail(found)
        node, elsewhere = found.node, found.elsewhere
        if not found.same_tools:
            detail = f"node {node.id} was sampled under other tools"
            return self.root_after(node, tail, conversation.tools, ("tools_changed", detail), started)
        parts = [found] if elsewhere is None else [found, elsewhere]
        changes = frozenset[str]().union(*(part.fit.changes for part in parts))
        return self._build(
            node,
            tail,
            turn_key(node, tail, conversation.tools),
            self._classify_edge(node.id, tail),
            started,
            projection=format_changes(tuple(sorted(changes)), ambiguous=any(part.ambiguous for part in parts)),
            origin=None if elsewhere is None else elsewhere.node,
        )

    def resolve_ids(self, conversation: Conversation, ids: TokenIds) -> Resolution:
        """Continues the longest recorded conversation that `ids` begin with, whatever the messages say."""
        node = self.tree.find_prefix(ids)
        added = ids[0 if node is None else node.length :]
        try:
            self.renderer.parse(sorted(set(added)))  # `decode` skips ids that are not in the vocabulary
        except (TokenizerError, EngineContractError) as error:
            raise MessageError(f"cannot be read: {error.__cause__ or error}", field="tokens") from error
        depth = 0 if node is None else self.index.places[node.id].depth
        if len(conversation) <= depth:
            raise MessageError(
                f"tokens continue a recorded conversation of {depth} messages: send these and the new ones, not "
                f"{len(conversation)}",
                field="messages",
            )
        given = tuple(conversation[depth:])
        key = turn_key(node, given, conversation.tools, added)
        first = "new_conversation" if len(self.tree) or self.pending else "first"
        edge = (first, "") if node is None else self._classify_edge(node.id, given)
        return self._build(node, given, key, edge, self.tree.committed_seq, projection=TOKEN_IDS)

    def root_after(
        self, node: Node, tail: Sequence[Given], tools: Tools | None, edge: tuple[str, str], started: int
    ) -> Resolution:
        given = (*self.tree.conversation(node), *tail)
        return self._build(None, given, turn_key(None, given, tools), edge, started, origin=node)

    def _build(
        self,
        parent: Node | None,
        given: tuple[Given, ...],
        key: TurnKey,
        edge: tuple[str | None, str],
        started: int,
        *,
        projection: str = "root",
        origin: Node | None = None,
    ) -> Resolution:
        """`edge`: reason and detail, unless this very turn was asked before."""
        if key in self.pending:
            edge = "parallel", "another request for this turn was in flight"
        elif answers := self.tree.answers.get(key):
            newest = answers[-1]
            if newest.seq < started:
                edge = "retry", f"turn asked again after node {newest.id}"
            else:
                edge = "parallel", f"node {newest.id} answered this turn meanwhile"
        return Resolution(
            parent=parent,
            given=given,
            turn_key=key,
            started=started,
            projection=projection,
            edge_reason=edge[0],
            detail=edge[1],
            origin=origin,
        )

    def _classify_edge(self, node: str, tail: Sequence[Given]) -> tuple[str | None, str]:
        copies = sum(isinstance(item, ServedRef) for item in tail)
        if any(not isinstance(item, ServedRef) and item.get("role") == "assistant" for item in tail):
            return "edited", f"messages after node {node} are not what was served"
        if copies:
            return "rejoined", f"after node {node}, {copies} turn(s) sampled under other tools or another system prompt"
        if any(parent == node for parent, _ in self.pending):
            return "parallel", f"another continuation of node {node} was in flight"
        if self.tree.followers.get(node):
            return "branch", f"node {node} had already been continued otherwise"
        return None, ""

    def _classify_root(self, conversation: Conversation) -> tuple[str, str]:
        """Judged by the first message that no recorded conversation contains."""
        if not len(self.tree) and not self.pending:
            return "first", ""
        passed = self.index.passed
        shared = next((i for i, key in enumerate(conversation.keys) if key not in passed), len(conversation.keys))
        if shared == 0:
            return "new_conversation", "shares no message with this session"
        before = passed[conversation.keys[shared - 1]]
        if any(facts.role == "assistant" for facts in conversation.facts):
            role = conversation.facts[min(shared, len(conversation.facts) - 1)].role
            return "edited", f"messages[{shared}] ({role}) is not what led to node {before.id}"
        if shared == len(conversation.keys) and digest(before.tools) != conversation.tools_digest:
            return "tools_changed", f"the same messages led to node {before.id} under other tools"
        detail = f"shares only its first {shared} message(s) with this session: a summary, or another task"
        return "history_replaced", detail


class _Search:
    def __init__(self, matcher: Matcher, conversation: Conversation, named: str | None) -> None:
        self._matcher, self._tree, self._index = matcher, matcher.tree, matcher.index
        self._conversation, self._named = conversation, named
        self._fits: dict[str, PathFit | None] = {}  # of this request, by node

    async def find_deepest(self) -> Match | None:
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
        facts = self._conversation.facts
        first = (found.elsewhere or found).fit.depth
        if all(read.role != "assistant" for read in facts[first:]):
            return found
        num_system = count_system(read.role for read in facts)
        key, ends = START_KEY, list[bytes]()
        for at, read in enumerate(facts):
            key = chain_turns(key, read.key, self._conversation.references[at], at, num_system)
            if at >= first and read.role == "assistant":
                ends.append(key)
        for key in reversed(ends):
            nodes = self._index.turns.get(key, ())
            fits = [(node, fit) for node in nodes if (fit := self._fit_turns(node, num_system, found.node)) is not None]
            if fits:
                joined = ServedRef(found.node.id)
                ranks = [
                    (node.outcome != "served", joined not in self._tree.conversation(node), fit.num_changes)
                    for node, fit in fits
                ]
                best = min(ranks)
                equal = [found for found, rank in zip(fits, ranks, strict=True) if rank == best]
                node, fit = min(equal, key=lambda pair: (pair[0].id != self._named, -pair[0].seq))
                ambiguous = node.id != self._named and len(equal) > 1
                return replace(found, elsewhere=Match(node=node, fit=fit, ambiguous=ambiguous, same_tools=False))
        return found

    def _fit_turns(self, node: Node, num_system: int, joined: Node) -> PathFit | None:
        """The request and the conversation of `node`, each after its system prompt; None unless all given messages
        are identical."""
        items = self._tree.conversation(node)[self._index.places[node.id].num_system :]
        # Under the first prompt of a kind, the turns to `joined` are the client's copies, perhaps written differently
        # from this request, which fits `joined` itself.
        served = self._tree.conversation(joined)[num_system:]
        for at, (item, known) in enumerate(zip(items, served, strict=False)):
            if isinstance(known, ServedRef) and not isinstance(item, ServedRef):
                if find_changes(self._tree.nodes[known.node].served, item) is None:
                    return None
                items[at] = known
        fit = self._fit_items(PathFit(depth=num_system), items)
        return None if fit is None or fit.num_respelled else fit

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
        node = match.node
        is_replaced = any(other.started > node.seq for other in self._tree.answers_like(node))
        key = turn_key(node, self.build_tail(match), self._conversation.tools)
        return is_replaced, key in self._tree.answers or key in self._matcher.pending, -node.seq

    def _fit(self, node: Node) -> PathFit | None:
        """None if a turn on the path was edited. Siblings, and the next request, reuse their parent's fit."""
        fits, known, name_first = self._fits, self._matcher.fits, self._conversation.name_first
        if node.id not in fits:
            parent, before = self._tree.parent(node), PathFit()
            if parent is not None:
                if parent.id not in fits:
                    fit = known.get((parent.id, name_first(self._index.places[parent.id].depth)))
                    fits[parent.id] = fit or self._fit_items(PathFit(), self._tree.conversation(parent))
                before = fits[parent.id]
            fit = fits[node.id] = before and self._fit_items(before, (*node.given, ServedRef(node.id)))
            if fit is not None:
                known[node.id, name_first(fit.depth)] = fit
                if len(known) > _MAX_KNOWN_FITS:
                    known.popitem(last=False)
        return fits[node.id]

    def _fit_items(self, before: PathFit, items: Sequence[Given]) -> PathFit | None:
        facts = self._conversation.facts
        num_changes, changes, num_respelled = before.num_changes, set(before.changes), before.num_respelled
        for at, item in enumerate(items, before.depth):
            if isinstance(item, ServedRef):
                found = find_changes(self._tree.nodes[item.node].served, facts[at].message)
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
        place = self._index.places[node.id]
        return place.tools == self._conversation.tools_digest or place.loose_tools == self._loose_tools

    async def _has_same_tools(self, node: Node) -> bool:
        if self._index.places[node.id].tools == self._conversation.tools_digest:
            return True
        if not self._may_have_same_tools(node):
            return False
        recorded = self._tree.messages(node)[:-1]
        return await self._renders_equal(node, recorded, recorded, self._conversation.tools)

    @cached_property
    def _loose_tools(self) -> bytes:
        return tools_key(self._conversation.tools)

    async def _renders_alike(self, node: Node) -> bool:
        recorded, now = self._tree.messages(node), list[Message]()
        for item, message in zip(self._tree.conversation(node), recorded, strict=True):
            sent = message if isinstance(item, ServedRef) else self._conversation.facts[len(now)].message
            now.append({**sent, "tool_call_id": message["tool_call_id"]} if "tool_call_id" in message else sent)
        return await self._renders_equal(node, recorded[:-1], now[:-1], node.tools)

    async def _renders_equal(self, node: Node, recorded: Messages, now: Messages, tools: Tools | None) -> bool:
        render, kwargs = self._matcher.renderer.render, node.template_kwargs

        def compare() -> bool:
            try:
                was, is_now = (
                    render(messages, own, template_kwargs=kwargs)
                    for messages, own in ((recorded, node.tools), (now, tools))
                )
                # Two images of one size have the same ids.
                return (was.token_ids, was.images) == (is_now.token_ids, is_now.images)
            except RenderError:
                return False

        return await run_by_size(compare, count_chars(recorded) + count_chars(now))

    def build_tail(self, match: Match) -> tuple[Given, ...]:
        # Tool results get the call ids that were served: templates and sampled tokens may contain them.
        depth = self._index.places[match.node.id].depth
        recorded: list[Given] = []
        if match.elsewhere is not None:
            path = self._tree.conversation(match.elsewhere.node)
            recorded = path[len(path) - match.elsewhere.fit.depth + depth :]  # system prompts may differ in length
        sent = self._conversation[depth + len(recorded) :]
        answered = self._tree.expand(recorded)
        return tuple(
            _restore(self._tree, match.node, depth, answered, item, reference)
            for item, reference in zip((*recorded, *sent), self._conversation.references[depth:], strict=True)
        )


def _restore(
    tree: Tree, node: Node, depth: int, recorded: Sequence[Message], item: Given, reference: CallRef | str | None
) -> Given:
    """`recorded`: the messages from index `depth` on that were recorded elsewhere."""
    if isinstance(item, ServedRef) or not isinstance(reference, tuple) or reference[0] >= depth + len(recorded):
        return item  # no tool result, or one that answers a call of the request's own messages
    at, position = reference
    if at == depth - 1:
        calls = calls_of(node.served)
    else:
        calls = calls_of(recorded[at - depth] if at >= depth else tree.messages(node)[at])
    served = calls[position].get("id") if position < len(calls) else None
    return item if served in (None, item.get("tool_call_id")) else {**item, "tool_call_id": served}


@dataclass(frozen=True, slots=True)
class Place:
    """The key of the conversation after a node's served message, and its length. `turns_key` excludes the `num_system`
    messages of the system prompt. `loose_tools`: the tools in any order."""

    key: bytes = START_KEY
    depth: int = 0
    turns_key: bytes = START_KEY
    num_system: int = 0
    tools: bytes = b""
    loose_tools: bytes = b""


class CandidateIndex:
    """From a conversation's loose key, with and without its system prompt, to the turns that end there."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self.places: dict[str, Place] = {}
        self.ends: dict[bytes, list[Node]] = defaultdict(list)  # key after the served message -> nodes
        self.turns: dict[bytes, list[Node]] = defaultdict(list)  # the same without the system prompt
        # key after any message -> the first node whose conversation contains it
        self.passed: dict[bytes, Node] = {}
        for node in tree.in_order():
            self.add(node)

    def add(self, node: Node) -> None:
        parent, given = self._tree.parent(node), self._tree.given_messages(node)
        before = Place(num_system=count_system(map(read_role, given))) if parent is None else self.places[parent.id]
        key, turns_key, depth, seen = before.key, before.turns_key, before.depth, dict[str, CallRef]()
        for message in given:
            own, reference = candidate_key(message), self._reference(message, parent, seen)
            key = chain_key(key, own, reference)
            turns_key = chain_turns(turns_key, own, reference, depth, before.num_system)
            note_calls(seen, depth, call_ids_of(message))
            self.passed.setdefault(key, node)
            depth += 1
        own, same_tools = candidate_key(node.served), parent is not None and node.tools is parent.tools
        place = self.places[node.id] = Place(
            key=chain_key(key, own, None),
            depth=depth + 1,
            turns_key=chain_turns(turns_key, own, None, depth, before.num_system),
            num_system=before.num_system,
            tools=before.tools if same_tools else digest(node.tools),
            loose_tools=before.loose_tools if same_tools else tools_key(node.tools),
        )
        served = node.served
        # A turn that ended before a client saw any of it cannot be replayed, and its ids may not decode.
        if node.outcome == "served" or text_of(served.get("content")) or reasoning_of(served) or calls_of(served):
            self.ends[place.key].append(node)
            self.turns[place.turns_key].append(node)
        self.passed.setdefault(place.key, node)

    def _reference(self, message: Message, node: Node | None, seen: Mapping[str, CallRef]) -> CallRef | str | None:
        """The call that a tool result answers: one in `seen`, else the nearest on the path to `node`."""
        call_id = message.get("tool_call_id")
        if not isinstance(call_id, str) or read_role(message) == "assistant":
            return None
        if call_id in seen:
            return seen[call_id]
        while node is not None:
            index = self.places[node.id].depth - 1
            for earlier in (node.served, *reversed(self._tree.given_messages(node))):
                ids = call_ids_of(earlier)
                if call_id in ids:
                    return index, len(ids) - 1 - ids[::-1].index(call_id)
                index -= 1
            node = self._tree.parent(node)
        return call_id


def chain_turns(previous: bytes, key: bytes, reference: CallRef | str | None, index: int, num_system: int) -> bytes:
    """`chain_key` without the system prompt."""
    if index < num_system:
        return START_KEY
    if isinstance(reference, tuple):
        reference = reference[0] - num_system, reference[1]
    return chain_key(previous, key, reference)
