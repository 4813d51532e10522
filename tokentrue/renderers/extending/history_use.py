"""What a template takes from the messages before the recorded turn, read from its syntax tree.

The text after the recorded turn may depend on earlier messages through namespaces that a loop over the messages writes
("the last user message holds /think"), through positions, neighbours and the first message. `analyse` answers with a
`HistoryUse`: which messages must be rendered for that text to be the one of the whole conversation. What it does not
understand (counts, arithmetic with positions, texts that are collected) has a reason in `why`, and only the real
history is rendered.

The rule that makes a few messages enough: a variable that every loop overwrites, under conditions on the current
message alone, has the value that its last writer gave it. So the last writer of each variable is kept, in order; the
other messages have no effect. Positions are only compared with each other, and keeping some messages in order changes
no such comparison.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, TypeAlias, cast

from jinja2 import nodes

Flags: TypeAlias = frozenset[str]
"""What decides about a value: "msg" the current message; "last" whether it is the last one; "now" something that is
equal in the short context, but not in every iteration; "first", "second" the first messages; "tools"; "top" a variable
that is set outside loops; "block" a text that a block sets, which `_build_effects` leaves out; "pos:FROM:LIST" it is
a position; "near:LIST" a position beside one; "state:NS.ATTR"; "msgs",
"reversed", "future", "chosen" it is a list of messages; "bad:WHY" not understood."""
NONE: Flags = frozenset()
LISTS = frozenset({"msgs", "reversed", "future", "chosen"})
HARMLESS_STATEMENTS = (nodes.Continue, nodes.ExprStmt)


@cache
def chat_environment() -> Any:
    from transformers.utils import chat_template_utils

    return chat_template_utils._compile_jinja_template("").environment  # pyright: ignore[reportPrivateUsage]


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryUse:
    """`why` is empty where the template is understood. `effects` prints which of `variables` one message writes;
    `fields` are the message's fields that it reads. The others say what else the text after the turn reads."""

    why: str = ""
    effects: Any = None
    variables: frozenset[str] = frozenset()
    fields: tuple[str, ...] = ()
    first: bool = False  # the first message
    second: bool = False  # the first one that is no system message
    tools: bool = False
    roles: frozenset[str] = frozenset()  # the last message of these roles
    neighbour: bool = False  # the message before the recorded turn
    gaps: bool = False  # whether two messages are neighbours


def analyse(source: str) -> HistoryUse:
    try:
        return _Analysis(chat_environment().parse(source)).find_use()
    except (AttributeError, RecursionError) as error:  # a node of a form that is not expected here
        return HistoryUse(why=f"its form is not known ({error})")


@dataclass(frozen=True, slots=True)
class MessageLoop:
    node: nodes.For
    base: str  # the list that positions count in
    is_reversed: bool
    is_filtered: bool


@dataclass(frozen=True, slots=True)
class Guard:
    """A condition that holds (or does not) where a statement runs; `body` is what the condition decides about."""

    test: nodes.Expr
    holds: bool
    flags: Flags
    place: Place
    body: Sequence[nodes.Node] = ()


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

    @property
    def knows_first(self) -> bool:
        """Whether `loop.first` is false for the new messages there."""
        return self.loop is not None and not self.inner and not self.loop.is_filtered

    def under(self, guard: Guard) -> Place:
        return Place((*self.guards, guard), self.loop, self.inner, self.in_macro)


@dataclass
class _Findings:
    """What one walk over the tree found; walks are repeated until nothing changes."""

    variables: dict[str, Flags] = field(default_factory=dict[str, Flags])
    macros: dict[str, Flags] = field(default_factory=dict[str, Flags])
    namespaces: set[str] = field(default_factory=set[str])  # set outside loops and macros: they carry state
    initial: dict[str, list[nodes.Node]] = field(default_factory=dict[str, "list[nodes.Node]"])
    writes: dict[str, list[Write]] = field(default_factory=dict[str, "list[Write]"])
    faults: dict[str, str] = field(default_factory=dict[str, str])  # why a variable's last writer does not decide
    lists: dict[str, int] = field(default_factory=lambda: {"messages": 1})  # times that a list of messages is set

    def summarise(self) -> object:
        """Everything but the nodes, which compare by all that is in them."""
        writes = {name: [write.flags for write in found] for name, found in self.writes.items()}
        return self.variables, self.macros, self.namespaces, writes, self.lists, self.faults

    def forget_bad(self) -> None:
        for flags in (self.variables, self.macros):
            flags.update({name: frozenset(f for f in found if f[:4] != "bad:") for name, found in flags.items()})
        self.faults = {}

    def add(self, name: str, flags: Flags) -> None:
        self.variables[name] = self.variables.get(name, NONE) | flags


