"""Vocabulary of history_use (flags, guards, places), and `build_effects`: a template that prints what one message
writes into the variables that a template carries from message to message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, TypeAlias

from jinja2 import nodes

Flags: TypeAlias = frozenset[str]
"""What a value depends on. "msg": the current message; "last": whether it is the last one; "now": something equal in
the short context but not in every iteration; "first", "second": the first messages; "tools"; "top": a variable set
outside loops; "pos:FROM:LIST": a position; "near:LIST": a position beside one; "state:NS.ATTR"; "msgs", "reversed",
"future", "chosen": a list of messages; "bad:WHY": not understood.
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
    node: nodes.Assign
    flags: Flags
    guards: tuple[Guard, ...]
    loop: MessageLoop


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
    def knows_first(self) -> bool:
        """True if `loop.first` is false for the new messages here."""
        return self.loop is not None and not self.inner and not (self.loop.is_filtered or self.loop.is_reversed)

    @property
    def knows_last(self) -> bool:
        """True if `loop.last` is false for the earlier messages here."""
        return self.knows_first

    @property
    def scope(self) -> str:
        """Prefix of names set in a loop or macro, which are local to it."""
        return f"{self.in_macro}(" if self.in_macro else f"{id(self.loop.node)} " if self.loop else ""

    def under(self, guard: Guard) -> Place:
        return replace(self, guards=(*self.guards, guard))


def join(flags: Iterable[Flags]) -> Flags:
    return frozenset[str]().union(*flags)


def make_flags(*flags: str) -> Flags:
    return frozenset(flags)


def bad(why: str) -> Flags:
    return frozenset({f"bad:{why}"})


def has(flags: Iterable[str], *prefixes: str) -> bool:
    return any(flag.startswith(prefixes) for flag in flags)


def without(flags: Iterable[str], *prefixes: str) -> Flags:
    return frozenset(flag for flag in flags if not flag.startswith(prefixes))


def constant(node: nodes.Node | None) -> Any:
    if isinstance(node, nodes.Neg) and isinstance(node.node, nodes.Const):
        return -node.node.value
    return node.value if isinstance(node, nodes.Const) else None


def name_attribute(node: nodes.Node) -> str:
    return (
        f"{node.node.name}.{node.attr}" if isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name) else ""
    )


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


def list_names(node: nodes.Node) -> Iterator[str]:
    if isinstance(node, nodes.Name):
        yield node.name
    for name in node.find_all(nodes.Name):
        yield name.name


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


@cache
def chat_environment() -> Any:
    from transformers.utils import chat_template_utils

    return chat_template_utils._compile_jinja_template("").environment  # pyright: ignore[reportPrivateUsage]


class NotUnderstood(Exception):
    pass


Kept: TypeAlias = dict[int, tuple[str, Write]]


def build_effects(
    writes: dict[str, list[Write]], wanted: set[str], macros: Iterable[nodes.Macro]
) -> tuple[Any, dict[str, frozenset[str] | None], tuple[str, ...]]:
    """Builds a template that prints, for the one message in `history`, the variables set by each loop and their values:
    the loops with only these assignments. Also returns the roles that write each variable, and the fields read.
    """
    if not wanted:
        return None, {}, ()
    kept: Kept = {id(write.node): (name, write) for name in sorted(wanted) for write in writes[name]}
    loops = {id(write.loop.node): write.loop.node for _, write in kept.values()}
    fields: set[str] = set()
    variables: dict[str, frozenset[str] | None] = {}
    body: list[nodes.Node] = [*macros]
    for number, loop in enumerate(loops.values()):
        if not isinstance(loop.target, nodes.Name):
            raise NotUnderstood("a loop that takes messages apart")
        for name in wanted:
            if inside := [write for write in writes[name] if write.loop.node is loop]:
                roles = [_list_roles(write, loop.target.name) for write in inside]
                variables[f"{number}.{name}"] = frozenset[str]().union(*roles) if all(roles) else None
        needed: set[str] = set()
        while True:
            pruned = _prune(loop.body, kept, needed, f"{number}.", set(writes))
            names = {name for node in pruned for name in list_names(node)}
            if names <= needed:
                break
            needed |= names
        body.append(nodes.For(loop.target, nodes.Name("history", "load"), pruned, [], loop.test, False))
        fields |= _list_fields([*pruned, *([loop.test] if loop.test is not None else [])], loop.target.name)
    environment = chat_environment()
    template = nodes.Template(body, lineno=1)
    template.set_lineno(1)
    template.set_environment(environment)
    code = environment.compile(template)
    compiled = environment.template_class.from_code(environment, code, dict(environment.globals))
    return compiled, variables, tuple(sorted(fields))


