"""Requests that an adapter has in flight at its engine, by request id.

A request whose caller leaves or fails is aborted at the engine, which must not go on sampling. All can be aborted for a
weight update.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from uuid import uuid4

from tokentrue.errors import EngineTimeout

_ABORT_S = 30.0
_RETRY_S = 0.1  # a request may reach the engine after the abort that was meant for it


class RunningRequests:
    def __init__(self) -> None:
        self._ids: set[str] = set()

    @asynccontextmanager
    async def hold(self, abort: Callable[[str], Awaitable[None]]) -> AsyncGenerator[str, None]:
        """A new request id for the block in which the engine samples; `abort` is awaited if the block is left by an
        exception."""
        request_id = uuid4().hex
        self._ids.add(request_id)
        try:
            yield request_id
        except BaseException:
            self._ids.discard(request_id)
            await abort(request_id)
            raise
        finally:
            self._ids.discard(request_id)

    async def abort_all(self, abort: Callable[[Sequence[str]], Awaitable[None]]) -> int:
        """Abort every running request, wait until each has returned, and return how many there were."""
        count, end = len(self._ids), time.monotonic() + _ABORT_S
        while self._ids:
            if time.monotonic() > end:
                raise EngineTimeout(
                    f"the engine did not end {len(self._ids)} aborted generations within {_ABORT_S:g} s"
                )
            await abort(sorted(self._ids))
            await asyncio.sleep(_RETRY_S if self._ids else 0)
        return count