class _Analysis:
    def __init__(self, template: nodes.Template) -> None:
        self.template = template
        self.macros = {macro.name: macro for macro in template.find_all(nodes.Macro)}
        self.known = _Findings(variables={"messages": frozenset({"msgs"}), "tools": frozenset({"tools"})})
        self.found = self.known
        self.tail: set[str] = set()  # flags that decide about the text after the recorded turn
        self.cut: set[str] = set()  # flags that decide which messages a list has
        self.has_printed = False
        self.slices: set[int] = set()  # places where the first message is cut off

    def find_use(self) -> HistoryUse:
        for number in range(20):
            self._walk_once()
            if number < 5:  # what looks bad while namespaces are not known yet would keep itself alive
                self.found.forget_bad()
            if self.found.summarise() == self.known.summarise() and number >= 5:
                break
            self.known = self.found
        else:
            return HistoryUse(why="its variables depend on each other")
        places = {"start", "first", "second", "neighbour", "gap"}
        if self.tail & places or any(flag.startswith("state:") for flag in self.tail):
            self.tail |= self.cut
        self.tail |= {flag for flag in self.cut if flag.startswith("bad:")}
        bad = sorted(flag[4:] for flag in self.tail if flag.startswith("bad:"))
        bad += [f"a {flag.partition(':')[0]} value decides" for flag in self.tail if flag.startswith(("pos:", "near"))]
        bad += ["a list of messages decides"] if self.tail & LISTS else []
        if len(self.slices) > 2 or ("start" in self.tail and (len(self.slices) > 1 or "cut" in self.cut)):
            bad.append("it cuts off more than one first message")
        if not self.has_printed:
            bad.append("no loop writes the messages")
        if bad:
            return HistoryUse(why="; ".join(bad[:3]))
        state = {flag[6:] for flag in self.tail if flag.startswith("state:")}
        wanted = {name for name in state if name in self.found.writes}
        try:
            effects, variables, fields = _build_effects(self.found.writes, wanted)
        except _NotUnderstood as error:
            return HistoryUse(why=str(error))
        if {"name", "tool_call_id"} & set(fields):
            return HistoryUse(why="it carries the names of calls")  # a result's may be filled in from its call
        return HistoryUse(
            effects=effects,
            variables=variables,
            fields=fields,
            first="first" in self.tail,
            second="second" in self.tail,
            tools="tools" in self.tail,
            roles=frozenset(flag[5:] for flag in self.tail if flag.startswith("last:")),
            neighbour="neighbour" in self.tail,
            gaps="gap" in self.tail,
        )

    def _walk_once(self) -> None:
        self.found = _Findings(
            variables={"messages": frozenset({"msgs"}), "tools": frozenset({"tools"})},
        )
        self.tail, self.cut, self.has_printed, self.slices = set(), set(), False, set()
        self._walk(self.template.body, Place())
        self.found.faults = {name: self._find_fault(name, writes) for name, writes in self.found.writes.items()}

    # statements

    def _walk(self, body: Sequence[nodes.Node], place: Place) -> None:
        for node in body:
            self._statement(node, place)

    def _statement(self, node: nodes.Node, place: Place) -> None:
        match node:
            case nodes.Output():
                if not _only_raises([node]):
                    for child in node.nodes:
                        self._decide(self._flags(child, place), place)
                    self._decide(_join(guard.flags for guard in place.guards), place)
            case nodes.If():
                self._if(node, place)
            case nodes.For():
                self._for(node, place)
            case nodes.Assign():
                self._assign(node, place)
            case nodes.AssignBlock() if isinstance(node.target, nodes.Name):
                before, self.tail = self.tail, set()
                was_printed, self.has_printed = self.has_printed, True
                self._walk(node.body, place)
                flags, self.tail, self.has_printed = frozenset(self.tail), before, was_printed
                if self._has_message_loop(node.body):
                    flags |= {"bad:texts of the messages are collected"}
                self._store(node.target.name, flags | {"block"}, place)
            case nodes.Macro():
                before, self.tail = self.tail, set()
                was_printed, self.has_printed = self.has_printed, True
                self._walk(node.body, Place(in_macro=node.name))
                flags, self.tail, self.has_printed = frozenset(self.tail), before, was_printed
                self.found.macros[node.name] = self.found.macros.get(node.name, NONE) | flags | {"top"}
            case nodes.CallBlock() if isinstance(node.call.node, nodes.ExtensionAttribute):  # {% generation %}
                self._walk(node.body, place)
            case nodes.Scope() | nodes.ScopedEvalContextModifier():
                self._walk(node.body, place)
            case _ if isinstance(node, HARMLESS_STATEMENTS):
                self._decide(_join(guard.flags for guard in place.guards), place)
            case _:
                self.tail.add(f"bad:{type(node).__name__.lower()}")

    def _if(self, node: nodes.If, place: Place) -> None:
        around = place
        for branch in (node, *node.elif_):
            if _only_raises(branch.body):
                continue  # its condition is false in every conversation that renders
            flags = self._test(branch.test, place)
            if self._has_message_loop(branch.body):
                self._decide(flags, place, always=True)
            self._walk(branch.body, around.under(Guard(branch.test, True, flags, place, branch.body)))
            around = around.under(Guard(branch.test, False, flags, place))
        self._walk(node.else_, around)

    def _for(self, node: nodes.For, place: Place) -> None:
        flags = self._flags(node.iter, place)
        names = [name.name for name in node.target.find_all(nodes.Name)] or [cast("Any", node.target).name]
        if not flags & LISTS:
            for name in names:
                self.found.add(name, flags | _join(guard.flags for guard in place.guards))
            test = self._test(node.test, place) if node.test else NONE
            inside = place.under(Guard(nodes.Const(True), True, flags | test, place))
            inner = place.inner or ("fields" if place.loop else "")
            self._walk(node.body, Place(inside.guards, place.loop, inner, place.in_macro))
            self._walk(node.else_, inside)
            return
        if flags & {"chosen"} or node.recursive or node.else_ or (place.in_macro and "future" not in flags):
            self.tail.add("bad:a loop over some of the messages")
            return
        if place.loop is not None:  # a loop over messages inside the loop over messages
            if "future" not in flags:
                self.tail.add("bad:a loop over all messages for each message")
            for name in names:
                self.found.add(name, frozenset({"now"}))
            self._walk(node.body, Place(place.guards, place.loop, "future", place.in_macro))
            return
        if "future" in flags:
            self.tail.add("bad:a loop over some of the messages")
        if any(_constant(piece.start) for piece in node.iter.find_all(nodes.Slice)):
            self.cut |= self._find_cut(node.iter, place)
        for name in names:
            self.found.add(name, frozenset({"msg"}))
        loop = MessageLoop(node, _list_name(node.iter), "reversed" in flags, node.test is not None)
        prints = not _only_raises(node.body) and any(not _only_raises([child]) for child in node.find_all(nodes.Output))
        if prints and loop.is_reversed:
            self.tail.add("bad:messages written in reverse")
        if any(True for _ in node.find_all(nodes.Break)):
            self.tail.add("bad:break")
        self.has_printed = self.has_printed or prints
        inside = Place((), loop)
        if node.test is not None:
            inside = inside.under(Guard(node.test, True, self._test(node.test, inside), inside))
        self._walk(node.body, inside)

    def _has_message_loop(self, body: Sequence[nodes.Node]) -> bool:
        loops = [
            loop for child in body for loop in ((child,) if isinstance(child, nodes.For) else child.find_all(nodes.For))
        ]
        return any(self._flags(cast("nodes.For", loop).iter, Place()) & LISTS for loop in loops)

    def _assign(self, node: nodes.Assign, place: Place) -> None:
        flags = self._flags(node.node, place) | _join(guard.flags for guard in place.guards)
        if isinstance(node.target, nodes.NSRef):
            self._assign_attribute(node, node.target, place)
            return
        for target in node.target.items if isinstance(node.target, nodes.Tuple) else (node.target,):
            name = cast("nodes.Name", target).name
            if _is_namespace(node.node):
                if place.loop is None and not place.in_macro:
                    self.found.namespaces.add(name)
                for option in cast("nodes.Call", node.node).kwargs:
                    full = f"{name}.{option.key}"
                    self.found.initial.setdefault(full, []).append(option.value)
                    self.found.add(full, self._flags(option.value, place))
                if place.loop is not None and name in self.known.namespaces:
                    self.found.add(name, frozenset({"bad:a namespace that is made again"}))
                continue
            if flags & LISTS:
                self.found.lists[name] = self.found.lists.get(name, 0) + 1
                self.found.add(name, frozenset(flag for flag in flags if flag in LISTS or flag.startswith("role:")))
                if any(_constant(piece.start) for piece in node.node.find_all(nodes.Slice)):
                    self.cut |= self._find_cut(node.node, place)
            else:
                self._store(name, flags, place)

    def _find_cut(self, value: nodes.Expr, place: Place) -> Flags:
        """What decides which messages a list has, apart from "without the system message"."""
        tests = [(guard.test, guard.flags) for guard in place.guards]
        while isinstance(value, nodes.CondExpr):
            tests.append((value.test, self._test(value.test, place)))
            value = cast("nodes.Expr", value.expr2)
        flags = [flags for test, flags in tests if not _is_system_test(test)]
        if len(flags) == len(tests):
            flags.append(frozenset({"cut"}))
        values = self._flags(value, place) if value is not None else NONE
        return _join(flags) | {flag for flag in values if flag.startswith("bad:")}

    def _store(self, name: str, flags: Flags, place: Place) -> None:
        is_top = place.loop is None and not place.in_macro
        self.found.add(name, flags | _join(guard.flags for guard in place.guards) | ({"top"} if is_top else set()))

    def _assign_attribute(self, node: nodes.Assign, target: nodes.NSRef, place: Place) -> None:
        full = f"{target.name}.{target.attr}"
        value = self._flags(node.node, place)
        guards = _join(guard.flags for guard in place.guards)
        is_carried = target.name in self.known.namespaces
        if not is_carried or (place.loop is None and not place.in_macro):
            self.found.add(full, value | guards)
        elif place.loop is None or place.inner == "future":
            self.found.add(full, frozenset({f"bad:{full} is set in a macro or a loop inside the loop"}))
        else:
            self.found.writes.setdefault(full, []).append(Write(node, value, place.guards, place.loop))

    def _decide(self, flags: Flags, place: Place, *, always: bool = False) -> None:
        """These flags decide about text. Before the first message is written, that text is before the turn."""
        if not (place.loop or place.in_macro or self.has_printed or always):
            return
        if any(
            _is_loop_first(test) and holds and guard.place.knows_first for test, holds, guard in _literals(place.guards)
        ):
            flags = frozenset({"start"})  # the new messages are never the first
        if "neighbour" in flags and _excludes_assistant(place.guards):
            flags -= {"neighbour"}  # the recorded turn is an assistant's: its neighbour before it is not asked
        self.tail |= flags - {"msg", "top", "now", "last"}

    # expressions

    def _test(self, node: nodes.Expr, place: Place) -> Flags:
        match node:
            case nodes.And() if place.knows_first and any(map(_is_loop_first, (node.left, node.right))):
                return frozenset({"start"})  # false for the new messages
            case nodes.And() | nodes.Or():
                return self._test(node.left, place) | self._test(node.right, place)
            case nodes.Not():
                return self._test(node.node, place)
            case nodes.Name() if self.known.variables.get(node.name, NONE) & LISTS:
                return NONE  # no conversation is empty
            case _:
                return self._flags(node, place)

    def _flags(self, node: nodes.Node, place: Place) -> Flags:
        match node:
            case nodes.Const() | nodes.TemplateData() | nodes.ExtensionAttribute():
                return NONE
            case nodes.And() | nodes.Or() | nodes.Not():
                return self._test(node, place)
            case nodes.CondExpr():
                flags = self._flags(node.expr1, place) | (self._flags(node.expr2, place) if node.expr2 else NONE)
                return flags | self._test(node.test, place)
            case nodes.Name():
                return self._name(node.name)
            case nodes.Getattr() if isinstance(node.node, nodes.Name):
                return self._attribute(node.node.name, node.attr, place)
            case nodes.Getitem():
                return self._item(node, place)
            case nodes.Filter() if node.node is not None:
                return self._filter(node, place)
            case nodes.Compare():
                return self._compare(node, place)
            case nodes.BinExpr():
                return self._arithmetic(node, place)
            case nodes.Call() if isinstance(node.node, nodes.Name):
                return self._call(node, node.node.name, place)
            case nodes.Call():
                return self._plain(node, place)
            case nodes.Test():
                flags = self._plain(node, place, keep_positions=node.name in {"none", "defined", "undefined"})
                if any(flag.startswith("pos:") for flag in flags):
                    return frozenset(flag for flag in flags if not flag.startswith("pos:")) | {"now"}
                return flags
            case _:
                return self._plain(node, place)

    def _plain(self, node: nodes.Node, place: Place, *, keep_positions: bool = False) -> Flags:
        """A value that is made of the values in it."""
        flags = _join(self._flags(child, place) for child in node.iter_child_nodes())
        return _make_value(flags, keep_positions=keep_positions)

    def _name(self, name: str) -> Flags:
        if name in {"loop", "cycler", "joiner", "caller", "varargs", "kwargs", "lipsum"}:
            return frozenset({f"bad:{name}"})
        if name in self.known.namespaces:  # under another name, it can be written unseen
            self.cut.add(f"bad:the namespace {name} is used as a value")
            return frozenset({f"bad:the namespace {name} is used as a value"})
        return self.known.variables.get(name, NONE)

    def _attribute(self, name: str, attribute: str, place: Place) -> Flags:
        if name == "loop":
            return self._loop(attribute, place)
        full = f"{name}.{attribute}"
        if name in self.known.namespaces:
            return self._state(full) | {flag for flag in self.known.variables.get(name, NONE) if "bad" in flag}
        if full in self.known.variables:  # a namespace that lives for one message
            return self.known.variables[full]
        flags = self._name(name)
        return flags | {"bad:an attribute of a list of messages"} if flags & LISTS else flags

    def _state(self, full: str) -> Flags:
        flags = self.known.variables.get(full, NONE)
        writes = self.known.writes.get(full, [])
        if not writes:
            return flags
        why = self.known.faults.get(full, "")
        positions = {flag for write in writes for flag in write.flags if flag.startswith("pos:")}
        return flags | positions | {"now", f"state:{full}"} | ({f"bad:{why}"} if why else set())

    def _loop(self, attribute: str, place: Place) -> Flags:
        if place.inner == "fields":
            return frozenset({"msg"})
        if place.inner == "future":
            return frozenset({"now"})
        if place.loop is None:
            return NONE
        if place.loop.is_filtered and attribute != "last":
            return frozenset({"bad:a position among some of the messages"})
        match attribute:
            case "index0" | "index":
                if place.loop.is_reversed:
                    return frozenset({f"back:{attribute}:{place.loop.base}", "bad:a position from the end"})
                return frozenset({f"pos:{attribute}:{place.loop.base}"})
            case "last":
                return frozenset({"last"})
            case "first":
                return frozenset({"now", "start"})
            case "previtem":
                return frozenset({"now", "start", "neighbour"})
            case "nextitem":
                return frozenset({"now"})
            case _:
                return frozenset({f"bad:loop.{attribute}"})

    def _item(self, node: nodes.Getitem, place: Place) -> Flags:
        owner = self._flags(node.node, place)
        if isinstance(node.node, nodes.Name) and node.node.name in self.known.namespaces:
            return frozenset({"bad:a namespace is subscripted"})
        if not owner & LISTS:
            return owner | self._plain(node.arg, place)
        if isinstance(node.arg, nodes.Slice):
            return self._slice(owner, node.arg, place)
        constant = _constant(node.arg)
        if constant == -1 and not owner & {"reversed"}:
            return _last_of(owner)
        if owner & {"chosen", "reversed", "future"}:
            return frozenset({"bad:one of some messages"})
        if constant == 0:
            return self._first(node.node)
        flags = self._flags(node.arg, place)
        if any(flag.startswith("bad:") for flag in flags):
            return flags
        bases = {flag.rpartition(":")[2] for flag in flags if flag.startswith(("pos:", "near:"))}
        if (
            bases != {_list_name(node.node)}
            or _reads_state(flags)
            or any(flag.startswith("pos:length") for flag in flags)
        ):
            return frozenset({"bad:a message at a number"})
        return frozenset(flag for flag in flags if not flag.startswith(("pos:", "near:"))) | {"now"}

    def _first(self, owner: nodes.Node) -> Flags:
        is_whole = isinstance(owner, nodes.Name) and owner.name == "messages" and self.known.lists["messages"] == 1
        return frozenset({"now", "first"} if is_whole else {"now", "first", "second"})

    def _slice(self, owner: Flags, piece: nodes.Slice, place: Place) -> Flags:
        start, stop, step = (_constant(part) for part in (piece.start, piece.stop, piece.step))
        if owner != {"msgs"}:
            return frozenset({"bad:a part of a part of the messages"})
        if piece.start is None and piece.stop is None and step == -1:
            return frozenset({"msgs", "reversed"})
        if piece.step is None and piece.stop is None and start in {0, 1}:
            self.slices |= {id(piece)} if start else set()
            return owner
        if piece.step is None and piece.start is None and stop == -1:
            return owner
        if piece.step is None and piece.stop is None and piece.start is not None and place.loop is not None:
            flags = self._flags(piece.start, place)
            if flags and all(flag.startswith(("pos:index", "near:", "now")) for flag in flags):
                return frozenset({"future"})
        return frozenset({"bad:a part of the messages"})

    def _filter(self, node: nodes.Filter, place: Place) -> Flags:
        value = self._flags(cast("nodes.Expr", node.node), place)
        if not value & LISTS:
            given = [*node.args, *node.kwargs, *(part for part in (node.dyn_args, node.dyn_kwargs) if part is not None)]
            return _make_value(value | _join(self._flags(argument, place) for argument in given))
        arguments = [_constant(argument) for argument in node.args]
        if node.name in {"length", "count"} and value == {"msgs"}:
            return frozenset({f"pos:length:{_list_name(cast('nodes.Expr', node.node))}"})
        if node.name == "list":
            return value
        if node.name == "reverse" and value == {"msgs"}:
            return frozenset({"msgs", "reversed"})
        if node.name == "selectattr" and arguments[:1] == ["role"] and arguments[1:2] in (["equalto"], ["=="], ["eq"]):
            is_role = value == {"msgs"} and arguments[2:] and arguments[2] in {"user", "assistant", "tool"}
            return frozenset({"chosen", f"role:{arguments[2]}"} if is_role else {"bad:some of the messages"})
        if node.name == "last" and not value & {"reversed"}:
            return _last_of(value)
        if node.name == "first" and value == {"msgs"}:
            return self._first(cast("nodes.Expr", node.node))
        return frozenset({f"bad:{node.name} of messages"})

    def _compare(self, node: nodes.Compare, place: Place) -> Flags:
        sides = [self._flags(child, place) for child in (node.expr, *(operand.expr for operand in node.ops))]
        flags = _join(sides)
        positions = [{flag for flag in side if flag.startswith("pos:")} for side in sides]
        if flags & LISTS or any(flag.startswith("near:") for flag in flags):
            return flags - LISTS | {"bad:messages are compared"}
        if not any(positions):
            return flags
        rest = frozenset(flag for flag in flags if not flag.startswith("pos:")) | {"now"}
        constants = [_constant(child) for child in (node.expr, *(operand.expr for operand in node.ops))]
        if len(sides) != 2 or any(operand.op in {"in", "notin"} for operand in node.ops):
            return rest | {"bad:positions are compared"}
        if not all(positions):
            kinds = {flag.split(":")[1] for side in positions for flag in side}
            number = constants[0] if constants[1] is None else constants[1]
            before = -1 if kinds == {"index0"} else 0  # no message has this position
            if type(number) is int and number == before:
                return rest
            if type(number) is int and number == before + 1 and "length" not in kinds and not _reads_state(flags):
                return rest | {"start"}  # whether a new message is the first
            return rest | {"bad:a position is compared with a number"}
        bases = {flag for side in positions for flag in side}
        lists = {flag.split(":", 2)[2] for flag in bases}
        counts_from_one = {not flag.startswith("pos:index0:") for flag in bases}
        if len(counts_from_one) > 1:
            return rest | {"bad:positions that count from 0 and from 1"}
        if len(lists) > 1 or any(self.known.lists.get(name, 2) > 1 for name in lists):
            return rest | {"gap"}  # one list may be cut by one message: then neighbours differ from others
        return rest

    def _arithmetic(self, node: nodes.BinExpr, place: Place) -> Flags:
        sides = self._flags(node.left, place), self._flags(node.right, place)
        flags = _join(sides)
        moved = [flag for flag in flags if flag.startswith(("pos:", "back:"))]
        if not moved:
            return _make_value(flags)
        one = _constant(node.right) == 1
        if isinstance(node, nodes.Sub) and one and len(moved) == 1 and moved[0].startswith("pos:length:"):
            return flags - {moved[0]} | {moved[0].replace("pos:length:", "pos:index0:")}  # the last place
        if isinstance(node, nodes.Sub) and place.loop is not None and place.loop.is_reversed:
            back = next((flag for flag in sides[1] if flag.startswith("back:")), "")
            length = "pos:index0:" if back.startswith("back:index0:") else "pos:length:"
            if back and sides[0] == {length + place.loop.base}:  # length - 1 - loop.index0, length - loop.index
                return frozenset({f"pos:index0:{place.loop.base}"})
        if isinstance(node, (nodes.Add, nodes.Sub)) and one and all(flag.startswith("pos:index0:") for flag in moved):
            beside = {"start", "neighbour"} if isinstance(node, nodes.Sub) else set[str]()
            near = {f"near:{flag.rpartition(':')[2]}" for flag in moved}
            return frozenset(flag for flag in flags if not flag.startswith("pos:")) | near | beside
        return flags | {"bad:arithmetic with positions"}

    def _call(self, node: nodes.Call, name: str, place: Place) -> Flags:
        flags = self._plain(node, place)
        if name in self.known.macros:
            flags |= self.known.macros[name]
            given = dict(zip((argument.name for argument in self.macros[name].args), node.args, strict=False))
            given |= {option.key: option.value for option in node.kwargs}
            for parameter, value in given.items():
                self.found.add(parameter, self._flags(value, place))
        return flags

    # variables that carry state from message to message

    def _find_fault(self, full: str, writes: Sequence[Write]) -> str:
        """Why the last writer does not decide the variable's value; empty where it does."""
        values = [write.node.node for write in writes]
        is_one_value = all(isinstance(value, nodes.Const) for value in values) and (
            len({repr(cast("nodes.Const", value).value) for value in values}) == 1
        )
        asked: dict[int, bool] = {}  # conditions on the variable itself, and whether they hold
        for write in writes:
            if any(not flag.startswith(("msg", "pos:")) for flag in write.flags):
                return f"{full} is made of other values"
            is_latched = False
            for expression, holds, guard in _literals(write.guards):
                if _name_attribute(expression) == full:
                    # Both branches of one condition: the value is turned over, not overwritten.
                    is_other_branch = asked.setdefault(id(guard.test), holds) is not holds
                    if is_other_branch or not self._overwrites(full, write.node.node, holds, values):
                        return f"{full} depends on itself"
                elif self._is_latch(expression, holds, guard.body, write, writes):
                    is_latched = True
                elif not self._asks_one_message(expression, guard):
                    return f"{full} is set under a condition on other messages"
            if write.loop.is_reversed and not is_latched and not is_one_value:
                return f"{full} is set in a loop from the end"
            if any(True for _ in write.loop.node.find_all(nodes.Continue)):
                return f"{full} is set in a loop that skips messages"
        return ""

    def _asks_one_message(self, node: nodes.Expr, guard: Guard) -> bool:
        match node:
            case nodes.Const():  # of a loop
                return guard.flags <= {"msg"}
            case nodes.And() | nodes.Or():
                return self._asks_one_message(node.left, guard) and self._asks_one_message(node.right, guard)
            case nodes.Not():
                return self._asks_one_message(node.node, guard)
            case _ if _name_attribute(node) == "loop.last" and not guard.place.inner:
                return True  # false for every earlier message
            case _:
                return self._test(node, guard.place) <= {"msg"}

    def _overwrites(self, full: str, value: nodes.Expr, holds: bool, values: Sequence[nodes.Expr]) -> bool:
        """`if ns.x: set ns.x = false` leaves the same as `set ns.x = false`, where x is true or false."""
        every = [_constant(node) for node in (*values, *self.known.initial.get(full, []))]
        return all(isinstance(constant, bool) for constant in every) and _constant(value) is (not holds)

    def _is_latch(
        self, expression: nodes.Expr, holds: bool, body: Sequence[nodes.Node], write: Write, writes: Sequence[Write]
    ) -> bool:
        """`if ns.open and …: set ns.open = false; set ns.x = …` in a loop from the end: x is set once, at the last
        message that fits."""
        latch = _name_attribute(expression)
        shut = self.known.writes.get(latch or "", [])
        is_shut_here = any(other.node is node for other in shut for node in body)
        same_block = all(any(other.node is node for node in body) for other in writes)
        constants = {_constant(other.node.node) for other in shut}
        initial = [_constant(node) for node in self.known.initial.get(latch or "", [])]
        return (
            write.loop.is_reversed
            and is_shut_here
            and same_block
            and len(shut) == 1
            and constants == {not holds}
            and initial == [holds]
        )


