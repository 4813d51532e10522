"""Foreign values into typed records by msgspec, with complaints that name the field and say what it must be."""

from __future__ import annotations

import re
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from tokentrue.errors import MessageError

T = TypeVar("T")
_AT = re.compile(r" - at `\$\.?(.*)`$")
_FIELD = re.compile(r"Object (contains unknown|missing required) field `(.*)`")
_EXPECTED = re.compile(r"Expected `([^`]*)`(.*?)(, got `.*`)?")
_WORDS = {
    "str": "a string",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "object": "an object",
    "array": "a list",
}


def convert(value: Any, type_: type[T], path: str = "", *, strict: bool = True) -> T:
    """`path` names the value in errors. Not `strict`: numbers and booleans may be text, as in a query."""
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
        message = "is not supported by this gateway; leave it out" if is_unknown else "is required"
        return MessageError(message, field=join_path(where, named[2]))
    if what.startswith("Invalid enum value") and (choices := literals(type_, inner)):
        what = f"must be {' or '.join(choices)}, not {what.removeprefix('Invalid enum value ')}"
    elif expected := _EXPECTED.fullmatch(what):
        kinds = [_WORDS.get(kind, kind) for kind in expected[1].split(" | ") if kind != "null"]
        what = f"must be {' or '.join(kinds)}{expected[2]}"
    elif what.startswith("Invalid value"):
        what = f"{what.removeprefix('Invalid value ')} is not supported"
    return MessageError(what, field=where or None)


def join_path(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name and not name.startswith("[") else path + name


def literals(type_: Any, name: str) -> list[str]:
    """The words that a field of `type_` may hold."""
    hint = get_type_hints(type_).get(name)
    return [
        str(word) for each in (hint, *get_args(hint)) if get_origin(each) is Literal for word in get_args(each) if word
    ]
