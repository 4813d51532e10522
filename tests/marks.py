"""What `make test` tries of a test with many values or examples, and what `make test-slow` tries."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest

IS_THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"  # as `make test-slow` sets it


def examples(count: int) -> int:
    """How many examples a property gets: `count` in `make test-slow`, a fifth of it in `make test`."""
    return count if IS_THOROUGH else max(10, count // 5)


def enough(count: int) -> float:
    """What a test must at least have exercised: `count` in `make test-slow`; in `make test` an eighth of it, because a
    fifth of the examples varies more."""
    return count if IS_THOROUGH else count / 8


def slow_except(fast: Collection[str], values: Iterable[Any], *, name: Callable[[Any], str] = str) -> list[Any]:
    """`values` as parameters, all slow but those whose name is in `fast`, each of which must exist."""
    values = list(values)
    missing = set(fast) - {name(value) for value in values}
    assert not missing, f"no such parameter: {sorted(missing)}"
    return [
        pytest.param(*as_tuple(value), marks=pytest.mark.slow) if name(value) not in fast else value for value in values
    ]


def slow_but_every(step: int, values: Iterable[Any], *, start: int = 0) -> list[Any]:
    """`values` as parameters, all slow but every `step`-th, for tables whose rows are alike."""
    return [
        value if (at - start) % step == 0 else pytest.param(*as_tuple(value), marks=pytest.mark.slow)
        for at, value in enumerate(values)
    ]


def as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
