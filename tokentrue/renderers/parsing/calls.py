"""Reads a tool call incrementally; at its end returns the call or the reason why it is not one.

`feed` returns the argument text that may be shown so far, `end` the call. JSON formats pass on the model's text;
untyped formats emit each parameter when it is complete, because its value needs its type. The last brace is held back
until the whole call has been read, so the arguments of an aborted call are never valid JSON. Bodies that a reader does
not know (`end` returns None) and formats without a reader go to `read_whole`, which uses transformers' content parsers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, cast

import regex
from transformers.utils.chat_parsing import content_parsers

from tokentrue.json_types import JsonMapping, JsonObject, is_array, is_object
from tokentrue.renderers.parsing.partial_json import JsonValueReader
from tokentrue.types import Status, Tools

Schemas = Mapping[str, JsonMapping]
"""Tool name to its parameters' schemas."""

_TRUE, _FALSE = {"true", "1"}, {"false", "0"}
_PYTHON_TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "NoneType": "null"}


def list_parameter_schemas(tools: Tools | None) -> dict[str, JsonMapping]:
    """Accepts wrapped (`{"type": "function", "function": …}`) and bare tools."""
    found: dict[str, JsonMapping] = {}
    for tool in cast("tuple[Any, ...]", tuple(tools or ())):
        function = _as_object(_as_object(tool).get("function", tool))
        name = function.get("name")
        if isinstance(name, str):
            parameters = _as_object(function.get("parameters") or function.get("input_schema"))
            found[name] = _as_object(parameters.get("properties"))
    return found


def type_match(match: Any, schema: Any) -> Any:
    """Value of one matched parameter, typed by its own attribute (DeepSeek's `string="true"`), else by the schema."""
    declared, value = match.groupdict().get("string"), match["value"]
    if declared is None:
        return type_value(value, schema)
    if declared == "true":
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def type_value(value: Any, schema: Any) -> Any:
    """Converts `value` to the schema's type; a value that does not fit stays the model's string."""
    if not isinstance(value, str):
        return value
    types = _list_types(schema)
    text = value.strip()
    if "null" in types and text in {"null", "None"}:
        return None
    if not types or "string" in types:
        return value
    for name in types:
        fits, result = _convert(name, text)
        if fits:
            return result
    return value


def _convert(name: str, text: str) -> tuple[bool, Any]:
    if name == "boolean":
        return text.lower() in _TRUE | _FALSE, text.lower() in _TRUE
    try:
        decoded: Any = json.loads(text)
    except (ValueError, RecursionError):
        return False, None
    is_number = (
        isinstance(decoded, int | float)
        and not isinstance(decoded, bool)
        and decoded == decoded
        and abs(decoded) != float("inf")
    )
    if name == "integer" and is_number and decoded == int(decoded):
        return True, int(decoded)
    if name == "number" and is_number:
        return True, decoded
    fits = (name == "object" and is_object(decoded)) or (name == "array" and is_array(decoded))
    return fits, decoded


def _list_types(schema: Any) -> tuple[str, ...]:
    given = _as_object(schema)
    declared: Any = given.get("type")
    found: list[str] = (
        [declared] if isinstance(declared, str) else [name for name in declared or () if isinstance(name, str)]
    )
    for union in ("anyOf", "oneOf", "allOf"):
        for choice in given.get(union) or ():
            found.extend(_list_types(choice))
    if not found and "enum" in given:
        found = [_PYTHON_TYPES.get(type(choice).__name__, "string") for choice in given["enum"]]
    if not found and "properties" in given:
        found = ["object"]
    return tuple(found + (["null"] if given.get("nullable") else []))


def _as_object(value: Any) -> JsonMapping:
    return value if is_object(value) else {}


ForeignField: TypeAlias = Any
"""A field of a response template, compiled by `transformers`; its attributes are untyped."""

