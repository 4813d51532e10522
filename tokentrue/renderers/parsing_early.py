"""A tool call while it is being written: what of its arguments may already be shown.

A call is shown from its arguments' first brace on, once its name is known. In JSON formats the model's own text goes through; in untyped
formats each parameter goes out when it is whole, because its value needs its type. The last brace is kept back until the whole call has
been read: what a client holds of a call that breaks off is therefore never valid JSON, and cannot be taken for a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import regex
from transformers.utils.chat_parsing.response_templates import ResponseTemplateField

from tokentrue.renderers.parsing_json import Value

_PLACEHOLDER = regex.compile(r"\{(\w+)(?:\.(\w+))?\}")
_LITERAL_END = regex.compile(r"[\w<>/:｜]+\Z")
_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonShape:
    """Where a call in JSON has its name and its arguments: under a key of the body, or (None) captured and the whole body.

    `usual` reads the name of a call that is written as most are, up to its arguments.
    """

    name: str | None
    arguments: str | None
    usual: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TagShape:
    """A call whose body is one tag per parameter; `closing` is the text that every tag ends with."""

    pattern: Any
    closing: str


def shape_of(field: ResponseTemplateField | None) -> JsonShape | TagShape | None:
    """None where a call can only be read whole: several in one list, or a dialect of JSON that must be translated first."""
    if field is None or field.transform_each or not isinstance(field.transform, Mapping):
        return None
    function = field.transform.get("function", field.transform)
    name, arguments = (_placeholder(function.get(key)) for key in ("name", "arguments"))
    if field.content == "json" and not field.content_args:
        if name == ("name", None) and arguments == ("content", None):
            return JsonShape(name=None, arguments=None)
        if name[0] == arguments[0] == "content" and name[1] and arguments[1]:
            return JsonShape(name=name[1], arguments=arguments[1], usual=_usual(name[1], arguments[1]))
    if field.content == "xml-inline" and field.content_args.keys() == {"tag_pattern"} and name == ("name", None):
        pattern = field.content_args["tag_pattern"]
        closing = _LITERAL_END.search(pattern)
        if arguments == ("content", None) and closing is not None:
            return TagShape(pattern=regex.compile(pattern, regex.DOTALL), closing=closing[0])
    return None


def _usual(name: str, arguments: str) -> Any:
    gap = r"[ \t\r\n]*"
    return re.compile(gap.join(("", r"\{", f'"{name}"', ":", r'"([^"\\\x00-\x1f]+)"', ",", f'"{arguments}"', ":", r"(?=\{)")))


def _placeholder(text: Any) -> tuple[str | None, str | None]:
    found = _PLACEHOLDER.fullmatch(text) if isinstance(text, str) else None
    return (found[1], found[2]) if found else (None, None)


class Early(Protocol):
    """`feed` gives the arguments' text that may be shown now. Nothing is, before `name` is known."""

    name: str
    call_id: str

    def feed(self, text: str) -> str: ...


Typed = Callable[[str, Any], Any]
"""A parameter's match to its value, for the tool of that name."""


def early(shape: JsonShape | TagShape, captures: Mapping[str, str], typed: Typed) -> Early:
    name = captures.get("name", "").strip()
    call_id = captures.get("id") or captures.get("call_id") or ""
    if isinstance(shape, TagShape):
        return Tags(shape, name, call_id, typed)
    return Members(shape, call_id) if shape.arguments is not None else Body(name, call_id)


class Body:
    """The body is the arguments."""

    def __init__(self, name: str, call_id: str = "") -> None:
        self.name, self.call_id = name, call_id
        self._value = Value()
        self._begun = False

    def feed(self, text: str) -> str:
        if not self._begun:
            text = text.lstrip(_SPACE)
            if not text:
                return ""
            self._begun = True
            self._value.broken = text[0] != "{" or not self.name
        return text[: self.take(text, 0)]

    def take(self, text: str, place: int) -> int:
        """The place up to which `text` may be shown: all of the value but its last character."""
        end = self._value.feed(text, place)
        return end - 1 if self._value.done and end > place else end


class Members:
    """The body is an object that has the name and the arguments under keys of its own. Its arguments wait for its name."""

    def __init__(self, shape: JsonShape, call_id: str) -> None:
        self.name, self.call_id = "", call_id
        self._shape = shape
        self._outer = "{"  # the next character of structure that must come: `{`, a key's quote, `:`, a value, `,`
        self._text = ""  # of the key or value being read
        self._key = ""
        self._value: Value | None = None
        self._arguments: Body | None = None
        self._lost = False

    def feed(self, text: str) -> str:
        place = 0
        while self._arguments is None and place < len(text) and not self._lost:
            if self._value is not None:
                place = self._inside(text, place, self._value)
            elif text[place] in _SPACE:
                place += 1
            else:
                place = self._between(text, place)
        if self._arguments is None:
            return ""
        return text[place : self._arguments.take(text, place)]  # what follows the arguments is read when the call is whole

    def _between(self, text: str, place: int) -> int:
        char = text[place]
        if self._outer == "value":
            if self._key != self._shape.arguments:
                self._value, self._text = Value(), ""
            elif self.name and char == "{":
                self._arguments = Body(self.name)
            else:
                self._lost = True
            return place
        if self._outer == "key":
            self._value, self._text, self._lost = Value(), "", char != '"'
            return place
        self._lost = char != self._outer
        self._outer = "value" if self._outer == ":" else "key"
        return place + 1

    def _inside(self, text: str, place: int, value: Value) -> int:
        end = value.feed(text, place)
        self._text += text[place:end]
        if value.broken:
            self._lost = True
        elif value.done:
            self._value = None
            self._read(json.loads(self._text, strict=False))
        return end

    def _read(self, value: Any) -> None:
        if self._outer == "key":
            self._key, self._outer = value, ":"
            return
        self._outer = ","
        if isinstance(value, str) and self._key == self._shape.name:
            self._lost = bool(self.name)  # said twice
            self.name = value.strip()
        elif isinstance(value, str) and self._key == "id":
            self.call_id = self.call_id or value


class Tags:
    """One tag per parameter; each becomes a member of the arguments when it is whole."""

    def __init__(self, shape: TagShape, name: str, call_id: str, typed: Typed) -> None:
        self.name, self.call_id = name, call_id
        self._shape, self._typed = shape, typed
        self._text = ""
        self._keys: set[str] = set()

    def feed(self, text: str) -> str:
        shown: list[str] = []
        tail = len(self._text)
        self._text += text
        if self._text.find(self._shape.closing, max(tail - len(self._shape.closing) + 1, 0)) < 0:
            return ""
        place = 0
        for match in self._shape.pattern.finditer(self._text):
            key = match["key"]
            if self._text[place : match.start()].strip(_SPACE) or key in self._keys:
                break  # not as this format is written: it is read when it is whole
            shown.append(member(key, self._typed(self.name, match), first=not self._keys))
            self._keys.add(key)
            place = match.end()
        self._text = self._text[place:]
        return "".join(shown) if self.name else ""


def member(key: str, value: Any, *, first: bool) -> str:
    """The next piece of the text that `json.dumps` gives for the whole object."""
    return f"{'{' if first else ', '}{json.dumps(key, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"
