"""What a serving process does about its memory, once, when everything is loaded. Where the system knows no such thing, nothing happens."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25  # <sys/mman.h>
KEPT_BYTES = 64 << 20
HUGE_BYTES = 2 << 20


def settle_memory() -> None:
    libc = _libc()
    if libc is not None:
        keep_freed(libc)
    settle_garbage()
    if libc is not None and sys.platform == "linux":
        take_huge_pages(libc)


def _libc() -> Any:
    try:
        return ctypes.CDLL(None)
    except (OSError, TypeError):
        return None


def keep_freed(libc: Any) -> None:
    """Bodies and prompts of some hundred kilobytes come and go with each turn: glibc would give their pages back and fault them in anew."""
    mallopt = getattr(libc, "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, KEPT_BYTES // 4)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def settle_garbage() -> None:
    """What start-up made stays for good: the collector need not walk it each time. A turn makes few cycles, so it comes less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def take_huge_pages(libc: Any) -> None:
    """A turn touches objects all over the heap, each in a page of its own: in large pages the processor finds them sooner."""
    madvise = libc.madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for start, end in heap():
        start, end = -(-start // HUGE_BYTES) * HUGE_BYTES, end // HUGE_BYTES * HUGE_BYTES
        if start < end:
            madvise(start, end - start, MADV_HUGEPAGE)
            madvise(start, end - start, MADV_COLLAPSE)  # at once, not when the kernel comes by; refused where it is too old for that


def heap() -> Iterator[tuple[int, int]]:
    """The places in memory that belong to no file and can be written to."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        place, rights, _, _, _, *name = line.split(maxsplit=5)
        if rights.startswith("rw") and name in ([], ["[heap]"]):
            start, end = place.split("-")
            yield int(start, 16), int(end, 16)