_process_field: Callable[[str, ForeignField, dict[str, str]], Any] = cast("Any", content_parsers).process_field
_NAMES, _ARGUMENTS = ("name", "function_name", "tool_name"), ("arguments", "parameters", "args", "input")
_PLACEHOLDER = regex.compile(r"\{(\w+)(?:\.(\w+))?\}")
_LITERAL_END = regex.compile(r"[\w<>/:｜]+\Z")
_TRAILERS = regex.compile(r"\s*(?:</function>|</invoke>|</tool>)?\s*")
_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCall:
    """`arguments` is JSON text, `values` its parsed form; `call_id` is empty unless the model wrote one."""

    name: str
    arguments: str
    values: JsonMapping
    call_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFailure:
    status: Status
    detail: str
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCallFormat:
    """Keys of a JSON call's name and arguments in the body; None: captured by the marker, or the whole body."""

    name: str | None
    arguments: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TagCallFormat:
    """One tag per parameter; every tag ends with `closing`."""

    pattern: Any
    closing: str


CallFormat: TypeAlias = JsonCallFormat | TagCallFormat


def find_call_format(field: ForeignField | None) -> CallFormat | None:
    """None if calls can only be read whole: several in one list, or a JSON dialect that must be translated first."""
    if field is None or field.transform_each or not is_object(field.transform):
        return None
    function: JsonMapping = field.transform.get("function", field.transform)
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


class CallReader(Protocol):
    """`feed` returns the argument text that may be shown now; `name` and `call_id` are known by then. `end` returns
    None if the body is not in this format.
    """

    name: str
    call_id: str

    def feed(self, text: str) -> str: ...

    def end(self) -> ParsedCall | CallFailure | None: ...


def start_call(call_format: CallFormat, captures: Mapping[str, str], schemas: Schemas) -> CallReader:
    name, call_id = captures.get("name", "").strip(), _captured_id(captures)
    if isinstance(call_format, TagCallFormat):
        return TagCallReader(call_format, name, call_id, schemas.get(name, {}))
    return JsonCallReader(call_format, name, call_id)


def _captured_id(captures: Mapping[str, str]) -> str:
    return captures.get("id") or captures.get("call_id") or ""


class JsonCallReader:
    def __init__(self, call_format: JsonCallFormat, name: str, call_id: str) -> None:
        self.name, self.call_id = name if call_format.name is None else "", call_id
        self._format = call_format
        self._expected = "value" if call_format.arguments is None else "{"  # or "key", ":", ",", "end"
        self._key = call_format.arguments  # key of the current or next value
        self._value: JsonValueReader | None = None  # reader of the current key or value
        self._text: list[str] = []  # its text
        self._shows = False  # the current value is the arguments, which may be shown
        self._keys: list[str | None] = []  # keys of the members so far
        self._arguments = ""
        self._is_lost = False

    def feed(self, text: str) -> str:
        place, shown = 0, ""
        while place < len(text) and not self._is_lost:
            if self._value is not None:
                start, place = place, self._value.feed(text, place)
                self._text.append(text[start:place])
                if self._shows:
                    shown = text[start : place - self._value.is_done]
                self._is_lost = self._value.is_broken
                if self._value.is_done:
                    self._end_value()
            elif text[place] in _SPACE:
                place += 1
            else:
                place += self._read_structure(text[place])
        return shown

    def _read_structure(self, char: str) -> int:
        """Returns the number of characters consumed; the first character of a value is left to its reader."""
        if self._expected == "value" or (self._expected == "key" and char == '"'):
            self._value, self._text = JsonValueReader(), []
            is_first = self._expected == "value" and self._key == self._format.arguments not in self._keys
            self._shows = is_first and char == "{" and bool(self.name)
            return 0
        if char == "}" and (self._expected == "," or (self._expected == "key" and not self._keys)):
            self._expected = "end"
        else:
            self._is_lost = char != self._expected
            self._expected = "value" if char == ":" else "key"
        return 1

    def _end_value(self) -> None:
        text, self._value, self._shows = "".join(self._text), None, False
        if self._expected == "key":
            self._key, self._expected = json.loads(text), ":"
            return
        has_arguments = self._format.arguments in self._keys
        self._keys.append(self._key)
        self._expected = "end" if self._format.arguments is None else ","
        if self._key == self._format.arguments:
            self._arguments = self._arguments or text
        elif text[0] == '"' and self._key == self._format.name:
            self.name = self.name or json.loads(text).strip()
        elif text[0] == '"' and self._key == "id" and not has_arguments:  # with arguments, a stream has shown it
            self.call_id = self.call_id or json.loads(text)

    def end(self) -> ParsedCall | CallFailure | None:
        if self._is_lost or self._expected != "end" or self._format.arguments not in self._keys:
            return None
        if self._keys.count(self._format.arguments) > 1 or self._keys.count(self._format.name or "") > 1:
            return CallFailure(status=Status.MALFORMED, detail="the call says its name or its arguments twice")
        try:
            values = json.loads(self._arguments)
        except (ValueError, RecursionError):
            return None
        if not self.name or not is_object(values):
            return None
        return ParsedCall(name=self.name, arguments=self._arguments, values=values, call_id=self.call_id)


