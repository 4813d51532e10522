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
from tokentrue.types import Status, Tools

Schemas = Mapping[str, JsonMapping]
"""Tool name to its parameters' schemas."""

ForeignField: TypeAlias = Any
"""A field of a response template, compiled by `transformers`; its attributes are untyped."""

_process_field: Callable[[str, ForeignField, dict[str, str]], Any] = cast("Any", content_parsers).process_field
_PYTHON_TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "NoneType": "null"}
_NAMES, _ARGUMENTS = ("name", "function_name", "tool_name"), ("arguments", "parameters", "args", "input")
_PLACEHOLDER = regex.compile(r"\{(\w+)(?:\.(\w+))?\}")
_LITERAL_END = regex.compile(r"[\w<>/:｜]+\Z")
_TRAILERS = regex.compile(r"\s*(?:</function>|</invoke>|</tool>)?\s*")
_SPACE = " \t\r\n"


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


def _as_object(value: Any) -> JsonMapping:
    return value if is_object(value) else {}


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
    decoded = _load_json(text)
    for name in types:
        if name == "boolean" and text.lower() in {"true", "1", "false", "0"}:
            return text.lower() in {"true", "1"}
        if name in {"integer", "number"} and type(decoded) in {int, float} and abs(decoded) < float("inf"):
            if name == "number":
                return decoded
            if decoded == int(decoded):
                return int(decoded)
        if (name == "object" and is_object(decoded)) or (name == "array" and is_array(decoded)):
            return decoded
    return value


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


def _load_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


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
    name, call_id = captures.get("name", "").strip(), _get_id(captures)
    if isinstance(call_format, TagCallFormat):
        return TagCallReader(call_format, name, call_id, schemas.get(name, {}))
    return JsonCallReader(call_format, name, call_id)


def _get_id(captures: Mapping[str, str]) -> str:
    return captures.get("id") or captures.get("call_id") or ""


_CHARACTERS = regex.compile(r'(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+')
_PART_OF_ESCAPE = regex.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_WORD = regex.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_WORD_CHARACTERS = regex.compile(r"[-+.0-9A-Za-z]+")
_VALUE, _FIRST_ITEM, _KEY, _FIRST_KEY, _COLON, _NEXT = range(6)
_OPENING = {"}": "{", "]": "["}


