"""Reads a tool call incrementally; at its end returns the call or the reason why it is not one. JSON formats pass on
the model's text; untyped formats emit each parameter when it is complete, because its value needs its type. The last
brace is held back until the whole call has been read, so the arguments of an aborted call are never valid JSON. Bodies
that a reader does not know go to `read_whole`, which uses transformers' content parsers."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

import regex
from transformers.utils.chat_parsing import content_parsers

from tokentrue.json_types import JsonMapping, JsonObject, JsonValue, is_array, is_object
from tokentrue.records import record
from tokentrue.types import Status, Tools

Schemas = Mapping[str, JsonMapping]
"""Tool name to its parameters' schemas."""

ForeignField = Any
"""A field of a response template, compiled by `transformers`; its attributes are untyped."""

_process_field: Callable[[str, ForeignField, dict[str, str]], JsonValue] = cast("Any", content_parsers).process_field

_PYTHON_TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "NoneType": "null"}
_NAMES, _ARGUMENTS = ("name", "function_name", "tool_name"), ("arguments", "parameters", "args", "input")
_PLACEHOLDER = regex.compile(r"\{(\w+)(?:\.(\w+))?\}")
_LITERAL_END = regex.compile(r"[\w<>/:｜]+\Z")
_TRAILERS = regex.compile(r"\s*(?:</function>|</invoke>|</tool>)?\s*")
_SPACE = " \t\r\n"
_SPACES = r"[ \t\r\n]*+"
_CHARACTERS = r'(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+'
_TEXT_MEMBER = rf'(?P<key>"{_CHARACTERS}"){_SPACES}:{_SPACES}(?P<text>"{_CHARACTERS}"){_SPACES}'
_NO_MEMBERS = regex.compile(_SPACES + r"(?=\{)")
_STRING = regex.compile(_CHARACTERS)
_PART_OF_ESCAPE = regex.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_WORD = regex.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_WORD_CHARACTERS = regex.compile(r"[-+.0-9A-Za-z]+")
_OPENING = {"}": "{", "]": "["}


def list_parameter_schemas(tools: Tools | None) -> dict[str, JsonMapping]:
    """Of wrapped (`{"type": "function", "function": …}`) and bare tools."""
    found: dict[str, JsonMapping] = {}
    for tool in tools or ():
        function = _as_object(_as_object(tool).get("function", tool))
        name = function.get("name")
        if isinstance(name, str):
            parameters = _as_object(function.get("parameters") or function.get("input_schema"))
            found[name] = _as_object(parameters.get("properties"))
    return found


def _as_object(value: JsonValue) -> JsonMapping:
    return value if is_object(value) else {}


def type_value(value: JsonValue, schema: JsonValue) -> JsonValue:
    """Of the schema's type; a value that does not fit it stays the model's string."""
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


def _list_types(schema: JsonValue) -> tuple[str, ...]:
    given = _as_object(schema)
    declared = given.get("type") or ()
    found = [name for name in ([declared] if isinstance(declared, str) else declared) if isinstance(name, str)]
    choices = (choice for union in ("anyOf", "oneOf", "allOf") for choice in given.get(union) or ())
    found += (name for choice in choices for name in _list_types(choice))
    if not found and "enum" in given:
        found = [_PYTHON_TYPES.get(type(choice).__name__, "string") for choice in given["enum"]]
    if not found and "properties" in given:
        found = ["object"]
    return tuple(found + (["null"] if given.get("nullable") else []))


def _load_json(text: str, default: JsonValue = None, *, pairs: type[list[JsonValue]] | None = None) -> JsonValue:
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except (ValueError, RecursionError):
        return default


@record
class ParsedCall:
    """`arguments` is JSON text; `call_id` is empty unless the model wrote one."""

    name: str
    arguments: str
    values: JsonMapping
    call_id: str = ""


@record
class CallFailure:
    status: Status
    detail: str
    name: str | None = None