class TagCallReader:
    def __init__(self, call_format: TagCallFormat, name: str, call_id: str, schemas: JsonMapping) -> None:
        self.name, self.call_id = name, call_id
        self._format, self._schemas = call_format, schemas
        self._text = ""  # after the last whole tag
        self._outside: list[str] = []  # text outside all tags
        self._values: JsonObject = {}
        self._twice: str | None = None
        self._is_odd = False  # not as this format is written: nothing more is shown

    def feed(self, text: str) -> str:
        tail = len(self._text)
        self._text += text
        if self._text.find(self._format.closing, max(tail - len(self._format.closing) + 1, 0)) < 0:
            return ""
        shown, place = "", 0
        for match in self._format.pattern.finditer(self._text):
            self._outside.append(self._text[place : match.start()])
            key, place = match["key"], match.end()
            if key in self._values and self._twice is None:
                self._twice = key
            self._is_odd = self._is_odd or key in self._values or bool(self._outside[-1].strip(_SPACE))
            value = type_match(match, self._schemas.get(key))
            if self.name and not self._is_odd:
                shown += _write_member(key, value, first=not self._values)
            self._values[key] = value
        self._text = self._text[place:]
        return shown

    def end(self) -> ParsedCall | CallFailure | None:
        if not self.name:
            return CallFailure(status=Status.MISSING_NAME, detail="call 0 has no name")
        outside = "".join((*self._outside, self._text))
        wrong = f"parameter {self._twice!r} is written twice" if self._twice is not None else ""
        if not _TRAILERS.fullmatch(outside):
            wrong = f"text outside the parameters: {outside.strip()[:60]!r}"
        if wrong:
            return CallFailure(status=Status.MALFORMED, detail=wrong, name=self.name)
        text = json.dumps(self._values, ensure_ascii=False)
        return ParsedCall(name=self.name, arguments=text, values=self._values, call_id=self.call_id)


def _write_member(key: str, value: Any, *, first: bool) -> str:
    return f"{'{' if first else ', '}{json.dumps(key, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"


def read_whole(
    field: ForeignField, body: str, captures: Mapping[str, str], schemas: Schemas
) -> list[ParsedCall] | CallFailure:
    try:
        value = _process_field(body, field, dict(captures))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return _diagnose(field, body, captures, schemas, error)
    return _read_items(field, value, body, captures, schemas)


def _read_items(
    field: ForeignField, value: Any, body: str, captures: Mapping[str, str], schemas: Schemas
) -> list[ParsedCall] | CallFailure:
    items = cast("list[Any]", value) if isinstance(value, list) else [value]
    written = _list_written_ids(field, body, captures, len(items))
    calls: list[ParsedCall] = []
    for place, item in enumerate(items):
        call = _read_item(field, item, body if len(items) == 1 else "", schemas, place)
        if isinstance(call, CallFailure):
            return call
        calls.append(call if call.call_id else replace(call, call_id=written[place]))
    return calls or CallFailure(status=Status.MALFORMED, detail="an empty list of calls")


