"""Several decode steps at a time: the host hears the tokens of one burst while the device computes the next.

A burst holds requests that are all decoding, and whose distribution is shaped by temperature and seed alone. Tokens past a request's end
are dropped; blocks that a finished request gives back may still be written by the burst under way, but only before their next owner's
first write, because the device works in order. Anything that changes who runs (an arrival, a cancellation, new weights) first hears out
what is under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokentrue.engine.graphs import BUCKETS, MOST_STEPS, DecodeGraphs, Pending
from tokentrue.engine.request import Phase, Request
from tokentrue.engine.sample import not_finite
from tokentrue.engine.schedule import Work

if TYPE_CHECKING:
    from tokentrue.engine.core import Core

STEPS = 8


@dataclass(slots=True)
class Flight:
    """A burst under way. `lengths` are the tokens that each request has when the burst starts."""

    requests: list[Request]
    lengths: list[int]
    steps: int
    pending: Pending


class Bursts:
    def __init__(self, core: Core, *, steps: int = STEPS) -> None:
        page = core.forward.ops.block_size
        self.core = core
        self.steps = min(steps, MOST_STEPS)
        self.graphs = DecodeGraphs(core.forward, width=-(-core.capacity // page))
        self.flight: Flight | None = None

    def start(self, batch: Sequence[Work]) -> bool:
        """Launch a burst for a batch that the scheduler just made, if it is all plain decoding and has room to go on."""
        requests = [work.request for work in batch]
        if len(batch) > BUCKETS[-1] or any(work.count > 1 or not work.samples or not is_plain(work.request) for work in batch):
            return False
        lengths = [len(r.tokens) for r in requests]
        steps = self.room(requests, lengths)
        if steps < 1:
            return False
        self.flight = Flight(requests, lengths, steps, self.graphs.start(requests, steps))
        return True

    def go_on(self) -> bool:
        """Hear the burst under way, if there is one; before that launch the one behind it, unless somebody else should run."""
        flight = self.flight
        if flight is None:
            return False
        self.flight = self.next_of(flight)
        self.hear(flight)
        return True

    def drain(self) -> None:
        """Hear everything under way."""
        while self.flight is not None:
            flight, self.flight = self.flight, None
            self.hear(flight)

    def close(self) -> None:
        self.flight = None
        self.graphs.forget()

    def next_of(self, flight: Flight) -> Flight | None:
        active = [r for r in flight.requests if r.phase is Phase.RUNNING and not r.cancelled]
        scheduler = self.core.scheduler
        lengths = [length + flight.steps for length in flight.lengths]
        unfinished = [r for r, n in zip(flight.requests, lengths, strict=True) if r.phase is Phase.RUNNING and n < self.most(r)]
        newcomers = scheduler.waiting and len(unfinished) < scheduler.limits.max_requests
        if newcomers or len(active) < len(scheduler.running) or len(unfinished) < 0.75 * len(flight.requests):
            return None
        steps = self.room(flight.requests, lengths)
        if steps < 1:
            return None
        return Flight(flight.requests, lengths, steps, self.graphs.go_on(flight.requests, steps))

    def most(self, request: Request) -> int:
        return min(len(request.prompt_ids) + request.max_tokens, self.core.capacity)

    def room(self, requests: Sequence[Request], lengths: Sequence[int]) -> int:
        """Steps for which every request has blocks for what it may keep, and none runs past the tables; 0 when memory is short."""
        left = [self.most(r) - n for r, n in zip(requests, lengths, strict=True)]
        steps = min(self.steps, max(left), self.core.capacity - max(lengths) + 1)
        for request, length, keep in zip(requests, lengths, left, strict=True):
            if request.phase is not Phase.RUNNING or keep <= 0:
                continue
            if not self.core.scheduler.grow(request, length - 1 + min(steps, keep)):
                return 0
        return steps

    def hear(self, flight: Flight) -> None:
        """Give each request its tokens."""
        ids, logprobs, good = flight.pending.results()
        for request, tokens, found, finite in zip(flight.requests, ids, logprobs, good, strict=False):
            if request.phase is not Phase.RUNNING or request.cancelled:
                continue
            if not finite:
                self.flight = None
                self.core.take(request, not_finite())  # drops every page, so nothing after it counts
                return
            self.core.take_run(request, tokens, found)


def is_plain(request: Request) -> bool:
    if request.shaped or request.sampling.top_logprobs or request.wants_routes:
        return False
    return not (request.wants_prompt and not request.num_sampled)