@record
class JsonCallFormat:
    """Keys of the name and arguments in the body; None: captured by the marker, or the whole body. `head` matches the
    body before the arguments if it has only texts."""

    name: str | None = None
    arguments: str | None = None
    head: regex.Pattern[str] = _NO_MEMBERS


@record
class TagCallFormat:
    """One tag per parameter; every tag ends with `closing`."""

    pattern: regex.Pattern[str]
    closing: str


CallFormat = JsonCallFormat | TagCallFormat


def find_call_format(field: ForeignField | None) -> CallFormat | None:
    """None if calls can only be read whole: several in one list, or a JSON dialect that must be translated first."""
    if field is None or field.transform_each or not is_object(field.transform):
        return None
    function: JsonMapping = field.transform.get("function", field.transform)
    name, arguments = (_read_placeholder(function.get(key)) for key in ("name", "arguments"))
    if field.content == "json" and not field.content_args:
        if name == ("name", None) and arguments == ("content", None):
            return JsonCallFormat()
        if name[0] == arguments[0] == "content" and name[1] and arguments[1]:
            head = rf'{_SPACES}\{{{_SPACES}(?:{_TEXT_MEMBER},{_SPACES})*"{arguments[1]}"{_SPACES}:{_SPACES}(?=\{{)'
            return JsonCallFormat(name=name[1], arguments=arguments[1], head=regex.compile(head))
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
    None if the body is not in this format."""

    name: str
    call_id: str

    def feed(self, text: str) -> str: ...

    def end(self, body: str) -> ParsedCall | CallFailure | None: ...


def start_call(call_format: CallFormat, captures: Mapping[str, str], schemas: Schemas) -> CallReader:
    name, call_id = captures.get("name", "").strip(), _get_id(captures)
    if isinstance(call_format, TagCallFormat):
        return TagCallReader(call_format, name, call_id, schemas.get(name, {}))
    return JsonCallReader(call_format, name, call_id)


def _get_id(captures: Mapping[str, str]) -> str:
    return captures.get("id") or captures.get("call_id") or ""


class JsonCallReader:
    """Follows the arguments as long as they are words, texts and brackets of JSON; `end` checks the whole body."""

    def __init__(self, call_format: JsonCallFormat, name: str, call_id: str) -> None:
        self.name, self.call_id = name if call_format.name is None else "", call_id
        self._format = call_format
        self._state = "head"  # then "arguments"; at last "done" or "lost"
        self._head = ""
        self._arguments: list[str] = []
        self._stack: list[str] = []
        self._in_string = False
        self._tail = ""  # an escape or a word that may continue

    def feed(self, text: str) -> str:
        if self._state == "head":
            text = self._read_head(text)
        if self._state in ("head", "done", "lost"):
            return ""
        known, text = len(self._tail), self._tail + text
        self._arguments.append(text[known : self._follow(text)])
        return self._arguments[-1][:-1] if self._state == "done" else self._arguments[-1]

    def _read_head(self, text: str) -> str:
        """The text after the members before the arguments."""
        self._head += text
        found = self._format.head.match(self._head, partial=True)
        if found is None or found.partial:
            self._state = "lost" if found is None else "head"
            return ""
        if self._format.name is not None:
            for key, value in zip(found.captures("key"), found.captures("text"), strict=True):
                if json.loads(key) == self._format.name:
                    self.name = self.name or json.loads(value).strip()
                elif json.loads(key) == "id":
                    self.call_id = self.call_id or json.loads(value)
        self._state = "arguments" if self.name else "lost"
        return self._head[found.end() :]

    def _follow(self, text: str) -> int:
        """The end of the arguments, or of what can be their beginning."""
        self._tail, place = "", 0
        while place < len(text):
            char = text[place]
            if self._in_string:
                place = _find_end(_STRING, text, place)
                if place == len(text):
                    break
                if text[place] != '"':
                    return self._hold(text, place, _find_end(_PART_OF_ESCAPE, text, place))
                self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._stack.append(char)
            elif char in "}]":
                if self._stack.pop() != _OPENING[char]:
                    return self._hold(text, place, place)
                if not self._stack:
                    self._state = "done"
                    return place + 1
            elif char not in ",: \t\r\n":
                end = _find_end(_WORD_CHARACTERS, text, place)
                if end == len(text) or not _WORD.fullmatch(text, place, end):
                    valid = (size for size in range(end, place, -1) if _WORD.fullmatch(text, place, size, partial=True))
                    return self._hold(text, place, next(valid, place))
                place = end - 1
            place += 1
        return place

    def _hold(self, text: str, start: int, end: int) -> int:
        """More of an escape or a word must follow, or the text is not JSON."""
        self._tail = text[start:end]
        if end < len(text):
            self._state = "lost"
        return end

    def end(self, body: str) -> ParsedCall | CallFailure | None:
        arguments = "".join(self._arguments)
        values, members = _load_json(arguments), _load_json(body, pairs=list[JsonValue])
        if self._state != "done" or not is_object(values) or not is_array(members):
            return None
        keys = [key for key, _ in members]
        if any(keys.count(key) > 1 for key in (self._format.name, self._format.arguments) if key is not None):
            return CallFailure(status=Status.MALFORMED, detail="the call says its name or its arguments twice")
        return ParsedCall(name=self.name, arguments=arguments, values=values, call_id=self.call_id)


def _find_end(pattern: regex.Pattern[str], text: str, place: int) -> int:
    found = pattern.match(text, place)
    return place if found is None else found.end()


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

    def end(self, body: str) -> ParsedCall | CallFailure | None:
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


def type_match(match: regex.Match[str], schema: JsonValue) -> JsonValue:
    """A parameter's value, typed by its own attribute (DeepSeek's `string="true"`), else by the schema."""
    declared, value = match.groupdict().get("string"), match["value"]
    if declared is None:
        return type_value(value, schema)
    return value if declared == "true" else _load_json(value, value)


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
    items = value if is_array(value) else [value]
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
    found = [item.get("id") if is_object(item) else None for item in (value if is_array(value) else [value])]
    return [id_ if isinstance(id_, str) else "" for id_ in found] if len(found) == count else [""] * count


def _read_item(
    field: ForeignField, item: JsonValue, body: str, schemas: Schemas, place: int
) -> ParsedCall | CallFailure:
    function = item.get("function", item) if is_object(item) else None
    if not is_object(function):
        return CallFailure(status=Status.MALFORMED, detail=f"call {place} is not an object")
    name = _get_first(function, _NAMES)
    if not isinstance(name, str) or not name.strip():
        return CallFailure(status=Status.MISSING_NAME, detail=f"call {place} has no name")
    name, values, spelled = name.strip(), _get_first(function, _ARGUMENTS), ""
    if isinstance(values, str):  # arguments encoded twice
        spelled = values or "{}"
        try:
            values = json.loads(spelled)
        except ValueError as error:
            return CallFailure(status=Status.INVALID_JSON, detail=f"arguments: {error}", name=name)
    given: JsonValue = {} if values is None else values
    if not is_object(given):
        detail = f"arguments are {type(given).__name__}, not an object"
        return CallFailure(status=Status.MALFORMED, detail=detail, name=name)
    if field.content == "json":
        spelled = spelled or _find_spelling(body, given)
    else:
        given = {key: type_value(value, schemas.get(name, {}).get(key)) for key, value in given.items()}
    text = spelled or json.dumps(given, ensure_ascii=False)
    return ParsedCall(name=name, arguments=text, values=dict(given), call_id=str(item.get("id") or ""))


def _get_first(mapping: JsonMapping, keys: Sequence[str]) -> JsonValue:
    return next((mapping[key] for key in keys if key in mapping), None)


def _find_spelling(body: str, values: JsonMapping) -> str:
    """The model's text of the arguments; "" if ambiguous."""
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
