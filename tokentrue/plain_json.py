"""JSON values as the record keeps them: `freeze` copies and checks them, `dumps` and `loads` return exactly what went
in.

What JSON cannot hold exactly (NaN, a set, a key that is no string), and what is nested too deeply, is refused here,
before anything is generated or committed: later readers fail on deep values, orjson at 254 levels, Python at about a
thousand calls.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any, cast

import orjson

from tokentrue.errors import MessageError
from tokentrue.json_types import JsonValue

MAX_DEPTH = 128
_LEAVES = frozenset({str, int, float, bool, type(None)})
_EXACT_MARK = b" "
"""Before JSON that only the standard library reads back exactly: integers beyond 64 bits, lone surrogates."""


def dumps(value: JsonValue) -> bytes:
    """JSON in the order of the keys. orjson writes it where it can; the rest goes through the standard library, marked
    as such."""
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


def is_utf8(text: str) -> bool:
    """False for text with lone surrogates: JSON can write them, and UTF-8 cannot hold them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_depth(value: JsonValue, field: str, *, most: int = MAX_DEPTH) -> None:
    """Refuses a value of more than `most` levels."""
    level = [value]
    for _ in range(most):
        level = [item for outer in level for item in _items_in(outer) if type(item) not in _LEAVES]
        if not level:
            return
    raise _too_deep(field)


def _items_in(value: JsonValue) -> Iterable[JsonValue]:
    if isinstance(value, (list, tuple)):
        return cast("Iterable[JsonValue]", value)
    return cast("Mapping[Any, JsonValue]", value).values() if isinstance(value, (dict, Mapping)) else ()


def _too_deep(field: str) -> MessageError:
    return MessageError(f"is nested deeper than {MAX_DEPTH} levels", field=field)


def freeze(value: JsonValue, field: str) -> JsonValue:
    """A copy of `value` made of plain dicts, lists, strings and numbers, so that a later change by the caller reaches
    nothing recorded."""
    return _copy(value, field, MAX_DEPTH)


def _copy(value: JsonValue, field: str, levels: int) -> JsonValue:
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        raise MessageError(f"must be a JSON value; {value!r} is none", field=field)
    if levels == 0 and isinstance(value, (dict, list, tuple, Mapping)):
        raise _too_deep(field)
    if isinstance(value, (list, tuple)):
        return [_copy(item, field, levels - 1) for item in cast("list[JsonValue]", value)]
    if isinstance(value, (dict, Mapping)):
        items = cast("Mapping[Any, JsonValue]", value)
        for key in items:
            if not isinstance(key, str):
                raise MessageError(f"an object's keys must be strings, got {key!r}", field=field)
        return {key: item if type(item) is str else _copy(item, field, levels - 1) for key, item in items.items()}
    raise MessageError(f"must be a JSON value; {type(value).__name__} is none", field=field)


def digest(*values: JsonValue) -> bytes:
    """16 bytes that name these values exactly: `true` is not `1`, and the order of keys counts, because templates print
    both."""
    parts: list[bytes] = []
    for value in values:
        data = value if isinstance(value, bytes) else dumps(value)
        parts += (b"%d:" % len(data), data)
    return blake2b(b"".join(parts), digest_size=16).digest()
