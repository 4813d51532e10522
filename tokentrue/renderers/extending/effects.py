"""What one message writes into the variables that a template carries from message to message, as a template that prints
it: the loops over messages with nothing but these assignments left."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, TypeAlias

from jinja2 import nodes

from tokentrue.renderers.extending.template_nodes import (
    Write,
    constant,
    is_position,
    list_names,
    list_targets,
    literals,
    name_attribute,
    read_field,
)


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
    """A template that prints, for the one message in `history`, the variables that each loop sets and their values:
    the loops with only these assignments left. And the roles of the messages that write each variable."""
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
    """The roles that a message can have that writes this; empty where no condition says it."""

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
    """The condition for a message that others follow, where every variable that it asks allows it."""
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
    """The fields of the message that these statements read."""
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
