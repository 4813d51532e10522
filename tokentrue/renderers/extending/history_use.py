"""Static analysis of a chat template: which earlier messages does the text after the recorded turn depend on?

`extend` needs only the text that the template writes after the recorded assistant turn. Rendering the whole history for
it costs more at every turn, so `analyse` reads the template's syntax tree and returns a `HistoryUse`: the messages that
must be rendered to get the same text. Example, a template that remembers a switch:

    {% for m in messages %}
      {% if m.role == "user" and "/think" in m.content %}{% set ns.think = true %}{% endif %} ...
    {% endfor %}
    {% if add_generation_prompt and not ns.think %}<think></think>{% endif %}

The text at the end reads `ns.think`. Every write to it overwrites the value and is conditioned on the current message
alone, so its last writer decides: keep the last user message with "/think" and drop the rest. Comparisons of positions
are safe, too: dropping messages does not change the order of the others.

How: a walk over the tree labels each expression with `Flags` (see template_nodes), which say what its value depends on.
Walks repeat until the labels are stable. `_decide` collects the flags that decide about text after the turn (`tail`);
`find_use` translates those. Anything not understood (counts, arithmetic on positions, collected texts) is a "bad:WHY"
flag: `HistoryUse.why` is then set and the caller renders the real history.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from jinja2 import nodes

from tokentrue.renderers.extending.template_nodes import (
    NONE,
    Flags,
    Guard,
    MessageLoop,
    NotUnderstood,
    Place,
    Write,
    bad,
    build_effects,
    chat_environment,
    constant,
    has,
    join,
    list_name,
    list_targets,
    literals,
    make_flags,
    name_attribute,
    only_raises,
    read_field,
    without,
)

LISTS = make_flags("msgs", "reversed", "future", "chosen")
MESSAGES = make_flags("msgs")  # all of them, in order
OTHER, TEXT = make_flags("other"), make_flags("text")
TURN_SHAPE = make_flags("role", "tool_calls")  # fields that the sentinel does not change
HARMLESS_STATEMENTS = (nodes.Continue, nodes.ExprStmt)


@dataclass(frozen=True, slots=True, kw_only=True)
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
    second: bool = False  # reads the first message that is not a system message
    tools: bool = False
    roles: frozenset[str] = frozenset()  # reads the last message of these roles
    neighbour: bool = False  # reads the message before the recorded turn
    asks_turn: bool = False  # reads the text of the recorded turn
    gaps: bool = False  # reads whether two messages are adjacent

    @property
    def reads_turn(self) -> bool:
        return self.asks_turn or bool(self.why)


def analyse(source: str) -> HistoryUse:
    try:
        return _Analysis(chat_environment().parse(source)).find_use()
    except (AttributeError, RecursionError) as error:  # a node has an unexpected form
        return HistoryUse(why=f"its form is not known ({error})")


@dataclass
class _Findings:
    """Results of one walk over the tree."""

    variables: dict[str, Flags] = field(default_factory=lambda: {"messages": MESSAGES, "tools": make_flags("tools")})
    control: dict[str, Flags] = field(default_factory=dict[str, Flags])  # what decides if a name is set
    kinds: dict[str, Flags] = field(default_factory=dict[str, Flags])
    """What a name holds: "content" of a message, "part" of a content or a character, "text", or "other"."""
    macros: dict[str, Flags] = field(default_factory=dict[str, Flags])
    namespaces: set[str] = field(default_factory=set[str])  # created outside loops and macros: they carry state
    initial: dict[str, list[nodes.Node]] = field(default_factory=dict[str, "list[nodes.Node]"])
    writes: dict[str, list[Write]] = field(default_factory=dict[str, "list[Write]"])
    faults: dict[str, str] = field(default_factory=dict[str, str])  # why a variable's last writer does not decide it
    lists: dict[str, int] = field(default_factory=lambda: {"messages": 1})  # how often a list of messages is assigned

    def summarise(self) -> object:
        """Everything except the nodes, which compare by their whole content."""
        writes = {name: [write.flags for write in found] for name, found in self.writes.items()}
        return self.variables, self.control, self.kinds, self.macros, self.namespaces, writes, self.lists, self.faults

    def forget_bad(self) -> None:
        for flags in (self.variables, self.control, self.macros):
            flags.update({name: frozenset(f for f in found if f[:4] != "bad:") for name, found in flags.items()})
        self.faults = {}

    def add(self, name: str, flags: Flags, kinds: Flags = OTHER) -> None:
        self.variables[name] = self.variables.get(name, NONE) | flags
        self.kinds[name] = self.kinds.get(name, NONE) | kinds


class _Analysis:
    def __init__(self, template: nodes.Template) -> None:
        self.template = template
        self.macros = {macro.name: macro for macro in template.find_all(nodes.Macro)}
        self.known = _Findings()
        self.found = self.known
        self.tail: set[str] = set()  # flags that decide the text after the recorded turn
        self.cut: set[str] = set()  # flags that decide which messages a list contains
        self.has_printed = False
        self.slices: set[int] = set()  # where a slice drops the first message

    def find_use(self) -> HistoryUse:
        for number in range(20):
            self._walk_once()
            if number < 5:  # "bad" found before all namespaces are known would persist
                self.found.forget_bad()
            if self.found.summarise() == self.known.summarise() and number >= 5:
                break
            self.known = self.found
        else:
            return HistoryUse(why="its variables depend on each other")
        places = {"start", "first", "second", "neighbour", "gap"}
        if self.tail & places or has(self.tail, "state:"):
            self.tail |= self.cut
        self.tail |= {flag for flag in self.cut if flag.startswith("bad:")}
        reasons = sorted(flag[4:] for flag in self.tail if flag.startswith("bad:"))
        reasons += [
            f"a {flag.partition(':')[0]} value decides" for flag in self.tail if flag.startswith(("pos:", "near"))
        ]
        reasons += ["a list of messages decides"] if self.tail & LISTS else []
        is_cut = "cut" in self.cut and self.tail & {"start", "second"}
        if is_cut or len(self.slices) > 2 or ("start" in self.tail and len(self.slices) > 1):
            reasons.append("it cuts off more than one first message")
        if not self.has_printed:
            reasons.append("no loop writes the messages")
        if reasons:
            return HistoryUse(why="; ".join(reasons[:3]))
        state = {flag[6:] for flag in self.tail if flag.startswith("state:")}
        wanted = {name for name in state if name in self.found.writes}
        try:
            effects, variables, fields = build_effects(self.found.writes, wanted, self.macros.values())
        except NotUnderstood as error:
            return HistoryUse(why=str(error))
        if {"name", "tool_call_id"} & set(fields):
            return HistoryUse(why="it carries the names of calls")  # a tool result may get its name from its call
        is_carried = any(not roles or "assistant" in roles for roles in variables.values())
        return HistoryUse(
            effects=effects,
            variables=variables,
            fields=fields,
            first="first" in self.tail,
            second="second" in self.tail,
            tools="tools" in self.tail,
            roles=frozenset(flag[5:] for flag in self.tail if flag.startswith("last:")),
            neighbour="neighbour" in self.tail,
            asks_turn=bool(
                self.tail & {"turn", "last:assistant"} or (is_carried and not TURN_SHAPE.issuperset(fields))
            ),
            gaps="gap" in self.tail,
        )

    def _walk_once(self) -> None:
        self.found = _Findings()
        self.tail, self.cut, self.has_printed, self.slices = set(), set(), False, set()
        self._walk(self.template.body, Place())
        self.found.faults = {name: self._find_fault(name, writes) for name, writes in self.found.writes.items()}

    # statements

    def _walk(self, body: Sequence[nodes.Node], place: Place) -> None:
        for node in body:
            self._statement(node, place)
            place = replace(place, bound=place.bound.union(list_targets(node))) if place.scope else place

    def _statement(self, node: nodes.Node, place: Place) -> None:
        match node:
            case nodes.Output():
                if not only_raises([node]):
                    for child in node.nodes:
                        self._decide(self._flags(child, place), place)
                    self._decide(place.guard_flags, place)
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
                if self._has_message_loop(node.body, place):
                    flags |= {"bad:texts of the messages are collected"}
                self._store(node.target.name, flags, place)
            case nodes.Macro():
                before, self.tail = self.tail, set()
                was_printed, self.has_printed = self.has_printed, True
                parameters = frozenset(parameter.name for parameter in node.args)
                inside = Place(in_macro=node.name, bound=parameters)
                for parameter, default in zip(node.args[::-1], node.defaults[::-1], strict=False):
                    kinds = self._find_kinds(default, inside)
                    self.found.add(inside.scope + parameter.name, self._flags(default, inside), kinds)
                self._walk(node.body, inside)
                flags, self.tail, self.has_printed = frozenset(self.tail), before, was_printed
                self.found.macros[node.name] = self.found.macros.get(node.name, NONE) | flags
            case nodes.CallBlock() if isinstance(node.call.node, nodes.ExtensionAttribute):  # {% generation %}
                self._walk(node.body, place)
            case nodes.Scope() | nodes.ScopedEvalContextModifier():
                self._walk(node.body, place)
            case _ if isinstance(node, HARMLESS_STATEMENTS):
                self._decide(place.guard_flags, place)
            case _:
                self.tail.add(f"bad:{type(node).__name__.lower()}")

    def _if(self, node: nodes.If, place: Place) -> None:
        around = place
        for branch in (node, *node.elif_):
            if only_raises(branch.body) or self._asks_for_media(branch.test, place):
                continue  # its condition is false in every conversation that renders
            flags = self._test(branch.test, place)
            if self._has_message_loop(branch.body, place):
                self._decide(flags, place, always=True)
            self._walk(branch.body, around.under(Guard(branch.test, True, flags, place)))
            around = around.under(Guard(branch.test, False, flags, place))
        self._walk(node.else_, around)

    def _for(self, node: nodes.For, place: Place) -> None:
        flags = self._flags(node.iter, place)
        names = [name.name for name in node.target.find_all(nodes.Name)] or [cast("Any", node.target).name]
        if not flags & LISTS:
            inner = place.inner or ("fields" if place.loop else "")
            within = replace(place, inner=inner, bound=place.bound.union(names))
            kinds = frozenset({"part" if self._find_kinds(node.iter, place) <= {"content", "text"} else "other"})
            for name in names:
                self.found.add(place.scope + name, flags | place.guard_flags, kinds)
            test = self._test(node.test, within) if node.test else NONE
            self._walk(node.body, within.under(Guard(nodes.Const(True), True, flags | test, place)))
            self._walk(node.else_, place.under(Guard(nodes.Const(True), True, flags | test, place)))
            return
        if flags & {"chosen"} or node.recursive or node.else_ or (place.in_macro and "future" not in flags):
            self.tail.add("bad:a loop over some of the messages")
            return
        if place.loop is not None:  # a loop over messages inside the loop over messages
            if "future" not in flags:
                self.tail.add("bad:a loop over all messages for each message")
            for name in names:
                self.found.add(place.scope + name, make_flags("now"))
            self._walk(node.body, replace(place, inner="future", bound=place.bound.union(names)))
            return
        if "future" in flags:
            self.tail.add("bad:a loop over some of the messages")
        if any(constant(piece.start) for piece in node.iter.find_all(nodes.Slice)):
            self.cut |= self._find_cut(node.iter, place)
        loop = MessageLoop(node, list_name(node.iter), "reversed" in flags, node.test is not None)
        prints = not only_raises(node.body) and any(not only_raises([child]) for child in node.find_all(nodes.Output))
        if prints and loop.is_reversed:
            self.tail.add("bad:messages written in reverse")
        if any(True for _ in node.find_all(nodes.Break)):
            self.tail.add("bad:break")
        self.has_printed = self.has_printed or prints
        inside = Place((), loop, bound=frozenset(names))
        for name in names:
            self.found.add(inside.scope + name, make_flags("msg"))
        if node.test is not None:
            inside = inside.under(Guard(node.test, True, self._test(node.test, inside), inside))
        self._walk(node.body, inside)

    def _has_message_loop(self, body: Sequence[nodes.Node], place: Place) -> bool:
        loops = [
            loop for child in body for loop in ((child,) if isinstance(child, nodes.For) else child.find_all(nodes.For))
        ]
        return any(self._flags(loop.iter, place) & LISTS for loop in loops)

    def _assign(self, node: nodes.Assign, place: Place) -> None:
        flags = self._flags(node.node, place)
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
                    self.found.add(name, bad("a namespace that is made again"))
                continue
            if flags & LISTS:
                self.found.lists[name] = self.found.lists.get(name, 0) + 1
                of_list = frozenset(flag for flag in flags if flag in LISTS or flag.startswith(("role:", "bad:")))
                self.found.add(place.scope + name, of_list)
                if any(constant(piece.start) for piece in node.node.find_all(nodes.Slice)):
                    self.cut |= self._find_cut(node.node, place)
            else:
                is_one = isinstance(node.target, nodes.Name)
                self._store(name, flags, place, self._find_kinds(node.node, place) if is_one else OTHER)

    def _find_cut(self, value: nodes.Node, place: Place) -> Flags:
        """Flags that decide which messages a list contains, except "without the system message"."""
        tests = [(guard.test, guard.flags) for guard in place.guards]
        while isinstance(value, nodes.CondExpr):
            tests.append((value.test, self._test(value.test, place)))
            value = value.expr2 or nodes.Const(None)
        flags = [flags for test, flags in tests if not _is_system_test(test)]
        if len(flags) == len(tests):
            flags.append(make_flags("cut"))
        return join(flags) | {flag for flag in self._flags(value, place) if flag.startswith("bad:")}

    def _store(self, name: str, flags: Flags, place: Place, kinds: Flags = TEXT) -> None:
        """The guards' flags matter only if the name may be unset."""
        full, top = place.scope + name, NONE if place.scope else make_flags("top")
        guards = place.guard_flags
        self.found.add(full, flags | top | (guards if name in place.bound else NONE), kinds)
        self.found.control[full] = self.found.control.get(full, NONE) | guards

    def _assign_attribute(self, node: nodes.Assign, target: nodes.NSRef, place: Place) -> None:
        full = f"{target.name}.{target.attr}"
        value = self._flags(node.node, place)
        guards = place.guard_flags
        is_carried = target.name in self.known.namespaces
        if not is_carried or (place.loop is None and not place.in_macro):
            self.found.add(full, value | guards)
            self.found.initial.setdefault(full, []).append(node.node)
        elif place.loop is None or place.inner == "future":
            self.found.add(full, bad(f"{full} is set in a macro or a loop inside the loop"))
        else:
            self.found.writes.setdefault(full, []).append(Write(node, value, place.guards, place.loop))

    def _decide(self, flags: Flags, place: Place, *, always: bool = False) -> None:
        """Adds flags that decide about text. Text before the first message precedes the turn and does not count."""
        if not (place.loop or place.in_macro or self.has_printed or always):
            return
        if any(
            _is_loop_first(test) and holds and guard.place.knows_first for test, holds, guard in literals(place.guards)
        ):
            flags = make_flags("start")  # the new messages are never the first
        if "neighbour" in flags and _excludes_assistant(place.guards):
            flags -= {"neighbour"}  # the recorded turn is an assistant's: what precedes it is not read
        self.tail |= flags

    # expressions

    def _test(self, node: nodes.Node, place: Place) -> Flags:
        match node:
            case nodes.And() if place.knows_first and any(map(_is_loop_first, (node.left, node.right))):
                return make_flags("start")  # false for the new messages
            case nodes.And() | nodes.Or():
                return self._test(node.left, place) | self._test(node.right, place)
            case nodes.Not():
                return self._test(node.node, place)
            case nodes.Name() if (flags := self._look_up(node.name, place)) and flags <= {"msgs", "top"}:
                return NONE  # no conversation is empty
            case _:
                return self._flags(node, place)

    def _flags(self, node: nodes.Node, place: Place) -> Flags:
        match node:
            case nodes.Const() | nodes.TemplateData() | nodes.ExtensionAttribute():
                return NONE
            case nodes.And() | nodes.Or() | nodes.Not():
                return self._logic(node, place)
            case nodes.CondExpr():
                flags = self._flags(node.expr1, place) | (self._flags(node.expr2, place) if node.expr2 else NONE)
                return flags | self._test(node.test, place)
            case nodes.Name():
                return self._name(node.name, place)
            case nodes.Getattr() | nodes.Getitem() if (owner := _read_shape(node)) is not None:
                return _make_value(self._flags(owner, place) - {"turn"})
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
            case nodes.Test():
                flags = self._plain(node, place, keep_positions=node.name in {"none", "defined", "undefined"})
                if has(flags, "pos:"):
                    return without(flags, "pos:") | {"now"}
                return flags
            case _:
                return self._plain(node, place)

    def _logic(self, node: nodes.And | nodes.Or | nodes.Not, place: Place) -> Flags:
        if isinstance(node, nodes.Not):
            return self._test(node, place)
        return self._flags(node.left, place) | self._flags(node.right, place)

    def _plain(self, node: nodes.Node, place: Place, *, keep_positions: bool = False) -> Flags:
        flags = join(self._flags(child, place) for child in node.iter_child_nodes())
        return _make_value(flags, keep_positions=keep_positions)

    def _look_up(self, name: str, place: Place) -> Flags:
        flags = self.known.variables.get(place.scope + name, NONE)
        if name in place.bound:
            return flags
        outside = self.known.variables.get(name, NONE) | self.known.control.get(name, NONE)
        return flags | self.known.control.get(place.scope + name, NONE) | outside

    def _find_kinds(self, node: nodes.Node | None, place: Place) -> Flags:
        match node:
            case nodes.Name():
                kinds = self.known.kinds.get(place.scope + node.name, NONE)
                kinds |= NONE if node.name in place.bound else self.known.kinds.get(node.name, NONE)
                return kinds or OTHER
            case nodes.Call(node=nodes.Name()) if cast("nodes.Name", node.node).name in self.macros:
                return TEXT
            case nodes.Filter(name="trim" | "string") | nodes.Const(value=str()):
                return TEXT
            case nodes.CondExpr():
                return self._find_kinds(node.expr1, place) | self._find_kinds(node.expr2, place)
            case _ if (owner := read_field(node, "content")) is not None:
                flags = self._flags(owner, place)
                return frozenset({"other"} if flags & {*LISTS, "tools"} or not flags else {"content"})
            case _:
                return OTHER

    def _asks_for_media(self, test: nodes.Node, place: Place) -> bool:
        """True if the test needs a content part that is not text (an image, say): all contents are text here."""
        match test:
            case nodes.Or():
                return self._asks_for_media(test.left, place) and self._asks_for_media(test.right, place)
            case nodes.And():
                return self._asks_for_media(test.left, place) or self._asks_for_media(test.right, place)
            case nodes.Compare(ops=[nodes.Operand(op="in")]) if isinstance(word := constant(test.expr), str):
                part, is_text = test.ops[0].expr, word in {"type", "text"} or len(word) < 2
            case nodes.Compare(ops=[nodes.Operand(op="eq")]) if isinstance(word := constant(test.ops[0].expr), str):
                part, is_text = read_field(test.expr, "type"), word == "text"
            case _:
                return False
        return not is_text and isinstance(part, nodes.Name) and self._find_kinds(part, place) == make_flags("part")

    def _name(self, name: str, place: Place) -> Flags:
        if name in {"loop", "cycler", "joiner", "caller", "varargs", "kwargs", "lipsum"}:
            return bad(name)
        if name in self.known.namespaces:  # an alias could be written unnoticed
            self.cut.add(f"bad:the namespace {name} is used as a value")
            return bad(f"the namespace {name} is used as a value")
        if name in self.macros and name not in place.bound:
            return bad("a macro is used as a value")
        return self._look_up(name, place)

    def _attribute(self, name: str, attribute: str, place: Place) -> Flags:
        if name == "loop":
            return self._loop(attribute, place)
        full = f"{name}.{attribute}"
        if name in self.known.namespaces:
            return self._state(full) | self._look_up(name, place)
        if full in self.known.variables:  # a namespace that lives for one message
            return self.known.variables[full]
        flags = self._name(name, place)
        return flags | {"bad:an attribute of a list of messages"} if flags & LISTS else flags

    def _state(self, full: str) -> Flags:
        flags = self.known.variables.get(full, NONE)
        writes = self.known.writes.get(full, [])
        if not writes:
            return flags
        why = self.known.faults.get(full, "")
        positions = {flag for write in writes for flag in write.flags if flag.startswith("pos:")}
        return flags | positions | {"now", f"state:{full}"} | (bad(why) if why else NONE)

    def _loop(self, attribute: str, place: Place) -> Flags:
        if place.inner == "fields":
            return make_flags("msg")
        if place.inner == "future":
            return make_flags("now")
        if place.loop is None:
            return NONE
        if place.loop.is_filtered and attribute != "last":
            return bad("a position among some of the messages")
        match attribute:
            case "index0" | "index":
                if place.loop.is_reversed:
                    return make_flags(f"back:{attribute}:{place.loop.base}", "bad:a position from the end")
                return make_flags(f"pos:{attribute}:{place.loop.base}")
            case "last":
                return make_flags("last")
            case "first":
                return make_flags("now", "start")
            case "previtem":
                return make_flags("now", "start", "neighbour", "turn")
            case "nextitem":
                return make_flags("now")
            case _:
                return bad(f"loop.{attribute}")

    def _item(self, node: nodes.Getitem, place: Place) -> Flags:
        owner = self._flags(node.node, place)
        if isinstance(node.node, nodes.Name) and node.node.name in self.known.namespaces:
            return bad("a namespace is subscripted")
        if not owner & LISTS:
            return owner | self._plain(node.arg, place)
        if isinstance(node.arg, nodes.Slice):
            return self._slice(owner, node.arg, place)
        number = constant(node.arg)
        if number == -1 and not owner & {"reversed"}:
            return _last_of(owner)
        if owner & {"chosen", "reversed", "future"}:
            return bad("one of some messages")
        if number == 0:
            return self._first(node.node)
        flags = self._flags(node.arg, place)
        if has(flags, "bad:"):
            return flags
        bases = {flag.rpartition(":")[2] for flag in flags if flag.startswith(("pos:", "near:"))}
        if bases != {list_name(node.node)} or has(flags, "state:") or has(flags, "pos:length"):
            return bad("a message at a number")
        return without(flags, "pos:", "near:") | {"now"}

    def _first(self, owner: nodes.Node) -> Flags:
        is_whole = isinstance(owner, nodes.Name) and owner.name == "messages" and self.known.lists["messages"] == 1
        return frozenset({"now", "first"} if is_whole else {"now", "first", "second"})

    def _slice(self, owner: Flags, piece: nodes.Slice, place: Place) -> Flags:
        start, stop, step = (constant(part) for part in (piece.start, piece.stop, piece.step))
        if owner != MESSAGES:
            return bad("a part of a part of the messages")
        if piece.start is None and piece.stop is None and step == -1:
            return make_flags("msgs", "reversed")
        if piece.step is None and piece.stop is None and start in {0, 1}:
            self.slices |= {id(piece)} if start else set()
            return owner
        if piece.step is None and piece.start is None and stop == -1:
            return owner
        if piece.step is None and piece.stop is None and piece.start is not None and place.loop is not None:
            flags = self._flags(piece.start, place)
            if flags and all(flag.startswith(("pos:index", "near:", "now")) for flag in flags):
                return make_flags("future")
        return bad("a part of the messages")

    def _filter(self, node: nodes.Filter, place: Place) -> Flags:
        value = self._flags(cast("nodes.Expr", node.node), place)
        if not value & LISTS:
            given = [*node.args, *node.kwargs, *(part for part in (node.dyn_args, node.dyn_kwargs) if part is not None)]
            return _make_value(value | join(self._flags(argument, place) for argument in given))
        arguments = [constant(argument) for argument in node.args]
        if node.name in {"length", "count"} and value == MESSAGES:
            return make_flags(f"pos:length:{list_name(cast('nodes.Expr', node.node))}")
        if node.name == "list":
            return value
        if node.name == "reverse" and value == MESSAGES:
            return make_flags("msgs", "reversed")
        if node.name == "selectattr" and arguments[:1] == ["role"] and arguments[1:2] in (["equalto"], ["=="], ["eq"]):
            is_role = value == MESSAGES and arguments[2:] and arguments[2] in {"user", "assistant", "tool"}
            return frozenset({"chosen", f"role:{arguments[2]}"} if is_role else {"bad:some of the messages"})
        if node.name == "last" and not value & {"reversed"}:
            return _last_of(value)
        if node.name == "first" and value == MESSAGES:
            return self._first(cast("nodes.Expr", node.node))
        return bad(f"{node.name} of messages")

    def _compare(self, node: nodes.Compare, place: Place) -> Flags:
        sides = [self._flags(child, place) for child in (node.expr, *(operand.expr for operand in node.ops))]
        flags = join(sides)
        positions = [{flag for flag in side if flag.startswith("pos:")} for side in sides]
        if flags & LISTS or has(flags, "near:"):
            return flags - LISTS | {"bad:messages are compared"}
        if not any(positions):
            return flags
        rest = without(flags, "pos:") | {"now"}
        constants = [constant(child) for child in (node.expr, *(operand.expr for operand in node.ops))]
        if len(sides) != 2 or any(operand.op in {"in", "notin"} for operand in node.ops):
            return rest | {"bad:positions are compared"}
        if not all(positions):
            kinds = {flag.split(":")[1] for side in positions for flag in side}
            number = constants[0] if constants[1] is None else constants[1]
            before = -1 if kinds == {"index0"} else 0  # no message has this position
            if type(number) is int and number == before:
                return rest
            if type(number) is int and number == before + 1 and "length" not in kinds and not has(flags, "state:"):
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
        flags = join(sides)
        moved = [flag for flag in flags if flag.startswith(("pos:", "back:"))]
        if not moved:
            return _make_value(flags)
        one = constant(node.right) == 1
        if isinstance(node, nodes.Sub) and one and len(moved) == 1 and moved[0].startswith("pos:length:"):
            return flags - {moved[0]} | {moved[0].replace("pos:length:", "pos:index0:")}  # the last place
        if isinstance(node, nodes.Sub) and place.loop is not None and place.loop.is_reversed:
            back = next((flag for flag in sides[1] if flag.startswith("back:")), "")
            length = "pos:index0:" if back.startswith("back:index0:") else "pos:length:"
            if back and sides[0] == frozenset(
                {length + place.loop.base}
            ):  # length - 1 - loop.index0, length - loop.index
                return make_flags(f"pos:index0:{place.loop.base}")
        if isinstance(node, (nodes.Add, nodes.Sub)) and one and all(flag.startswith("pos:index0:") for flag in moved):
            beside = {"start", "neighbour", "turn"} if isinstance(node, nodes.Sub) else set[str]()
            near = {f"near:{flag.rpartition(':')[2]}" for flag in moved}
            return without(flags, "pos:") | near | beside
        return flags | {"bad:arithmetic with positions"}

    def _call(self, node: nodes.Call, name: str, place: Place) -> Flags:
        if name not in self.macros or name in place.bound:
            return self._plain(node, place)
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
        values = [write.node.node for write in writes]
        is_one_value = all(isinstance(value, nodes.Const) for value in values) and (
            len({repr(cast("nodes.Const", value).value) for value in values}) == 1
        )
        asked: dict[int, bool] = {}  # conditions on the variable itself, and whether they hold
        for write in writes:
            if any(not flag.startswith(("msg", "pos:")) for flag in write.flags):
                return f"{full} is made of other values"
            is_latched = False
            for expression, holds, guard in literals(write.guards):
                if name_attribute(expression) == full:
                    # Both branches of one condition: the value is toggled, not overwritten.
                    is_other_branch = asked.setdefault(id(guard.test), holds) is not holds
                    if is_other_branch or not self._overwrites(full, write.node.node, holds, values):
                        return f"{full} depends on itself"
                elif self._is_latch(expression, holds, write, writes):
                    is_latched = True
                elif not self._asks_one_message(expression, guard):
                    return f"{full} is set under a condition on other messages"
            if write.loop.is_reversed and not is_latched and not is_one_value:
                return f"{full} is set in a loop from the end"
            if any(True for _ in write.loop.node.find_all(nodes.Continue)):
                return f"{full} is set in a loop that skips messages"
        return ""

    def _asks_one_message(self, node: nodes.Node, guard: Guard) -> bool:
        match node:
            case nodes.Const():  # of a loop
                return guard.flags <= {"msg"}
            case nodes.And() | nodes.Or():
                return self._asks_one_message(node.left, guard) and self._asks_one_message(node.right, guard)
            case nodes.Not():
                return self._asks_one_message(node.node, guard)
            case _ if name_attribute(node) == "loop.last" and guard.place.knows_last:
                return True  # false for every earlier message
            case _:
                return self._test(node, guard.place) <= {"msg"}

    def _overwrites(self, full: str, value: nodes.Node, holds: bool, values: Sequence[nodes.Node]) -> bool:
        """If x is a boolean, `if ns.x: set ns.x = false` has the same effect as `set ns.x = false`."""
        initial = self.found.initial.get(full, [])
        every = [constant(node) for node in (*values, *initial)]
        return bool(initial) and all(isinstance(one, bool) for one in every) and constant(value) is (not holds)

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


