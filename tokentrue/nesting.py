"""How deeply JSON may be nested. What clients, callers and models write is checked where it enters, because readers
down the line fail on
deep values in ways of their own: orjson writes 254 levels, and Python's recursion ends at about a thousand calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from tokentrue.errors import MessageError

MAX_DEPTH = 128


def check_depth(value: Any, field: str, *, most: int = MAX_DEPTH) -> None:
    """Refuses a value of more than `most` levels."""
    level = [value]
    for _ in range(most):
        level = [item for outer in level for item in _items_in(outer) if type(item) not in _LEAVES]
        if not level:
            return
    raise too_deep(field)


def too_deep(field: str) -> MessageError:
    return MessageError(f"is nested deeper than {MAX_DEPTH} levels", field=field)


_LEAVES = frozenset({str, int, float, bool, type(None)})


def _items_in(value: Any) -> Iterable[Any]:
    if isinstance(value, (list, tuple)):
        return cast("Iterable[Any]", value)
    return cast("Mapping[Any, Any]", value).values() if isinstance(value, (dict, Mapping)) else ()
