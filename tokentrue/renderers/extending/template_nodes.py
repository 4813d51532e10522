"""What the reading of a template says about its nodes: what decides about a value, under which conditions a statement
runs; and small questions about nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from jinja2 import nodes

Flags: TypeAlias = frozenset[str]
"""What decides about a value: "msg" the current message; "last" whether it is the last one; "now" something that is
equal in the short context, but not in every iteration; "first", "second" the first messages; "tools"; "top" a variable
that is set outside loops; "pos:FROM:LIST" it is a position; "near:LIST" a position beside one; "state:NS.ATTR"; "msgs",
"reversed", "future", "chosen" it is a list of messages; "bad:WHY" not understood."""
NONE: Flags = frozenset()


@dataclass(frozen=True, slots=True)
class MessageLoop:
    node: nodes.For
    base: str  # the list that positions count in
    is_reversed: bool
    is_filtered: bool


@dataclass(frozen=True, slots=True)
class Guard:
    """A condition that holds (or does not) where a statement runs."""

    test: nodes.Node
    holds: bool
    flags: Flags
    place: Place


@dataclass(frozen=True, slots=True)
class Write:
    """`set ns.attr = value` in a loop over the messages."""

    node: nodes.Assign
    flags: Flags
    guards: tuple[Guard, ...]
    loop: MessageLoop


@dataclass(frozen=True, slots=True)
class Place:
    """Where a statement is: its conditions inside the outermost message loop, that loop, whether a loop inside it is
    around the statement, and whether the statement is in a macro."""

    guards: tuple[Guard, ...] = ()
    loop: MessageLoop | None = None
    inner: Literal["", "fields", "future"] = ""
    in_macro: str = ""
    bound: frozenset[str] = frozenset()  # names that are set before, in this loop or macro

    @property
    def knows_first(self) -> bool:
        """Whether `loop.first` is false for the new messages there."""
        return self.loop is not None and not self.inner and not (self.loop.is_filtered or self.loop.is_reversed)

    @property
    def knows_last(self) -> bool:
        """Whether `loop.last` is false for the earlier messages there."""
        return self.knows_first

    @property
    def scope(self) -> str:
        """Names that are set in a loop or macro live there."""
        return f"{self.in_macro}(" if self.in_macro else f"{id(self.loop.node)} " if self.loop else ""

    def under(self, guard: Guard) -> Place:
        return replace(self, guards=(*self.guards, guard))


def join(flags: Iterable[Flags]) -> Flags:
    return frozenset[str]().union(*flags)


def constant(node: nodes.Node | None) -> Any:
    if isinstance(node, nodes.Neg) and isinstance(node.node, nodes.Const):
        return -node.node.value
    return node.value if isinstance(node, nodes.Const) else None


def name_attribute(node: nodes.Node) -> str:
    return (
        f"{node.node.name}.{node.attr}" if isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name) else ""
    )


def read_field(node: nodes.Node | None, name: str) -> nodes.Expr | None:
    """`x` of `x.name`, `x["name"]` and `x.get("name")`."""
    match node:
        case nodes.Getattr(attr=attribute) if attribute == name:
            return node.node
        case nodes.Getitem() if constant(node.arg) == name:
            return node.node
        case nodes.Call(node=nodes.Getattr(attr="get") as method) if node.args and constant(node.args[0]) == name:
            return method.node
        case _:
            return None


def list_targets(node: nodes.Node) -> list[str]:
    """Names that this statement sets."""
    if not isinstance(node, (nodes.Assign, nodes.AssignBlock)):
        return []
    targets = node.target.items if isinstance(node.target, nodes.Tuple) else [node.target]
    return [target.name for target in targets if isinstance(target, nodes.Name)]


def literals(guards: Sequence[Guard]) -> Iterator[tuple[nodes.Node, bool, Guard]]:
    """The conditions that all hold (or do not) where these guards do."""

    def split(node: nodes.Node, holds: bool) -> Iterator[tuple[nodes.Node, bool]]:
        if isinstance(node, nodes.Not):
            yield from split(node.node, not holds)
        elif isinstance(node, nodes.And if holds else nodes.Or):
            yield from split(node.left, holds)
            yield from split(node.right, holds)
        else:
            yield node, holds

    for guard in guards:
        for node, holds in split(guard.test, guard.holds):
            yield node, holds, guard


def list_names(node: nodes.Node) -> Iterator[str]:
    if isinstance(node, nodes.Name):
        yield node.name
    for name in node.find_all(nodes.Name):
        yield name.name


def only_raises(body: Sequence[nodes.Node]) -> bool:
    """Whether these statements write nothing and only ever refuse the conversation."""
    found = False
    for node in body:
        if isinstance(node, nodes.Output):
            for child in node.nodes:
                raises = isinstance(child, nodes.Call) and list_name(child.node) == "raise_exception"
                if not raises and not (isinstance(child, nodes.TemplateData) and not child.data.strip()):
                    return False
                found = found or raises
        elif isinstance(node, nodes.If):
            if not only_raises([*node.body, *(child for branch in node.elif_ for child in branch.body), *node.else_]):
                return False
            found = True
        else:
            return False
    return found


def is_position(write: Write) -> bool:
    return any(flag.startswith("pos:") for flag in write.flags)


def list_name(node: nodes.Node) -> str:
    if isinstance(node, nodes.Name):
        return node.name
    if isinstance(node, nodes.Filter) and node.node is not None and node.name in {"reverse", "list"}:
        return list_name(node.node)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice) and node.arg.start is None:
        return list_name(node.node)
    return "?"
