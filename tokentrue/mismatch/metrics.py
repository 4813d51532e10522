"""The estimators, and metrics that merge over ranks and micro-batches.

Estimators take log r with r = trainer ÷ rollout (or the PPO ratio that is named) and estimate KL(rollout ‖ trainer)
from tokens sampled by the rollout policy. Every key is present on every rank; where nothing was counted, means and
extremes read 0.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from tokentrue.errors import InputError
from tokentrue.records import record

LOG_CLAMP = 20.0
"""exp of a log-ratio is taken inside ±this (e²⁰ ≈ 4.9e8); how often that bites is a metric, `clamped`."""


def k1(log_ratio: Tensor) -> Tensor:
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    return 0.5 * log_ratio * log_ratio


def k3(log_ratio: Tensor) -> Tensor:
    """`e^x - 1 - x`, never negative; in float64, with a relative error below 3e-11."""
    x = log_ratio.double()
    y = x.clamp(-0.01, 0.01)  # e^x - 1 - x would cancel there
    series = y * y * (1 / 2 + y * (1 / 6 + y * (1 / 24 + y * (1 / 120 + y * (1 / 720)))))
    return torch.where(x == y, series, torch.expm1(x) - x).to(log_ratio.dtype)


def contribution(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """`C(r) = -(r - 1)·A`: what a token adds to the surrogate loss beyond its on-policy value -A."""
    return -torch.expm1(log_ratio) * advantages


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


_SHIFT = 17  # a histogram bin is a float32 without its low 17 bits: 64 bins an octave
_OFFSET = 1 << 14  # makes bins of negative values count from 0
_MAGNITUDE = _OFFSET - 1  # a bin without its sign
NOT_FINITE = "metrics: a sum is not finite in float64; check the size of the advantages and log-probabilities"
QUANTILES = (0.01, 0.5, 0.9, 0.99, 0.999)


@record
class Count:
    count: int = 0

    def merge(self, other: Count) -> Count:
        return Count(count=self.count + other.count)

    def entries(self, name: str) -> Iterator[tuple[str, float]]:
        yield name, float(self.count)


@record
class Mean:
    total: float = 0.0
    count: int = 0

    @staticmethod
    def of(values: Tensor, count: int | None = None) -> Mean:
        total = float(values.sum(dtype=torch.float64))
        if not math.isfinite(total):
            raise InputError(NOT_FINITE)
        return Mean(total=total, count=values.numel() if count is None else count)

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else 0.0

    def merge(self, other: Mean) -> Mean:
        return Mean(total=self.total + other.total, count=self.count + other.count)

    def entries(self, name: str) -> Iterator[tuple[str, float]]:
        yield name, self.value


@record
class Extremes:
    low: float = math.inf
    high: float = -math.inf

    @staticmethod
    def of(values: Tensor) -> Extremes:
        return Extremes(low=float(values.min()), high=float(values.max())) if values.numel() else Extremes()

    def merge(self, other: Extremes) -> Extremes:
        return Extremes(low=min(self.low, other.low), high=max(self.high, other.high))

    def entries(self, name: str) -> Iterator[tuple[str, float]]:
        empty = self.low > self.high
        yield f"{name}/min", 0.0 if empty else self.low
        yield f"{name}/max", 0.0 if empty else self.high


@record
class Moments:
    count: int = 0
    mean: float = 0.0
    square: float = 0.0
    cube: float | None = None

    @staticmethod
    def of(values: Tensor, *, third: bool = False) -> Moments:
        if not values.numel():
            return Moments(cube=0.0 if third else None)
        mean = float(values.mean())
        deviations = values - mean
        square, cube = float((deviations**2).sum()), float((deviations**3).sum()) if third else None
        if not math.isfinite(float((values * values).sum()) + (cube or 0.0)):
            raise InputError(NOT_FINITE)
        return Moments(count=values.numel(), mean=mean, square=square, cube=cube)

    def merge(self, other: Moments) -> Moments:
        """The formulas of Chan, Golub and LeVeque, which do not cancel."""
        a, b, n = self.count, other.count, self.count + other.count
        if not a or not b:
            return self if a else other
        gap = other.mean - self.mean
        cube = None
        if self.cube is not None and other.cube is not None:
            cube = self.cube + other.cube + gap**3 * a * b * (a - b) / n**2
            cube += 3 * gap * (a * other.square - b * self.square) / n
        square = self.square + other.square + gap**2 * a * b / n
        return Moments(count=n, mean=self.mean + gap * b / n, square=square, cube=cube)

    def entries(self, name: str) -> Iterator[tuple[str, float]]:
        n = max(self.count, 1)
        std, raw = math.sqrt(self.square / n), self.square / n + self.mean**2
        yield f"{name}/count", float(self.count)
        yield f"{name}/mean", self.mean
        yield f"{name}/std", std
        yield f"{name}/ess", self.mean**2 / raw if raw else 0.0
        if self.cube is not None:
            is_spread = std > 1e-12 * abs(self.mean) and std**3 > 0
            yield f"{name}/skew", self.cube / n / std**3 if is_spread else 0.0


@record
class Histogram:
    """Counts by float32 bit pattern, 64 bins an octave: exact to merge, quantiles within 0.8% of the value."""

    counts: Mapping[int, int]

    @staticmethod
    def of(values: Tensor) -> Histogram:
        dense = torch.bincount((values.float().view(torch.int32) >> _SHIFT) + _OFFSET, minlength=2 * _OFFSET)
        found = dense.nonzero().squeeze(1)
        counts = dense[found].tolist()
        return Histogram(counts={key - _OFFSET: count for key, count in zip(found.tolist(), counts, strict=True)})

    def merge(self, other: Histogram) -> Histogram:
        return Histogram(counts=Counter(self.counts) + Counter(other.counts))

    def quantiles(self, *, magnitude: bool = False) -> list[float]:
        """At `QUANTILES`: the middle of the bin; with `magnitude`, of absolute values."""
        bins: dict[tuple[float, float], int] = {}
        for key, count in self.counts.items():
            # The edges of a bin are bit patterns with the low bits at zero.
            edges = struct.pack("<II", (key & _MAGNITUDE) << _SHIFT, ((key & _MAGNITUDE) + 1) << _SHIFT)
            near, far = struct.unpack("<ff", edges)
            place = (near, far) if key >= 0 or magnitude else (-far, -near)
            bins[place] = bins.get(place, 0) + count
        ordered = sorted(bins)
        below = list(accumulate(bins[place] for place in ordered))
        if not below:
            return [0.0] * len(QUANTILES)
        found = [ordered[bisect_right(below, share * (below[-1] - 1))] for share in QUANTILES]
        return [0.0 if 0.0 in place else sum(place) / 2 for place in found]

    def entries(self, name: str) -> Iterator[tuple[str, float]]:
        for prefix, values in (("p", self.quantiles()), ("abs_p", self.quantiles(magnitude=True))):
            for share, value in zip(QUANTILES, values, strict=True):
                yield f"{name}/{prefix}{share * 100:g}", value


Statistic = Count | Mean | Extremes | Moments | Histogram


class Metrics(Mapping[str, float]):
    def __init__(self, statistics: Mapping[str, Statistic]) -> None:
        self.statistics = dict(statistics)

    @cached_property
    def _values(self) -> dict[str, float]:
        return {key: value for name, stat in self.statistics.items() for key, value in stat.entries(name)}

    def __getitem__(self, key: str) -> float:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Metrics) and self.statistics == other.statistics

    __hash__ = None  # type: ignore[assignment]  # holds dictionaries

    def __repr__(self) -> str:
        return "Metrics(" + ", ".join(f"{key}={value:.6g}" for key, value in self.items()) + ")"

    def merge(self, *others: Metrics) -> Metrics:
        merged = dict(self.statistics)
        for other in others:
            for name, stat in other.statistics.items():
                mine = merged.get(name)
                merged[name] = stat if mine is None else mine.merge(stat)  # type: ignore[arg-type]
        return Metrics(merged)