class _NotUnderstood(Exception):
    pass


Kept: TypeAlias = dict[int, tuple[str, Write]]


def _build_effects(writes: dict[str, list[Write]], wanted: set[str]) -> tuple[Any, frozenset[str], tuple[str, ...]]:
    """A template that prints, for the one message in `history`, the variables that each loop sets and their values:
    the loops with only these assignments left."""
    if not wanted:
        return None, frozenset(), ()
    kept: Kept = {id(write.node): (name, write) for name in wanted for write in writes[name]}
    loops = {id(write.loop.node): write.loop.node for _, write in kept.values()}
    fields: set[str] = set()
    variables: set[str] = set()
    body: list[nodes.Node] = []
    for number, loop in enumerate(loops.values()):
        if not isinstance(loop.target, nodes.Name):
            raise _NotUnderstood("a loop that takes messages apart")
        inside = [write for _, write in kept.values() if write.loop.node is loop]
        variables |= {f"{number}.{name}" for name, write in kept.values() if write.loop.node is loop}
        pruned = _prune(loop.body, kept, _list_needed(loop, inside), f"{number}.", set(writes))
        body.append(nodes.For(loop.target, nodes.Name("history", "load"), pruned, [], None, False))
        fields |= _list_fields(pruned, loop.target.name)
    environment = chat_environment()
    template = nodes.Template(body, lineno=1)
    template.set_lineno(1)
    template.set_environment(environment)
    code = environment.compile(template)
    compiled = environment.template_class.from_code(environment, code, dict(environment.globals))
    return compiled, frozenset(variables), tuple(sorted(fields))


