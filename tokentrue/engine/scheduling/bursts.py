"""Several decode steps at a time: the host reads the tokens of one burst while the device computes the next.

A burst holds requests that are all decoding, and whose distribution is shaped by temperature and seed alone. Tokens
past a request's end are dropped; blocks that a finished request releases may still be written by the burst in flight,
but only before their next owner's first write, because the device works in order. Anything that changes who runs (an
arrival, a cancellation, new weights) first waits for the bursts in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokentrue.engine.graphs import BUCKETS, MOST_STEPS, DecodeGraphs, Pending
from tokentrue.engine.model.forward import Forward
from tokentrue.engine.scheduling.request import Phase, Request
from tokentrue.engine.scheduling.schedule import Scheduler, Work

STEPS = 8

Deliver = Callable[[Request, Sequence[int], Sequence[float]], None]
"""(request, token ids, log-probabilities): tokens that the request sampled one after the other."""


@dataclass(slots=True)
class Burst:
    """Decode steps in flight. `lengths` are the tokens that each request has when the burst starts."""

    requests: list[Request]
    lengths: list[int]
    steps: int
    pending: Pending


class Bursts:
    def __init__(
        self, forward: Forward, scheduler: Scheduler, *, capacity: int, deliver: Deliver, reject: Callable[[Request], None],
        steps: int = STEPS,
    ) -> None:  # fmt: skip
        """`deliver` receives the tokens of a request; `reject` a request whose log-probabilities are not finite."""
        self.scheduler = scheduler
        self.capacity = capacity
        self.steps = min(steps, MOST_STEPS)
        self.graphs = DecodeGraphs(forward, width=-(-capacity // forward.ops.block_size))
        self.in_flight: Burst | None = None
        self._deliver = deliver
        self._reject = reject

    def start(self, batch: Sequence[Work]) -> bool:
        """Launch a burst for a batch that the scheduler just made, if it is all plain decoding and has blocks to grow
        into."""
        requests = [work.request for work in batch]
        if len(batch) > BUCKETS[-1] or any(
            work.count > 1 or not work.samples or not is_plain(work.request) for work in batch
        ):
            return False
        if any(request.adapter for request in requests) and not self.graphs.forward.bank.is_packed:
            return False
        lengths = [len(r.tokens) for r in requests]
        steps = self.steps_that_fit(requests, lengths)
        if steps < 1:
            return False
        self.in_flight = Burst(requests, lengths, steps, self.graphs.start(requests, steps))
        return True

    def proceed(self) -> bool:
        """Deliver the burst in flight, if there is one; before that launch its successor, unless another request should
        run."""
        burst = self.in_flight
        if burst is None:
            return False
        self.in_flight = self.launch_next(burst)
        self.deliver(burst)
        return True

    def drain(self) -> None:
        """Wait for and deliver everything in flight."""
        while self.in_flight is not None:
            burst, self.in_flight = self.in_flight, None
            self.deliver(burst)

    def close(self) -> None:
        self.in_flight = None
        self.graphs.forget()

    def launch_next(self, burst: Burst) -> Burst | None:
        active = [r for r in burst.requests if r.phase is Phase.RUNNING and not r.cancelled]
        scheduler = self.scheduler
        lengths = [length + burst.steps for length in burst.lengths]
        unfinished = [
            r
            for r, n in zip(burst.requests, lengths, strict=True)
            if r.phase is Phase.RUNNING and n < self.most_tokens(r)
        ]
        newcomers = scheduler.waiting and len(unfinished) < scheduler.limits.max_requests
        if newcomers or len(active) < len(scheduler.running) or len(unfinished) < 0.75 * len(burst.requests):
            return None
        steps = self.steps_that_fit(burst.requests, lengths)
        if steps < 1:
            return None
        return Burst(burst.requests, lengths, steps, self.graphs.go_on(burst.requests, steps))

    def most_tokens(self, request: Request) -> int:
        return min(len(request.prompt_ids) + request.max_tokens, self.capacity)

    def steps_that_fit(self, requests: Sequence[Request], lengths: Sequence[int]) -> int:
        """Steps for which every request has blocks for what it may keep, and none runs past the tables; 0 when memory
        is short."""
        left = [self.most_tokens(r) - n for r, n in zip(requests, lengths, strict=True)]
        steps = min(self.steps, max(left), self.capacity - max(lengths) + 1)
        for request, length, keep in zip(requests, lengths, left, strict=True):
            if request.phase is not Phase.RUNNING or keep <= 0:
                continue
            if not self.scheduler.grow(request, length - 1 + min(steps, keep)):
                return 0
        return steps

    def deliver(self, burst: Burst) -> None:
        """Wait for a burst and give each request its tokens."""
        ids, logprobs, good = burst.pending.results()
        for request, tokens, found, finite in zip(burst.requests, ids, logprobs, good, strict=False):
            if request.phase is not Phase.RUNNING or request.cancelled:
                continue
            if not finite:
                self.in_flight = None
                self._reject(request)  # drops every page, so nothing after it counts
                return
            self._deliver(request, tokens, found)


def is_plain(request: Request) -> bool:
    """Temperature and seed alone shape what the request samples, and it wants nothing besides tokens and their
    log-probabilities."""
    if request.shaped or request.sampling.top_logprobs or request.wants_routes:
        return False
    return not (request.wants_prompt and not request.num_sampled)
