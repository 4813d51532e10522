"""Counters and recent latencies of the engine, for /metrics."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokentrue.engine.scheduling.request import Request
    from tokentrue.engine.scheduling.schedule import Scheduler, Work

WINDOW_S = 10.0


class Meter:
    def __init__(self) -> None:
        self.steps = 0
        self.prompt_tokens = 0
        self.sampled_tokens = 0
        self.requests = 0
        self.first_token_s: deque[float] = deque(maxlen=1024)
        self._recent: deque[tuple[float, int]] = deque(maxlen=4096)

    def count_step(self, batch: Sequence[Work]) -> None:
        self.steps += 1
        self.prompt_tokens += sum(work.count for work in batch if work.count > 1)

    def count_tokens(self, request: Request, count: int) -> None:
        """`count` tokens were just added to the request."""
        self.sampled_tokens += count
        now = time.monotonic()
        if request.num_sampled == count and request.first_token_s is not None:
            self.first_token_s.append(request.first_token_s - request.arrived_s)
        if self._recent and now - self._recent[-1][0] < 0.01:
            self._recent[-1] = (self._recent[-1][0], self._recent[-1][1] + count)
        else:
            self._recent.append((now, count))

    def count_request(self, request: Request) -> None:
        self.requests += 1

    def tokens_per_second(self) -> float:
        now = time.monotonic()
        inside = [(at, count) for at, count in self._recent if now - at < WINDOW_S]
        if not inside:
            return 0.0
        return sum(count for _, count in inside) / max(now - inside[0][0], 1e-3)

    def report(self, scheduler: Scheduler, version: int) -> dict[str, float]:
        waits = sorted(self.first_token_s)
        pool = scheduler.pool
        return {
            "steps_total": self.steps,
            "requests_total": self.requests,
            "requests_running": len(scheduler.running),
            "requests_waiting": len(scheduler.waiting),
            "prompt_tokens_total": self.prompt_tokens,
            "sampled_tokens_total": self.sampled_tokens,
            "tokens_per_second": self.tokens_per_second(),
            "first_token_seconds_p50": waits[len(waits) // 2] if waits else 0.0,
            "first_token_seconds_p95": waits[int(len(waits) * 0.95)] if waits else 0.0,
            "kv_blocks_used": pool.num_used,
            "kv_blocks_total": pool.num_blocks - 1,
            "prefix_hit_tokens_total": scheduler.prefix_hits,
            "prefix_query_tokens_total": scheduler.prefix_queries,
            "preemptions_total": scheduler.preemptions,
            "policy_version": version,
        }
