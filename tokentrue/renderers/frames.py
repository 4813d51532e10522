"""What a template writes around contents that it only passes on: proven once, then written without rendering.

The proof: the template is rendered with `Opaque` stand-ins in place of the contents and call ids. They can be handed around, joined to text
and put out, and they count as non-empty strings; anything else that a template may do with a string (compare, search, trim, measure, print
into JSON …) raises `Peeked`. A render that ends without it took no decision on what the strings hold, so it writes the same around any
others. Refused beforehand: templates that turn their own output into strings again (macros, set blocks) or that look at a clock or a die.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NoReturn, cast

from jinja2 import nodes

from tokentrue.errors import TemplateError
from tokentrue.renderers.sandbox import Quick
from tokentrue.renderers.template import Habits, Plain, Template

_MARK = f"\ufdee{secrets.token_hex(8)}:"
_MARKED = re.compile(_MARK + r"(-?\d+);")
_REUSES_OUTPUT = (nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock, nodes.Include, nodes.Import, nodes.FromImport)
_FICKLE = ("strftime_now", "random", "lipsum", "cycler", "joiner")
_KEYS = {
    "user": frozenset({"role", "content"}),
    "system": frozenset({"role", "content"}),
    "tool": frozenset({"role", "content", "tool_call_id", "name"}),
}


class Peeked(BaseException):
    """The template looked into a string. Not an Exception: jinja's own tests swallow those."""


def _peek(*_: Any) -> NoReturn:
    raise Peeked


class Opaque:
    """Any non-empty string, joined to known text. `parts` are texts and the numbers of strings."""

    __slots__ = ("parts",)

    def __init__(self, *parts: str | int) -> None:
        self.parts = parts

    def __add__(self, other: object) -> Opaque:
        return Opaque(*self.parts, *_parts(other))

    def __radd__(self, other: object) -> Opaque:
        return Opaque(*_parts(other), *self.parts)

    def __bool__(self) -> bool:
        return True


_PEEKS = "eq ne lt le gt ge hash str repr format bytes html len iter reversed contains getitem getattr mul rmul mod rmod int float index"
for _name in _PEEKS.split():
    setattr(Opaque, f"__{_name}__", _peek)


def _parts(value: object) -> tuple[str | int, ...]:
    if isinstance(value, Opaque):
        return value.parts
    return (value,) if isinstance(value, str) else _peek()


class Tracing(Quick):
    """A sandbox in which an opaque string has no attribute and no item."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        return _peek() if type(obj) is Opaque else super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        return _peek() if type(obj) is Opaque else super().getitem(obj, argument)


def _put_out(value: Any) -> Any:
    if not isinstance(value, Opaque):
        return value
    return "".join(part if isinstance(part, str) else f"{_MARK}{part};" for part in value.parts)


def _is_string(value: Any) -> bool:
    return isinstance(value, str | Opaque)


class Frames:
    """Frames of one template."""

    def __init__(self, template: Template) -> None:
        self._template = template
        self._compiled: Any = None
        self._possible: bool | None = None

    def text(self, messages: Sequence[Plain], tools: Sequence[Plain] | None, kwargs: Mapping[str, Any], habits: Habits) -> str | None:
        """Rendered, with marks for the opaque strings; None where the template looked into one, or cannot be proven."""
        if self._possible is None:
            self._possible = self._compile()
        if not self._possible:
            return None
        try:
            return self._template.text(messages, tools, kwargs, habits=habits, compiled=self._compiled)
        except (Peeked, TemplateError):
            return None

    def _compile(self) -> bool:
        source = self._template.source
        if any(word in source for word in _FICKLE):
            return False
        environment = self._template.environment.overlay(finalize=_put_out)
        environment.__class__ = Tracing
        environment.tests = {**environment.tests, "string": _is_string}
        if next(environment.parse(source).find_all(_REUSES_OUTPUT), None) is not None:
            return False
        self._compiled = cast("Any", environment).from_string(source)
        return True


def frame_from(text: str, count: int) -> tuple[str, ...] | None:
    """The texts around contents 0 to count - 1; None where they are not there once each and in order, or something else is."""
    pieces = _MARKED.split(text)
    return tuple(pieces[::2]) if pieces[1::2] == [str(index) for index in range(count)] else None


def filled(frame: Sequence[str], contents: Sequence[str]) -> str:
    return "".join(chain.from_iterable(zip(frame, contents, strict=False))) + frame[-1]


def opaque_turn(last: Plain) -> Plain:
    """An assistant's turn with opaque call ids."""
    if not last.get("tool_calls"):
        return last
    return {**last, "tool_calls": [{**call, "id": Opaque(-1)} for call in last["tool_calls"]]}


def opaque_messages(fresh: Sequence[Plain]) -> list[Plain]:
    out: list[Plain] = []
    for index, message in enumerate(fresh):
        shown: Plain = {**message, "content": Opaque(index)}
        if "tool_call_id" in message:
            shown["tool_call_id"] = Opaque(-1)
        out.append(shown)
    return out


def has_frame(last: Plain, fresh: Sequence[Plain]) -> bool:
    """Whether nothing but these messages' contents and ids can differ from any others of their shape, and none of those is empty."""
    for message in fresh:
        if message.keys() != _KEYS.get(message["role"]) or not all(isinstance(value, str) and value for value in message.values()):
            return False
    return all(call["id"] and call["function"].keys() == {"name", "arguments"} for call in last.get("tool_calls") or ())
