"""JSON values as the record stores them: `dumps` and `loads` round-trip exactly. What JSON cannot represent, or is
nested too deeply for later readers (orjson: 254 levels), is refused before anything is generated."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import orjson

from tokentrue.errors import MessageError, did_you_mean
from tokentrue.json_types import JsonValue

MAX_DEPTH = 128
T = TypeVar("T")
_AT = re.compile(r" - at `\$\.?(.*)`$")
_FIELD = re.compile(r"Object (contains unknown|missing required) field `(.*)`")
_EXPECTED = re.compile(r"Expected `([^`]*)`(.*?)(, got .*)?")
_WORDS = {
    "str": "a string",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "object": "an object",
    "array": "a list",
}
_LEAVES = frozenset({str, int, float, bool, type(None)})
_EXACT_MARK = b" "
"""Prefix of JSON that only the standard library reads back exactly: integers beyond 64 bits, lone surrogates."""


def dumps(value: JsonValue) -> bytes:
    """Keeps the order of keys. By orjson where that is exact, else by the standard library, and marked."""
    try:
        return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:
        return _EXACT_MARK + json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode()


def loads(data: bytes) -> JsonValue:
    if data[:1] == _EXACT_MARK:
        return json.loads(data)
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return json.loads(data)


def read_numbered_lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, numbered from 1."""
    # Bytes: a character that a crash cut is only its line's error, and `str.splitlines` also cuts at U+2028, U+0085 and
    # six more characters, which JSON strings hold as they are.
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, line.rstrip(b"\r\n")


def is_utf8(text: str) -> bool:
    """False for text with lone surrogates, which JSON can escape and UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_depth(value: JsonValue, field: str, *, most: int = MAX_DEPTH) -> None:
    level = [value]
    for _ in range(most):
        level = [item for outer in level for item in _items_in(outer) if type(item) not in _LEAVES]
        if not level:
            return
    raise _too_deep(field)


def _items_in(value: JsonValue) -> Iterable[JsonValue]:
    if isinstance(value, (list, tuple)):
        return value
    return value.values() if isinstance(value, (dict, Mapping)) else ()


def _too_deep(field: str) -> MessageError:
    return MessageError(f"is nested deeper than {MAX_DEPTH} levels", field=field)


def freeze(value: JsonValue, field: str, levels: int = MAX_DEPTH) -> JsonValue:
    """A copy of plain dicts, lists, strings and numbers: later changes by the caller do not affect it."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        raise MessageError(f"must be finite: JSON has no number {value!r}", field=field)
    if levels == 0 and isinstance(value, (dict, list, tuple, Mapping)):
        raise _too_deep(field)
    if isinstance(value, (list, tuple)):
        return [freeze(item, field, levels - 1) for item in value]
    if isinstance(value, (dict, Mapping)):
        items = value
        for key in items:
            if not isinstance(key, str):
                raise MessageError(f"an object's keys must be strings, got {key!r}", field=field)
        return {key: item if type(item) is str else freeze(item, field, levels - 1) for key, item in items.items()}
    raise MessageError(f"must be a JSON value; {type(value).__name__} is none", field=field)


def digest(*values: JsonValue) -> bytes:
    """16 bytes that identify these values exactly: `true` differs from `1`, and key order counts, because templates
    print both."""
    parts: list[bytes] = []
    for value in values:
        data = value if isinstance(value, bytes) else dumps(value)
        parts += (b"%d:" % len(data), data)
    return blake2b(b"".join(parts), digest_size=16).digest()


def echo(value: object) -> str:
    return repr(value)[:40]


# Conversion of foreign values to typed records; errors name the field and what it must be.
def convert(value: Any, type_: type[T], path: str = "", *, strict: bool = True) -> T:
    """`path` names the value in errors. With `strict=False` numbers and booleans may be text, as in a query string."""
    try:
        return msgspec.convert(value, type_, strict=strict)
    except msgspec.ValidationError as error:
        raise complaint(error, path, type_) from None


def complaint(error: msgspec.ValidationError, path: str, type_: Any) -> MessageError:
    text = str(error)
    at = _AT.search(text)
    inner, what = (at[1], text[: at.start()]) if at else ("", text)
    where = join_path(path, inner)
    if named := _FIELD.match(what):
        is_unknown = named[1] == "contains unknown"
        known = [] if inner else getattr(type_, "__struct_encode_fields__", ())
        unknown = f"is not supported by this gateway; {did_you_mean(named[2], known)[2:] or 'leave it out'}"
        message = unknown if is_unknown else "is required"
        return MessageError(message, field=join_path(where, named[2]))
    if what.startswith("Invalid enum value") and (choices := literals(type_, inner)):
        either = " or ".join(choices) if len(choices) < 3 else f"one of {', '.join(choices)}"
        what = f"must be {either}, not {what.removeprefix('Invalid enum value ')}"
    elif expected := _EXPECTED.fullmatch(what):
        kinds = [_WORDS.get(kind, kind) for kind in expected[1].split(" | ") if kind != "null"]
        what = f"must be {' or '.join(kinds)}{expected[2]}"
    elif what.startswith("Invalid value"):
        what = f"{what.removeprefix('Invalid value ')} is not supported"
    return MessageError(what, field=where or None)


def join_path(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name and not name.startswith("[") else path + name


def literals(type_: Any, name: str) -> list[str]:
    """What the Literal `type_`, or its field `name`, allows."""
    field = name.partition("[")[0]
    hint = get_type_hints(type_).get(field) if field and isinstance(type_, type) else type_
    if get_origin(hint) is Literal:
        return [str(word) for word in get_args(hint) if word]
    return [word for kind in get_args(hint) for word in literals(kind, "")]
