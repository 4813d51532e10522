"""JSON as it comes from callers and models: what a value is, for the type checker too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

JsonObject: TypeAlias = dict[str, Any]
"""A message, tool or call as a template sees it: JSON types only."""


def is_object(value: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, (dict, Mapping))


def is_array(value: object) -> TypeGuard[Sequence[Any]]:
    """A sequence that is no text."""
    return isinstance(value, (list, Sequence)) and not isinstance(value, (str, bytes, bytearray))
