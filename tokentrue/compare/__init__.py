"""Graded, aligned differences of two id sequences. The room is also the function: `tokentrue.compare(expected, actual, renderer=r)`."""

import sys
from types import ModuleType
from typing import Any

from tokentrue.compare.comparison import Mismatch, Part, compare

__all__ = ["Mismatch", "Part", "compare"]


class _Room(ModuleType):
    """Importing a submodule binds it on its package, so `tokentrue.compare` is this module; calling it compares."""

    def __call__(self, *args: Any, **kwargs: Any) -> list[Mismatch]:
        return compare(*args, **kwargs)


sys.modules[__name__].__class__ = _Room
