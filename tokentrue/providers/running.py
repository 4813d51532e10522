"""The generations that an adapter has at its engine, by the engine's own names.

One that its caller leaves, or that breaks, is aborted: the engine must not sample on. All can be broken off for a weight update.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from secrets import token_hex
from types import TracebackType

from tokentrue.errors import EngineTimeout

_AGAIN_S = 0.1  # a request may reach the engine after the abort that was meant for it


class Running:
    def __init__(self) -> None:
        self._ids: set[str] = set()
        self._names = map((token_hex(8) + "{:08x}").format, itertools.count())

    def new_id(self) -> str:
        """A name that no other request has, of this process or of another."""
        return next(self._names)

    def holding(self, request_id: str, abort: Callable[[], Awaitable[None]]) -> Held:
        """For the block in which the engine samples."""
        return Held(self._ids, request_id, abort)

    async def break_off(self, abort: Callable[[Sequence[str]], Awaitable[None]], *, within_s: float) -> int:
        """Aborts everything that is running and waits until the engine has let go of it; how many that were."""
        count, end = len(self._ids), time.monotonic() + within_s
        while self._ids:
            if time.monotonic() > end:
                raise EngineTimeout(f"the engine did not let go of {len(self._ids)} generations within {within_s:g} s")
            await abort(sorted(self._ids))
            await asyncio.sleep(_AGAIN_S if self._ids else 0)
        return count


class Held:
    def __init__(self, ids: set[str], request_id: str, abort: Callable[[], Awaitable[None]]) -> None:
        self._ids, self._request_id, self._abort = ids, request_id, abort

    async def __aenter__(self) -> None:
        self._ids.add(self._request_id)

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ids.discard(self._request_id)
        if kind is not None:
            await self._abort()
