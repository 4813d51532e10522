"""`deterministic_grad`: gradients that do not depend on how a batch is cut into micro-batches.

Sums of floating-point numbers depend on their order, so the order is fixed: one sequence, one backward pass, in the
order in which the caller gives the sequences, added into `.grad` one after the other. Cutting the same list elsewhere
cuts between two additions and changes nothing. It costs batching in the backward pass; leave it off when run-to-run
equality (which always holds) is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tokentrue.numerics.patching.patch import exact
from tokentrue.numerics.score import score

SequenceLoss = Callable[[int, Tensor], Tensor]
"""(index, log-probabilities [T-1] of that sequence) -> its share of the loss, a scalar that does not look at other
sequences."""


def deterministic_grad(
    model: nn.Module, sequences: Sequence[Tensor], loss: SequenceLoss, *, temperature: float = 1.0, first: int = 0
) -> tuple[Tensor, list[Tensor]]:
    """Add the gradient of sum_i loss(first + i, log-probabilities of sequences[i]) to `.grad`; returns that sum and the
    log-probabilities.

    Micro-batches are calls: `deterministic_grad(m, a, f); deterministic_grad(m, b, f, first=len(a))` leaves the same
    bits in `.grad` as `deterministic_grad(m, a + b, f)`.
    """
    total = torch.zeros((), dtype=torch.float64)
    found: list[Tensor] = []
    with exact(model):
        for index, ids in enumerate(sequences):
            logprobs = score(model, ids[None], temperature)[0]
            share = loss(first + index, logprobs)
            share.backward()
            total += share.detach().double().cpu()
            found.append(logprobs.detach())
    return total, found