def _list_needed(loop: nodes.For, writes: Sequence[Write]) -> set[str]:
    """Variables that the conditions and values of these assignments are made of."""
    read = [guard.test for write in writes for guard in write.guards]
    read += [write.node.node for write in writes if not _is_position(write)]
    needed = {name for node in read for name in _list_names(node)}
    assigns = [node for node in loop.find_all(nodes.Assign) if isinstance(node.target, nodes.Name)]
    before = 0
    while len(needed) > before:
        before = len(needed)
        for assign in assigns:
            if cast("nodes.Name", assign.target).name in needed:
                needed |= set(_list_names(assign.node))
    return needed


def _prune(
    body: Sequence[nodes.Node], kept: Kept, needed: set[str], prefix: str, states: set[str], *, inner: bool = False
) -> list[nodes.Node]:
    out: list[nodes.Node] = []
    for node in body:
        if id(node) in kept:
            name, write = kept[id(node)]
            value = nodes.Const("@") if _is_position(write) else write.node.node
            out.append(nodes.Output([nodes.TemplateData(f"\0{prefix}{name}="), value]))
        elif isinstance(node, nodes.Assign) and isinstance(node.target, nodes.Name) and node.target.name in needed:
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


def _open(test: nodes.Expr, states: set[str], *, inner: bool) -> nodes.Expr:
    """The condition for a message that others follow, where every variable that it asks allows it."""
    match test:
        case nodes.And():
            return nodes.And(_open(test.left, states, inner=inner), _open(test.right, states, inner=inner))
        case nodes.Or():
            return nodes.Or(_open(test.left, states, inner=inner), _open(test.right, states, inner=inner))
        case nodes.Not():
            is_state = _name_attribute(test.node) in states
            return nodes.Const(True) if is_state else nodes.Not(_open(test.node, states, inner=inner))
        case nodes.Getattr():
            name = _name_attribute(test)
            if name in states:
                return nodes.Const(True)
            return nodes.Const(False) if name == "loop.last" and not inner else test
        case _:
            return test


