"""A serving process's memory: a child process settles it, this one looks at what became of the child."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")
CHILD = """
import gc
from tokentrue.gateway import memory
kept = [str(number) for number in range(400_000)]
{before}
memory.settle_memory()
same = kept == list(map(str, range(400_000)))
rollup = open("/proc/self/smaps_rollup").read()
print(int(rollup.split("AnonHugePages:")[1].split()[0]), gc.get_freeze_count() > 0, gc.get_threshold()[0], same)
"""


def child(before: str = "") -> tuple[int, bool, int, bool]:
    out = subprocess.run([sys.executable, "-c", CHILD.format(before=before)], capture_output=True, text=True, check=True).stdout.split()
    return int(out[0]), out[1] == "True", int(out[2]), out[3] == "True"


@pytest.mark.skipif(not SWITCH.exists() or "[never]" in SWITCH.read_text(), reason="this system has no huge pages")
def test_the_heap_is_in_huge_pages_and_as_it_was() -> None:
    huge_kb, frozen, threshold, same = child()
    assert huge_kb >= 8 * 1024  # of the 20 MB and more that the list takes
    assert frozen and threshold == 10_000 and same


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("before", ["memory._libc = lambda: None", "memory.heap = lambda: iter(())"])
def test_without_the_means_it_serves_all_the_same(before: str) -> None:
    huge_kb, frozen, threshold, same = child(before)
    assert frozen and threshold == 10_000 and same
    assert huge_kb < 8 * 1024 or "[always]" in SWITCH.read_text()