def _list_roles(write: Write, message: str) -> frozenset[str]:

    def list_roles(node: nodes.Node) -> frozenset[str]:
        match node:
            case nodes.Or():
                left, right = list_roles(node.left), list_roles(node.right)
                return left | right if left and right else frozenset()
            case nodes.Compare(ops=[nodes.Operand(op="eq", expr=nodes.Const(value=str() as role))]):
                owner = read_field(node.expr, "role")
                return frozenset({role} if isinstance(owner, nodes.Name) and owner.name == message else ())
            case _:
                return frozenset()

    known = (list_roles(node) for node, holds, guard in literals(write.guards) if holds and not guard.place.inner)
    return next(filter(None, known), frozenset[str]())


def _prune(
    body: Sequence[nodes.Node], kept: Kept, needed: set[str], prefix: str, states: set[str], *, inner: bool = False
) -> list[nodes.Node]:
    out: list[nodes.Node] = []
    for node in body:
        if id(node) in kept:
            name, write = kept[id(node)]
            value = nodes.Const("@") if is_position(write) else write.node.node
            out.append(nodes.Output([nodes.TemplateData(f"\0{prefix}{name}="), value]))
        elif not needed.isdisjoint(list_targets(node)):
            out.append(node)
        elif isinstance(node, nodes.For):
            if inside := _prune(node.body, kept, needed, prefix, states, inner=True):
                out.append(nodes.For(node.target, node.iter, inside, [], node.test, False))
        elif isinstance(node, nodes.If):
            branches = [
                (branch.test, _prune(branch.body, kept, needed, prefix, states, inner=inner))
                for branch in (node, *node.elif_)
            ]
            other = _prune(node.else_, kept, needed, prefix, states, inner=inner)
            if other or any(inside for _, inside in branches):
                tests = [_open(test, states, inner=inner) for test, _ in branches]
                elifs = [
                    nodes.If(test, inside, [], []) for test, (_, inside) in list(zip(tests, branches, strict=True))[1:]
                ]
                out.append(nodes.If(tests[0], branches[0][1], elifs, other))
    return out


def _open(test: nodes.Node, states: set[str], *, inner: bool) -> Any:
    """The test for a message that others follow, with every variable in it assumed to allow it."""
    match test:
        case nodes.And():
            return nodes.And(_open(test.left, states, inner=inner), _open(test.right, states, inner=inner))
        case nodes.Or():
            return nodes.Or(_open(test.left, states, inner=inner), _open(test.right, states, inner=inner))
        case nodes.Not():
            is_state = name_attribute(test.node) in states
            return nodes.Const(True) if is_state else nodes.Not(_open(test.node, states, inner=inner))
        case nodes.Getattr():
            name = name_attribute(test)
            if name in states:
                return nodes.Const(True)
            return nodes.Const(False) if name == "loop.last" and not inner else test
        case _:
            return test


def _list_fields(body: Sequence[nodes.Node], message: str) -> set[str]:
    fields: set[str] = set()

    def is_message(node: nodes.Node) -> bool:
        return isinstance(node, nodes.Name) and node.name == message

    def visit(node: nodes.Node) -> None:
        match node:
            case nodes.Call(node=nodes.Getattr(attr="get") as method) if is_message(method.node) and node.args:
                read(constant(node.args[0]))
            case nodes.Getattr() if is_message(node.node):
                read(node.attr)
            case nodes.Getitem() if is_message(node.node):
                read(constant(node.arg))
            case nodes.Compare(ops=[nodes.Operand(op="in" | "notin") as operand]) if is_message(operand.expr):
                read(constant(node.expr))
            case nodes.Name() if is_message(node) and node.ctx == "load":
                raise NotUnderstood("a whole message decides")
            case _:
                for child in node.iter_child_nodes():
                    visit(child)

    def read(name: Any) -> None:
        if not isinstance(name, str) or name == "get":
            raise NotUnderstood("a field that is not named decides")
        fields.add(name)

    for node in body:
        visit(node)
    return fields
