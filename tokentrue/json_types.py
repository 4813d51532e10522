"""JSON types for the type checker."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

JsonValue = Any
"""None, bool, int, float, str, or a list or object of them. Readers check what they use."""
JsonObject = dict[str, Any]
JsonMapping = Mapping[str, Any]


def is_object(value: object) -> TypeGuard[JsonMapping]:
    return isinstance(value, (dict, Mapping))


def is_array(value: object) -> TypeGuard[Sequence[JsonValue]]:
    return isinstance(value, (list, Sequence)) and not isinstance(value, (str, bytes, bytearray))
