"""The engine without threads: add requests, call `step`, read their tokens. Deterministic; tests drive it directly."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from tokentrue.engine.execute import StepResult, scores_prompt, wants_of
from tokentrue.engine.metrics import Meter
from tokentrue.engine.model.adapters import Adapter
from tokentrue.engine.model.forward import Forward
from tokentrue.engine.model.states import StatePool
from tokentrue.engine.model.step import StepInputs
from tokentrue.engine.model.weights import Weights
from tokentrue.engine.proof import PIECES, difference_of
from tokentrue.engine.runner import LocalRunner, Runner
from tokentrue.engine.sample import not_finite
from tokentrue.engine.scheduling.blocks import BlockPool
from tokentrue.engine.scheduling.bursts import Bursts
from tokentrue.engine.scheduling.request import Phase, Request, Sampled
from tokentrue.engine.scheduling.schedule import ScheduleLimits, Scheduler, Work, cut_steps
from tokentrue.engine.trace import Difference
from tokentrue.errors import EngineError
from tokentrue.types import Finish

if TYPE_CHECKING:
    from tokentrue.engine.scheduling.prefills import PrefillGraphs

PROOF_LENGTH = 141
"""Tokens of the proof at load: past one block of 128 keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chaos:
    """Where tests let chance decide what no bit may depend on."""

    pages: random.Random | None = None
    chunk: Callable[[Request, int], int] | None = None
    unproven: bool = False  # run operators that are known not to be exact: for negative controls


