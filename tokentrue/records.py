"""`@record`: a frozen dataclass with slots, built by keyword."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def record(cls: type[T] | None = None, /, *, eq: bool = True) -> Callable[[type[T]], type[T]]:
    """With `eq=False` for records that hold tensors or are compared by identity."""
    return dataclass(cls, frozen=True, slots=True, kw_only=True, eq=eq)
