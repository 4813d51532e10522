"""Compiles a chat template that writes nothing for the earlier messages of a conversation, but runs all else for them.

`extend` needs only what a template writes after the recorded turn, while a rendering costs more at every turn. So each
loop over messages gets a second body for earlier messages. Example:

    {% for m in messages %}                                  {% for m in messages %}
      {{ "<|" + m.role + "|>" + m.content }}                   {% if m is EARLIER %}SKIPPED
      {% if "/think" in m.content %}               becomes       {% if "/think" in m.content %}
        {% set ns.think = true %}                                  {% set ns.think = true %}{% endif %}
      {% endif %}                                              {% else %} (the body as it was) {% endif %}
    {% endfor %}                                             {% endfor %}

What the second body keeps: writes to namespaces, calls that may have an effect (a macro that writes to a namespace),
break and continue, and the conditions and assignments that these need. Statements that this file does not know are kept
whole. Captured text (macros, {% set x %}…{% endset %}) is not touched. Where something was left out, the
text holds SKIPPED: a caller that finds it after the recorded turn renders the template as it is."""

import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from jinja2 import nodes

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.sandbox import SandboxedEnvironment

SKIPPED = f"\ufdef{secrets.token_hex(8)}\ufdef"
"""Random per process, so no input can contain it deliberately."""
EARLIER = "tokentrue_earlier"
MARK = nodes.Output([nodes.TemplateData(SKIPPED)])
RAISE = "raise_exception"
MAX_ATTRIBUTES = 1000
PURE_FUNCTIONS = {"range", "dict", "namespace", "strftime_now"}
LAZY_FILTERS = {"map", "select", "reject", "selectattr", "rejectattr", "batch", "slice", "unique", "reverse", "items"}
"""Their values are used up by reading them."""


class EarlierMessage(dict[str, Any]):
    """A message before the recorded turn. A type says so, because a new message may be equal to an earlier one."""

    __slots__ = ()


EarlierMessage.__name__, EarlierMessage.__module__ = "dict", "builtins"  # errors of templates name an object's type


def is_earlier(value: object) -> bool:
    return type(value) is EarlierMessage


_DICT_ATTRIBUTES = frozenset(dir(EarlierMessage))
_WRAPPED = ("format", "format_map")  # the sandbox replaces these methods of strings
_type_of: Callable[[object], type] = type


def compile_for_later(source: str, environment: "SandboxedEnvironment") -> "Template":
    own: Any = environment.overlay()
    own.tests = {**own.tests, EARLIER: is_earlier}
    _look_up_faster(own)
    return own.from_string(skip_earlier(own.parse(source)))


def _look_up_faster(environment: Any) -> None:
    """The sandbox's own look-up took half of the time of a long conversation. For a field of a message it raised and
    caught an AttributeError. Whether an attribute is safe depends on the object's type and the name alone."""
    look_up = environment.getattr
    safe: set[tuple[type, str]] = set()

    def get(obj: Any, attribute: str) -> Any:
        kind = _type_of(obj)
        if kind in (EarlierMessage, dict) and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else environment.undefined(obj=obj, name=attribute)
        value = getattr(obj, attribute, None)
        if value is None or getattr(value, "__name__", "") in _WRAPPED:
            return look_up(obj, attribute)
        if (kind, attribute) not in safe:
            if not environment.is_safe_attribute(obj, attribute, value):
                return look_up(obj, attribute)
            if len(safe) == MAX_ATTRIBUTES:  # a template can read names that a conversation holds
                safe.clear()
            safe.add((kind, attribute))
        return value

    environment.getattr = get


def skip_earlier(template: nodes.Template) -> nodes.Template:
    """The given tree must not be used again."""
    names = {name.name for name in template.find_all(nodes.Name)}
    stored = (node.node for node in template.find_all(nodes.Assign))
    has_iterators = any(isinstance(value, nodes.Filter) and value.name in LAZY_FILTERS for value in stored)
    if not has_iterators and names.isdisjoint({"cycler", "joiner"}):
        template.body = _Skipping(template).skip(template.body)
    return template.set_lineno(1).set_environment(template.environment)  # pyright: ignore


