"""JSON for the type checker: what callers, models and files hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

JsonValue: TypeAlias = Any
"""None, bool, int, float, str, or a list or object of them. Every reader checks what it takes."""
JsonObject: TypeAlias = dict[str, Any]
JsonMapping: TypeAlias = Mapping[str, Any]
"""An object that is only read."""


def is_object(value: object) -> TypeGuard[JsonMapping]:
    return isinstance(value, (dict, Mapping))


def is_array(value: object) -> TypeGuard[Sequence[JsonValue]]:
    """A sequence that is no text."""
    return isinstance(value, (list, Sequence)) and not isinstance(value, (str, bytes, bytearray))
