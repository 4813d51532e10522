"""Which values of a parameter `make test` tries; the others are marked slow and run by `make test-slow`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest


def slow_except(fast: Collection[str], values: Iterable[Any], *, name: Callable[[Any], str] = str) -> list[Any]:
    """`values` as parameters, all slow but those whose name is in `fast`, each of which must exist."""
    values = list(values)
    missing = set(fast) - {name(value) for value in values}
    assert not missing, f"no such parameter: {sorted(missing)}"
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
        if name(value) not in fast
        else value
        for value in values
    ]
