"""Which known fault explains the difference between the engine's numbers and the reference's. Pure functions over
vectors.

`e` is engine - reference, one value per observed token. A hypothesis predicts `h`; its share explained is 1 - Σ|e - h|
/ Σ|e|.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokentrue.doctor.findings import Confidence

FLOAT32_SPREAD = 5e-5  # mean |e| of two correct float32 implementations stays below this
CERTAIN, CLEAR, LIKELY = 0.95, 0.8, 0.45  # shares explained
BAND = 3.0  # a dtype's spread is known to within this factor: kernels differ


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Mean and largest |e| that the expected dtype gives by itself."""

    mean: float
    largest: float

    @property
    def limit(self) -> float:
        """A mean |e| above this is no rounding."""
        return max(BAND * self.mean, FLOAT32_SPREAD)

    @property
    def largest_limit(self) -> float:
        """A single |e| above this is no rounding."""
        return max(BAND * self.largest, 20 * FLOAT32_SPREAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A hypothesis and the share of the difference that it explains."""

    fault: str
    label: str
    share: float
    size: float = 0.0  # mean size of the predicted difference

    @property
    def confidence(self) -> Confidence:
        return "high" if self.share >= CLEAR else "medium"


def spread_of(e: Tensor) -> Spread:
    return (
        Spread(mean=float(e.abs().mean()), largest=float(e.abs().amax()))
        if e.numel()
        else Spread(mean=0.0, largest=0.0)
    )


def explained_share(e: Tensor, prediction: Tensor) -> float:
    total = float(e.abs().sum())
    return 1.0 - float((e - prediction).abs().sum()) / total if total else 0.0


def until_certain(explanations: Iterable[Explanation]) -> Iterator[Explanation]:
    """Up to the first that leaves nothing to explain: the rest need not be computed."""
    for one in explanations:
        yield one
        if one.share >= CERTAIN:
            return


def best(explanations: Sequence[Explanation]) -> Explanation | None:
    """The one that explains most, if it explains enough to be named."""
    chosen = max(explanations, key=lambda one: one.share, default=None)
    return chosen if chosen is not None and chosen.share >= LIKELY else None


def grows_with_position(e: Tensor, positions: Tensor) -> float:
    """Mean |e| over the last third of the positions, over that of the first third; wrong position settings make it
    large."""
    order = positions.argsort()
    third = max(1, e.numel() // 3)
    first, last = e[order[:third]].abs().mean(), e[order[-third:]].abs().mean()
    return float(last / first.clamp(min=1e-12))


def shift(values: Tensor, lengths: Sequence[int], by: int) -> tuple[Tensor, Tensor]:
    """Which entries have a neighbour `by` places on in the same sequence, and that neighbour's value."""
    inside = torch.zeros(values.shape, dtype=torch.bool)
    start = 0
    for length in lengths:
        low, high = start + max(0, -by), start + length - max(0, by)
        inside[low:high] = True
        start += length
    places = inside.nonzero().squeeze(1)
    return places, values[places + by]