# small questions about nodes


def _join(flags: Iterable[Flags]) -> Flags:
    return frozenset[str]().union(*flags)


def _make_value(flags: Flags, *, keep_positions: bool = False) -> Flags:
    if flags & LISTS:
        return flags - LISTS | {"bad:a list of messages is used as a value"}
    if not keep_positions and any(flag.startswith(("pos:", "near")) for flag in flags):
        return flags | {"bad:a position is used as a value"}
    return flags


def _constant(node: nodes.Node | None) -> Any:
    if isinstance(node, nodes.Neg) and isinstance(node.node, nodes.Const):
        return -node.node.value
    return node.value if isinstance(node, nodes.Const) else None


def _name_attribute(node: nodes.Node) -> str:
    return (
        f"{node.node.name}.{node.attr}" if isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name) else ""
    )


def _is_loop_first(node: nodes.Node) -> bool:
    return _name_attribute(node) == "loop.first"


def _is_namespace(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name) and node.node.name == "namespace"


def _is_position(write: Write) -> bool:
    return any(flag.startswith("pos:") for flag in write.flags)


def _reads_state(flags: Flags) -> bool:
    return any(flag.startswith("state:") for flag in flags)


def _last_of(owner: Flags) -> Flags:
    """The last message of a list: a new one, or the last of a role, which is kept."""
    return frozenset({"now", *(f"last:{flag[5:]}" for flag in owner if flag.startswith("role:"))})


