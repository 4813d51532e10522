"""Computes the core's steps: in this process (`LocalRunner`) or in the stages of a pipeline."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tokentrue.engine.adapters import Adapter, check_products, check_shapes, linear_modules
from tokentrue.engine.decoder import Decoder
from tokentrue.engine.forward import Forward
from tokentrue.engine.graphs import PrefillGraphs
from tokentrue.engine.proof import prove
from tokentrue.engine.request import Routes, Sampled, StepInputs
from tokentrue.engine.sample import SamplingRow, sample, sampling_row
from tokentrue.engine.schedule import ScheduleLimits, Work
from tokentrue.engine.weights import Weights, load_weights
from tokentrue.numerics import Contract, Ops, logprobs_of
from tokentrue.numerics.delta import GatedDelta

Experts = tuple[np.ndarray, np.ndarray]  # int16 [rows, layers, top_k] and their float32 weights


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRows:
    """Logits `first` .. `first + len(targets)` of the requested ones score these prompt tokens."""

    first: int
    targets: tuple[int, ...]
    temperature: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWants:
    """`rows`: token rows whose logits are needed; `sampling` indexes into them. `routing`: token rows (first, end) of
    each request that records its experts.
    """

    rows: list[int] = field(default_factory=list[int])
    sampling: list[tuple[int, SamplingRow]] = field(default_factory=list[tuple[int, SamplingRow]])
    scoring: list[PromptRows] = field(default_factory=list[PromptRows])
    routing: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Results in the order of `StepWants`."""

    sampled: list[Sampled | Exception]
    scored: list[list[float]]
    routes: list[Routes]


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
    scored = [score_prompt(forward, logits, part) for part in wants.scoring]
    sampled: list[Sampled | Exception] = []
    if wants.sampling:
        index = torch.tensor([at for at, _ in wants.sampling], device=logits.device)
        rows = logits if len(index) == logits.shape[0] else logits.index_select(0, index)
        sampled = sample(forward.ops, rows, [row for _, row in wants.sampling])
    return StepResult(sampled=sampled, scored=scored, routes=[])


def score_prompt(forward: Forward, logits: Tensor, part: PromptRows) -> list[float]:
    rows, targets = (
        logits[part.first : part.first + len(part.targets)],
        torch.tensor(part.targets, device=logits.device),
    )
    return logprobs_of(forward.ops, rows, targets, part.temperature).tolist()


def read_experts(chosen: Callable[[Sequence[int]], tuple[Tensor, Tensor]], rows: tuple[int, int]) -> Experts:
    experts, weights = chosen(range(*rows))
    return experts.numpy(), weights.numpy()


def routes_from(experts: np.ndarray, weights: np.ndarray) -> Routes:
    rows, layers, top_k = experts.shape
    return Routes((rows, layers, top_k), experts.astype("<i2").tobytes(), weights.astype("<f4").tobytes())


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    vocabulary: int
    max_positions: int
    block_size: int
    num_blocks: int
    num_states: int | None  # recurrent-state slots of a hybrid model

    @property
    def capacity(self) -> int:
        return min(self.max_positions, (self.num_blocks - 1) * self.block_size)


class Runner(Protocol):
    """Steps finish in the order they started; at most `depth` are in flight."""

    depth: int
    sizes: Sizes
    contract: Contract
    dead: str | None  # why the runner is dead

    def start(self, inputs: StepInputs, wants: StepWants) -> None: ...
    def finish(self) -> StepResult: ...
    def prove(self, steps: Sequence[StepInputs]) -> None: ...
    def load(self, weights: Weights) -> None: ...
    def set_adapter(self, adapter: Adapter, proof_steps: Sequence[StepInputs]) -> None: ...
    def unload_adapter(self, name: str) -> None: ...
    def clean(self) -> None: ...
    def close(self) -> None: ...


class LocalRunner:
    depth = 1
    dead: str | None = None

    def __init__(
        self, model: Any, decoder: Decoder, ops: Ops, contract: Contract, *, num_blocks: int, limits: ScheduleLimits
    ) -> None:
        self.model = model
        self.contract = contract
        self.sizes = Sizes(
            vocabulary=decoder.vocabulary,
            max_positions=decoder.max_positions,
            block_size=ops.block_size,
            num_blocks=num_blocks,
            num_states=states_for(decoder, limits),
        )
        self.forward = Forward(decoder, ops, num_blocks=num_blocks, num_states=self.sizes.num_states)
        # Steps are captured on CUDA; recurrent states are not.
        self.captures = self.forward.device.type == "cuda" and self.sizes.num_states is None
        width = -(-self.sizes.capacity // ops.block_size)
        self.prefills = PrefillGraphs(self.forward, width=width) if self.captures else None
        self._results: deque[StepResult] = deque()

    def start(self, inputs: StepInputs, wants: StepWants) -> None:
        forward = self.forward
        if wants.routing:
            with forward.routes() as chosen:
                result = answer(forward, forward.step(inputs, wants.rows), wants)
                routes = [routes_from(*read_experts(chosen, part)) for part in wants.routing]
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
        check_adapter(adapter, self.model, self.forward)
        bank = self.forward.bank
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


def check_adapter(adapter: Adapter, model: Any, forward: Forward, first: int = 0) -> None:
    check_shapes(adapter, forward.decoder, linear_modules(model), first)
    check_products(adapter, forward.ops)


def states_for(decoder: Decoder, limits: ScheduleLimits) -> int | None:
    """For hybrid models: a slot for every running request, and as many snapshots."""
    hybrid = any(isinstance(layer.mixer, GatedDelta) for layer in decoder.layers)
    return 2 * limits.max_requests + 2 if hybrid else None
