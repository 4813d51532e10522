"""JSON types for the type checker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

JsonValue: TypeAlias = Any
"""None, bool, int, float, str, or a list or object of them. Readers check what they use."""
JsonObject: TypeAlias = dict[str, Any]
JsonMapping: TypeAlias = Mapping[str, Any]


def is_object(value: object) -> TypeGuard[JsonMapping]:
    return isinstance(value, (dict, Mapping))


def is_array(value: object) -> TypeGuard[Sequence[JsonValue]]:
    return isinstance(value, (list, Sequence)) and not isinstance(value, (str, bytes, bytearray))