class Core:
    def __init__(
        self, runner: Runner, *, limits: ScheduleLimits, version: int, read: Callable[[Sequence[int]], str] | None = None,
        chaos: Chaos | None = None,
    ) -> None:  # fmt: skip
        """`runner` computes the steps; `read` turns token ids into text, for stop strings alone."""
        chaos = chaos or Chaos()
        sizes = runner.sizes
        self.runner = runner
        self.version = version
        self.read = read
        self.pool = BlockPool(sizes.num_blocks, sizes.block_size, shuffle=chaos.pages)
        states = StatePool(sizes.num_states) if sizes.num_states is not None else None
        self.scheduler = Scheduler(self.pool, limits, chunk=chaos.chunk, states=states)
        self.meter = Meter()
        self.capacity = min(sizes.max_positions, (sizes.num_blocks - 1) * sizes.block_size)
        """Most tokens that one request can hold."""
        self.adapters: dict[str, Adapter] = {}
        self.broken: str | None = None
        self.in_flight: deque[list[Work]] = deque()
        self.bursts = bursts_of(self)

    @property
    def forward(self) -> Forward:
        """Of an engine in one process."""
        assert isinstance(self.runner, LocalRunner), "a pipeline has no forward pass in this process"
        return self.runner.forward

    @property
    def model(self) -> nn.Module:
        assert isinstance(self.runner, LocalRunner), "a pipeline has no model in this process"
        return self.runner.model

    @property
    def prefills(self) -> PrefillGraphs | None:
        return self.runner.prefills if isinstance(self.runner, LocalRunner) else None

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def add(self, request: Request) -> None:
        if request.adapter is not None:
            adapter = self.adapters.get(request.adapter)
            if adapter is None:  # unloaded since the request was checked
                return self.fail(request, EngineError(f"adapter {request.adapter!r} is not loaded"))
            request.prefix = adapter.prefix
        self.scheduler.add(request)

    def version_of(self, request: Request) -> int:
        """Policy version of the weights that sample this request's next token: its adapter's own, where that has
        one."""
        adapter = self.adapters.get(request.adapter) if request.adapter is not None else None
        return self.version if adapter is None or adapter.version is None else adapter.version

    def set_adapter(self, adapter: Adapter) -> None:
        """Check, prove and load it. Requests that run with an older adapter of this name compute their context anew."""
        self.drain()
        self.runner.set_adapter(adapter, self.proof_steps(seed=6, adapter=adapter.name))
        for request in [r for r in (*self.scheduler.running, *self.scheduler.waiting) if r.adapter == adapter.name]:
            if request.phase is Phase.RUNNING:
                self.scheduler.preempt(request)
            request.prefix = adapter.prefix
            request.hashes.clear()
        self.adapters[adapter.name] = adapter

    def prove(self) -> None:
        """Raise ExactnessError unless the steps' bits are those of the model's own forward."""
        self.runner.prove(self.proof_steps(seed=5))

    def proof_steps(self, *, seed: int, adapter: str | None = None, length: int = PROOF_LENGTH) -> list[StepInputs]:
        """Random tokens of one sequence, cut into pieces, in blocks that are free again: later steps overwrite them."""
        length = min(length, self.capacity)
        ids = torch.randint(
            0, self.runner.sizes.vocabulary, (length,), generator=torch.Generator().manual_seed(seed)
        ).tolist()
        self.free_blocks(length)
        return cut_steps(self.scheduler, ids, PIECES, adapter)

    def compare(
        self, ids: Sequence[int], model: nn.Module | None = None, pieces: Sequence[int] = PIECES
    ) -> Difference | None:
        """The first operator whose bits differ between pages and the forward of `model` (the engine's own, unless
        given)."""
        return difference_of(self.forward, model or self.model, cut_steps(self.scheduler, ids, pieces))

    def drain(self) -> None:
        """Wait for everything in flight."""
        if self.bursts is not None:
            self.bursts.drain()
        while self.in_flight:
            self.finish_step()

    def free_blocks(self, tokens: int) -> None:
        """Wait for what is in flight and preempt requests until blocks for `tokens` are free."""
        self.drain()
        while self.scheduler.running and self.pool.num_free * self.pool.block_size < tokens:
            self.scheduler.preempt(self.scheduler.running[-1])

    def unload_adapter(self, name: str) -> None:
        """Requests that name it fail."""
        if name not in self.adapters:
            raise EngineError(f"adapter {name!r} is not loaded; loaded: {sorted(self.adapters)}")
        self.drain()
        for request in [r for r in (*self.scheduler.running, *self.scheduler.waiting) if r.adapter == name]:
            self.fail(request, EngineError(f"adapter {name!r} was unloaded"))
        self.runner.unload_adapter(name)
        del self.adapters[name]

    def step(self) -> bool:
        """One forward pass for whoever is ready; False when there was nothing to do."""
        self.drop_cancelled()
        if self.broken:
            self.fail_all(EngineError(self.broken))
        if self.bursts is not None and self.proceed(self.bursts):
            return True
        while len(self.in_flight) < self.runner.depth and (batch := self.scheduler.next_batch(self.runner.depth)):
            self.meter.count_step(batch)
            self.start_step(batch)
            if self.bursts is not None and self.bursts.in_flight is not None:
                return True
        if not self.in_flight:
            return False
        self.finish_step()
        return True

    def start_step(self, batch: list[Work]) -> None:
        try:
            if self.bursts is None or not self.bursts.start(batch):
                self.runner.start(self.scheduler.inputs(batch), wants_of(batch))
                self.in_flight.append(batch)
                self.scheduler.in_flight.update(work.request for work in batch)
        except Exception as error:
            self.fail_step(batch, error)

    def finish_step(self) -> None:
        """Wait for the oldest step in flight and give its requests their tokens."""
        batch = self.in_flight.popleft()
        self.scheduler.in_flight.difference_update(work.request for work in batch)
        try:
            self.apply(batch, self.runner.finish())
        except Exception as error:
            self.fail_step(batch, error)

    def fail_step(self, batch: list[Work], error: Exception) -> None:
        """The loop outlives any step: its requests fail, the others go on. Without its runner, all fail."""
        for work in batch:
            self.fail(work.request, error)
        if self.runner.dead is not None:
            self.broken = self.runner.dead
            self.in_flight.clear()
            self.scheduler.in_flight.clear()
            self.fail_all(EngineError(self.broken))

    def proceed(self, bursts: Bursts) -> bool:
        """Deliver the burst of decode steps in flight; False when there was none."""
        requests = bursts.in_flight.requests if bursts.in_flight is not None else []
        try:
            return bursts.proceed()
        except Exception as error:
            bursts.in_flight = None
            for request in requests:
                self.fail(request, error)
            return True

    def apply(self, batch: list[Work], result: StepResult) -> None:
        """A request that was preempted or ended while its step was computed samples the same token again, or none."""
        scored, sampled, routes = iter(result.scored), iter(result.sampled), iter(result.routes)
        for work in batch:
            if work.request.phase is Phase.RUNNING:
                self.scheduler.record(work)
        for work in batch:
            request, samples = work.request, work.samples
            logprobs = next(scored) if scores_prompt(work) else None
            token = next(sampled) if samples else None
            route = next(routes) if request.wants_routes else None
            if request.phase is not Phase.RUNNING:
                continue
            if logprobs is not None:  # a preempted prompt is scored again: keep positions, not a log
                request.prompt_logprobs[work.start :] = logprobs
            if route is not None and route.shape[0]:
                request.add_routes(route)
            if token is not None:
                self.take(request, token)

    def take(self, request: Request, result: Sampled | Exception) -> None:
        if isinstance(result, Exception):
            self.runner.clean()
            self.scheduler.restart()
            self.fail(request, result)
            return
        request.take(result, self.version_of(request))
        self.notify(request, 1)

    def take_run(self, request: Request, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Tokens that a decoding request sampled one after the other, without filters; what follows its end is
        dropped."""
        if request.sampling.stop:  # text is read token by token
            for token, logprob in zip(ids, logprobs, strict=True):
                if request.phase is Phase.RUNNING:
                    self.scheduler.record(Work(request, request.computed, 1))
                    self.take(request, Sampled(token_id=token, logprob=logprob, raw_logprob=logprob))
            return
        room = min(request.max_tokens - request.num_sampled, self.capacity - len(request.tokens), len(ids))
        stops = request.stop_ids
        if not stops.isdisjoint(ids):
            room = next((i + 1 for i, token in enumerate(ids[:room]) if token in stops), room)
        request.take_run(ids[:room], logprobs[:room], self.version_of(request))
        self.scheduler.record(Work(request, request.computed, room))
        self.notify(request, room)

    def notify(self, request: Request, count: int) -> None:
        """Notify the listener of the newest `count` tokens, and finish the request where they are its last."""
        self.meter.count_tokens(request, count)
        if request.listener is not None:
            request.listener(request)
        finish, by = self.ending(request)
        if finish is not None:
            self.end(request, finish, by)

    def ending(self, request: Request) -> tuple[Finish | None, int | str | None]:
        token = request.tokens[-1]
        if token in request.stop_ids:
            return Finish.STOP, token
        if request.sampling.stop:
            for text in self.stop_strings(request):
                return Finish.STOP, text
        full = request.num_sampled >= request.max_tokens or len(request.tokens) >= self.capacity
        return (Finish.LENGTH, None) if full else (None, None)

    def stop_strings(self, request: Request) -> list[str]:
        """Those that the newest token completes: they lie within as many tokens as the longest has bytes."""
        stops = request.sampling.stop
        if not stops or self.read is None:
            return []
        window = max(len(stop.encode()) for stop in stops) + 8
        text = self.read(request.sampled_ids[-window:])
        return [stop for stop in stops if stop in text]

    def end(self, request: Request, finish: Finish, by: int | str | None = None) -> None:
        self.scheduler.finish(request)
        request.stopped_by = by
        request.finish = finish  # last: whoever sees it set may read the rest
        self.meter.count_request(request)
        if request.listener is not None:
            request.listener(request)

    def fail(self, request: Request, error: Exception) -> None:
        if request.phase is Phase.FINISHED:
            return
        request.error = error if isinstance(error, EngineError) else EngineError(f"{type(error).__name__}: {error}")
        self.end(request, Finish.ABORT)

    def fail_all(self, error: Exception) -> None:
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            self.fail(request, error)

    def drop_cancelled(self) -> None:
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            if request.cancelled:
                self.end(request, Finish.ABORT)

    def close(self) -> None:
        """Give the memory of the pages and of captured steps back now, not when this object is collected."""
        if self.bursts is not None:
            self.bursts.close()
        self.runner.close()

    def load(self, weights: Weights, version: int) -> None:
        """New weights between two steps. Keys and values of the old ones are dropped and computed anew where they are
        still needed, so that every later token's log-probability is the one of the new weights over its whole
        context."""
        self.drain()
        self.scheduler.restart()
        try:
            self.runner.load(weights)
        except Exception as error:
            if self.runner.dead is not None:
                self.broken = self.runner.dead
            elif not isinstance(weights, Mapping | str | Path):  # those were checked whole before the first copy
                self.broken = f"the last weight load failed half way ({error}); load whole weights"
            raise
        if self.broken:
            self.runner.clean()
        self.broken = None
        self.version = version


def bursts_of(core: Core) -> Bursts | None:
    """Captured decode steps, on CUDA in one process alone; recurrent states are not captured."""
    runner = core.runner
    if (
        not isinstance(runner, LocalRunner)
        or runner.forward.device.type != "cuda"
        or runner.sizes.num_states is not None
    ):
        return None
    return Bursts(
        core.forward,
        core.scheduler,
        capacity=core.capacity,
        deliver=core.take_run,
        reject=lambda request: core.take(request, not_finite()),
    )
