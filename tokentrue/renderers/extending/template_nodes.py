"""Vocabulary of history_use (flags, guards, places), and `build_effects`: a template that prints what one message
writes into the variables that a template carries from message to message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal, TypeAlias, cast

from jinja2 import Environment, Template, nodes

from tokentrue.json_types import JsonValue

Flags: TypeAlias = AbstractSet[str]
"""What a value depends on. "msg": the current message; "last": whether it is the last one; "now": something equal in
the short context but not in every iteration; "first", "second": the first message of all, or of a list without it;
"start": whether a message is the first; "neighbour": the message before; "turn": the recorded turn's text; "tools";
"top": a variable set outside loops; "pos:FROM:LIST": a position; "near:LIST": a position beside one; "state:NS.ATTR";
"msgs", "reversed", "future", "chosen": a list of messages; "bad:WHY": not understood.
"""
NONE: Flags = frozenset()


@dataclass(frozen=True, slots=True)
class MessageLoop:
    node: nodes.For
    base: str  # the list that positions count in
    is_reversed: bool
    is_filtered: bool


@dataclass(frozen=True, slots=True)
class Guard:
    test: nodes.Node
    holds: bool
    flags: Flags
    place: Place


@dataclass(frozen=True, slots=True)
class Write:
    """An assignment to a variable that is carried. Equal if of the same flags: nodes compare by their whole content."""

    node: nodes.Assign = field(compare=False)
    flags: Flags
    guards: tuple[Guard, ...] = field(compare=False)
    loop: MessageLoop = field(compare=False)


@dataclass(frozen=True, slots=True)
class Place:
    """Context of a statement: its message loop and the conditions inside that, an inner loop if any, and its macro."""

    guards: tuple[Guard, ...] = ()
    loop: MessageLoop | None = None
    inner: Literal["", "fields", "future"] = ""
    in_macro: str = ""
    bound: frozenset[str] = frozenset()  # names already set in this loop or macro

    @property
    def guard_flags(self) -> Flags:
        return join(guard.flags for guard in self.guards)

    @property
    def is_in_order(self) -> bool:
        """True if `loop.first` is false for the new messages here, and `loop.last` for the earlier ones."""
        return self.loop is not None and not self.inner and not (self.loop.is_filtered or self.loop.is_reversed)

    @property
    def scope(self) -> str:
        """Prefix of names set in a loop or macro, which are local to it."""
        return f"{self.in_macro}(" if self.in_macro else f"{id(self.loop.node)} " if self.loop else ""

    def under(self, test: nodes.Node, flags: Flags, place: Place, *, holds: bool = True) -> Place:
        return replace(self, guards=(*self.guards, Guard(test, holds, flags, place)))


def join(flags: Iterable[Flags]) -> Flags:
    return frozenset[str]().union(*flags)


def having(flags: Iterable[str], *prefixes: str) -> set[str]:
    return {flag for flag in flags if flag.startswith(prefixes)}


def constant(node: nodes.Node | None) -> JsonValue:
    if isinstance(node, nodes.Neg) and isinstance(node.node, nodes.Const):
        return -node.node.value
    return node.value if isinstance(node, nodes.Const) else None


def name_attribute(node: nodes.Node) -> str:
    match node:
        case nodes.Getattr(node=nodes.Name(name=name), attr=attribute):
            return f"{name}.{attribute}"
        case _:
            return ""


def read_field(node: nodes.Node | None, name: str) -> nodes.Expr | None:
    """Returns `x` of `x.name`, `x["name"]` or `x.get("name")`."""
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
    if not isinstance(node, (nodes.Assign, nodes.AssignBlock)):
        return []
    targets = node.target.items if isinstance(node.target, nodes.Tuple) else [node.target]
    return [target.name for target in targets if isinstance(target, nodes.Name)]


def literals(guards: Sequence[Guard]) -> Iterator[tuple[nodes.Node, bool, Guard]]:
    """Splits the guards into conditions that are all true (or false) together."""

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


def list_roles(test: nodes.Node, message: str = "") -> set[str]:
    """The roles of a test like `m.role == "user" or m.role == "tool"`; empty for any other. `message`: the name `m`."""
    match test:
        case nodes.Or():
            left, right = list_roles(test.left, message), list_roles(test.right, message)
            return left | right if left and right else set()
        case nodes.Compare(ops=[nodes.Operand(op="eq", expr=nodes.Const(value=str() as role))]):
            owner = read_field(test.expr, "role")
            return {role} if isinstance(owner, nodes.Name) and message in ("", owner.name) else set()
        case _:
            return set()


def only_raises(body: Sequence[nodes.Node]) -> bool:
    """True if the statements write nothing and can only reject the conversation."""
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


def list_name(node: nodes.Node) -> str:
    if isinstance(node, nodes.Name):
        return node.name
    if isinstance(node, nodes.Filter) and node.node is not None and node.name == "list":
        return list_name(node.node)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice) and node.arg.start is None:
        return list_name(node.node)
    return "?"


@cache
def chat_environment() -> Environment:
    from transformers.utils import chat_template_utils

    return chat_template_utils._compile_jinja_template("").environment  # pyright: ignore[reportPrivateUsage]


class NotUnderstood(Exception):
    pass


Writes: TypeAlias = Mapping[str, Sequence[Write]]


def build_effects(
    writes: Writes, wanted: set[str], macros: Iterable[nodes.Macro]
) -> tuple[Template | None, dict[str, frozenset[str] | None], tuple[str, ...]]:
    """Builds a template that prints, for the one message in `history`, the variables set by each loop and their values:
    the loops with only these assignments. Also returns the roles that write each variable, and the fields read.
    """
    if not wanted:
        return None, {}, ()
    kept = {id(write.node): (name, write) for name in sorted(wanted) for write in writes[name]}
    loops = {id(write.loop.node): write.loop.node for _, write in kept.values()}
    fields: set[str] = set()
    variables: dict[str, frozenset[str] | None] = {}
    body: list[nodes.Node] = [*macros]
    for number, loop in enumerate(loops.values()):
        if not isinstance(loop.target, nodes.Name):
            raise NotUnderstood("a loop that takes messages apart")
        message = loop.target.name
        for name in wanted:
            if inside := [write for write in writes[name] if write.loop.node is loop]:
                roles = [_find_roles(write, message) for write in inside]
                variables[f"{number}.{name}"] = frozenset(join(roles)) if all(roles) else None
        pruned = _Pruning(kept, f"{number}.", set(writes)).prune_loop(loop)
        body.append(pruned)
        for node in (*pruned.body, *([loop.test] if loop.test is not None else [])):
            fields |= _list_fields(node, message)
    environment = chat_environment()
    template = nodes.Template(body, lineno=1)
    template.set_lineno(1)
    template.set_environment(environment)
    return environment.from_string(template), variables, tuple(sorted(fields))


def _find_roles(write: Write, message: str) -> set[str]:
    known = (
        list_roles(node, message) for node, holds, guard in literals(write.guards) if holds and not guard.place.inner
    )
    return next(filter(None, known), set[str]())


@dataclass
class _Pruning:
    """Reduces a loop to the `kept` assignments, what they need, and the conditions around them."""

    kept: Mapping[int, tuple[str, Write]]
    prefix: str
    states: set[str]
    needed: set[str] = field(default_factory=set[str])

    def prune_loop(self, loop: nodes.For) -> nodes.For:
        while True:
            body = self._prune(loop.body, inner=False)
            names = {
                name.name
                for node in body
                for name in (node, *node.find_all(nodes.Name))
                if isinstance(name, nodes.Name)
            }
            if names <= self.needed:
                return nodes.For(loop.target, nodes.Name("history", "load"), body, [], loop.test, False)
            self.needed |= names

    def _prune(self, body: Sequence[nodes.Node], *, inner: bool) -> list[nodes.Node]:
        out: list[nodes.Node] = []
        for node in body:
            if id(node) in self.kept:
                name, write = self.kept[id(node)]
                value = nodes.Const("@") if having(write.flags, "pos:") else write.node.node
                out.append(nodes.Output([nodes.TemplateData(f"\0{self.prefix}{name}="), value]))
            elif not self.needed.isdisjoint(list_targets(node)):
                out.append(node)
            elif isinstance(node, nodes.For):
                if inside := self._prune(node.body, inner=True):
                    out.append(nodes.For(node.target, node.iter, inside, [], node.test, False))
            elif isinstance(node, nodes.If):
                first, *others = (
                    nodes.If(self._open(branch.test, inner=inner), self._prune(branch.body, inner=inner), [], [])
                    for branch in (node, *node.elif_)
                )
                first.elif_, first.else_ = others, self._prune(node.else_, inner=inner)
                if first.else_ or any(branch.body for branch in (first, *others)):
                    out.append(first)
        return out

    def _open(self, test: nodes.Node, *, inner: bool) -> nodes.Expr:
        """The test for a message that others follow, with every variable in it assumed to allow it."""
        match test:
            case nodes.And() | nodes.Or():
                return type(test)(self._open(test.left, inner=inner), self._open(test.right, inner=inner))
            case nodes.Not():
                is_state = name_attribute(test.node) in self.states
                return nodes.Const(True) if is_state else nodes.Not(self._open(test.node, inner=inner))
            case nodes.Getattr() if name_attribute(test) in self.states:
                return nodes.Const(True)
            case nodes.Getattr() if name_attribute(test) == "loop.last" and not inner:
                return nodes.Const(False)
            case _:
                return cast("nodes.Expr", test)


def _list_fields(node: nodes.Node, message: str) -> set[str]:
    """The fields of the message that the node reads."""

    def is_message(other: nodes.Node) -> bool:
        return isinstance(other, nodes.Name) and other.name == message

    match node:
        case nodes.Call(node=nodes.Getattr(attr="get") as method) if is_message(method.node) and node.args:
            name = constant(node.args[0])
        case nodes.Getattr() if is_message(node.node):
            name = node.attr
        case nodes.Getitem() if is_message(node.node):
            name = constant(node.arg)
        case nodes.Compare(ops=[nodes.Operand(op="in" | "notin") as operand]) if is_message(operand.expr):
            name = constant(node.expr)
        case nodes.Name() if is_message(node) and node.ctx == "load":
            raise NotUnderstood("a whole message decides")
        case _:
            return set[str]().union(*(_list_fields(child, message) for child in node.iter_child_nodes()))
    if not isinstance(name, str) or name == "get":
        raise NotUnderstood("a field that is not named decides")
    return {name}
