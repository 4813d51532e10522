"""Computes the core's steps in this process; `processes.pipeline.Pipeline` has the same methods for several processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from tokentrue.engine.adapters import Adapter, check_adapter
from tokentrue.engine.decoder import Decoder
from tokentrue.engine.forward import Forward
from tokentrue.engine.graphs import PrefillGraphs
from tokentrue.engine.proof import prove
from tokentrue.engine.sample import SamplingRow, sample, sampling_row
from tokentrue.engine.schedule import Sampled, ScheduleLimits, StepInputs, Work
from tokentrue.engine.weights import Weights, load_weights
from tokentrue.numerics import Contract, Ops, logprobs_of
from tokentrue.numerics.delta import GatedDelta
from tokentrue.records import record
from tokentrue.types import RoutedExperts


@record
class PromptRows:
    """Logits `first` .. `first + len(targets)` of the requested ones score these prompt tokens."""

    first: int
    targets: tuple[int, ...]
    temperature: float


class StepWants(msgspec.Struct, frozen=True, kw_only=True):
    """`rows`: token rows whose logits are needed; `sampling` indexes into them. `routing`: token rows (first, end) of
    each request that records its experts.
    """

    rows: list[int] = []
    sampling: list[tuple[int, SamplingRow]] = []
    scoring: list[PromptRows] = []
    routing: list[tuple[int, int]] = []


@record
class StepResult:
    """Results in the order of `StepWants`."""

    sampled: list[Sampled | Exception]
    scored: list[list[float]]
    routes: list[RoutedExperts]


def wants_of(batch: Sequence[Work]) -> StepWants:
    wants, start = StepWants(), 0
    for work in batch:
        request = work.request
        if request.wants_routes:
            # A preempted request computes positions again whose experts are kept already.
            known = max(0, request.num_routed - work.start)
            wants.routing.append((start + min(known, work.count), start + work.count))
        if scores_prompt(work):
            stop = min(work.start + work.count + 1, len(request.prompt_ids))
            targets, temperature = request.prompt_ids[work.start + 1 : stop], request.sampling.temperature or 1.0
            wants.scoring.append(PromptRows(first=len(wants.rows), targets=targets, temperature=temperature))
            wants.rows.extend(range(start, start + work.count))
        elif work.samples:
            wants.rows.append(start + work.count - 1)
        if work.samples:
            wants.sampling.append((len(wants.rows) - 1, sampling_row(request)))
        start += work.count
    return wants


def scores_prompt(work: Work) -> bool:
    return work.request.wants_prompt and work.start + 1 < len(work.request.prompt_ids)


def answer(forward: Forward, logits: Tensor, wants: StepWants) -> StepResult:
    """Builds the result from the logits of the requested rows; the caller adds the experts."""
    scored, sampled = list[list[float]](), list[Sampled | Exception]()
    for part in wants.scoring:
        targets = torch.tensor(part.targets, device=logits.device)
        rows = logits[part.first : part.first + len(part.targets)]
        scored.append(logprobs_of(forward.ops, rows, targets, part.temperature).tolist())
    if wants.sampling:
        index = torch.tensor([at for at, _ in wants.sampling], device=logits.device)
        rows = logits if len(index) == logits.shape[0] else logits.index_select(0, index)
        sampled = sample(forward.ops, rows, [row for _, row in wants.sampling])
    return StepResult(sampled=sampled, scored=scored, routes=[])


def routes_from(experts: np.ndarray, weights: np.ndarray) -> RoutedExperts:
    rows, layers, top_k = experts.shape
    data, factors = experts.astype("<i2").tobytes(), weights.astype("<f4").tobytes()
    return RoutedExperts(shape=(rows, layers, top_k), data=data, weights=factors)


@record
class Sizes:
    vocabulary: int
    max_positions: int
    block_size: int
    num_blocks: int
    num_states: int | None  # recurrent-state slots of a hybrid model

    @classmethod
    def of(cls, decoder: Decoder, ops: Ops, *, num_blocks: int, limits: ScheduleLimits) -> Sizes:
        return cls(
            vocabulary=decoder.vocabulary, max_positions=decoder.max_positions, block_size=ops.block_size, num_blocks=num_blocks,
            num_states=states_for(decoder, limits),
        )  # fmt: skip

    @property
    def capacity(self) -> int:
        return min(self.max_positions, (self.num_blocks - 1) * self.block_size)


class LocalRunner:
    """Steps finish in the order they started; at most `depth` are in flight. `dead`: why the runner can do no more."""

    depth = 1
    dead: str | None = None

    def __init__(
        self, model: Any, decoder: Decoder, ops: Ops, contract: Contract, *, num_blocks: int, limits: ScheduleLimits
    ) -> None:
        self.model = model
        self.contract = contract
        self.sizes = Sizes.of(decoder, ops, num_blocks=num_blocks, limits=limits)
        self.forward = Forward(decoder, ops, num_blocks=num_blocks, num_states=self.sizes.num_states)
        self.captures = self.forward.device.type == "cuda"
        width = -(-self.sizes.capacity // ops.block_size)
        self.prefills = PrefillGraphs(self.forward, width=width) if self.captures else None
        self._results: deque[StepResult] = deque()

    def start(self, inputs: StepInputs, wants: StepWants) -> None:
        forward = self.forward
        if wants.routing:
            with forward.routes() as chosen:
                result = answer(forward, forward.step(inputs, wants.rows), wants)
                routes = [routes_from(*chosen(*part)) for part in wants.routing]
                self._results.append(replace(result, routes=routes))
            return
        replayed = self.prefills.step(inputs, wants.rows) if self.prefills is not None else None
        logits = forward.step(inputs, wants.rows) if replayed is None else replayed
        self._results.append(answer(forward, logits, wants))

    def finish(self) -> StepResult:
        return self._results.popleft()

    def prove(self, steps: Sequence[StepInputs]) -> None:
        prove(self.forward, self.model, steps)

    def load(self, weights: Weights) -> None:
        load_weights(self.model, weights)
        self.forward.refresh()

    def set_adapter(self, adapter: Adapter, proof_steps: Sequence[StepInputs]) -> None:
        """Raises unless the adapter fits the model and its products are exact here."""
        bank = self.forward.bank
        check_adapter(adapter, self.forward.decoder, self.forward.ops)
        before = bank.adapters.get(adapter.name)
        bank.set(adapter)
        try:
            prove(self.forward, self.model, proof_steps, adapter)
        except BaseException:
            if before is None:
                bank.remove(adapter.name)
            else:
                bank.set(before)
            raise

    def unload_adapter(self, name: str) -> None:
        self.forward.bank.remove(name)

    def clean(self) -> None:
        self.forward.clean()

    def close(self) -> None:
        if self.prefills is not None:
            self.prefills.forget()
        self.forward.caches.clear()
        self.forward.states = ()


def states_for(decoder: Decoder, limits: ScheduleLimits) -> int | None:
    """For hybrid models: a slot for every running request, and as many snapshots."""
    hybrid = any(isinstance(layer.mixer, GatedDelta) for layer in decoder.layers)
    return 2 * limits.max_requests + 2 if hybrid else None
