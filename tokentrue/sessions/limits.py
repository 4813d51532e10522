"""Size limits of one session. Large inputs run in a thread, so that they do not stall other sessions; encoding takes
about a hundred times a text's size in memory, so huge ones run one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from tokentrue.errors import InputError, LimitExceeded
from tokentrue.json_types import JsonMapping, JsonValue
from tokentrue.records import record
from tokentrue.types import MAX_CHOICES


@record
class SessionLimits:
    """None means no limit. `max_tokens` counts recorded tokens, `max_new_chars` a request's characters that are not
    recorded yet. `conversation_bytes` bounds the cache of conversations; 0 disables it."""

    max_nodes: int | None = 10_000
    max_tokens: int | None = 20_000_000
    max_prompt_tokens: int | None = None
    max_new_chars: int | None = 8_000_000
    max_in_flight: int | None = 256
    max_n: int = MAX_CHOICES
    conversation_bytes: int = 32 << 20

    def check_turn(self, *, n: int, nodes: int, tokens: int, in_flight: int) -> None:
        if not 1 <= n <= self.max_n:
            raise InputError(f"n must be between 1 and {self.max_n}, got {n}")
        for name, count in (("max_nodes", nodes + n - 1), ("max_in_flight", in_flight), ("max_tokens", tokens)):
            limit: int | None = getattr(self, name)
            if limit is not None and count >= limit:
                cure, after_s = ("try again", 1.0) if name == "max_in_flight" else ("end the session", None)
                raise LimitExceeded(
                    f"session limit {name}={limit} reached; {cure}, or raise the limit", retry_after_s=after_s
                )

    def check_text(self, chars: int) -> None:
        if self.max_new_chars is not None and chars > self.max_new_chars:
            raise LimitExceeded(
                f"the request has {chars} new characters, the limit is max_new_chars={self.max_new_chars}; "
                "shorten them or raise it"
            )

    def check_prompt(self, length: int) -> None:
        if self.max_prompt_tokens is not None and length > self.max_prompt_tokens:
            raise LimitExceeded(
                f"the prompt has {length} tokens, the limit is max_prompt_tokens={self.max_prompt_tokens}; "
                "shorten the conversation"
            )


P = ParamSpec("P")
T = TypeVar("T")
INLINE_CHARS = 16_000
HUGE_CHARS = 500_000
CHARS_PER_ID = 4
HUGE = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokentrue-huge")


async def run_by_size(work: Callable[P, T], chars: int, /, *args: P.args, **kwargs: P.kwargs) -> T:
    if chars < INLINE_CHARS:
        return work(*args, **kwargs)
    if chars < HUGE_CHARS:
        return await asyncio.to_thread(work, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(HUGE, partial(work, *args, **kwargs))


def count_chars(messages: Iterable[JsonMapping]) -> int:
    return sum(_count_in(value) for message in messages for value in message.values())


def _count_in(value: JsonValue) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_count_in, value.values()))
    return sum(map(_count_in, value)) if isinstance(value, (list, tuple)) else 8