def _list_name(node: nodes.Node) -> str:
    if isinstance(node, nodes.Name):
        return node.name
    if isinstance(node, nodes.Filter) and node.node is not None and node.name in {"reverse", "list"}:
        return _list_name(node.node)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice) and node.arg.start is None:
        return _list_name(node.node)
    return "?"


def _only_raises(body: Sequence[nodes.Node]) -> bool:
    """Whether these statements write nothing and only ever refuse the conversation."""
    found = False
    for node in body:
        if isinstance(node, nodes.Output):
            for child in node.nodes:
                raises = isinstance(child, nodes.Call) and _list_name(child.node) == "raise_exception"
                if not raises and not (isinstance(child, nodes.TemplateData) and not child.data.strip()):
                    return False
                found = found or raises
        elif isinstance(node, nodes.If):
            if not _only_raises([*node.body, *(child for branch in node.elif_ for child in branch.body), *node.else_]):
                return False
            found = True
        else:
            return False
    return found


def _literals(guards: Sequence[Guard]) -> Iterator[tuple[nodes.Expr, bool, Guard]]:
    """The conditions that all hold (or do not) where these guards do."""

    def split(node: nodes.Expr, holds: bool) -> Iterator[tuple[nodes.Expr, bool]]:
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


def _read_role(node: nodes.Node) -> nodes.Node | None:
    """`x` of `x.role` and `x["role"]`."""
    if isinstance(node, nodes.Getattr) and node.attr == "role":
        return node.node
    return node.node if isinstance(node, nodes.Getitem) and _constant(node.arg) == "role" else None


