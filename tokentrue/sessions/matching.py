"""Resolve a request against the record, changing nothing: `Continue(node, tail …) | Root(why …)`.

Messages are matched by what was served: chained loose keys find candidates in O(1), `projections` checks every assistant turn on
a candidate's path. Keys and checks of a history that was seen before are remembered per branch, so a request costs its new
messages. Among equal candidates the best exact fit wins, then the one that was not replaced by a retry, then one whose turn
was not asked yet, then the newest; an equal fit is recorded as ambiguous.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tokentrue.errors import MessageError
from tokentrue.sessions.keys import Bases, CallRef, calls_of, next_key, role_of
from tokentrue.sessions.projections import label, projection
from tokentrue.sessions.tree import CallIds, Given, Node, ServedRef, Tree
from tokentrue.types import Message, Messages, Tools

_REMEMBERED_BRANCHES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Continue:
    """Go on after `node`; `tail` is what is new, its call ids being those that were served. `why` is None where the newest leaf goes on."""

    node: Node
    tail: tuple[Message, ...]
    projection: str
    key: bytes  # of the whole request: attempts at one turn share it
    why: str | None = None
    detail: str = ""
    ambiguous: bool = False  # other nodes fit as well

    @property
    def place(self) -> str | None:
        """What names the request besides its key: which node it continues, where that is beyond doubt."""
        return None if self.ambiguous else self.node.id


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """Nothing recorded can be continued. `origin` is the node that it continues in meaning, where there is one."""

    messages: tuple[Message, ...]
    given: tuple[Given, ...]
    key: bytes
    why: str
    detail: str = ""
    origin: Node | None = None

    @property
    def place(self) -> None:
        return None


Plan = Continue | Root


@dataclass(slots=True)
class _Walk:
    """A history that was seen: its messages, the key after each, where call ids point, and which nodes were found to fit it."""

    base: bytes
    messages: list[Message]
    keys: list[bytes]
    calls: dict[str, CallRef]
    known: dict[str, tuple[int, tuple[str, ...]] | None] = field(default_factory=dict[str, "tuple[int, tuple[str, ...]] | None"])


class Matcher:
    """Resolves requests of one session. Its only state is a memory of histories seen; dropping it changes no answer."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._walks: list[_Walk] = []
        self._calls: dict[str, dict[str, CallRef]] = {}  # node -> where the ids of the request before it point
        self._bases = Bases()
        self.flying: dict[tuple[str | None, bytes], int] = {}  # turns being generated: (parent, key) -> how many

    def resolve(self, messages: Messages, tools: Tools | None, *, after: str | None = None) -> Plan:
        if not messages:
            raise MessageError("at least one message is needed", field="messages")
        if after is not None:
            plan = self._resolve_after(self._tree.get(after), messages)
            if plan is not None and self._bases.key(tools) == self._bases.key(plan.node.tools):
                return plan
            node = self._tree.get(after)
            messages = [*self._tree.messages(node)[:-1], *messages]
        return self._resolve_all(messages, tools)

    def remember_calls(self, node: Node, plan: Plan) -> None:
        """Called when `node` was committed for `plan`: a later `after` resolves rewritten ids of the whole history."""
        parent = plan.node.id if isinstance(plan, Continue) else None
        seen = self._calls.pop(parent, None) if parent is not None else None
        if seen:
            self._calls[node.id] = seen
        while len(self._calls) > 8:
            self._calls.pop(next(iter(self._calls)))

    # With `after`: everything before the replay of that node is known to be unchanged.
    def _resolve_after(self, node: Node, messages: Messages) -> Continue | None:
        if role_of(messages[0], "messages[0]") != "assistant":
            raise MessageError("with `after`, the first message must replay that node's assistant turn", field="messages[0]")
        losses = projection(node.served, messages[0])
        if losses is None:
            return None
        place = self._tree.place(node)
        calls = CallIds(self._tree, node, self._calls.get(node.id))
        calls.saw(place.depth - 1, messages[0])
        tail, key = self._tail(node, messages[1:], place.after, place.depth, calls)
        if calls.seen:
            self._calls[node.id] = calls.seen
        why, detail = self._edge(node, key, tail)
        return Continue(node=node, tail=tail, projection=label(losses), key=key, why=why, detail=detail)

    def _tail(self, node: Node, tail: Messages, key: bytes, depth: int, calls: CallIds) -> tuple[tuple[Message, ...], bytes]:
        restored: list[Message] = []
        for index, message in enumerate(tail):
            role_of(message, f"messages[{depth + index}]")
            reference = calls.reference(message)
            restored.append(self._restore(node, message, reference))
            key = next_key(key, message, reference)
            calls.saw(depth + index, message)
        return tuple(restored), key

    def _restore(self, node: Node, message: Message, reference: CallRef | str | None) -> Message:
        """A tool result with the call id that was served: the template may print it, and the sampled tokens hold the served one."""
        if not isinstance(reference, tuple):
            return message
        path = self._tree.messages(node) if reference[0] != self._tree.place(node).depth - 1 else None
        if path is not None and reference[0] >= len(path):
            return message  # points at an assistant message of the tail itself
        calls = calls_of(node.served if path is None else path[reference[0]])
        served = calls[reference[1]].get("id") if reference[1] < len(calls) else None
        return message if served in (None, message.get("tool_call_id")) else {**message, "tool_call_id": served}

    # Without `after`: the whole conversation.
    def _resolve_all(self, messages: Messages, tools: Tools | None) -> Plan:
        walk = self._walk(self._bases.key(tools), messages)
        found = self._deepest(walk)
        if found is None:
            return self._root(walk, tools)
        node, losses, ambiguous = found
        depth = self._tree.place(node).depth
        tail = tuple(self._restore(node, message, self._reference(walk, index)) for index, message in enumerate(messages[depth:], depth))
        self._calls[node.id] = dict(walk.calls)
        why, detail = self._edge(node, walk.keys[-1], tail)
        how = label(losses, ambiguous=ambiguous)
        return Continue(node=node, tail=tail, projection=how, key=walk.keys[-1], why=why, detail=detail, ambiguous=ambiguous)

    def _reference(self, walk: _Walk, index: int) -> CallRef | None:
        message = walk.messages[index]
        call_id = message.get("tool_call_id")
        return walk.calls.get(call_id) if isinstance(call_id, str) and role_of(message) != "assistant" else None

    def _walk(self, base: bytes, messages: Messages) -> _Walk:
        old, shared = None, 0
        for candidate in self._walks:
            if candidate.base == base and (length := _common(candidate.messages, messages)) > shared:
                old, shared = candidate, length
        calls = CallIds(self._tree, None)
        if old is not None and shared == len(old.messages):
            walk = old  # it only grows
            calls.seen = walk.calls
            self._walks.remove(old)
        else:
            walk = self._cut(old, shared, calls) if old is not None else _Walk(base, [], [], calls.seen)
        for index, message in enumerate(messages[shared:], shared):
            role_of(message, f"messages[{index}]")
            walk.keys.append(next_key(walk.keys[-1] if walk.keys else base, message, calls.reference(message)))
            calls.saw(index, message)
            walk.messages.append(message)
        self._walks.insert(0, walk)
        del self._walks[_REMEMBERED_BRANCHES:]
        return walk

    def _cut(self, old: _Walk, shared: int, calls: CallIds) -> _Walk:
        """What of a history seen before still holds when only its first `shared` messages are there."""
        for index, message in enumerate(old.messages[:shared]):
            calls.saw(index, message)
        known = {k: v for k, v in old.known.items() if self._tree.place(self._tree.nodes[k]).depth <= shared}
        return _Walk(old.base, old.messages[:shared], old.keys[:shared], calls.seen, known)

    def _deepest(self, walk: _Walk) -> tuple[Node, tuple[str, ...], bool] | None:
        for index in range(len(walk.messages) - 1, -1, -1):
            if walk.messages[index].get("role") != "assistant" or walk.keys[index] not in self._tree.ends:
                continue
            fits = [(fit, node) for node in self._tree.ends[walk.keys[index]] if (fit := self._fit(walk, node)) is not None]
            if fits:
                return self._prefer(fits, walk.keys[-1])
        return None

    def _prefer(self, fits: Sequence[tuple[tuple[int, tuple[str, ...]], Node]], key: bytes) -> tuple[Node, tuple[str, ...], bool]:
        best = min(score for (score, _), _ in fits)
        equal = [(losses, node) for (score, losses), node in fits if score == best]

        def rank(item: tuple[tuple[str, ...], Node]) -> tuple[bool, bool, int]:
            node = item[1]
            asked = (node.id, key) in self._tree.asked or self.flying.get((node.id, key), 0) > 0
            return self._replaced(node), asked, -node.seq

        losses, node = min(equal, key=rank)
        return node, losses, len(equal) > 1

    def _replaced(self, node: Node) -> bool:
        """A later attempt at the same turn began after this one was over: the client gave this one up."""
        attempts = self._tree.asked[node.parent, self._tree.place(node).before]
        return any(other.started > node.seq for other in attempts)

    def _fit(self, walk: _Walk, node: Node) -> tuple[int, tuple[str, ...]] | None:
        """How many losses lie between the recorded path to `node` and the walk, and which; None where a turn was edited."""
        steps: list[Node] = []
        cursor: Node | None = node
        while cursor is not None and cursor.id not in walk.known:
            steps.append(cursor)
            cursor = self._tree.parent(cursor)
        so_far = (0, ()) if cursor is None else walk.known[cursor.id]
        for step in reversed(steps):
            so_far = None if so_far is None else self._fit_step(walk, step, so_far)
            walk.known[step.id] = so_far
        return so_far

    def _fit_step(self, walk: _Walk, step: Node, so_far: tuple[int, tuple[str, ...]]) -> tuple[int, tuple[str, ...]] | None:
        score, all_losses = so_far[0], set(so_far[1])
        depth = self._tree.place(step).depth
        given = self._tree.given_messages(step)
        for index, message in enumerate((*given, step.served), depth - len(given) - 1):
            if message.get("role") != "assistant":
                continue
            losses = projection(message, walk.messages[index])
            if losses is None:
                return None
            score += len(losses)
            all_losses.update(losses)
        return score, tuple(sorted(all_losses))

    def _edge(self, node: Node, key: bytes, tail: Sequence[Message]) -> tuple[str | None, str]:
        if self.flying.get((node.id, key), 0):
            return "parallel", "another request for this turn was in flight"
        if (node.id, key) in self._tree.asked:
            return "retry", f"turn asked again after node {self._tree.asked[node.id, key][-1].id}"
        if any(message.get("role") == "assistant" for message in tail):
            return "edited", f"messages after node {node.id} are not what was served"
        if any(parent == node.id for parent, _ in self.flying):
            return "parallel", f"another continuation of node {node.id} was in flight"
        if self._tree.followers.get(node.id):
            return "branch", f"node {node.id} had already been continued otherwise"
        return None, ""

    def _root(self, walk: _Walk, tools: Tools | None) -> Root:
        why, detail, origin = self._why_root(walk, tools)
        messages = tuple(walk.messages)
        given: tuple[Given, ...] = messages
        if origin is not None:
            given = self.refer(origin, messages[self._tree.place(origin).depth :])
            messages = (*self._tree.messages(origin), *messages[self._tree.place(origin).depth :])
        return Root(messages=messages, given=given, key=walk.keys[-1], why=why, detail=detail, origin=origin)

    def refer(self, origin: Node, tail: Iterable[Message]) -> tuple[Given, ...]:
        """The conversation to `origin` as references to what was served, then `tail`."""
        given: list[Given] = []
        for step in self._tree.path(origin):
            given += [*step.given, ServedRef(step.id)]
        return (*given, *tail)

    def _why_root(self, walk: _Walk, tools: Tools | None) -> tuple[str, str, Node | None]:
        tree = self._tree
        if not len(tree) and not self.flying:
            return "first", "", None
        if self.flying.get((None, walk.keys[-1]), 0):
            return "parallel", "another request for this turn was in flight", None
        if (None, walk.keys[-1]) in tree.asked:
            return "retry", f"first turn asked again after node {tree.asked[None, walk.keys[-1]][-1].id}", None
        for base in tree.tool_sets:
            if base != walk.base and (found := self._deepest(self._rebased(walk, base))) is not None:
                return "tools_changed", f"node {found[0].id} was sampled under other tools", found[0]
        shared = next((i for i, key in enumerate(walk.keys) if key not in tree.passed), len(walk.keys))
        if shared == 0:
            return "new_conversation", "shares no message with this session", None
        role = str(walk.messages[min(shared, len(walk.messages) - 1)].get("role"))
        if any(message.get("role") == "assistant" for message in walk.messages):
            return "edited", f"messages[{shared}] ({role}) is not what led to node {tree.passed[walk.keys[shared - 1]].id}", None
        return "history_replaced", f"shares only its first {shared} message(s) with this session: a summary, or another task", None

    def _rebased(self, walk: _Walk, base: bytes) -> _Walk:
        calls = CallIds(self._tree, None)
        other = _Walk(base, walk.messages, [], calls.seen)
        key = base
        for index, message in enumerate(walk.messages):
            key = next_key(key, message, calls.reference(message))
            calls.saw(index, message)
            other.keys.append(key)
        return other


def _common(old: Sequence[Message], new: Messages) -> int:
    length = 0
    for a, b in zip(old, new, strict=False):
        if a is not b and a != b:
            break
        length += 1
    return length
