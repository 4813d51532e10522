"""The engine without threads: add requests, call `step`, read their tokens. Deterministic; tests drive it directly."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from tokentrue.engine.metrics import Meter
from tokentrue.engine.model.adapters import Adapter, check_shapes, linear_modules, shapes_by_dtype
from tokentrue.engine.model.decoder import Decoder
from tokentrue.engine.model.forward import Forward
from tokentrue.engine.model.states import StatePool
from tokentrue.engine.model.weights import Weights, load_weights
from tokentrue.engine.sample import not_finite, sample
from tokentrue.engine.scheduling.blocks import BlockPool
from tokentrue.engine.scheduling.bursts import Bursts
from tokentrue.engine.scheduling.request import Phase, Request, Routes, Sampled
from tokentrue.engine.scheduling.schedule import Limits, Scheduler, Work
from tokentrue.errors import EngineError
from tokentrue.numerics import Contract, Ops, logprobs_of
from tokentrue.numerics.delta import GatedDelta
from tokentrue.types import Finish

if TYPE_CHECKING:
    from tokentrue.engine.scheduling.prefills import PrefillGraphs


@dataclass(frozen=True, slots=True, kw_only=True)
class Chaos:
    """Where tests let chance decide what no bit may depend on."""

    pages: random.Random | None = None
    chunk: Callable[[Request, int], int] | None = None
    unproven: bool = False  # run operators that are known not to be exact: for negative controls


class Core:
    def __init__(
        self, model: nn.Module, decoder: Decoder, ops: Ops, contract: Contract, *, num_blocks: int, limits: Limits, version: int,
        read: Callable[[Sequence[int]], str] | None = None, chaos: Chaos | None = None,
    ) -> None:  # fmt: skip
        """`read` turns token ids into text, for stop strings alone."""
        chaos = chaos or Chaos()
        weight = decoder.head
        self.model = model
        self.contract = contract
        self.fingerprint = contract.fingerprint
        self.version = version
        self.read = read
        self.pool = BlockPool(num_blocks, ops.block_size, shuffle=chaos.pages)
        states = state_pool_of(decoder, limits)
        self.scheduler = Scheduler(self.pool, limits, chunk=chaos.chunk, states=states)
        self.forward = Forward(decoder, ops, num_blocks=num_blocks, dtype=weight.dtype, device=weight.device, states=states)
        self.meter = Meter()
        self.capacity = min(decoder.max_positions, (num_blocks - 1) * ops.block_size)
        """Most tokens that one request can hold."""
        self.adapters: dict[str, Adapter] = {}
        self.broken: str | None = None
        self.bursts = bursts_of(self)
        self.prefills = prefills_of(self)

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
        """Policy version of the weights that sample this request's next token: its adapter's own, where that has one."""
        adapter = self.adapters.get(request.adapter) if request.adapter is not None else None
        return self.version if adapter is None or adapter.version is None else adapter.version

    def check_adapter(self, adapter: Adapter) -> None:
        """Raise unless the adapter fits the model and its products are exact here."""
        check_shapes(adapter, self.forward.decoder, linear_modules(self.model))
        for dtype, linears in shapes_by_dtype(adapter).items():
            self.forward.ops.self_test(linears=linears, heads=set(), dtype=dtype)

    def set_adapter(self, adapter: Adapter) -> None:
        """Requests that run with an older adapter of this name compute their context anew."""
        for request in [r for r in (*self.scheduler.running, *self.scheduler.waiting) if r.adapter == adapter.name]:
            if request.phase is Phase.RUNNING:
                self.scheduler.preempt(request)
            request.prefix = adapter.prefix
            request.hashes.clear()
        self.adapters[adapter.name] = adapter

    def free_blocks(self, tokens: int) -> None:
        """Wait for the bursts in flight and preempt requests until blocks for `tokens` are free."""
        if self.bursts is not None:
            self.bursts.drain()
        while self.scheduler.running and self.pool.num_free * self.pool.block_size < tokens:
            self.scheduler.preempt(self.scheduler.running[-1])

    def unload_adapter(self, name: str) -> None:
        """Requests that name it fail."""
        if name not in self.adapters:
            raise EngineError(f"adapter {name!r} is not loaded; loaded: {sorted(self.adapters)}")
        if self.bursts is not None:
            self.bursts.drain()
        for request in [r for r in (*self.scheduler.running, *self.scheduler.waiting) if r.adapter == name]:
            self.fail(request, EngineError(f"adapter {name!r} was unloaded"))
        del self.adapters[name]

    def step(self) -> bool:
        """One forward pass for whoever is ready; False when there was nothing to do."""
        self.drop_cancelled()
        if self.broken:
            self.fail_all(EngineError(self.broken))
        if self.bursts is not None and self.proceed(self.bursts):
            return True
        batch = self.scheduler.next_batch()
        if not batch:
            return False
        try:
            if self.bursts is None or not self.bursts.start(batch):
                self.run(batch)
        except Exception as error:
            # The loop outlives any batch: its requests fail, the others go on.
            for work in batch:
                self.fail(work.request, error)
        self.meter.count_step(batch)
        return True

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

    def run(self, batch: list[Work]) -> None:
        rows, sampling, scoring, routing, start = [], [], [], [], 0
        for work in batch:
            if work.request.wants_routes:
                routing.append((work, start))
            if work.request.wants_prompt and work.start + 1 < len(work.request.prompt_ids):
                scoring.append((work, len(rows)))
                rows.extend(range(start, start + work.count))
            elif work.samples:
                rows.append(start + work.count - 1)
            if work.samples:
                sampling.append((work.request, len(rows) - 1))
            start += work.count
        logits = self.compute_logits(batch, rows, routing)
        for work in batch:
            self.scheduler.record(work)
        for work, at in scoring:
            self.score_prompt(work, logits[at : at + work.count])
        if sampling:
            index = torch.tensor([at for _, at in sampling], device=logits.device)
            chosen = logits if len(index) == logits.shape[0] else logits.index_select(0, index)
            results = sample(self.forward.ops, chosen, [request for request, _ in sampling])
            for (request, _), result in zip(sampling, results, strict=True):
                self.take(request, result)

    def compute_logits(self, batch: list[Work], rows: list[int], routing: list[tuple[Work, int]]) -> torch.Tensor:
        """Logits of `rows`; the works of `routing`, each with its first token row, keep the experts of new positions."""
        if not routing:
            replayed = self.prefills.step(batch, rows) if self.prefills is not None else None
            return self.forward.step(batch, rows, self.adapters) if replayed is None else replayed
        with self.forward.routes() as chosen:
            logits = self.forward.step(batch, rows, self.adapters)
            for work, first in routing:
                known = max(0, work.request.num_routed - work.start)  # a preempted request computes positions again
                if known < work.count:
                    experts, weights = chosen(range(first + known, first + work.count))
                    data, scales = experts.numpy().astype("<i2").tobytes(), weights.numpy().astype("<f4").tobytes()
                    work.request.add_routes(Routes((work.count - known, experts.shape[1], experts.shape[2]), data, scales))
        return logits

    def score_prompt(self, work: Work, logits: torch.Tensor) -> None:
        request = work.request
        stop = min(work.start + work.count + 1, len(request.prompt_ids))
        targets = torch.tensor(request.prompt_ids[work.start + 1 : stop], device=logits.device)
        found = logprobs_of(self.forward.ops, logits[: len(targets)], targets, request.sampling.temperature or 1.0)
        # A preempted prompt is scored again: keep positions, not a log.
        request.prompt_logprobs[work.start :] = found.tolist()

    def take(self, request: Request, result: Sampled | Exception) -> None:
        if isinstance(result, Exception):
            self.forward.clean()
            self.scheduler.restart()
            self.fail(request, result)
            return
        request.take(result, self.version_of(request))
        self.notify(request, 1)

    def take_run(self, request: Request, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Tokens that a decoding request sampled one after the other, without filters; what follows its end is dropped."""
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
        if self.prefills is not None:
            self.prefills.forget()
        self.forward.caches.clear()
        self.forward.recurrent.clear()

    def load(self, weights: Weights, version: int) -> None:
        """New weights between two steps. Keys and values of the old ones are dropped and computed anew where they are still needed, so
        that every later token's log-probability is the one of the new weights over its whole context."""
        if self.bursts is not None:
            self.bursts.drain()
        self.scheduler.restart()
        try:
            load_weights(self.model, weights)
        except Exception as error:
            if not isinstance(weights, Mapping | str | Path):  # those were checked whole before the first copy
                self.broken = f"the last weight load failed half way ({error}); load whole weights"
            raise
        self.forward.refresh()
        if self.broken:
            self.forward.clean()
        self.broken = None
        self.version = version


def state_pool_of(decoder: Decoder, limits: Limits) -> StatePool | None:
    """For hybrid models: a slot for every running request, and as many snapshots."""
    hybrid = any(isinstance(layer.mixer, GatedDelta) for layer in decoder.layers)
    return StatePool(2 * limits.max_requests + 2) if hybrid else None


def bursts_of(core: Core) -> Bursts | None:
    """Captured decode steps, on CUDA alone; recurrent states are not captured."""
    if core.forward.device.type != "cuda" or core.forward.states is not None:
        return None
    return Bursts(
        core.forward, core.scheduler, capacity=core.capacity, deliver=core.take_run, reject=lambda request: core.take(request, not_finite())
    )


def prefills_of(core: Core) -> PrefillGraphs | None:
    if core.forward.device.type != "cuda" or core.forward.states is not None:
        return None
    from tokentrue.engine.scheduling.prefills import PrefillGraphs

    return PrefillGraphs(core.forward, width=-(-core.capacity // core.pool.block_size))