def _excludes_assistant(guards: Sequence[Guard]) -> bool:
    """Whether only a message of another role gets there."""

    def excludes(node: nodes.Expr) -> bool:
        if isinstance(node, nodes.Or):
            return excludes(node.left) and excludes(node.right)
        if not isinstance(node, nodes.Compare) or len(node.ops) != 1 or node.ops[0].op != "eq":
            return False
        other = _constant(node.ops[0].expr)
        return isinstance(_read_role(node.expr), nodes.Name) and isinstance(other, str) and other != "assistant"

    return any(holds and excludes(node) for node, holds, _ in _literals(guards))


def _is_system_test(node: nodes.Expr) -> bool:
    """`messages[0].role == "system"`, alone or with a test that there are messages."""
    match node:
        case nodes.And(left=nodes.Name()):
            return _is_system_test(node.right)
        case nodes.Or():
            return _is_system_test(node.left) and _is_system_test(node.right)
        case nodes.Compare(ops=[nodes.Operand(op="eq" | "ne", expr=nodes.Const(value="system" | "developer"))]):
            owner = _read_role(node.expr)
            return isinstance(owner, nodes.Getitem) and _constant(owner.arg) == 0
        case _:
            return False


def _list_names(node: nodes.Node) -> Iterator[str]:
    if isinstance(node, nodes.Name):
        yield node.name
    for name in node.find_all(nodes.Name):
        yield name.name


def _list_fields(body: Sequence[nodes.Node], message: str) -> set[str]:
    """The fields of the message that these statements read."""
    fields: set[str] = set()

    def is_message(node: nodes.Node) -> bool:
        return isinstance(node, nodes.Name) and node.name == message

    def visit(node: nodes.Node) -> None:
        match node:
            case nodes.Call(node=nodes.Getattr(attr="get") as method) if is_message(method.node) and node.args:
                read(_constant(node.args[0]))
            case nodes.Getattr() if is_message(node.node):
                read(node.attr)
            case nodes.Getitem() if is_message(node.node):
                read(_constant(node.arg))
            case nodes.Compare(ops=[nodes.Operand(op="in" | "notin") as operand]) if is_message(operand.expr):
                read(_constant(node.expr))
            case nodes.Name() if is_message(node) and node.ctx == "load":
                raise _NotUnderstood("a whole message decides")
            case _:
                for child in node.iter_child_nodes():
                    visit(child)

    def read(name: Any) -> None:
        if not isinstance(name, str) or name == "get":
            raise _NotUnderstood("a field that is not named decides")
        fields.add(name)

    for node in body:
        visit(node)
    return fields
