"""The engine without threads: add requests, call `step`, read their tokens. Deterministic."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from tokentrue.engine.adapters import Adapter
from tokentrue.engine.graphs import Bursts
from tokentrue.engine.images import RequestImages, proof_images
from tokentrue.engine.processes import Processes
from tokentrue.engine.runner import PIECES, LocalRunner, StepResult, scores_prompt, wants_of
from tokentrue.engine.schedule import (
    BlockPool,
    Phase,
    Request,
    Sampled,
    ScheduleLimits,
    Scheduler,
    StatePool,
    StepInputs,
    Work,
    cut_steps,
)
from tokentrue.engine.weights import Weights
from tokentrue.errors import EngineError
from tokentrue.types import Finish

WINDOW_S = 10.0
PROOF_LENGTH = 141  # tokens of the proof at load: more than one block of 128 keys


class Meter:
    def __init__(self) -> None:
        self.steps = 0
        self.prompt_tokens = 0
        self.sampled_tokens = 0
        self.requests = 0
        self.first_token_s: deque[float] = deque(maxlen=1024)
        self._recent: deque[tuple[float, int]] = deque(maxlen=4096)

    def count_tokens(self, request: Request, count: int) -> None:
        self.sampled_tokens += count
        now = time.monotonic()
        if request.num_sampled == count and request.first_token_s is not None:
            self.first_token_s.append(request.first_token_s - request.arrived_s)
        if self._recent and now - self._recent[-1][0] < 0.01:
            self._recent[-1] = (self._recent[-1][0], self._recent[-1][1] + count)
        else:
            self._recent.append((now, count))

    def report(self, scheduler: Scheduler, version: int) -> dict[str, float]:
        now, pool = time.monotonic(), scheduler.pool
        waits = sorted(self.first_token_s) or [0.0]
        recent = [(at, count) for at, count in self._recent if now - at < WINDOW_S]
        rate = sum(count for _, count in recent) / max(now - recent[0][0], 1e-3) if recent else 0.0
        return {
            "steps_total": self.steps,
            "requests_total": self.requests,
            "requests_running": len(scheduler.running),
            "requests_waiting": len(scheduler.waiting),
            "prompt_tokens_total": self.prompt_tokens,
            "sampled_tokens_total": self.sampled_tokens,
            "tokens_per_second": rate,
            "first_token_seconds_p50": waits[len(waits) // 2],
            "first_token_seconds_p95": waits[int(len(waits) * 0.95)],
            "kv_blocks_used": pool.num_used,
            "kv_blocks_total": pool.num_blocks - 1,
            "prefix_hit_tokens_total": scheduler.prefix_hits,
            "prefix_query_tokens_total": scheduler.prefix_queries,
            "preemptions_total": scheduler.preemptions,
            "policy_version": version,
        }


class Core:
    """`read` decodes token ids to text, only for stop strings."""

    def __init__(
        self,
        runner: LocalRunner | Processes,
        *,
        limits: ScheduleLimits,
        version: int,
        read: Callable[[Sequence[int]], str] | None,
    ) -> None:
        sizes = runner.sizes
        self.runner = runner
        self.version = version
        self.read = read
        self.pool = BlockPool(sizes.num_blocks, sizes.block_size)
        states = StatePool(sizes.num_states) if sizes.num_states is not None else None
        self.scheduler = Scheduler(self.pool, limits, states=states)
        self.meter = Meter()
        self.capacity = sizes.capacity
        self.adapters: dict[str, Adapter] = {}
        self.broken: str | None = None
        self.bursts: Bursts | None = None
        if isinstance(runner, LocalRunner) and runner.captures:
            self.bursts = Bursts(runner.forward, self.scheduler, self.capacity, self.take_run, self.take)

    @property
    def local(self) -> LocalRunner:
        assert isinstance(self.runner, LocalRunner), "the model is in several processes"
        return self.runner

    @property
    def requests(self) -> list[Request]:
        return [*self.scheduler.running, *self.scheduler.waiting]

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
        """The version of the weights that sample the next token: the adapter's if that has one."""
        adapter = self.adapters.get(request.adapter) if request.adapter is not None else None
        return self.version if adapter is None or adapter.version is None else adapter.version

    # ---- weights
    def load(self, weights: Weights, version: int) -> None:
        """Loads weights between two steps and drops all cached keys and values: every later log-probability uses the
        new weights over its whole context."""
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

    def set_adapter(self, adapter: Adapter) -> None:
        """Requests with an older adapter of this name recompute their context."""
        self.drain()
        self.runner.set_adapter(adapter, self.proof_steps(seed=6, adapter=adapter.name))
        for request in self.requests:
            if request.adapter == adapter.name:
                if request.phase is Phase.RUNNING:
                    self.scheduler.preempt(request)
                request.prefix = adapter.prefix
                request.hashes.clear()
        self.adapters[adapter.name] = adapter

    def unload_adapter(self, name: str) -> None:
        if name not in self.adapters:
            raise EngineError(f"adapter {name!r} is not loaded; loaded: {sorted(self.adapters)}")
        self.drain()
        for request in self.requests:
            if request.adapter == name:
                self.fail(request, EngineError(f"adapter {name!r} was unloaded"))
        self.runner.unload_adapter(name)
        del self.adapters[name]

    def prove(self) -> None:
        """Raises ExactnessError unless the steps have the bits of the model's own forward."""
        self.runner.prove(self.proof_steps(seed=5))
        decoder = self.runner.forward.decoder if isinstance(self.runner, LocalRunner) else None
        if decoder is not None and decoder.tower is not None and self.capacity >= PROOF_LENGTH:
            self.runner.prove(self.proof_steps(seed=7, images=proof_images(decoder.tower)))

    def proof_steps(
        self, *, seed: int, adapter: str | None = None, images: RequestImages | None = None
    ) -> list[StepInputs]:
        """Random tokens of one sequence, in pieces. The blocks are free again afterwards."""
        length, generator = min(PROOF_LENGTH, self.capacity), torch.Generator().manual_seed(seed)
        ids = torch.randint(0, self.runner.sizes.vocabulary, (length,), generator=generator).tolist()
        if images is not None:
            placeholder = self.local.model.config.image_token_id
            ids = [token - 1 if token == placeholder else token for token in ids]
            for image in images.images:
                ids[image.start : image.end] = [placeholder] * (image.end - image.start)
        self.drain()
        while self.scheduler.running and self.pool.num_free * self.pool.block_size < length:
            self.scheduler.preempt(self.scheduler.running[-1])
        return cut_steps(self.scheduler, ids, PIECES, adapter, images)

    # ---- steps
    def step(self) -> bool:
        """One forward pass for the ready requests; False if there was nothing to do."""
        for request in self.requests:
            if request.cancelled:
                self.end(request, Finish.ABORT)
        if self.broken:
            self.fail_all(EngineError(self.broken))
        if self.bursts is not None and (burst := self.bursts.in_flight) is not None:
            try:
                self.bursts.proceed()
            except Exception as error:
                self.bursts.in_flight = None
                for request in burst.requests:
                    self.fail(request, error)
            return True
        batch = self.scheduler.next_batch()
        if not batch:
            return False
        self.meter.steps += 1
        self.meter.prompt_tokens += sum(work.count for work in batch if work.count > 1)
        try:
            if self.bursts is None or not self.bursts.start(batch):
                self.apply(batch, self.runner.step(self.scheduler.inputs(batch), wants_of(batch)))
        except Exception as error:
            for work in batch:
                self.fail(work.request, error)
            if self.runner.dead is not None:
                self.broken = self.runner.dead
                self.fail_all(EngineError(self.broken))
        return True

    def drain(self) -> None:
        if self.bursts is not None:
            self.bursts.drain()

    def apply(self, batch: list[Work], result: StepResult) -> None:
        scored, sampled, routes = iter(result.scored), iter(result.sampled), iter(result.routes)
        for work in batch:
            self.scheduler.record(work)
        for work in batch:
            request = work.request
            logprobs = next(scored) if scores_prompt(work) else None
            token = next(sampled) if work.samples else None
            route = next(routes) if request.wants_routes else None
            if request.phase is not Phase.RUNNING:
                continue
            if logprobs is not None:  # a preempted prompt is scored again: keep positions, not a log
                request.prompt_logprobs[work.start :] = logprobs
            if route is not None and route.shape[0]:
                self.scheduler.record_routes(request, route)
            if token is not None:
                self.take(request, token)

    # ---- results
    def take(self, request: Request, result: Sampled | Exception) -> None:
        if isinstance(result, Exception):
            self.runner.clean()
            self.scheduler.restart()
            return self.fail(request, result)
        request.take(result, self.version_of(request))
        self.notify(request, 1)

    def take_run(self, request: Request, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Takes consecutive sampled tokens of a decoding request without filters; drops those after its end."""
        if request.sampling.stop:  # text is read token by token
            for token, logprob in zip(ids, logprobs, strict=True):
                if request.phase is Phase.RUNNING:
                    self.scheduler.record(Work(request, request.computed, 1), ahead=True)
                    self.take(request, Sampled(token_id=token, logprob=logprob, raw_logprob=logprob))
            return
        room = min(request.max_tokens - request.num_sampled, self.capacity - len(request.tokens), len(ids))
        if not request.stop_ids.isdisjoint(ids):
            room = next((i + 1 for i, token in enumerate(ids[:room]) if token in request.stop_ids), room)
        request.take_run(ids[:room], logprobs[:room], self.version_of(request))
        self.scheduler.record(Work(request, request.computed, room), ahead=True)
        self.notify(request, room)

    def notify(self, request: Request, count: int) -> None:
        """Calls the listener for the newest `count` tokens; finishes the request if they are its last."""
        self.meter.count_tokens(request, count)
        if request.listener is not None:
            request.listener(request)
        token = request.tokens[-1]
        if token in request.stop_ids:
            self.end(request, Finish.STOP, token)
        elif (text := self.stop_string(request)) is not None:
            self.end(request, Finish.STOP, text)
        elif request.num_sampled >= request.max_tokens or len(request.tokens) >= self.capacity:
            self.end(request, Finish.LENGTH)

    def stop_string(self, request: Request) -> str | None:
        """The stop string that the newest token completes; searches as many tokens as the longest one has bytes."""
        stops = request.sampling.stop
        if not stops or self.read is None:
            return None
        window = max(len(stop.encode()) for stop in stops) + 8
        text = self.read(request.sampled_ids[-window:])
        return next((stop for stop in stops if stop in text), None)

    def end(self, request: Request, finish: Finish, by: int | str | None = None) -> None:
        self.scheduler.finish(request)
        request.stopped_by = by
        request.finish = finish  # last: any thread that sees it set may read the rest
        self.meter.requests += 1
        if request.listener is not None:
            request.listener(request)

    def fail(self, request: Request, error: Exception) -> None:
        if request.phase is not Phase.FINISHED:
            request.error = error if isinstance(error, EngineError) else EngineError(f"{type(error).__name__}: {error}")
            self.end(request, Finish.ABORT)

    def fail_all(self, error: Exception) -> None:
        for request in self.requests:
            self.fail(request, error)

    def close(self) -> None:
        """Frees pages and captured steps now, not on garbage collection."""
        if self.bursts is not None:
            self.bursts.close()
        self.runner.close()
