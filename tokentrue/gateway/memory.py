"""The memory of a process that serves.

A text takes about a hundred times its size while it is encoded, in many small blocks. glibc keeps what is freed of them
in the arenas of the threads that ran, so that a process stays as large as the largest moment of each thread.
`release_freed_memory` hands it back.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache


@cache
def _find_trim() -> Callable[[int], int] | None:
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none


def release_freed_memory() -> bool:
    """Takes milliseconds, without the interpreter's lock. False where the C library has no such function, or had
    nothing to give back."""
    trim = _find_trim()
    return trim is not None and trim(0) == 1