def _list_written_ids(field: ForeignField, body: str, captures: Mapping[str, str], count: int) -> list[str]:
    captured = _captured_id(captures)
    value = _load_json(body) if field.content == "json" and "name" not in captures else None
    if captured or value is None:  # with a captured name the body is the arguments
        return [captured] * count
    items = cast("list[Any]", value) if isinstance(value, list) else [value]
    found = [item.get("id") if is_object(item) else None for item in items]
    return [id_ if isinstance(id_, str) else "" for id_ in found] if len(found) == count else [""] * count


def _read_item(field: ForeignField, item: Any, body: str, schemas: Schemas, place: int) -> ParsedCall | CallFailure:
    function: Any = item.get("function", item) if is_object(item) else None
    if not is_object(function):
        return CallFailure(status=Status.MALFORMED, detail=f"call {place} is not an object")
    name: Any = _get_first(function, _NAMES)
    if not isinstance(name, str) or not name.strip():
        return CallFailure(status=Status.MISSING_NAME, detail=f"call {place} has no name")
    name, values, spelled = name.strip(), _get_first(function, _ARGUMENTS), ""
    if isinstance(values, str):  # arguments encoded twice
        spelled = values or "{}"
        try:
            values = json.loads(spelled)
        except ValueError as error:
            return CallFailure(status=Status.INVALID_JSON, detail=f"arguments: {error}", name=name)
    if values is None:
        values = JsonObject()
    if not is_object(values):
        return CallFailure(
            status=Status.MALFORMED, detail=f"arguments are {type(values).__name__}, not an object", name=name
        )
    given = values
    if field.content == "json":
        spelled = spelled or _find_spelling(body, given)
    else:
        given = {key: type_value(value, schemas.get(name, {}).get(key)) for key, value in given.items()}
    written: Any = item.get("id") if is_object(item) else None
    text = spelled or json.dumps(given, ensure_ascii=False)
    return ParsedCall(name=name, arguments=text, values=dict(given), call_id=str(written) if written else "")


def _get_first(mapping: JsonMapping, keys: Sequence[str]) -> Any:
    return next((mapping[key] for key in keys if key in mapping), None)


def _find_spelling(body: str, values: JsonMapping) -> str:
    """Returns the model's text of the arguments inside `body`; "" if ambiguous."""
    places = [match.end() for match in regex.finditer(r'"(?:arguments|parameters|args|input)"\s*:\s*', body)]
    for begin in (max(body.find("{"), 0), *places):
        try:
            found, end = json.JSONDecoder().raw_decode(body, begin)
            is_equal = is_object(found) and json.dumps(found) == json.dumps(values)  # as text, NaN equals itself
        except (ValueError, RecursionError):
            continue
        if is_equal:
            return body[begin:end]
    return ""


def _load_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _diagnose(
    field: ForeignField, body: str, captures: Mapping[str, str], schemas: Schemas, error: Exception
) -> list[ParsedCall] | CallFailure:
    """Why `process_field` failed. A JSON call of a known tool without arguments is a valid call."""
    if field.content != "json":
        return CallFailure(status=Status.MALFORMED, detail=str(error).splitlines()[0], name=captures.get("name"))
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as reason:
        return CallFailure(status=Status.INVALID_JSON, detail=str(reason), name=captures.get("name"))
    calls = _read_items(field, value, body, captures, schemas)
    if isinstance(calls, CallFailure):
        return calls
    items = cast("list[Any]", value) if isinstance(value, list) else [value]
    for call, item in zip(calls, items, strict=True):
        function = item.get("function", item)
        if call.name not in schemas and _get_first(function, _ARGUMENTS) is None:
            return CallFailure(
                status=Status.MALFORMED, detail=f"{call.name!r} has no arguments and is no known tool", name=call.name
            )
    return calls