class _Skipping:
    def __init__(self, template: nodes.Template) -> None:
        self._local_namespaces = _list_local_namespaces(template)
        macros = {macro.name: macro for macro in template.find_all(nodes.Macro)}
        self._pure = {*PURE_FUNCTIONS, *macros}
        while impure := {name for name in self._pure & macros.keys() if not self._is_pure(*macros[name].body)}:
            self._pure -= impure

    def skip(self, body: list[nodes.Node]) -> list[nodes.Node]:
        """Statements that write nothing up to the earlier messages of the last loop over messages."""
        loops = [index for index, node in enumerate(body) if _has_message_loop(node)]
        if not loops:
            return body
        at = loops[-1]
        head = self._list_effects(body[:at], _list_names(body))
        match body[at]:
            case nodes.For() as loop:
                loop.body = [_choose(loop, [MARK, *self._list_earlier_effects(loop.body, set())], loop.body)]
            case nodes.If() as choice:
                for branch in (choice, *choice.elif_):
                    branch.body = self.skip(branch.body)
                choice.else_ = self.skip(choice.else_)
            case _:
                pass
        return [*head, MARK, *body[at:]]

    def _list_earlier_effects(self, body: Sequence[nodes.Node], needed: set[str]) -> list[nodes.Node]:
        """Without raise_exception: earlier messages are recorded, whatever the template says about them now."""
        before, self._pure = self._pure, {*self._pure, RAISE}
        effects = self._list_effects(body, needed)
        self._pure = before
        return effects

    def _list_effects(self, body: Sequence[nodes.Node], needed: set[str]) -> list[nodes.Node]:
        """Without those that only write text. `needed`: the names that later statements read; those that the result
        reads are added."""
        out: list[nodes.Node] = []
        for node in reversed(body):
            match node:
                case nodes.Output() if self._is_pure(node):
                    continue
                case nodes.Assign(target=nodes.Name(name=name) | nodes.NSRef(name=name)) if (
                    name not in needed and self._is_pure(node)
                ):
                    continue
                case nodes.CallBlock(call=nodes.Call(node=nodes.ExtensionAttribute())) if not (
                    self._list_effects(node.body, needed)
                ):
                    continue  # {% generation %}
                case nodes.If():
                    node = self._list_branch_effects(node, needed)
                    if not any((node.body, node.elif_, node.else_)) and self._is_pure(node.test):
                        continue
                    needed |= _list_names([node.test])
                case nodes.For(recursive=False):
                    inside = self._list_effects(node.body, needed)
                    if not (inside or node.else_) and self._is_pure(node.iter):
                        continue
                    if isinstance(node.target, nodes.Name) and _calls_raise(inside):
                        inside = [_choose(node, self._list_earlier_effects(node.body, needed), inside)]
                    node = nodes.For(node.target, node.iter, inside, node.else_, node.test, False)
                    needed |= _list_names([node])
                case _:
                    needed |= _list_names([node])
            out.append(node)
        return out[::-1]

    def _list_branch_effects(self, node: nodes.If, needed: set[str]) -> nodes.If:
        others = [self._list_branch_effects(branch, needed) for branch in node.elif_]
        body, otherwise = self._list_effects(node.body, needed), self._list_effects(node.else_, needed)
        while others and not otherwise and not others[-1].body and self._is_pure(others[-1].test):
            others.pop()
        needed |= _list_names([branch.test for branch in others])
        return nodes.If(node.test, body, others, otherwise)

    def _is_pure(self, *body: nodes.Node) -> bool:
        """False if the nodes can do more than write text and set local names. The sandbox lets no method change its
        object."""
        for node in _walk(body):
            match node:
                case nodes.NSRef(name=name) if name in self._local_namespaces:
                    pass
                case nodes.NSRef() | nodes.Break() | nodes.Continue():
                    return False
                case nodes.Call(node=nodes.Name(name=name)) if name in self._pure:
                    pass
                case nodes.Call(node=nodes.Getattr(attr=name)) if hasattr(str, name) or hasattr(dict, name):
                    pass
                case nodes.Call():
                    return False
                case _:
                    pass
        return True


def _choose(loop: nodes.For, earlier: list[nodes.Node], other: list[nodes.Node]) -> nodes.If:
    message = nodes.Name(cast("nodes.Name", loop.target).name, "load")
    return nodes.If(nodes.Test(message, EARLIER, [], [], None, None), earlier, [], other)


def _calls_raise(body: Sequence[nodes.Node]) -> bool:
    return any(isinstance(node, nodes.Name) and node.name == RAISE for node in _walk(body))


def _list_local_namespaces(template: nodes.Template) -> set[str]:
    """Set only inside loops and macros, and only to a new namespace: no other iteration or call can read it."""
    places = [*template.find_all(nodes.For), *template.find_all(nodes.Macro)]
    local = {
        id(node.target): node.target.name
        for node in _walk([statement for place in places for statement in place.body])
        if isinstance(node, nodes.Assign) and isinstance(node.target, nodes.Name) and _is_namespace(node.node)
    }
    others = {name.name for name in template.find_all(nodes.Name) if name.ctx != "load" and id(name) not in local}
    return set(local.values()) - others


def _is_namespace(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name) and node.node.name == "namespace"


def _has_message_loop(node: nodes.Node) -> bool:
    match node:
        case nodes.If():
            return any(map(_has_message_loop, (*node.body, *node.elif_, *node.else_)))
        case nodes.For(target=nodes.Name(), recursive=False):
            return any(isinstance(child, nodes.Output) for child in _walk(node.body)) and _reads_role(node)
        case _:
            return False


def _reads_role(loop: nodes.For) -> bool:
    return any(
        (isinstance(node, nodes.Getattr) and node.attr == "role")
        or (isinstance(node, nodes.Const) and node.value == "role")
        for node in _walk(loop.body)
    )


def _walk(body: Sequence[nodes.Node]) -> Iterator[nodes.Node]:
    for node in body:
        yield node
        yield from _walk([*node.iter_child_nodes()])


def _list_names(body: Sequence[nodes.Node]) -> set[str]:
    return {node.name for node in _walk(body) if isinstance(node, nodes.Name | nodes.NSRef)}
