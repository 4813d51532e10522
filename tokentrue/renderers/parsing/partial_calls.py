"""A tool call while it is being written: what of its arguments may already be shown.

A call is shown from its arguments' first brace on, once its name is known. In JSON formats the model's own text goes
through; in untyped formats each parameter goes out when it is whole, because its value needs its type. The last brace
is kept back until the whole call has
been read: what a client holds of a call that breaks off is therefore never valid JSON, and cannot be taken for a call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import regex

from tokentrue.renderers.json_types import is_object
from tokentrue.renderers.parsing.partial_json import JsonValueReader

ForeignField: TypeAlias = Any
"""A field of a response template, as `transformers` compiles it: its attributes have no types."""

_PLACEHOLDER = regex.compile(r"\{(\w+)(?:\.(\w+))?\}")
_LITERAL_END = regex.compile(r"[\w<>/:｜]+\Z")
_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCallFormat:
    """Where a call in JSON has its name and its arguments: under a key of the body, or (None) captured and the whole
    body."""

    name: str | None
    arguments: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TagCallFormat:
    """A call whose body is one tag per parameter; `closing` is the text that every tag ends with."""

    pattern: Any
    closing: str


CallFormat: TypeAlias = JsonCallFormat | TagCallFormat


def find_call_format(field: ForeignField | None) -> CallFormat | None:
    """None where a call can only be read whole: several in one list, or a dialect of JSON that must be translated
    first."""
    if field is None or field.transform_each or not is_object(field.transform):
        return None
    function: Mapping[str, Any] = field.transform.get("function", field.transform)
    name, arguments = (_read_placeholder(function.get(key)) for key in ("name", "arguments"))
    if field.content == "json" and not field.content_args:
        if name == ("name", None) and arguments == ("content", None):
            return JsonCallFormat(name=None, arguments=None)
        if name[0] == arguments[0] == "content" and name[1] and arguments[1]:
            return JsonCallFormat(name=name[1], arguments=arguments[1])
    if field.content == "xml-inline" and field.content_args.keys() == {"tag_pattern"} and name == ("name", None):
        pattern: str = field.content_args["tag_pattern"]
        closing = _LITERAL_END.search(pattern)
        if arguments == ("content", None) and closing is not None:
            return TagCallFormat(pattern=regex.compile(pattern, regex.DOTALL), closing=closing[0])
    return None


def _read_placeholder(text: object) -> tuple[str | None, str | None]:
    found = _PLACEHOLDER.fullmatch(text) if isinstance(text, str) else None
    return (found[1], found[2]) if found else (None, None)


class PartialCall(Protocol):
    """`feed` gives the arguments' text that may be shown now. Nothing is, before `name` is known."""

    name: str
    call_id: str

    def feed(self, text: str) -> str: ...


TypeValue = Callable[[str, Any], Any]
"""The tool's name and a parameter's match to the parameter's value."""


def start_call(call_format: CallFormat, captures: Mapping[str, str], type_value: TypeValue) -> PartialCall:
    name = captures.get("name", "").strip()
    call_id = captures.get("id") or captures.get("call_id") or ""
    if isinstance(call_format, TagCallFormat):
        return TagArguments(call_format, name, call_id, type_value)
    return JsonCallObject(call_format, call_id) if call_format.arguments is not None else JsonArguments(name, call_id)


class JsonArguments:
    """The body is the arguments."""

    def __init__(self, name: str, call_id: str = "") -> None:
        self.name, self.call_id = name, call_id
        self._value = JsonValueReader()
        self._has_begun = False

    def feed(self, text: str) -> str:
        if not self._has_begun:
            text = text.lstrip(_SPACE)
            if not text:
                return ""
            self._has_begun = True
            self._value.is_broken = text[0] != "{" or not self.name
        return text[: self.read(text, 0)]

    def read(self, text: str, place: int) -> int:
        """The place up to which `text` may be shown: all of the value but its last character."""
        end = self._value.feed(text, place)
        return end - 1 if self._value.is_done and end > place else end


class JsonCallObject:
    """The body is an object that has the name and the arguments under keys of its own. Its arguments wait for its
    name."""

    def __init__(self, call_format: JsonCallFormat, call_id: str) -> None:
        self.name, self.call_id = "", call_id
        self._format = call_format
        self._expected = "{"  # the next character of structure that must come: `{`, a key's quote, `:`, a value, `,`
        self._text = ""  # of the key or value being read
        self._key = ""
        self._value: JsonValueReader | None = None
        self._arguments: JsonArguments | None = None
        self._is_lost = False

    def feed(self, text: str) -> str:
        place = 0
        while self._arguments is None and place < len(text) and not self._is_lost:
            if self._value is not None:
                place = self._read_value(text, place, self._value)
            elif text[place] in _SPACE:
                place += 1
            else:
                place = self._read_structure(text, place)
        if self._arguments is None:
            return ""
        return text[
            place : self._arguments.read(text, place)
        ]  # what follows the arguments is read when the call is whole

    def _read_structure(self, text: str, place: int) -> int:
        char = text[place]
        if self._expected == "value":
            if self._key != self._format.arguments:
                self._value, self._text = JsonValueReader(), ""
            elif self.name and char == "{":
                self._arguments = JsonArguments(self.name)
            else:
                self._is_lost = True
            return place
        if self._expected == "key":
            self._value, self._text, self._is_lost = JsonValueReader(), "", char != '"'
            return place
        self._is_lost = char != self._expected
        self._expected = "value" if self._expected == ":" else "key"
        return place + 1

    def _read_value(self, text: str, place: int, value: JsonValueReader) -> int:
        end = value.feed(text, place)
        self._text += text[place:end]
        if value.is_broken:
            self._is_lost = True
        elif value.is_done:
            self._value = None
            self._take(json.loads(self._text, strict=False))
        return end

    def _take(self, value: Any) -> None:
        if self._expected == "key":
            self._key, self._expected = value, ":"
            return
        self._expected = ","
        if isinstance(value, str) and self._key == self._format.name:
            self._is_lost = bool(self.name)  # said twice
            self.name = value.strip()
        elif isinstance(value, str) and self._key == "id":
            self.call_id = self.call_id or value


class TagArguments:
    """One tag per parameter; each becomes a member of the arguments when it is whole."""

    def __init__(self, call_format: TagCallFormat, name: str, call_id: str, type_value: TypeValue) -> None:
        self.name, self.call_id = name, call_id
        self._format, self._type_value = call_format, type_value
        self._text = ""
        self._keys: set[str] = set()

    def feed(self, text: str) -> str:
        shown: list[str] = []
        tail = len(self._text)
        self._text += text
        if self._text.find(self._format.closing, max(tail - len(self._format.closing) + 1, 0)) < 0:
            return ""
        place = 0
        for match in self._format.pattern.finditer(self._text):
            key: str = match["key"]
            if self._text[place : match.start()].strip(_SPACE) or key in self._keys:
                break  # not as this format is written: it is read when it is whole
            shown.append(_write_member(key, self._type_value(self.name, match), first=not self._keys))
            self._keys.add(key)
            place = match.end()
        self._text = self._text[place:]
        return "".join(shown) if self.name else ""


def _write_member(key: str, value: Any, *, first: bool) -> str:
    """The next piece of the text that `json.dumps` gives for the whole object."""
    return f"{'{' if first else ', '}{json.dumps(key, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"
