"""The computing half of a step: logits of the wanted rows, then sampled tokens, prompt log-probabilities and chosen
experts.

It runs where the output head is: in the engine's own process, or in the last stage of a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tokentrue.engine.model.forward import Forward
from tokentrue.engine.model.step import StepInputs
from tokentrue.engine.sample import SamplingRow, sample, sampling_row
from tokentrue.engine.scheduling.request import Routes, Sampled
from tokentrue.engine.scheduling.schedule import Work
from tokentrue.numerics import logprobs_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRows:
    """Logits `first` .. `first + len(targets)` of the wanted ones score these prompt tokens."""

    first: int
    targets: tuple[int, ...]
    temperature: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWants:
    """What a step must answer. `rows` are token rows whose logits are needed; `sampling` indexes into them. `routing`
    are the token rows (first, end) of each request that wants to know their experts."""

    rows: list[int] = field(default_factory=list[int])
    sampling: list[tuple[int, SamplingRow]] = field(default_factory=list[tuple[int, SamplingRow]])
    scoring: list[PromptRows] = field(default_factory=list[PromptRows])
    routing: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Answers in the order of `StepWants`."""

    sampled: list[Sampled | Exception]
    scored: list[list[float]]
    routes: list[Routes]


class PrefillReplay(Protocol):
    def step(self, inputs: StepInputs, rows: Sequence[int]) -> Tensor | None:
        """Logits of those token rows, or None for a step that is not replayed."""
        ...


def wants_of(batch: Sequence[Work]) -> StepWants:
    wants, start = StepWants(), 0
    for work in batch:
        request = work.request
        if request.wants_routes:
            wants.routing.append((start + min(known_routes(work), work.count), start + work.count))
        if scores_prompt(work):
            stop = min(work.start + work.count + 1, len(request.prompt_ids))
            targets = tuple(request.prompt_ids[work.start + 1 : stop])
            wants.scoring.append(
                PromptRows(first=len(wants.rows), targets=targets, temperature=request.sampling.temperature or 1.0)
            )
            wants.rows.extend(range(start, start + work.count))
        elif work.samples:
            wants.rows.append(start + work.count - 1)
        if work.samples:
            wants.sampling.append((len(wants.rows) - 1, sampling_row(request)))
        start += work.count
    return wants


def known_routes(work: Work) -> int:
    """Positions of the work whose experts are kept already: a preempted request computes positions again."""
    return max(0, work.request.num_routed - work.start)


def scores_prompt(work: Work) -> bool:
    return work.request.wants_prompt and work.start + 1 < len(work.request.prompt_ids)


def execute(
    forward: Forward,
    inputs: StepInputs,
    wants: StepWants,
    prefills: PrefillReplay | None = None,
) -> StepResult:
    """A whole step in one process."""
    if not wants.routing:
        replayed = prefills.step(inputs, wants.rows) if prefills is not None else None
        return answer(forward, forward.step(inputs, wants.rows) if replayed is None else replayed, wants)
    with forward.routes() as chosen:
        result = answer(forward, forward.step(inputs, wants.rows), wants)
        return replace(result, routes=[routes_from(*read_experts(chosen, part)) for part in wants.routing])


Experts = tuple[np.ndarray, np.ndarray]
"""int16 [rows, layers, top_k] and their float32 weights."""


def read_experts(chosen: Callable[[Sequence[int]], tuple[Tensor, Tensor]], rows: tuple[int, int]) -> Experts:
    experts, weights = chosen(range(*rows))
    return experts.numpy(), weights.numpy()


def routes_from(experts: np.ndarray, weights: np.ndarray) -> Routes:
    rows, layers, top_k = experts.shape
    return Routes((rows, layers, top_k), experts.astype("<i2").tobytes(), weights.astype("<f4").tobytes())


def answer(forward: Forward, logits: Tensor, wants: StepWants) -> StepResult:
    """`logits` of the wanted rows; the experts are added by the caller."""
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