class JsonCallReader:
    """Strict: follows the body as long as it is the beginning of JSON that any reader accepts. The call's members are
    those of the outermost object, or the whole body as arguments.
    """

    def __init__(self, call_format: JsonCallFormat, name: str, call_id: str) -> None:
        self.name, self.call_id = name if call_format.name is None else "", call_id
        self._format = call_format
        self._depth = 0 if call_format.arguments is None else 1  # of the members
        self._stack: list[str] = []  # open brackets
        self._want = _VALUE
        self._in_string = False
        self._tail = ""  # an escape or a word that may continue
        self._from: int | None = None  # where the member's text begins in this piece; None outside members
        self._member: list[str] = []  # its text in earlier pieces
        self._shows = False  # the member is the arguments, which may be shown
        self._key = call_format.arguments  # key of the current or next member
        self._keys: list[str | None] = []
        self._arguments = ""
        self._is_lost = False

    def feed(self, text: str) -> str:
        if self._is_lost:
            return ""
        text, place, shown = self._tail + text, 0, ""
        if self._from is not None:
            self._from = len(self._tail)
        self._tail = ""
        while place < len(text) and not self._is_lost:
            begin, shows = self._from, self._shows
            place = self._read_string(text, place) if self._in_string else self._read_structure(text, place)
            if shows and self._from is None:
                shown = text[begin : place - 1]
        if self._from is not None:
            self._member.append(text[self._from : place])
            if self._shows:
                shown = self._member[-1]
        return shown

    def _read_string(self, text: str, place: int) -> int:
        place = _CHARACTERS.match(text, place).end()
        if place == len(text):
            return place
        if text[place] == '"':
            self._in_string = False
            self._end_value(text, place + 1)
            return place + 1
        escape = _PART_OF_ESCAPE.match(text, place)
        return self._hold(text, place, escape.end() if escape else place)

    def _hold(self, text: str, start: int, end: int) -> int:
        """`text[start:end]` is the beginning of an escape or a word: more must follow, or the text is not JSON."""
        self._tail, self._is_lost = text[start:end], end < len(text)
        return end

    def _read_structure(self, text: str, place: int) -> int:
        char, want, stack = text[place], self._want, self._stack
        if char in _SPACE:
            return place + 1
        if len(stack) < self._depth and (char != "{" or want != _VALUE):
            self._is_lost = True
            return place
        if self._from is None and len(stack) == self._depth and want in (_VALUE, _KEY, _FIRST_KEY) and char != "}":
            self._from = place
            is_first = self._key == self._format.arguments and self._key not in self._keys
            self._shows = want == _VALUE and is_first and char == "{" and bool(self.name)
        if char == '"' and want < _COLON:
            self._in_string = True
        elif char in "{[" and want < _KEY:
            stack.append(char)
            self._want = _FIRST_KEY if char == "{" else _FIRST_ITEM
        elif char in "}]" and want in (_NEXT, _FIRST_ITEM, _FIRST_KEY) and stack[-1:] == [_OPENING[char]]:
            stack.pop()
            self._want = _NEXT
            self._end_value(text, place + 1)
        elif char == ":" and want == _COLON:
            self._want = _VALUE
        elif char == "," and want == _NEXT and stack:
            self._want = _KEY if stack[-1] == "{" else _VALUE
        elif want < _KEY and (word := _WORD_CHARACTERS.match(text, place)):
            end = word.end()
            if end < len(text) and _WORD.fullmatch(word[0]):
                self._end_value(text, end)
                return end
            valid = (size for size in range(end, place, -1) if _WORD.fullmatch(text, place, size, partial=True))
            return self._hold(text, place, next(valid, place))
        else:
            self._is_lost = True
            return place
        return place + 1

    def _end_value(self, text: str, end: int) -> None:
        is_key = self._want in (_KEY, _FIRST_KEY)
        self._want = _COLON if is_key else _NEXT
        if self._from is None or len(self._stack) > self._depth:
            return
        member = "".join(self._member) + text[self._from : end]
        self._from, self._member, self._shows = None, [], False
        if is_key:
            self._key = json.loads(member)
            return
        has_arguments = self._format.arguments in self._keys
        self._keys.append(self._key)
        if self._key == self._format.arguments:
            self._arguments = self._arguments or member
        elif member[0] == '"' and self._key == self._format.name:
            self.name = self.name or json.loads(member).strip()
        elif member[0] == '"' and self._key == "id" and not has_arguments:  # with arguments, a stream has shown it
            self.call_id = self.call_id or json.loads(member)

    def end(self) -> ParsedCall | CallFailure | None:
        is_whole = self._want == _NEXT and not self._stack and not self._is_lost
        if not is_whole or self._format.arguments not in self._keys:
            return None
        if self._keys.count(self._format.arguments) > 1 or self._keys.count(self._format.name or "") > 1:
            return CallFailure(status=Status.MALFORMED, detail="the call says its name or its arguments twice")
        values = _load_json(self._arguments)
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
                comma = ", " if self._values else "{"
                shown += f"{comma}{json.dumps(key, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"
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


def read_whole(
    field: ForeignField, body: str, captures: Mapping[str, str], schemas: Schemas
) -> list[ParsedCall] | CallFailure:
    name, is_raw = captures.get("name"), False
    try:
        value = _process_field(body, field, dict(captures))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if field.content != "json":
            return CallFailure(status=Status.MALFORMED, detail=str(error).splitlines()[0], name=name)
        try:  # a call of a known tool without arguments is valid
            value, is_raw = json.loads(body), True
        except (ValueError, RecursionError) as reason:
            return CallFailure(status=Status.INVALID_JSON, detail=str(reason), name=name)
    items = cast("list[Any]", value) if isinstance(value, list) else [value]
    written = _list_written_ids(field, body, captures, len(items))
    calls: list[ParsedCall] = []
    for place, item in enumerate(items):
        call = _read_item(field, item, body if len(items) == 1 else "", schemas, place)
        if isinstance(call, CallFailure):
            return call
        if is_raw and call.name not in schemas and _get_first(item.get("function", item), _ARGUMENTS) is None:
            detail = f"{call.name!r} has no arguments and is no known tool"
            return CallFailure(status=Status.MALFORMED, detail=detail, name=call.name)
        calls.append(call if call.call_id else replace(call, call_id=written[place]))
    return calls or CallFailure(status=Status.MALFORMED, detail="an empty list of calls")


def _list_written_ids(field: ForeignField, body: str, captures: Mapping[str, str], count: int) -> list[str]:
    captured = _get_id(captures)
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
    given: Any = {} if values is None else values
    if not is_object(given):
        detail = f"arguments are {type(given).__name__}, not an object"
        return CallFailure(status=Status.MALFORMED, detail=detail, name=name)
    if field.content == "json":
        spelled = spelled or _find_spelling(body, given)
    else:
        given = {key: type_value(value, schemas.get(name, {}).get(key)) for key, value in given.items()}
    text = spelled or json.dumps(given, ensure_ascii=False)
    return ParsedCall(name=name, arguments=text, values=dict(given), call_id=str(item.get("id") or ""))


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
