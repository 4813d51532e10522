"""Work that nobody waits for: done when the answer is out."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

# On a machine with few cores the one who was woken by our answer may be queued behind us.
_give_way: Callable[[], None] = getattr(os, "sched_yield", lambda: None)


def afterwards(work: Callable[[], object]) -> None:
    """Runs `work` two rounds of the loop from now: in the round between, whoever waits for this turn goes on and sends the answer."""
    loop = asyncio.get_running_loop()
    loop.call_soon(loop.call_soon, _run, work)


def _run(work: Callable[[], object]) -> None:
    _give_way()
    work()
