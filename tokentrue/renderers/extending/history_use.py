"""Static analysis of a chat template: which earlier messages does the text after the recorded turn depend on?

Rendering the whole history costs more at every turn. `analyse` reads the template's syntax tree and returns the messages
that must be rendered to get the same text. Example, a template that remembers a switch:

    {% for m in messages %}
      {% if m.role == "user" and "/think" in m.content %}{% set ns.think = true %}{% endif %} ...
    {% endfor %}
    {% if add_generation_prompt and not ns.think %}<think></think>{% endif %}

Every write to `ns.think` overwrites the value and is conditioned on the current message alone, so its last writer
decides: keep the last user message with "/think". Comparisons of positions are safe, too: dropping messages does not
change the order of the others.

A walk over the tree labels each expression with `Flags` (see template_nodes); walks repeat until the labels are stable.
`tail` collects the flags that decide about text after the turn. What is not understood (counts, arithmetic on
positions, collected texts) is a "bad:WHY" flag: the caller then renders the real history.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, cast

from jinja2 import nodes

from tokentrue.records import record
from tokentrue.renderers.extending.template_nodes import (
    NONE,
    Flags,
    Guard,
    MessageLoop,
    NotUnderstood,
    Place,
    Write,
    build_effects,
    chat_environment,
    constant,
    having,
    join,
    list_name,
    list_roles,
    list_targets,
    literals,
    name_attribute,
    only_raises,
    read_field,
)

LISTS = {"msgs", "reversed", "future", "chosen"}
MESSAGES = {"msgs"}  # all of them, in order
UNUSUAL = {"second": "after the system message", "neighbour": "before the recorded turn"}
TURN_SHAPE = {"role", "tool_calls"}  # fields that the sentinel does not change
LOOP_FLAGS: Mapping[str, Flags] = {
    "last": {"last"},
    "first": {"now", "start"},
    "previtem": {"now", "start", "neighbour", "turn"},
    "nextitem": {"now"},
}


@record
class HistoryUse:
    """What the text after the recorded turn reads. `why`: the reason if the template is not understood, else empty.

    `effects`: a template that prints which of `variables` one message writes. `variables`: name to the roles that write
    it, None if unknown. `fields`: the message fields that `effects` reads.
    """

    why: str = ""
    effects: Any = None
    variables: Mapping[str, frozenset[str] | None] = field(default_factory=dict[str, "frozenset[str] | None"])
    fields: tuple[str, ...] = ()
    first: bool = False  # reads the first message
    tools: bool = False
    roles: frozenset[str] = frozenset()  # reads the last message of these roles
    asks_turn: bool = False  # reads the text of the recorded turn
    gaps: bool = False  # reads whether two messages are adjacent

    @property
    def reads_turn(self) -> bool:
        return self.asks_turn or bool(self.why)


def analyse(source: str) -> HistoryUse:
    try:
        return _Analysis(chat_environment().parse(source)).find_use()
    except NotUnderstood as error:
        return HistoryUse(why=str(error))
    except (AttributeError, RecursionError) as error:  # a node has an unexpected form
        return HistoryUse(why=f"its form is not known ({error})")


FlagsByName: TypeAlias = defaultdict[str, set[str]]


def _flags_by_name() -> FlagsByName:
    return defaultdict(set[str])


@dataclass
class _Findings:
    """Results of one walk over the tree."""

    variables: FlagsByName = field(default_factory=lambda: defaultdict(set[str], messages={*MESSAGES}, tools={"tools"}))
    control: FlagsByName = field(default_factory=_flags_by_name)  # what decides if a name is set
    kinds: FlagsByName = field(default_factory=_flags_by_name)
    """What a name holds: "content" of a message, "part" of a content or a character, or "other"."""
    macros: FlagsByName = field(default_factory=_flags_by_name)
    namespaces: set[str] = field(default_factory=set[str])  # created outside loops and macros: they carry state
    initial: defaultdict[str, list[nodes.Node]] = field(
        default_factory=lambda: defaultdict(list[nodes.Node]), compare=False
    )
    writes: defaultdict[str, list[Write]] = field(default_factory=lambda: defaultdict(list[Write]))
    faults: dict[str, str] = field(default_factory=dict[str, str])  # why a variable's last writer does not decide it
    lists: dict[str, int] = field(default_factory=lambda: {"messages": 1})  # how often a list of messages is assigned

    def add(self, name: str, flags: Flags, kinds: Flags = frozenset({"other"})) -> None:
        self.variables[name] |= flags
        self.kinds[name] |= kinds

    def forget_bad(self) -> None:
        for flags in (self.variables, self.control, self.macros):
            for found in flags.values():
                found -= having(found, "bad:")
        self.faults = {}


class _Analysis:
    def __init__(self, template: nodes.Template) -> None:
        self.template = template
        self.macros = {macro.name: macro for macro in template.find_all(nodes.Macro)}
        self.known = self.found = _Findings()
        self._forget()

    def _forget(self) -> None:
        self.tail: set[str] = set()  # flags that decide the text after the recorded turn
        self.cut: set[str] = set()  # flags that decide which messages a list contains
        self.has_printed = False
        self.slices: set[int] = set()  # where a slice drops the first message

    def find_use(self) -> HistoryUse:
        for number in range(20):
            self.found = _Findings()
            self._forget()
            self._walk(self.template.body, Place())
            self.found.faults = {name: self._find_fault(name, writes) for name, writes in self.found.writes.items()}
            if number < 5:  # "bad" found before all namespaces are known would persist
                self.found.forget_bad()
            elif self.found == self.known:
                return self._read_tail()
            self.known = self.found
        raise NotUnderstood("its variables depend on each other")

    def _read_tail(self) -> HistoryUse:
        tail = self.tail
        if tail & {"start", "first", "gap"} or having(tail, "state:"):
            tail |= self.cut
        tail |= having(self.cut, "bad:")
        reasons = sorted(flag[4:] for flag in having(tail, "bad:"))
        reasons += [f"a {flag.partition(':')[0]} value decides" for flag in having(tail, "pos:", "near")]
        if tail & LISTS:
            reasons.append("a list of messages decides")
        reasons += [f"the message {where} decides" for flag, where in UNUSUAL.items() if flag in tail]
        if len(self.slices) > 2 or ("start" in tail and ("cut" in self.cut or len(self.slices) > 1)):
            reasons.append("it cuts off more than one first message")
        if not self.has_printed:
            reasons.append("no loop writes the messages")
        if reasons:
            raise NotUnderstood("; ".join(reasons[:3]))
        carried = {flag[6:] for flag in having(tail, "state:")} & self.found.writes.keys()
        effects, variables, fields = build_effects(self.found.writes, carried, self.macros.values())
        if {"name", "tool_call_id"} & set(fields):
            raise NotUnderstood("it carries the names of calls")  # a tool result may get its name from its call
        is_carried = any(not roles or "assistant" in roles for roles in variables.values())
        return HistoryUse(
            effects=effects,
            variables=variables,
            fields=fields,
            first="first" in tail,
            tools="tools" in tail,
            roles=frozenset(flag[5:] for flag in having(tail, "last:")),
            asks_turn=bool(tail & {"turn", "last:assistant"}) or (is_carried and not TURN_SHAPE.issuperset(fields)),
            gaps="gap" in tail,
        )

    # statements

    def _walk(self, body: Sequence[nodes.Node], place: Place) -> None:
        for node in body:
            self._statement(node, place)
            place = replace(place, bound=place.bound.union(list_targets(node))) if place.scope else place

    def _statement(self, node: nodes.Node, place: Place) -> None:
        match node:
            case nodes.Output():
                if not only_raises([node]):
                    self._decide(join(self._flags(child, place) for child in node.nodes), place)
                    self._decide(place.guard_flags, place)
            case nodes.If():
                self._if(node, place)
            case nodes.For():
                self._for(node, place)
            case nodes.Assign(target=nodes.NSRef(name=name, attr=attribute)):
                self._assign_attribute(node, f"{name}.{attribute}", place)
            case nodes.Assign():
                self._assign(node, place)
            case nodes.AssignBlock(target=nodes.Name(name=name)):
                flags = self._find_text_flags(node.body, place)
                if self._has_message_loop(node.body, place):
                    flags |= {"bad:texts of the messages are collected"}
                self._store(name, flags, place, {"other"})
            case nodes.Macro():
                inside = Place(in_macro=node.name, bound=frozenset(parameter.name for parameter in node.args))
                for parameter, default in zip(node.args[::-1], node.defaults[::-1], strict=False):
                    self.found.add(inside.scope + parameter.name, self._flags(default, inside))
                self.found.macros[node.name] |= self._find_text_flags(node.body, inside)
            case nodes.CallBlock() if isinstance(node.call.node, nodes.ExtensionAttribute):  # {% generation %}
                self._walk(node.body, place)
            case _:
                self.tail.add(f"bad:{type(node).__name__.lower()}")

    def _find_text_flags(self, body: Sequence[nodes.Node], place: Place) -> set[str]:
        """Flags that decide the text which the statements write."""
        outside, self.tail, self.has_printed = (self.tail, self.has_printed), set(), True
        self._walk(body, place)
        flags, (self.tail, self.has_printed) = self.tail, outside
        return flags

    def _if(self, node: nodes.If, place: Place) -> None:
        around = place
        for branch in (node, *node.elif_):
            if only_raises(branch.body) or self._asks_for_media(branch.test, place):
                continue  # its condition is false in every conversation that renders
            flags = self._test(branch.test, place)
            if self._has_message_loop(branch.body, place):
                self._decide(flags, place, always=True)
            self._walk(branch.body, around.under(branch.test, flags, place))
            around = around.under(branch.test, flags, place, holds=False)
        self._walk(node.else_, around)

    def _for(self, node: nodes.For, place: Place) -> None:
        flags = self._flags(node.iter, place)
        names = [name.name for name in (node.target, *node.target.find_all(nodes.Name)) if isinstance(name, nodes.Name)]
        if not flags & LISTS:
            within = replace(
                place, inner=place.inner or ("fields" if place.loop else ""), bound=place.bound.union(names)
            )
            kinds = {"part" if self._find_kinds(node.iter, place) == {"content"} else "other"}
            for name in names:
                self.found.add(place.scope + name, flags | place.guard_flags, kinds)
            flags = flags | (self._test(node.test, within) if node.test else NONE)
            self._walk(node.body, within.under(nodes.Const(True), flags, place))
            self._walk(node.else_, place.under(nodes.Const(True), flags, place))
            return
        is_future = "future" in flags
        if "chosen" in flags or node.recursive or node.else_ or (place.in_macro and not is_future):
            self.tail.add("bad:a loop over some of the messages")
            return
        if place.loop is not None:  # a loop over messages inside the loop over messages
            if not is_future:
                self.tail.add("bad:a loop over all messages for each message")
            for name in names:
                self.found.add(place.scope + name, {"now"})
            self._walk(node.body, replace(place, inner="future", bound=place.bound.union(names)))
            return
        self._note_cut(node.iter, place)
        loop = MessageLoop(node, list_name(node.iter), "reversed" in flags, node.test is not None)
        prints = not only_raises(node.body) and any(not only_raises([child]) for child in node.find_all(nodes.Output))
        faults = {
            "a loop over some of the messages": is_future,
            "messages written in reverse": prints and loop.is_reversed,
            "break": node.find(nodes.Break) is not None,
        }
        self.tail |= {f"bad:{why}" for why, is_found in faults.items() if is_found}
        self.has_printed = self.has_printed or prints
        inside = Place(loop=loop, bound=frozenset(names))
        for name in names:
            self.found.add(inside.scope + name, {"msg"})
        if node.test is not None:
            inside = inside.under(node.test, self._test(node.test, inside), inside)
        self._walk(node.body, inside)

    def _has_message_loop(self, body: Sequence[nodes.Node], place: Place) -> bool:
        loops = (loop for child in body for loop in (child, *child.find_all(nodes.For)) if isinstance(loop, nodes.For))
        return any(self._flags(loop.iter, place) & LISTS for loop in loops)

    def _assign(self, node: nodes.Assign, place: Place) -> None:
        flags = self._flags(node.node, place)
        if _is_namespace(node.node):
            self._create_namespace(cast("nodes.Name", node.target).name, cast("nodes.Call", node.node), place)
            return
        names = list_targets(node)
        if isinstance(node.target, nodes.Tuple) and len(names) != len(node.target.items):
            self.tail.add("bad:a namespace is set in a tuple")
        for name in names:
            if flags & LISTS:
                self.found.lists[name] = self.found.lists.get(name, 0) + 1
                self.found.add(place.scope + name, flags & LISTS | having(flags, "role:", "bad:"))
                self._note_cut(node.node, place)
            else:
                is_one = isinstance(node.target, nodes.Name)
                self._store(name, flags, place, self._find_kinds(node.node, place) if is_one else {"other"})

    def _create_namespace(self, name: str, call: nodes.Call, place: Place) -> None:
        if place.loop is None and not place.in_macro:
            self.found.namespaces.add(name)
        for option in call.kwargs:
            full = f"{name}.{option.key}"
            self.found.initial[full].append(option.value)
            self.found.add(full, self._flags(option.value, place))
        if place.loop is not None and name in self.known.namespaces:
            self.found.add(name, {"bad:a namespace that is made again"})

    def _note_cut(self, value: nodes.Node, place: Place) -> None:
        """Notes what decides which messages a list contains, except "without the system message"."""
        if not any(constant(piece.start) for piece in value.find_all(nodes.Slice)):
            return
        tests = [(guard.test, guard.flags) for guard in place.guards]
        while isinstance(value, nodes.CondExpr):
            tests.append((value.test, self._test(value.test, place)))
            value = value.expr2 or nodes.Const(None)
        flags = [flags for test, flags in tests if not _is_system_test(test)]
        self.cut |= join(flags) | having(self._flags(value, place), "bad:")
        if len(flags) == len(tests):
            self.cut.add("cut")

    def _store(self, name: str, flags: Flags, place: Place, kinds: Flags) -> None:
        """The guards' flags matter only if the name may be unset."""
        full, guards = place.scope + name, place.guard_flags
        self.found.add(
            full, flags | (NONE if place.scope else {"top"}) | (guards if name in place.bound else NONE), kinds
        )
        self.found.control[full] |= guards

    def _assign_attribute(self, node: nodes.Assign, full: str, place: Place) -> None:
        value = self._flags(node.node, place)
        is_carried = full.partition(".")[0] in self.known.namespaces
        if not is_carried or (place.loop is None and not place.in_macro):
            self.found.add(full, value | place.guard_flags)
            self.found.initial[full].append(node.node)
        elif place.loop is None or place.inner == "future":
            self.found.add(full, {f"bad:{full} is set in a macro or a loop inside the loop"})
        else:
            self.found.writes[full].append(Write(node, value, place.guards, place.loop))

    def _decide(self, flags: Flags, place: Place, *, always: bool = False) -> None:
        """Adds flags that decide about text. Text before the first message precedes the turn and does not count."""
        if not (place.loop or place.in_macro or self.has_printed or always):
            return
        conditions = [(test, guard.place) for test, holds, guard in literals(place.guards) if holds]
        if any(name_attribute(test) == "loop.first" and where.is_in_order for test, where in conditions):
            flags = {"start"}  # the new messages are never the first
        if "neighbour" in flags and any(
            "assistant" not in (list_roles(test) or {"assistant"}) for test, _ in conditions
        ):
            flags = flags - {"neighbour"}  # the recorded turn is an assistant's: what precedes it is not read
        self.tail |= flags

    # expressions

    def _test(self, node: nodes.Node, place: Place) -> Flags:
        match node:
            case nodes.And() | nodes.Or():
                return self._test(node.left, place) | self._test(node.right, place)
            case nodes.Not():
                return self._test(node.node, place)
            case _:
                return self._flags(node, place)

    def _flags(self, node: nodes.Node, place: Place) -> Flags:
        match node:
            case nodes.Const() | nodes.TemplateData() | nodes.ExtensionAttribute():
                return NONE
            case nodes.And() | nodes.Or():
                return self._flags(node.left, place) | self._flags(node.right, place)
            case nodes.Not():
                return self._test(node, place)
            case nodes.CondExpr():
                flags = self._flags(node.expr1, place) | (self._flags(node.expr2, place) if node.expr2 else NONE)
                return flags | self._test(node.test, place)
            case nodes.Name():
                return self._name(node.name, place)
            case nodes.Getattr() | nodes.Getitem() if isinstance(
                owner := read_field(node, "role"), (nodes.Getattr, nodes.Getitem)
            ):  # `loop.previtem.role` reads nothing sampled from the turn before
                return _make_value(self._flags(owner, place) - {"turn"})
            case nodes.Getattr(node=nodes.Name(name=name), attr=attribute):
                return self._attribute(name, attribute, place)
            case nodes.Getitem():
                return self._item(node, place)
            case nodes.Filter() if node.node is not None:
                return self._filter(node, node.node, place)
            case nodes.Compare():
                return self._compare(node, place)
            case nodes.BinExpr():
                return self._arithmetic(node, place)
            case nodes.Call(node=nodes.Name(name=name)) if name in self.macros and name not in place.bound:
                return self._call(node, name, place)
            case _:
                return _make_value(join(self._flags(child, place) for child in node.iter_child_nodes()))

    def _look_up(self, name: str, place: Place) -> Flags:
        known, full = self.known, place.scope + name
        flags = known.variables.get(full, NONE)
        if name in place.bound:
            return flags
        return join(
            [flags, *(found.get(key, NONE) for found in (known.variables, known.control) for key in (full, name))]
        )

    def _find_kinds(self, node: nodes.Node, place: Place) -> Flags:
        if isinstance(node, nodes.Name):
            kinds: Flags = self.known.kinds.get(place.scope + node.name, NONE)
            if node.name not in place.bound:
                kinds = kinds | self.known.kinds.get(node.name, NONE)
            return kinds or {"other"}
        owner = read_field(node, "content")
        flags = NONE if owner is None else self._flags(owner, place)
        return {"content" if flags and not flags & {*LISTS, "tools"} else "other"}

    def _asks_for_media(self, test: nodes.Node, place: Place) -> bool:
        """True if the test needs a content part that is not text (an image, say): all contents are text here."""
        match test:
            case nodes.Or():
                return self._asks_for_media(test.left, place) and self._asks_for_media(test.right, place)
            case nodes.Compare(ops=[nodes.Operand(op="in")], expr=nodes.Const(value=str() as word)):
                part, is_text = test.ops[0].expr, word in {"type", "text"} or len(word) < 2
            case nodes.Compare(ops=[nodes.Operand(op="eq", expr=nodes.Const(value=str() as word))]):
                part, is_text = read_field(test.expr, "type"), word == "text"
            case _:
                return False
        return not is_text and isinstance(part, nodes.Name) and self._find_kinds(part, place) == {"part"}

    def _name(self, name: str, place: Place) -> Flags:
        if name in {"loop", "cycler", "joiner", "caller", "varargs", "kwargs", "lipsum"}:
            return {f"bad:{name}"}
        if name in self.known.namespaces:  # an alias could be written unnoticed
            self.cut.add(f"bad:the namespace {name} is used as a value")
            return {f"bad:the namespace {name} is used as a value"}
        if name in self.macros and name not in place.bound:
            return {"bad:a macro is used as a value"}
        return self._look_up(name, place)

    def _attribute(self, name: str, attribute: str, place: Place) -> Flags:
        full, known = f"{name}.{attribute}", self.known
        if name == "loop":
            return self._loop(attribute, place)
        if name in known.namespaces:
            flags = known.variables.get(full, NONE) | self._look_up(name, place)
            if full not in known.writes:
                return flags
            why = {f"bad:{known.faults[full]}"} if known.faults.get(full) else NONE
            positions = having(join(write.flags for write in known.writes[full]), "pos:")
            return flags | positions | {"now", f"state:{full}"} | why
        if full in known.variables:  # a namespace that lives for one message
            return known.variables[full]
        flags = self._name(name, place)
        return flags | {"bad:an attribute of a list of messages"} if flags & LISTS else flags

    def _loop(self, attribute: str, place: Place) -> Flags:
        if place.inner or place.loop is None:
            return {"now"} if place.inner else NONE
        if place.loop.is_filtered and attribute != "last":
            return {"bad:a position among some of the messages"}
        if attribute not in {"index", "index0"}:
            return LOOP_FLAGS.get(attribute, {f"bad:loop.{attribute}"})
        if place.loop.is_reversed:
            return {f"back:{attribute}:{place.loop.base}", "bad:a position from the end"}
        return {f"pos:{attribute}:{place.loop.base}"}

    def _item(self, node: nodes.Getitem, place: Place) -> Flags:
        owner = self._flags(node.node, place)
        if isinstance(node.node, nodes.Name) and node.node.name in self.known.namespaces:
            return {"bad:a namespace is subscripted"}
        if not owner & LISTS:
            return owner | _make_value(self._flags(node.arg, place))
        if isinstance(node.arg, nodes.Slice):
            return self._slice(owner, node.arg, place)
        number = constant(node.arg)
        if number == -1 and "reversed" not in owner:  # a new message, or the last of a role (kept)
            return {"now", *(f"last:{flag[5:]}" for flag in having(owner, "role:"))}
        if owner & {"chosen", "reversed", "future"}:
            return {"bad:one of some messages"}
        if number == 0:
            is_whole = list_name(node.node) == "messages" and self.known.lists["messages"] == 1
            return {"now", "first"} if is_whole else {"now", "second"}
        flags = self._flags(node.arg, place)
        if having(flags, "bad:"):
            return flags
        moved = having(flags, "pos:", "near:")
        bases = {flag.rpartition(":")[2] for flag in moved}
        if bases != {list_name(node.node)} or having(flags, "state:", "pos:length"):
            return {"bad:a message at a number"}
        return flags - moved | {"now"}

    def _slice(self, owner: Flags, piece: nodes.Slice, place: Place) -> Flags:
        if owner != MESSAGES:
            return {"bad:a part of a part of the messages"}
        match (
            constant(piece.start) or piece.start,
            constant(piece.stop) or piece.stop,
            constant(piece.step) or piece.step,
        ):
            case None, None, -1:
                return {"msgs", "reversed"}
            case 1, None, None:
                self.slices.add(id(piece))
                return owner
            case None, -1, None:
                return owner
            case nodes.Node() as start, None, None if place.loop is not None:
                flags = self._flags(start, place)
                if flags and flags == having(flags, "pos:index", "near:", "now"):
                    return {"future"}
            case _:
                pass
        return {"bad:a part of the messages"}

    def _filter(self, node: nodes.Filter, owner: nodes.Expr, place: Place) -> Flags:
        value = self._flags(owner, place)
        if not value & LISTS:
            return _make_value(join(self._flags(child, place) for child in node.iter_child_nodes()))
        match node.name, [constant(argument) for argument in node.args]:
            case "length" | "count", _ if value == MESSAGES:
                return {f"pos:length:{list_name(owner)}"}
            case "list", _:
                return value
            case "selectattr", ["role", "equalto" | "==" | "eq", "user" | "assistant" | "tool" as role] if (
                value == MESSAGES
            ):
                return {"chosen", f"role:{role}"}
            case name, _:
                return {f"bad:{name} of messages"}

    def _compare(self, node: nodes.Compare, place: Place) -> Flags:
        children = node.expr, *(operand.expr for operand in node.ops)
        sides = [self._flags(child, place) for child in children]
        flags, positions = join(sides), [having(side, "pos:") for side in sides]
        if flags & LISTS or having(flags, "near:"):
            return flags - LISTS | {"bad:messages are compared"}
        if not any(positions):
            return flags
        moved = join(positions)
        rest = flags - moved | {"now"}
        kinds, lists = {flag.split(":")[1] for flag in moved}, {flag.split(":", 2)[2] for flag in moved}
        if len(sides) != 2 or node.ops[0].op in {"in", "notin"}:
            return rest | {"bad:positions are compared"}
        if not all(positions):
            number = next((constant(child) for child in children if constant(child) is not None), None)
            before = -1 if kinds == {"index0"} else 0  # no message has this position
            if type(number) is int and number == before:
                return rest
            if type(number) is int and number == before + 1 and "length" not in kinds and not having(flags, "state:"):
                return rest | {"start"}  # whether a new message is the first
            return rest | {"bad:a position is compared with a number"}
        if "index0" in kinds and len(kinds) > 1:
            return rest | {"bad:positions that count from 0 and from 1"}
        if len(lists) > 1 or any(self.known.lists.get(name, 2) > 1 for name in lists):
            return rest | {"gap"}  # one list may be cut by one message: then neighbours differ from others
        return rest

    def _arithmetic(self, node: nodes.BinExpr, place: Place) -> Flags:
        left, right = self._flags(node.left, place), self._flags(node.right, place)
        flags = left | right
        moved = having(flags, "pos:", "back:")
        if not moved:
            return _make_value(flags)
        is_minus, is_one = isinstance(node, nodes.Sub), constant(node.right) == 1
        lists = {flag.rpartition(":")[2] for flag in moved}
        if is_minus and is_one and len(moved) == 1 and having(moved, "pos:length:"):
            return flags - moved | {f"pos:index0:{lists.pop()}"}  # the last place
        if is_minus and place.loop is not None and place.loop.is_reversed and having(right, "back:"):
            # length - 1 - loop.index0, length - loop.index
            length = "pos:index0:" if having(right, "back:index0:") else "pos:length:"
            if left == {length + place.loop.base}:
                return {f"pos:index0:{place.loop.base}"}
        if (is_minus or isinstance(node, nodes.Add)) and is_one and moved == having(moved, "pos:index0:"):
            beside: Flags = {"start", "neighbour", "turn"} if is_minus else NONE
            return flags - moved | {f"near:{name}" for name in lists} | beside
        return flags | {"bad:arithmetic with positions"}

    def _call(self, node: nodes.Call, name: str, place: Place) -> Flags:
        flags = [self._flags(child, place) for child in node.iter_child_nodes() if child is not node.node]
        given = dict(zip((parameter.name for parameter in self.macros[name].args), node.args, strict=False))
        given |= {option.key: option.value for option in node.kwargs}
        for parameter, value in given.items():
            scoped = Place(in_macro=name).scope + parameter
            self.found.add(scoped, NONE, self._find_kinds(value, place))  # its flags are among those of the call
        return _make_value(join(flags) | self.known.macros.get(name, NONE))

    # variables that carry state from message to message

    def _find_fault(self, full: str, writes: Sequence[Write]) -> str:
        """Returns why the last writer does not decide the variable's value; empty if it does."""
        asked: dict[int, bool] = {}  # conditions on the variable itself, and whether they hold
        for write in writes:
            if write.flags != having(write.flags, "msg", "pos:"):
                return f"{full} is made of other values"
            is_latched = False
            for expression, holds, guard in literals(write.guards):
                if name_attribute(expression) == full:
                    # Both branches of one condition: the value is toggled, not overwritten.
                    is_other_branch = asked.setdefault(id(guard.test), holds) is not holds
                    if is_other_branch or not self._overwrites(full, write, holds, writes):
                        return f"{full} depends on itself"
                elif self._is_latch(expression, holds, write, writes):
                    is_latched = True
                elif not self._asks_one_message(expression, guard):
                    return f"{full} is set under a condition on other messages"
            if write.loop.is_reversed and not is_latched:
                return f"{full} is set in a loop from the end"
        return ""

    def _asks_one_message(self, node: nodes.Node, guard: Guard) -> bool:
        match node:
            case nodes.Const():  # of a loop
                return guard.flags <= {"msg"}
            case nodes.And() | nodes.Or():
                return self._asks_one_message(node.left, guard) and self._asks_one_message(node.right, guard)
            case nodes.Not():
                return self._asks_one_message(node.node, guard)
            case _ if name_attribute(node) == "loop.last" and guard.place.is_in_order:
                return True  # false for every earlier message
            case _:
                return self._test(node, guard.place) <= {"msg"}

    def _overwrites(self, full: str, write: Write, holds: bool, writes: Sequence[Write]) -> bool:
        """If x is a boolean, `if ns.x: set ns.x = false` has the same effect as `set ns.x = false`."""
        initial = self.found.initial.get(full, [])
        every = [constant(node) for node in (*(other.node.node for other in writes), *initial)]
        return (
            bool(initial) and all(isinstance(one, bool) for one in every) and constant(write.node.node) is (not holds)
        )

    def _is_latch(self, expression: nodes.Node, holds: bool, write: Write, writes: Sequence[Write]) -> bool:
        """`if ns.open and …: set ns.open = false; set ns.x = …` in a reversed loop: sets x at the last match only."""
        latch = name_attribute(expression)
        shut = self.found.writes.get(latch, [])
        return (
            write.loop.is_reversed
            and len(shut) == 1
            and all(other.guards is shut[0].guards for other in writes)
            and constant(shut[0].node.node) is (not holds)
            and [constant(node) for node in self.found.initial.get(latch, [])] == [holds]
        )


def _make_value(flags: Flags) -> Flags:
    if flags & LISTS:
        return flags - LISTS | {"bad:a list of messages is used as a value"}
    return flags | {"bad:a position is used as a value"} if having(flags, "pos:", "near") else flags


def _is_namespace(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name) and node.node.name == "namespace"


def _is_system_test(node: nodes.Node) -> bool:
    """`messages[0].role == "system"`, alone or with a test that there are messages."""
    match node:
        case nodes.And(left=nodes.Name()):
            return _is_system_test(node.right)
        case nodes.Or():
            return _is_system_test(node.left) and _is_system_test(node.right)
        case nodes.Compare(ops=[nodes.Operand(op="eq" | "ne", expr=nodes.Const(value="system" | "developer"))]):
            owner = read_field(node.expr, "role")
            return isinstance(owner, nodes.Getitem) and constant(owner.arg) == 0
        case _:
            return False