def _make_value(flags: Flags, *, keep_positions: bool = False) -> Flags:
    if flags & LISTS:
        return flags - LISTS | {"bad:a list of messages is used as a value"}
    if not keep_positions and any(flag.startswith(("pos:", "near")) for flag in flags):
        return flags | {"bad:a position is used as a value"}
    return flags


def _read_shape(node: nodes.Getattr | nodes.Getitem) -> nodes.Expr | None:
    """`loop.previtem` of `loop.previtem.role`: reads nothing sampled from the turn before."""
    owner = read_field(node, "role")
    return owner if isinstance(owner, (nodes.Getattr, nodes.Getitem)) else None


def _is_loop_first(node: nodes.Node) -> bool:
    return name_attribute(node) == "loop.first"


def _is_namespace(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name) and node.node.name == "namespace"


def _last_of(owner: Flags) -> Flags:
    """Flags of a list's last message: a new one, or the last of a role (kept)."""
    return frozenset({"now", *(f"last:{flag[5:]}" for flag in owner if flag.startswith("role:"))})


def _excludes_assistant(guards: Sequence[Guard]) -> bool:

    def excludes(node: nodes.Node) -> bool:
        if isinstance(node, nodes.Or):
            return excludes(node.left) and excludes(node.right)
        if not isinstance(node, nodes.Compare) or len(node.ops) != 1 or node.ops[0].op != "eq":
            return False
        other = constant(node.ops[0].expr)
        return isinstance(read_field(node.expr, "role"), nodes.Name) and isinstance(other, str) and other != "assistant"

    return any(holds and excludes(node) for node, holds, _ in literals(guards))


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
