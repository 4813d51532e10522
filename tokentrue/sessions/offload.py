"""Where rendering and parsing run: small inputs inline, large ones in a thread, so that one long document does not
stall every other
session. A text takes about a hundred times its size while it is encoded: huge ones run one at a time, in a thread of
their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast

from tokentrue.json_types import JsonMapping, JsonObject

P = ParamSpec("P")
T = TypeVar("T")
INLINE_CHARS = 16_000
INLINE_IDS = 4_000
HUGE_CHARS = 500_000
HUGE = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokentrue-huge")


async def run_inline_or_thread(work: Callable[P, T], small: bool, /, *args: P.args, **kwargs: P.kwargs) -> T:
    return work(*args, **kwargs) if small else await asyncio.to_thread(work, *args, **kwargs)


async def run_by_size(work: Callable[P, T], chars: int, /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs `work` on a text of `chars` characters."""
    if chars < HUGE_CHARS:
        return await run_inline_or_thread(work, chars < INLINE_CHARS, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(HUGE, partial(work, *args, **kwargs))


def count_chars(messages: Iterable[JsonMapping]) -> int:
    """About how much text there is to render."""
    return sum(_count_in(value) for message in messages for value in message.values())


def _count_in(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_count_in, cast("JsonObject", value).values()))
    if isinstance(value, (list, tuple)):
        return sum(map(_count_in, cast("list[Any]", value)))
    return 8
